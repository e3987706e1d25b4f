"""Is TITO exact for this model? Sessions of every kind, grown as the server grows them, held to the template.

Owns the checks beyond the proof of append-only (`append_proof`), which looks at text: these look at ids. A model's
replies are stood in for by what the template writes for them, so that whatever differs is the frame's fault. Knows
nothing of engines or printing.
"""

import enum
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec

from stenograph.core.errors import UnrenderableMessage
from stenograph.core.messages import Message, ToolCall
from stenograph.core.types import Finish, FinishReason, SamplingParams
from stenograph.render.append_proof import Proof
from stenograph.render.conversations import Exchange, appended, exchanges, user
from stenograph.render.drift import DriftClass, find_drift
from stenograph.render.renderer import Renderer

_TAIL_TOKENS = 64
_NO_PARAMS = SamplingParams()


class Check(enum.StrEnum):
    """What is checked."""

    BRIDGE = "bridge"
    """A line that was bridged has the ids of a full render."""
    PARSE = "parse"
    """A reply that was rendered parses to itself, whole or id by id."""
    PARTS = "parts"
    """The parts of a parsed reply are all of its ids, in order."""
    INJECTION = "injection"
    """Control tokens that a client writes in plain text are text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One check of one conversation. `problem` is empty where it passed."""

    check: Check
    conversation: str
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """Everything that was found. `num_tolerated` bridges differ from a render in how a reply is tokenized, no more."""

    proof: Proof
    findings: tuple[Finding, ...]
    num_refused: int
    num_tolerated: int

    @property
    def failures(self) -> tuple[Finding, ...]:
        """What did not pass."""
        return tuple(finding for finding in self.findings if finding.problem)

    @property
    def holds(self) -> bool:
        """Whether all is as it has to be."""
        return self.proof.holds and not self.failures


def verify(renderer: Renderer) -> Verification:
    """Check every kind of conversation that the family can have. Never raises for what a template does."""
    run = _Run(renderer)
    proof = renderer.prove()
    findings = tuple(run.findings())
    return Verification(proof=proof, findings=findings, num_refused=run.num_refused, num_tolerated=run.num_tolerated)


