"""A completion's ids to its text, as they come. No reasoning and no calls: a completion is no message.

Text is held back only while a stop string could still complete, or a character.
"""

from collections.abc import Sequence

from stenograph.core.chat import ParsedReply, ReplyDelta
from stenograph.core.messages import Message, Role
from stenograph.core.types import Finish
from stenograph.render.parsers.stop_strings import StopStrings
from stenograph.render.tokenizer import Tokenizer


class PlainParser:
    """The parser of one completion; owned by its turn. `feed` as ids come, `finish` once.

    With `keeps_stop` the text ends with the stop string that ended it, else before.
    """

    def __init__(self, tokenizer: Tokenizer, *, stop: tuple[str, ...], skips_special: bool, keeps_stop: bool) -> None:
        self._stream = tokenizer.text_stream(skip_special=skips_special)
        self._stops = StopStrings(stop, keeps_last=keeps_stop)
        self._text: list[str] = []

    def feed(self, ids: Sequence[int]) -> ReplyDelta:
        """Read more ids; the text that became certain by them."""
        return self._told(self._stops.push("".join(map(self._stream.push, ids))))

    def finish(self, finish: Finish) -> tuple[ReplyDelta, ParsedReply]:
        """The end: what was still held back, and the whole text as a message."""
        delta = self._told(self._stops.push(self._stream.flush()) + self._stops.finish(finish))
        return delta, ParsedReply(message=Message(role=Role.ASSISTANT, content="".join(self._text)))

    def _told(self, text: str) -> ReplyDelta:
        self._text.append(text)
        return ReplyDelta(content=text)
