"""The date written by a template: fixed for a session's whole life.

Knows nothing of clocks: the caller passes the seconds.
"""

import datetime
from dataclasses import dataclass

STRFTIME_NOW = "strftime_now"
"""Its name in templates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Day:
    """A day, as a template calls it: with a format, to be given its date. It has no time of day but 00:00.

    So the prompts of all sessions of one day begin alike, and a session's turns do too when the day is over.
    """

    date: datetime.date

    @staticmethod
    def of(wall_s: float) -> "Day":
        """The day of `wall_s` seconds since the Unix epoch, in the machine's time zone."""
        return Day(date=datetime.datetime.fromtimestamp(wall_s).astimezone().date())

    @staticmethod
    def of_iso(text: str) -> "Day":
        """The day written as YYYY-MM-DD. Raises ValueError."""
        return Day(date=datetime.date.fromisoformat(text))

    def __call__(self, form: str) -> str:
        return self.date.strftime(form)
