"""An event loop whose time stands still until a test moves it."""

import asyncio
from typing import Any


class MovableLoop(asyncio.SelectorEventLoop):
    """A loop that a test has all the time of: no deadline passes because the machine was slow.

    `complaints` has what was said to nobody: tasks whose errors none asked for.
    """

    def __init__(self) -> None:
        super().__init__()
        self.skipped_s = 0.0
        """Seconds that the test has moved its time by, since it began."""
        self.complaints: list[dict[str, Any]] = []
        self.set_exception_handler(lambda _, context: self.complaints.append(context))

    def time(self) -> float:
        return self.skipped_s
