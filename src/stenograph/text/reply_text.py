"""A reply's ids to the text that its parser reads. Owns which control tokens are text. Knows nothing of any syntax."""

from collections.abc import Collection, Sequence

from stenograph.core.types import Finish, FinishReason
from stenograph.model.tokenizer import Tokenizer
from stenograph.text.stop_strings import StopStrings


class ShownStream:
    """Ids to text, one at a time. Owned by one parser.

    Special tokens have no text, but for those in `keep`. Without `skips_special` all have, save the one that ends the
    reply, which is no part of a message, unless `shows_last`. That one is the last is known when no other follows, so
    each is held back.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, skips_special: bool, keep: Collection[int] = (), shows_last: bool = False
    ) -> None:
        is_certain = skips_special or shows_last
        self._maybe_last = frozenset[int]() if is_certain else tokenizer.special_ids.difference(keep)
        self._stream = tokenizer.text_stream(skip_special=skips_special, keep=keep)
        self._held = ""

    def push(self, token_id: int) -> str:
        """The text that is certain with `token_id`."""
        held, self._held = self._held, ""
        if token_id not in self._maybe_last:
            return held + self._stream.push(token_id)
        before = held + self._stream.flush()
        self._held = self._stream.push(token_id)
        return before

    def flush(self, *, is_ended: bool = False) -> str:
        """The rest; `is_ended`: by its last token, if that is a control token."""
        held, self._held = self._held, ""
        return self._stream.flush() if is_ended else held + self._stream.flush()


def ends_by_token(finish: Finish) -> bool:
    """Whether a reply ended by its last token: by a stop token, not by a stop string or its length."""
    return finish.reason is FinishReason.STOP and not isinstance(finish.matched, str)


class ReplyText:
    """A reply's ids to its text, without the stop string, or the one of `stop_ids`, that ended it. Owned by one parser.

    None of the first `min_tokens` ids ends the reply, so no stop string does that they complete.
    """

    def __init__(
        self, stream: ShownStream, stops: StopStrings, *, min_tokens: int, stop_ids: Collection[int] = ()
    ) -> None:
        self._stream = stream
        self._stops = stops
        self._num_free = min_tokens
        self._stop_ids = stop_ids
        self._maybe_last: Sequence[int] = ()

    def push(self, ids: Sequence[int]) -> str:
        """The text that became certain with `ids`."""
        free = ids[: self._num_free]
        self._num_free -= len(free)
        passed = self._stops.pass_over("".join(map(self._stream.push, free))) if len(free) else ""
        rest = ids[len(free) :]
        if self._stop_ids and len(rest):
            rest = [*self._maybe_last, *rest]
            num_text = len(rest) - (rest[-1] in self._stop_ids)
            rest, self._maybe_last = rest[:num_text], rest[num_text:]
        return passed + self._stops.push("".join(map(self._stream.push, rest)))

    def finish(self, finish: Finish) -> str:
        """The rest of it."""
        is_ended, last, self._maybe_last = ends_by_token(finish), self._maybe_last, ()
        rest = "" if is_ended else "".join(map(self._stream.push, last))
        rest += self._stream.flush(is_ended=is_ended and not last)
        return self._stops.push(rest) + self._stops.finish(finish)
