"""A completion's ids to its text, as they come. No reasoning and no calls: a completion is no message.

Text is held back only while a stop string could still complete, or a character.
"""

from collections.abc import Sequence

from stenograph.core.chat import ParsedReply, TextView
from stenograph.core.messages import Message, ReplyDelta, Role
from stenograph.core.types import Finish
from stenograph.model.tokenizer import Tokenizer
from stenograph.text.reply_text import ReplyText, ShownStream, StopStrings


class PlainParser:
    """The parser of one completion; owned by its turn. `feed` as ids come, `finish` once.

    The text ends with the stop string that ended it, or before, as `view` says. With control tokens it has all of them,
    the last as well. No stop string ends it that its first `min_tokens` ids complete.
    """

    def __init__(self, tokenizer: Tokenizer, *, stop: tuple[str, ...], view: TextView, min_tokens: int = 0) -> None:
        stream = ShownStream(tokenizer, skips_special=view.skips_special, shows_last=True)
        stops = StopStrings(stop, keeps_last=view.keeps_stop)
        self._reading = ReplyText(stream, stops, min_tokens=min_tokens)
        self._text: list[str] = []

    def feed(self, ids: Sequence[int]) -> ReplyDelta:
        """Read more ids; the text that became certain by them."""
        return self._delta(self._reading.push(ids))

    def finish(self, finish: Finish) -> tuple[ReplyDelta, ParsedReply]:
        """The end: what was still held back, and the whole text as a message."""
        delta = self._delta(self._reading.finish(finish))
        return delta, ParsedReply(message=Message(role=Role.ASSISTANT, content="".join(self._text)))

    def _delta(self, text: str) -> ReplyDelta:
        self._text.append(text)
        return ReplyDelta(content=text)
