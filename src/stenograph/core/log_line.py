"""A line of the log, made of named fields, such as the end of a turn. Pure.

It is formatted when it is written, not when it is logged: the writer asks for its text or its fields.
"""

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:  # a log is opened before numpy is loaded
    from stenograph.core.stages import Stage

LogValue = str | int | float | None

MAX_TEXT_CHARS = 300
"""Longest text of one value; an error may quote a whole reply."""

_PLAIN = re.compile(rf"[!#-<>-\[\]-~]{{1,{MAX_TEXT_CHARS}}}")
"""Text that needs neither a cut nor quotes: visible ASCII without quote, equals sign and backslash."""


class LogLine(Struct, frozen=True, kw_only=True, gc=False):
    """An `event`, and its facts, always in the same order. None is a missing fact.

    `stages_s` are seconds by stage; they are written in milliseconds, as `stages_ms`. None: it has none.

    Its text is `event key=value …`: without missing facts, with quotes and escapes as in JSON where a value has blanks
    or anything but visible ASCII in it, so no text can begin another line.
    """

    event: str
    facts: Mapping[str, LogValue]
    stages_s: "Mapping[Stage, float] | None" = None

    def __str__(self) -> str:
        shown = [self.event]
        for name, value in self.facts.items():
            if isinstance(value, str):
                shown.append(f"{name}={value if _PLAIN.fullmatch(value) else json.dumps(_cut(value))}")
            elif value is not None:
                shown.append(f"{name}={value}")
        if self.stages_s:
            shown.append(_stages_format(tuple(self.stages_s)) % tuple([1e3 * time for time in self.stages_s.values()]))
        return " ".join(shown)

    def fields(self) -> dict[str, object]:
        """The facts for a structured log, text cut as in `str`."""
        shown: dict[str, object] = {
            name: _cut(value) if isinstance(value, str) else value for name, value in self.facts.items()
        }
        if self.stages_s is not None:
            shown["stages_ms"] = {stage.value: round(1e3 * time, 3) for stage, time in self.stages_s.items()}
        return shown


def _cut(text: str) -> str:
    return text if len(text) <= MAX_TEXT_CHARS else f"{text[: MAX_TEXT_CHARS - 1]}…"


@lru_cache(maxsize=64)
def _stages_format(stages: "tuple[Stage, ...]") -> str:
    """The text of these stages, with a place for the time of each: few turns differ in them."""
    return "stages_ms=" + ",".join(f"{stage}:%.3f" for stage in stages)
