"""The template's own rendering of a reply, to stand in for a model's reply in verification.

Knows nothing of the checks.
"""

from array import array
from collections.abc import Iterator, Mapping, Sequence

from stenograph.core.messages import Message
from stenograph.text.conversations import ExampleExchange
from stenograph.text.renderer import Renderer

TAIL_TOKENS = 64
"""Ids looked at from a line's end: more than any template writes between two messages."""


def may_answer(renderer: Renderer, prompt: Sequence[int], reply: Message) -> bool:
    """Whether a prompt can have such a reply: a prompt with open reasoning needs it, one with closed reasoning has
    none."""
    marks = renderer.family.syntax.reasoning
    text = renderer.tokenizer.decode(prompt[-TAIL_TOKENS:]).rstrip()
    if marks is None or text.endswith(marks.close):
        return reply.reasoning is None
    return reply.reasoning is not None or not text.endswith(marks.open)


def sampled_as(
    renderer: Renderer, exchange: ExampleExchange, kwargs: Mapping[str, object] | None = None
) -> Iterator["array[int]"]:
    """The reply as a model would sample it if it wrote as the template does: once for each possible end token.

    So not at all where neither the template nor the family names one.
    """
    writer, tokenizer = renderer.writer, renderer.tokenizer
    sealer = writer.sealer((*exchange.opening, exchange.reply), exchange.tools, kwargs)
    asked = writer.text(sealer, exchange.opening, exchange.tools, kwargs, prompt=True)
    whole = writer.text(sealer, (*exchange.opening, exchange.reply), exchange.tools, kwargs, prompt=False)
    text = whole[len(asked) :]
    closing = renderer.closing(exchange.tools, kwargs, has_calls=bool(exchange.reply.tool_calls))
    said = text[: len(text) - len(closing)] if closing and text.endswith(closing) else text
    stops = [closing[start:end] for start, end in tokenizer.find_added(closing)][:1] or renderer.family.opening_stops
    for stop in dict.fromkeys((*stops, *renderer.family.reply_stops)):
        ids = tokenizer.encode_spans(sealer.open(said))
        ids.append(tokenizer.added_tokens[stop])
        yield ids
