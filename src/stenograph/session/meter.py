"""When a turn's tokens came, and what that makes of TTFT, ITL and TPOT. Pure: the caller tells the time."""


class TurnMeter:
    """Counts the tokens of one turn as they come. Times are monotonic seconds."""

    def __init__(self, *, started: float) -> None:
        self.num_drawn = 0
        self._started = started
        self._first: float | None = None
        self._num_first = 0
        self._last = started
        self._gaps: list[float] = []

    def __repr__(self) -> str:
        return f"<TurnMeter {self.num_drawn} tokens>"

    def drew(self, num_tokens: int, now: float) -> None:
        """Note one step of the engine. A step without tokens is none."""
        if not num_tokens:
            return
        if self._first is None:
            self._first, self._num_first = now, num_tokens
        else:
            self._gaps.append(now - self._last)
        self._last = now
        self.num_drawn += num_tokens

    @property
    def ttft_s(self) -> float | None:
        """From the turn's start to its first tokens.

        None while there are none, and where all came at once: when the first was drawn, nobody has told.
        """
        came_at_once = self.num_drawn == self._num_first > 1
        return None if self._first is None or came_at_once else self._first - self._started

    @property
    def itl_s(self) -> tuple[float, ...]:
        """The gaps between steps."""
        return tuple(self._gaps)

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token after the first step; None if nothing came after it."""
        num_later = self.num_drawn - self._num_first
        return None if self._first is None or not num_later else (self._last - self._first) / num_later
