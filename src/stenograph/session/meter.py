"""The times at which a turn's tokens came, and TTFT, ITL and TPOT from them. Pure: the caller passes the time."""


class TurnMeter:
    """Counts the tokens of one turn as they come. Times are monotonic seconds."""

    def __init__(self, *, started: float) -> None:
        self.num_sampled = 0
        self.unasked_replay: tuple[str, ...] = ()
        self._started = started
        self._first: float | None = None
        self._num_first = 0
        self._last = started
        self._gaps: list[float] = []

    def __repr__(self) -> str:
        return f"<TurnMeter {self.num_sampled} tokens>"

    def sampled(self, num_tokens: int, now: float, unasked_replay: tuple[str, ...] = ()) -> None:
        """Note one step of the engine, and payloads in it that were not asked for. A step without tokens is none."""
        self.unasked_replay += unasked_replay
        if not num_tokens:
            return
        if self._first is None:
            self._first, self._num_first = now, num_tokens
        else:
            self._gaps.append(now - self._last)
        self._last = now
        self.num_sampled += num_tokens

    @property
    def ttft_s(self) -> float | None:
        """From the turn's start to its first tokens.

        None while there are none, and where all came at once: then it is unknown when the first was sampled.
        """
        came_at_once = self.num_sampled == self._num_first > 1
        return None if self._first is None or came_at_once else self._first - self._started

    @property
    def itl_s(self) -> tuple[float, ...]:
        """The gaps between steps."""
        return tuple(self._gaps)

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token after the first step; None if nothing came after it."""
        num_later = self.num_sampled - self._num_first
        return None if self._first is None or not num_later else (self._last - self._first) / num_later