class _Run:
    """One verification on its way."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._roles = renderer.family.roles or frozenset()
        self._early_roles = renderer.family.early_roles or frozenset()
        self.num_refused = 0
        self.num_tolerated = 0

    def findings(self) -> Iterator[Finding]:
        """Check by check."""
        for exchange in exchanges(has_tools=bool(self._renderer.family.shows_tools)):
            if not self._may_be_written(exchange.opening):
                continue
            try:
                yield from self._of_exchange(exchange)
            except UnrenderableMessage:
                self.num_refused += 1
        yield self._injection()

    def _of_exchange(self, exchange: Exchange) -> Iterator[Finding]:
        renderer, tools = self._renderer, exchange.tools
        prompt = renderer.render(exchange.opening, tools, {})
        if not may_answer(renderer, prompt, exchange.reply):
            return
        for sampled in sampled_as(renderer, exchange):
            yield from self._parsed(exchange, prompt, sampled)
            for new in appended(exchange.reply):
                if not self._may_be_written(new) or any(message.role in self._early_roles for message in new):
                    continue
                try:
                    yield self._bridged(exchange, prompt + sampled, len(prompt), new)
                except UnrenderableMessage:
                    self.num_refused += 1

    def _parsed(self, exchange: Exchange, prompt: "array[int]", sampled: "array[int]") -> Iterator[Finding]:
        renderer, name = self._renderer, describe((*exchange.opening, exchange.reply))
        finish = Finish(reason=FinishReason.STOP, matched=sampled[-1])
        parsed, parts = renderer.parse_tokens(sampled, finish, _NO_PARAMS, exchange.tools, prompt_ids=prompt)
        is_shown = (exchange.reply.reasoning or "") in renderer.tokenizer.decode(sampled)
        reply = exchange.reply if is_shown else replace(exchange.reply, reasoning=None)
        expected, actual = _comparable(reply), _comparable(parsed.message)
        parser = renderer.parser(_NO_PARAMS, exchange.tools, prompt_ids=prompt)
        for token_id in sampled:
            parser.feed((token_id,))
        by_id = parser.finish(finish)[1]
        problem = ""
        if actual != expected:
            problem = f"{renderer.tokenizer.decode(sampled)!r} is read as {actual}, not as {expected}"
        elif parsed.faults:
            problem = f"a fault is seen in what the template writes: {parsed.faults[0]}"
        elif by_id != parsed:
            problem = f"read id by id it is {by_id}, read at once {parsed}"
        yield Finding(check=Check.PARSE, conversation=name, problem=problem)
        ends = [0, *(part.end for part in parts)]
        is_whole = ends[-1] == len(sampled) and all(
            start >= part.start > start - 2 and part.start <= part.end for start, part in zip(ends, parts, strict=False)
        )
        yield Finding(
            check=Check.PARTS, conversation=name, problem="" if is_whole else f"of {len(sampled)} ids: {parts}"
        )

    def _bridged(self, exchange: Exchange, node: "array[int]", num_prompt: int, new: Sequence[Message]) -> Finding:
        renderer, tools = self._renderer, exchange.tools
        bridge = renderer.bridge(node[-_TAIL_TOKENS:], exchange.reply, new, tools, {})
        kept = node[: len(node) - bridge.num_trimmed]
        line = kept + bridge.ids
        messages = (*exchange.opening, exchange.reply, *new)
        expected = renderer.render(messages, tools, {})
        problem = ""
        if line != expected:
            report = find_drift(
                renderer,
                ids=line,
                sampled_spans=[(num_prompt, len(kept))],
                messages=messages,
                tools=tools,
                kwargs={},
            )
            forbidden = [drift for drift in report.drifts if drift.type is not DriftClass.ASSISTANT_TEXT]
            if report.unrenderable is None and not forbidden:
                self.num_tolerated += 1
            else:
                problem = report.unrenderable or str(forbidden[0])
        return Finding(check=Check.BRIDGE, conversation=describe(messages), problem=problem)

    def _injection(self) -> Finding:
        """A user who spells every control token of the tokenizer."""
        renderer = self._renderer
        tokenizer = renderer.tokenizer
        text = " ".join(tokenizer.added_spellings)
        try:
            num_of = [
                sum(token_id in tokenizer.special_ids for token_id in renderer.render((user(one),), (), {}))
                for one in ("harmless", text)
            ]
        except UnrenderableMessage as error:
            return Finding(check=Check.INJECTION, conversation="user", problem=str(error))
        problem = "" if num_of[0] == num_of[1] else f"{num_of[1] - num_of[0]} control tokens were forged"
        return Finding(check=Check.INJECTION, conversation="user", problem=problem)

    def _may_be_written(self, messages: Sequence[Message]) -> bool:
        return all(message.role in self._roles for message in messages)


def may_answer(renderer: Renderer, prompt: Sequence[int], reply: Message) -> bool:
    """Whether a prompt can have such a reply: one that opened the reasoning needs it, one that closed it has none."""
    marks = renderer.family.syntax.reasoning
    text = renderer.tokenizer.decode(prompt[-_TAIL_TOKENS:]).rstrip()
    if marks is None or text.endswith(marks.close):
        return reply.reasoning is None
    return reply.reasoning is not None or not text.endswith(marks.open)


def sampled_as(renderer: Renderer, exchange: Exchange) -> Iterator["array[int]"]:
    """The reply as a model would sample it if it wrote as the template does: once for each token that may end it."""
    writer, tokenizer = renderer.writer, renderer.tokenizer
    sealer = writer.sealer((*exchange.opening, exchange.reply), exchange.tools)
    asked = writer.text(sealer, exchange.opening, exchange.tools, prompt=True)
    whole = writer.text(sealer, (*exchange.opening, exchange.reply), exchange.tools, prompt=False)
    text = whole[len(asked) :]
    closing = renderer.closing(exchange.tools)
    said = text[: len(text) - len(closing)] if closing and text.endswith(closing) else text
    stops = [closing[start:end] for start, end in tokenizer.find_added(closing)][:1] or renderer.family.opening_stops
    for stop in stops:
        ids = tokenizer.encode_spans(sealer.open(said))
        ids.append(tokenizer.added_tokens[stop])
        yield ids


def describe(messages: Sequence[Message]) -> str:
    """A conversation in a few words."""
    return ", ".join(
        f"{message.role.value}"
        + (" with reasoning" if message.reasoning else "")
        + (f" with {len(message.tool_calls)} calls" if message.tool_calls else "")
        for message in messages
    )


def _comparable(message: Message) -> Message:
    """A message without what a reply does not say: ids of calls, the spelling of their arguments, null or empty."""
    calls = tuple(ToolCall(id="", name=one.name, arguments=_canonical(one.arguments)) for one in message.tool_calls)
    return replace(message, content=message.content or "", tool_calls=calls)


def _canonical(arguments: str) -> str:
    try:
        return msgspec.json.encode(msgspec.json.decode(arguments), order="sorted").decode()
    except (msgspec.DecodeError, ValueError):
        return arguments
