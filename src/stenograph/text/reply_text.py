"""A reply's ids to text for its parser, as it streams. Knows nothing of any syntax.

Owns the choice of control tokens shown as text, the cut at a stop string, and completions: text alone, no message.
"""

from collections.abc import Collection, Sequence

from stenograph.core.chat import ParsedReply, TextView
from stenograph.core.messages import Message, ReplyDelta, Role
from stenograph.core.types import Finish, FinishReason
from stenograph.model.tokenizer import Tokenizer


class ShownStream:
    """Ids to text, one at a time. Owned by one parser.

    Special tokens have no text, but for those in `keep`. Without `skips_special` all have, save the last one of the
    reply: it is no part of a message, unless `shows_last`. A token is known as the last when no other follows, so each
    is held back.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, skips_special: bool, keep: Collection[int] = (), shows_last: bool = False
    ) -> None:
        is_certain = skips_special or shows_last
        self._maybe_last = frozenset[int]() if is_certain else tokenizer.special_ids.difference(keep)
        self._stream = tokenizer.text_stream(skip_special=skips_special, keep=keep)
        self._held = ""

    def push(self, token_id: int) -> str:
        """The text made certain by `token_id`."""
        held, self._held = self._held, ""
        if token_id not in self._maybe_last:
            return held + self._stream.push(token_id)
        before = held + self._stream.flush()
        self._held = self._stream.push(token_id)
        return before

    def flush(self, *, is_ended: bool = False) -> str:
        """The rest; `is_ended`: by its last token, if it is a control token."""
        held, self._held = self._held, ""
        return self._stream.flush() if is_ended else held + self._stream.flush()


def ends_by_token(finish: Finish) -> bool:
    """Whether a reply ended by its last token: by a stop token, not by a stop string or its length."""
    return finish.reason is FinishReason.STOP and not isinstance(finish.matched, str)


class StopStrings:
    """Passes text on, except a stop string or a possible beginning of one. Owned by one parser.

    With `keeps_last` the matched stop string is passed on at the end; text after it never is. A stop string that is
    whole in text passed over (`pass_over`: the text of the first tokens, unable to end the turn) ended nothing. Costs a
    constant for each character and stop string, however long they are.
    """

    def __init__(self, stop: tuple[str, ...], *, keeps_last: bool = False) -> None:
        self._searches = [_Search(one) for one in stop]
        self._keeps_last = keeps_last
        self._held: str = ""
        self._num_free = 0  # of the held characters, how many no stop string ends in
        self._after: list[str] = []

    def pass_over(self, text: str) -> str:
        """The same as `push`, for text unable to end the turn; a stop string may begin in it."""
        if not self._searches:
            return text
        for search in self._searches:
            search.pass_over(text)
        return self._pass_on(self._held + text, num_free=len(self._held) + len(text))

    def push(self, text: str) -> str:
        """The text beyond the reach of every stop string. After a whole stop string all is held."""
        if not self._searches:
            return text
        if self._after:
            self._after.append(text)
            return ""
        num_before = len(self._held)
        found = [num_before + at for search in self._searches if (at := search.push(text)) is not None]
        text = self._held + text
        if found:
            self._held, self._after = "", [text[min(found) :]]
            self._num_free = max(0, self._num_free - min(found))
            return text[: min(found)]
        return self._pass_on(text, num_free=self._num_free)

    def finish(self, finish: Finish) -> str:
        """The rest of the text: up to the start or end of the matched stop string, or all of it."""
        rest, stop = "".join(self._after) or self._held, finish.matched
        if isinstance(stop, str) and (at := rest.find(stop, max(0, self._num_free - len(stop) + 1))) >= 0:
            return rest[: at + len(stop)] if self._keeps_last else rest[:at]
        return rest

    def _pass_on(self, text: str, *, num_free: int) -> str:
        """Return the part of `text` that cannot become a stop string; the rest is held."""
        at = len(text) - max(search.num_matched for search in self._searches)
        self._held, self._num_free = text[at:], max(0, num_free - at)
        return text[:at]


class _Search:
    """Looks for one string in a text in pieces, each character once. Source: Knuth, Morris and Pratt, 1977.

    `num_matched` is how many characters at the text's end begin the string, the longest such end. The table of matches
    after a mismatch is made as far as the text has reached.
    """

    def __init__(self, wanted: str) -> None:
        self.num_matched = 0
        self._wanted = wanted
        self._fallbacks = [0, 0]
        """At n: how many characters both begin the string and end its first n, fewer than n."""

    def pass_over(self, text: str) -> None:
        """Look at text without counting whole strings in it."""
        while (at := self.push(text)) is not None:
            text = text[at + len(self._wanted) :]
            self.num_matched = self._fallback(len(self._wanted))

    def push(self, text: str) -> int | None:
        """Start of the string's first occurrence, from the start of `text` on; None if it has not ended yet.

        Below 0 if it began before. There is no more to look for then.
        """
        wanted, matched, at = self._wanted, self.num_matched, 0
        while at < len(text):
            if not matched:
                at = text.find(wanted[0], at)
                if at < 0:
                    break
            if text[at] == wanted[matched]:
                matched, at = matched + 1, at + 1
                if matched == len(wanted):
                    return at - matched
            else:
                matched = self._fallback(matched)
        self.num_matched = matched
        return None

    def _fallback(self, num: int) -> int:
        table, wanted = self._fallbacks, self._wanted
        while len(table) <= num:
            size, char = table[-1], wanted[len(table) - 1]
            while size and wanted[size] != char:
                size = table[size]
            table.append(size + (wanted[size] == char))
        return table[num]


def len_of_overlap(text: str, marker: str) -> int:
    """Number of characters at the end of `text` that begin `marker`, the whole of it excluded."""
    longest = min(len(text), len(marker) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(marker[:size])), 0)


class ReplyText:
    """A reply's ids to its text, without the stop string, or the one of `stop_ids`, at its end. Owned by one parser.

    None of the first `min_tokens` ids ends the reply, so no stop string completed by them does.
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
        """The text made certain by `ids`."""
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


class PlainParser:
    """The parser of one completion; owned by its turn. `feed` as ids come, `finish` once.

    The text ends with the matched stop string, or before it, as `view` says. With control tokens it has all of them,
    the last as well. A stop string completed by its first `min_tokens` ids does not end it.
    """

    def __init__(self, tokenizer: Tokenizer, *, stop: tuple[str, ...], view: TextView, min_tokens: int = 0) -> None:
        stream = ShownStream(tokenizer, skips_special=view.skips_special, shows_last=True)
        stops = StopStrings(stop, keeps_last=view.keeps_stop)
        self._reading = ReplyText(stream, stops, min_tokens=min_tokens)
        self._text: list[str] = []

    def feed(self, ids: Sequence[int]) -> ReplyDelta:
        """Read more ids; return the text made certain by them."""
        return self._delta(self._reading.push(ids))

    def finish(self, finish: Finish) -> tuple[ReplyDelta, ParsedReply]:
        """The end: the rest, held back until now, and the whole text as a message."""
        delta = self._delta(self._reading.finish(finish))
        return delta, ParsedReply(message=Message(role=Role.ASSISTANT, content="".join(self._text)))

    def _delta(self, text: str) -> ReplyDelta:
        self._text.append(text)
        return ReplyDelta(content=text)
