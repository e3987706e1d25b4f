"""Verifies exact TITO for a model: grows sessions of every kind as the server does, and renders them again.

Owns the checks beyond the proof of append-only (`append_proof`): it looks at text, these look at ids. The template's
own text stands in for a model's replies, so any difference is the frame's fault. Knows nothing of engines or printing.
"""

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import msgspec
from msgspec import structs

from stenograph.core.drift import DriftClass
from stenograph.core.errors import UnrenderableMessage
from stenograph.core.messages import Message, Tool, ToolCall
from stenograph.core.types import Finish, FinishReason, SamplingParams
from stenograph.text.append_proof import Law, Proof, rewrite_of
from stenograph.text.conversations import ExampleExchange, appended, exchanges, user
from stenograph.text.drift import find_drift
from stenograph.text.renderer import Renderer
from stenograph.verify.findings import Check, Difference, Finding, describe, first_difference, kinds_of
from stenograph.verify.long_session import grow
from stenograph.verify.template_reply import TAIL_TOKENS, may_answer, sampled_as

__all__ = ["Check", "Finding", "Verification", "may_answer", "sampled_as", "verify"]

_NO_PARAMS = SamplingParams()

_NO_END = (
    "the template writes no control token after a reply, and the family names no end token: the model's end token"
    " would stay in the line, where the template has none"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """All findings. `num_tolerated` bridges differ from a render in how a reply is tokenized, no more."""

    proof: Proof
    findings: tuple[Finding, ...]
    num_refused: int
    num_tolerated: int

    @property
    def failures(self) -> tuple[Finding, ...]:
        """The failed findings."""
        return tuple(finding for finding in self.findings if finding.problem)

    @property
    def holds(self) -> bool:
        """Whether all is as it has to be."""
        return self.proof.holds and not self.failures


def verify(
    renderer: Renderer,
    kwargs: Mapping[str, object] | None = None,
    *,
    told: Callable[[int, int], None] | None = None,
) -> Verification:
    """Check every kind of conversation possible in the family, with these template arguments in each.

    `told` is called with the number of conversations done, and of all. Never raises for a template's faults.
    """
    run = _Run(renderer, kwargs or {})
    proof = renderer.prove(kwargs or {})
    findings = tuple(run.findings(told or _tell_nobody))
    return Verification(proof=proof, findings=findings, num_refused=run.num_refused, num_tolerated=run.num_tolerated)


def _tell_nobody(done: int, total: int) -> None: ...


class _Run:
    """One verification on its way."""

    def __init__(self, renderer: Renderer, kwargs: Mapping[str, object]) -> None:
        self._renderer = renderer
        self._kwargs = kwargs
        self._roles = renderer.family.roles or frozenset()
        self._early_roles = renderer.family.early_roles or frozenset()
        self._has_end = True
        self.num_refused = 0
        self.num_tolerated = 0

    def findings(self, told: Callable[[int, int], None]) -> Iterator[Finding]:
        """Check by check."""
        all_exchanges = list(exchanges(has_tools=bool(self._renderer.family.shows_tools)))
        for number, exchange in enumerate(all_exchanges):
            told(number, len(all_exchanges))
            if not self._may_be_written(exchange.opening):
                continue
            try:
                yield from self._of_exchange(exchange)
            except UnrenderableMessage:
                self.num_refused += 1
        try:
            if self._has_end and self._renderer.prove(self._kwargs).holds:  # else it has no replies to grow with
                yield from self._long_session()
        except UnrenderableMessage:
            self.num_refused += 1
        yield self._injection()
        told(len(all_exchanges), len(all_exchanges))

    def _of_exchange(self, exchange: ExampleExchange) -> Iterator[Finding]:
        renderer, tools, reply = self._renderer, exchange.tools, exchange.reply
        prompt = self._rendered(exchange.opening, tools)
        if not may_answer(renderer, prompt, reply):
            return
        asked = self._history(Law.PROMPT, exchange, ())
        yield asked
        if asked.problem:
            return  # nothing that is written stands for what a model would write
        # A reply with calls may have another end than one with text, and an empty one has nothing but its end.
        may_end_early = len(exchange.opening) == 1 and bool(reply.content) and not reply.tool_calls
        later: list[tuple[Message, ...]] = []
        for new in filter(self._may_follow, appended(reply)):
            try:
                history = self._history(Law.HISTORY, exchange, new)
            except UnrenderableMessage:
                self.num_refused += 1
                continue
            yield history
            if not history.problem:
                later.append(new)
        replies = tuple(sampled_as(renderer, exchange, self._kwargs))
        if not replies:
            self._has_end = False
            name, kinds = describe((*exchange.opening, reply)), kinds_of((*exchange.opening, reply))
            yield Finding(check=Check.BOUNDARY, conversation=name, kinds=kinds, problem=_NO_END)
        for sampled in replies:
            yield from self._parsed(exchange, prompt, sampled)
            lines = [(Check.BRIDGE, prompt + sampled)]
            if may_end_early:
                lines.append((Check.BOUNDARY, prompt + sampled[:-1]))
            for new, (check, line) in product(later, lines):
                try:
                    yield self._bridged(check, exchange, line, len(prompt), new)
                except UnrenderableMessage:
                    self.num_refused += 1
            may_end_early = False

    def _parsed(self, exchange: ExampleExchange, prompt: "array[int]", sampled: "array[int]") -> Iterator[Finding]:
        renderer = self._renderer
        name, kinds = describe((*exchange.opening, exchange.reply)), kinds_of((*exchange.opening, exchange.reply))
        finish = Finish(reason=FinishReason.STOP, matched=sampled[-1])
        end = renderer.prompt_end(prompt)
        parsed, parts = renderer.parse_tokens(sampled, finish, _NO_PARAMS, exchange.tools, prompt_end=end)
        is_shown = (exchange.reply.reasoning or "") in renderer.tokenizer.decode(sampled)
        reply = exchange.reply if is_shown else structs.replace(exchange.reply, reasoning=None)
        expected, actual = _comparable(reply), _comparable(parsed.message)
        parser = renderer.parser(_NO_PARAMS, exchange.tools, prompt_end=end)
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
        yield Finding(check=Check.PARSE, conversation=name, kinds=kinds, problem=problem)
        ends = [0, *(part.end for part in parts)]
        is_whole = ends[-1] == len(sampled) and all(
            start >= part.start > start - 2 and part.start <= part.end for start, part in zip(ends, parts, strict=False)
        )
        problem = "" if is_whole else f"of {len(sampled)} ids: {parts}"
        yield Finding(check=Check.PARTS, conversation=name, kinds=kinds, problem=problem)

    def _history(self, law: Law, exchange: ExampleExchange, new: Sequence[Message]) -> Finding:
        """Whether the reply is written after its prompt, or new messages after all the text up to it."""
        writer, opening, tools = self._renderer.writer, exchange.opening, exchange.tools
        messages = (*opening, exchange.reply, *new)
        sealer = writer.sealer(messages, tools, self._kwargs)
        is_asked = law is Law.PROMPT
        earlier = opening if is_asked else (*opening, exchange.reply)
        before = writer.text(sealer, earlier, tools, self._kwargs, prompt=is_asked)
        after = writer.text(sealer, messages, tools, self._kwargs, prompt=not is_asked)
        finding = Finding(check=Check.HISTORY, conversation=describe(messages), kinds=kinds_of(messages))
        if after.startswith(before):
            return finding
        kept, written = (self._renderer.tokenizer.encode_spans(sealer.open(text)) for text in (before, after))
        problem = rewrite_of(law, messages, before, after).why
        return replace(finding, problem=problem, difference=self._difference(written, kept))

    def _bridged(
        self, check: Check, exchange: ExampleExchange, node: "array[int]", num_prompt: int, new: Sequence[Message]
    ) -> Finding:
        renderer, tools = self._renderer, exchange.tools
        bridge = renderer.bridge(node[-TAIL_TOKENS:], exchange.reply, new, tools, self._kwargs)
        kept = node[: len(node) - bridge.num_trimmed]
        messages = (*exchange.opening, exchange.reply, *new)
        return self._compared(
            Finding(check=check, conversation=describe(messages), kinds=kinds_of(messages)),
            messages,
            tools,
            kept + bridge.ids,
            [(num_prompt, len(kept))],
        )

    def _compared(
        self,
        finding: Finding,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        line: "array[int]",
        sampled_spans: Sequence[tuple[int, int]],
    ) -> Finding:
        """The finding, with the difference between a line and the full render of its messages."""
        renderer = self._renderer
        expected = renderer.render(messages, tools, self._kwargs)
        if line == expected:
            return finding
        report = find_drift(
            renderer,
            ids=line,
            sampled_spans=sampled_spans,
            messages=messages,
            tools=tools,
            kwargs=self._kwargs,
        )
        forbidden = [drift for drift in report.drifts if drift.type is not DriftClass.ASSISTANT_TEXT]
        if report.unrenderable is None and not forbidden:
            self.num_tolerated += 1
            return finding
        problem = report.unrenderable or f"{forbidden[0].type.value}: {forbidden[0].detail}"
        return replace(finding, problem=problem, difference=self._difference(expected, line))

    def _difference(self, expected: Sequence[int], actual: Sequence[int]) -> Difference:
        return first_difference(self._renderer.tokenizer, expected=expected, actual=actual)

    def _long_session(self) -> Iterator[Finding]:
        """A long session, grown turn by turn."""
        grown = grow(self._renderer, self._kwargs)
        name, kinds = f"a session of {grown.num_turns} turns", kinds_of(grown.messages)
        bridged = Finding(check=Check.BRIDGE, conversation=name, kinds=kinds)
        yield self._compared(bridged, grown.messages, grown.tools, grown.ids, grown.sampled_spans)
        retried = Finding(check=Check.RETRY, conversation=name, kinds=kinds)
        if grown.retried is not None:
            first, again = grown.retried
            problem = "its second attempt has another prompt than its first"
            retried = replace(retried, problem=problem, difference=self._difference(first, again))
        yield retried

    def _injection(self) -> Finding:
        """A user message with every control token of the tokenizer spelled out."""
        tokenizer = self._renderer.tokenizer
        text = " ".join(tokenizer.added_spellings)
        try:
            num_of = [
                sum(token_id in tokenizer.special_ids for token_id in self._rendered((user(one),), ()))
                for one in ("harmless", text)
            ]
        except UnrenderableMessage as error:
            return Finding(check=Check.INJECTION, conversation="user", problem=str(error))
        problem = "" if num_of[0] == num_of[1] else f"{num_of[1] - num_of[0]} control tokens were forged"
        return Finding(check=Check.INJECTION, conversation="user", problem=problem)

    def _rendered(self, messages: Sequence[Message], tools: Sequence[Tool]) -> "array[int]":
        """The renderer's ids for messages, even with arguments it refuses."""
        writer = self._renderer.writer
        sealer = writer.sealer(messages, tools, self._kwargs)
        text = writer.text(sealer, messages, tools, self._kwargs, prompt=True)
        return self._renderer.tokenizer.encode_spans(sealer.open(text))

    def _may_follow(self, new: Sequence[Message]) -> bool:
        return self._may_be_written(new) and not any(message.role in self._early_roles for message in new)

    def _may_be_written(self, messages: Sequence[Message]) -> bool:
        return all(message.role in self._roles for message in messages)


def _comparable(message: Message) -> Message:
    """A message without the parts missing from a reply: ids of calls, the spelling of their arguments, null or
    empty."""
    calls = tuple(ToolCall(id="", name=one.name, arguments=_canonical(one.arguments)) for one in message.tool_calls)
    return structs.replace(message, content=message.content or "", tool_calls=calls)


def _canonical(arguments: str) -> str:
    try:
        return msgspec.json.encode(msgspec.json.decode(arguments), order="sorted").decode()
    except (msgspec.DecodeError, ValueError):
        return arguments
