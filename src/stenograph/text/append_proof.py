"""The proof that a template is append-only: its text of a conversation stays when the session appends to it.

Owns the laws by which a line's ids stay those that the template would write, and the report of a broken one. The proof
renders every kind of conversation (`conversations`); it is as good as they are.
"""

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from stenograph.core.blame import Blame, RequestPart
from stenograph.core.errors import UnrenderableMessage
from stenograph.core.messages import Message, Role
from stenograph.text.conversations import ExampleExchange, appended, exchanges, user
from stenograph.text.family import Family
from stenograph.text.template.input import Sealer
from stenograph.text.writer import Writer

_MAX_REWRITES = 8
_MAX_PROOFS = 64
_LEAD_CHARS, _SHOWN_CHARS = 32, 120


class Law(enum.StrEnum):
    """Laws for a template to keep."""

    HISTORY = "history"
    """Later messages do not change how earlier ones are written."""
    PROMPT = "prompt"
    """A reply is later written after its own prompt."""
    SUFFIX = "suffix"
    """The text of new messages does not depend on anything before the last reply."""


_BROKEN = {
    Law.HISTORY: "when messages are appended, it rewrites earlier ones",
    Law.PROMPT: "it later writes the reply in another way than the prompt that asked for it",
    Law.SUFFIX: "what it appends depends on what came before the last reply",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewrite:
    """A broken law: in this conversation the template has to go on as `expected`, but it writes `actual`.

    Both are cut around the first difference, at the character `at` of the conversation's text.
    """

    law: Law
    conversation: str
    why: str
    expected: str
    actual: str
    at: int

    def __str__(self) -> str:
        return (
            f"{_BROKEN[self.law]}: {self.why}. In the conversation [{self.conversation}], at character {self.at},"
            f" it should write {self.expected!r}, but writes {self.actual!r}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """Result of the check. `refusal` is the template's word where it shows no plain conversation at all."""

    rewrites: tuple[Rewrite, ...]
    num_checked: int
    num_refused: int
    refusal: str | None

    @property
    def holds(self) -> bool:
        """Whether the template may be used for sessions."""
        return not self.rewrites and self.refusal is None

    @property
    def why_not(self) -> str:
        """One sentence for a person; empty where it holds."""
        if self.refusal is not None:
            return f"it cannot show a plain conversation: {self.refusal}"
        return f"it is not append-only: {self.rewrites[0]}." if self.rewrites else ""


class ProofCache:
    """The proofs of one template, by the arguments from a request; the oldest forgotten first."""

    def __init__(self, writer: Writer, family: Family) -> None:
        self._writer = writer
        self._family = family
        self._proofs: dict[str, Proof] = {}

    def __repr__(self) -> str:
        return f"<ProofCache {len(self._proofs)} of {_MAX_PROOFS}>"

    def has(self, kwargs: Mapping[str, object]) -> bool:
        """Whether `get` has it at hand."""
        return _spelled(self._writer.read_by_template(kwargs)) in self._proofs

    def get(self, kwargs: Mapping[str, object]) -> Proof:
        """The proof with these arguments, as far as the template reads them.

        If several threads ask at once, each may make it.
        """
        kwargs = self._writer.read_by_template(kwargs)
        spelled = _spelled(kwargs)
        proof = self._proofs.get(spelled)
        if proof is None:
            proof = prove(self._writer, self._family, kwargs)
            while len(self._proofs) >= _MAX_PROOFS:
                self._proofs.pop(next(iter(self._proofs)), None)
            self._proofs[spelled] = proof
        return proof

    def check(self, kwargs: Mapping[str, object]) -> None:
        """Raise UnrenderableMessage if with these arguments, and because of them, the template is not append-only."""
        if (proof := self.get(kwargs)).holds or not self.get({}).holds:
            return
        raise UnrenderableMessage(
            f"With these chat_template_kwargs the model's chat template cannot be used: {proof.why_not}",
            blame=Blame(RequestPart.TEMPLATE_KWARGS),
        )


def _spelled(kwargs: Mapping[str, object]) -> str:
    """Arguments by their spelling: True, 1 and 1.0 are not the same."""
    return repr(sorted(kwargs.items(), key=lambda item: item[0]))


def prove(writer: Writer, family: Family, kwargs: Mapping[str, object]) -> Proof:
    """Check a template against the laws. `family`'s roles are known. Never raises, whatever a template does."""
    attempt = _Attempt(writer, family, kwargs)
    rewrites = tuple(islice(attempt.rewrites(), _MAX_REWRITES))
    return Proof(
        rewrites=rewrites,
        num_checked=attempt.num_checked,
        num_refused=attempt.num_refused,
        refusal=attempt.refusal(),
    )


class _Attempt:
    """One proof on its way."""

    def __init__(self, writer: Writer, family: Family, kwargs: Mapping[str, object]) -> None:
        self._writer = writer
        self._family = family
        self._roles = family.roles or frozenset()
        self._early_roles = family.early_roles or frozenset()
        self._kwargs = kwargs
        self._sealer: Sealer = writer.sealer((), (), kwargs)
        self.num_checked = 0
        self.num_refused = 0

    def rewrites(self) -> Iterator[Rewrite]:
        """Every broken law, conversation by conversation."""
        for exchange in exchanges(has_tools=bool(self._family.shows_tools)):
            if not self._may_be_written(exchange.opening):
                continue
            try:
                yield from self._of_exchange(exchange)
            except UnrenderableMessage:
                self.num_refused += 1

    def refusal(self) -> str | None:
        """The reason why the template cannot show a user, a reply and a user; None if it can."""
        reply = Message(role=Role.ASSISTANT, content="b")
        try:
            self._text(ExampleExchange(opening=(user("a"),), reply=reply, tools=()), (user("c"),))
        except UnrenderableMessage as error:
            return str(error)
        return None

    def _of_exchange(self, exchange: ExampleExchange) -> Iterator[Rewrite]:
        asked = self._writer.text(self._sealer, exchange.opening, exchange.tools, self._kwargs, prompt=True)
        if not self._may_answer(asked, exchange.reply):
            return
        before = self._text(exchange, None)
        self.num_checked += 1
        if not before.startswith(asked):
            yield rewrite_of(Law.PROMPT, (*exchange.opening, exchange.reply), asked, before)
        for new in appended(exchange.reply):
            if not self._may_be_written(new) or any(message.role in self._early_roles for message in new):
                continue
            try:
                yield from self._of_appended(exchange, before, new)
            except UnrenderableMessage:
                self.num_refused += 1

    def _of_appended(self, exchange: ExampleExchange, before: str, new: Sequence[Message]) -> Iterator[Rewrite]:
        after = self._text(exchange, new)
        self.num_checked += 1
        conversation = (*exchange.opening, exchange.reply, *new)
        if not after.startswith(before):
            yield rewrite_of(Law.HISTORY, conversation, before, after)
            return
        # What a bridge makes of it (writer): the same messages after a history that stands for any.
        reply = Message(role=Role.ASSISTANT, content="a", tool_calls=exchange.reply.tool_calls)
        tools = () if self._family.tools_before_turns else exchange.tools
        other = ExampleExchange(opening=(user("u"),), reply=reply, tools=tools)
        other_before, other_after = self._text(other, None), self._text(other, new)
        if not other_after.startswith(other_before):
            yield rewrite_of(Law.HISTORY, (*other.opening, reply, *new), other_before, other_after)
        elif before + other_after[len(other_before) :] != after:
            yield rewrite_of(Law.SUFFIX, conversation, before + other_after[len(other_before) :], after)

    def _text(self, exchange: ExampleExchange, new: Sequence[Message] | None) -> str:
        """Up to the reply, or with `new` up to the prompt after them."""
        messages = (*exchange.opening, exchange.reply, *(new or ()))
        return self._writer.text(self._sealer, messages, exchange.tools, self._kwargs, prompt=new is not None)

    def _may_be_written(self, messages: Sequence[Message]) -> bool:
        return all(message.role in self._roles for message in messages)

    def _may_answer(self, asked: str, reply: Message) -> bool:
        """Whether a prompt can have such a reply: an opened block needs reasoning, a closed one allows none.

        A family without reasoning markers has none.
        """
        marks = self._family.syntax.reasoning
        if marks is None or asked.rstrip().endswith(marks.close):
            return reply.reasoning is None
        return reply.reasoning is not None or not asked.rstrip().endswith(marks.open)


def rewrite_of(law: Law, messages: Sequence[Message], expected: str, actual: str) -> Rewrite:
    """The difference of two texts; the second ought to go on as the first."""
    shorter = min(len(expected), len(actual))
    at = next((i for i in range(shorter) if expected[i] != actual[i]), shorter)
    return Rewrite(
        law=law,
        conversation=", ".join(map(_described, messages)),
        why=_why(messages, expected, actual),
        expected=_cut(expected, at),
        actual=_cut(actual, at),
        at=at,
    )


def _described(message: Message) -> str:
    with_ = [
        what
        for what, is_there in (("reasoning", message.reasoning), ("calls", message.tool_calls))
        if is_there and message.role is Role.ASSISTANT
    ]
    return f"{message.role.value} with {' and '.join(with_)}" if with_ else message.role.value


def _why(messages: Sequence[Message], expected: str, actual: str) -> str:
    """The missing part of the messages, where it is plain."""
    for message in messages:
        if message.reasoning and message.reasoning in expected and message.reasoning not in actual:
            return "it drops the reasoning of an earlier reply"
    if any(message.content and message.content not in actual for message in messages):
        return "it drops what a message says"
    if "think" in expected and expected.count("think") != actual.count("think"):
        return "it writes a block for reasoning at one time and not at the other"
    return "it writes the same messages differently"


def _cut(text: str, around: int) -> str:
    start = max(0, around - _LEAD_CHARS)
    end = start + _SHOWN_CHARS
    return ("…" if start else "") + text[start:end] + ("…" if end < len(text) else "")
