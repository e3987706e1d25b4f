"""Chunks to a message: parsed from the ids, or, where the engine writes the reply itself, taken from it.

Owns how much of a chunk is read at once: most engines that are not asked to stream give a whole reply in one. Knows
neither the turn nor who watches it.
"""

from collections.abc import Callable, Iterator

from stenograph.core.chat import ParsedReply, ReplyDelta, whole_delta
from stenograph.core.types import Chunk, EngineReply, Finish, SampledTurn
from stenograph.reply.reading import Parser

READ_AT_ONCE = 512
"""Ids that are read at once: up to 5 µs each where reasoning is counted, and as much again for 64 stop strings."""


def parts_of(sampled: Chunk | SampledTurn) -> Iterator[Chunk]:
    """Sampled ids with their log-probabilities and alternatives, at most READ_AT_ONCE in each part."""
    tops = sampled.top_logprobs
    for start in range(0, len(sampled.ids), READ_AT_ONCE):
        part = slice(start, start + READ_AT_ONCE)
        top_logprobs = None if tops is None else tops[part]
        yield Chunk(ids=sampled.ids[part], logprobs=sampled.logprobs[part], top_logprobs=top_logprobs)


_NOTHING = ReplyDelta()


class ChunkReader:
    """Reader of a turn's chunks. Owned by one turn; used once, `finish` last."""

    def __init__(self, make_parser: Callable[[], Parser]) -> None:
        self.written: EngineReply | None = None
        self._make_parser = make_parser
        self._made: Parser | None = None

    def feed(self, chunk: Chunk) -> ReplyDelta:
        """Read a chunk; returns what it adds to the message."""
        if chunk.reply is None:
            return self._parser.feed(chunk.ids)
        self.written = chunk.reply
        return whole_delta(chunk.reply.message)

    @property
    def _parser(self) -> Parser:
        """Made when it is needed: a reply that the engine wrote needs none."""
        if self._made is None:
            self._made = self._make_parser()
        return self._made

    def take_whole(self, reply: EngineReply) -> None:
        """Take the engine's own reply, whose message nobody reads in pieces."""
        self.written = reply

    def feed_parts(self, chunk: Chunk) -> Iterator[tuple[ReplyDelta, Chunk]]:
        """The same in parts for the loop, each with the ids and log-probabilities that it was read from."""
        if chunk.reply is not None:
            yield self.feed(chunk), chunk
            return
        for part in parts_of(chunk):
            yield self._parser.feed(part.ids), part

    def finish(self, finish: Finish) -> tuple[ReplyDelta, ParsedReply]:
        """The rest, and the whole message."""
        if self.written is not None:
            return _NOTHING, ParsedReply(message=self.written.message)
        return self._parser.finish(finish)
