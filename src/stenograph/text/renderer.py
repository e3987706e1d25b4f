"""Messages to ids and ids to messages, for one model: START READING HERE in this package.

Owns the two ways to open a turn. `render` puts a whole conversation through the chat template; `bridge` appends to
recorded ids; it never changes them or reads their text. All methods are pure and may be called from any thread.
"""

from array import array
from collections.abc import Mapping, Sequence
from functools import lru_cache

from msgspec import Struct

from stenograph.core.blame import Blame, RequestPart
from stenograph.core.chat import ChatRequest, ParsedReply, TextView, ToolChoice
from stenograph.core.errors import UnrenderableMessage
from stenograph.core.messages import Message, Role, Tool, ToolCall
from stenograph.core.types import Finish, Grammar, PromptEnd, SamplingParams
from stenograph.model.tokenizer import Span, Tokenizer
from stenograph.text.append_proof import Proof, ProofCache
from stenograph.text.family import Family
from stenograph.text.grammar.held import BeforeAnswer, Holder, forced_calls, open_reasoning
from stenograph.text.grammar.lark import marker
from stenograph.text.reading import MessageParser, Reading, ReplyPart
from stenograph.text.reply import ReplyParser
from stenograph.text.template.input import client_strings, occurs
from stenograph.text.template.shown import as_shown
from stenograph.text.template.template import Template
from stenograph.text.writer import BARE, Frame, FrameCache, FrameKey, Writer

DEFAULT_TEXT = TextView()
THINKING_SWITCHES = ("enable_thinking", "thinking")
"""Arguments to switch a template's reasoning on or off: the first of most families, the other DeepSeek's."""

EFFORT = "reasoning_effort"
EFFORTS = ("low", "medium", "high")
"""Efforts known to every family with such an argument. Any other is taken for the last."""

PROMPT_END_TOKENS = 16
"""Number of ids read at a prompt's end: more than any family's generation prompt has after its last turn."""
SURE_END_TOKENS = 4
"""Most prompts end with the same few ids; their meaning is kept."""
MAX_SURE_ENDS = 256
MOST_UTF8_BYTES = 4
"""The first characters of a few ids may be the rest of one begun before them."""


class Bridge(Struct, frozen=True, kw_only=True, gc=False):
    """The opening of a turn: `ids` to append after the line's ids, without the last `num_trimmed` of these.

    A trimmed id is a stop token that is another message's opener in this family: the template writes the real next
    message's opener in its place.
    """

    ids: "array[int]"
    num_trimmed: int = 0


class Renderer:
    """A tokenizer, a template and a family that belong together.

    `allows_special`: in what clients write, a control token's spelling is that token, in this renderer's calls alone.
    """

    def __init__(
        self, tokenizer: Tokenizer, template: Template, family: Family, *, allows_special: bool = False
    ) -> None:
        self.tokenizer = tokenizer
        self.family = as_shown(family, tokenizer, template)
        self.writer = Writer(tokenizer, template, self.family, allows_special=allows_special)
        self._frames = FrameCache(tokenizer, self.writer)
        self._roles = self.family.roles or frozenset()
        self._early_roles = self.family.early_roles or frozenset()
        self.hidden_late = frozenset({Role.SYSTEM, Role.DEVELOPER}) - (self.family.late_roles or frozenset())
        """Roles whose messages the template does not write where they stand, once the conversation has begun."""
        self._reply_stops = frozenset(tokenizer.added_tokens[token] for token in self.family.reply_stops)
        self._opening_stops = frozenset(tokenizer.added_tokens[token] for token in self.family.opening_stops)
        self._proofs = ProofCache(self.writer, self.family)
        self._sure_ends = lru_cache(maxsize=MAX_SURE_ENDS)(self._sure_end)

    def __repr__(self) -> str:
        return f"<Renderer {self.family.name}, {self.tokenizer!r}>"

    def check_messages(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        first: int = 0,
        follows_call: bool = False,
    ) -> None:
        """Raise UnrenderableMessage, with a pointer to the fault, for anything without a frame in this family.

        `first` messages come before them in the request. `follows_call`: there is a tool call before them.
        """
        if tools and not self.family.shows_tools:
            raise _no_tool_list()
        was_call = follows_call
        for i, message in enumerate(messages, first):
            if message.role not in self._roles:
                reason = f"The model's chat template has no frame for the role {message.role.value!r}."
                raise UnrenderableMessage(reason, blame=Blame(RequestPart.MESSAGES, i, ("role",)))
            if message.tool_calls and not self.family.shows_tools:
                raise UnrenderableMessage(
                    "The model's chat template cannot show tool calls.",
                    blame=Blame(RequestPart.MESSAGES, i, ("tool_calls",)),
                )
            if message.role is Role.TOOL and not was_call:
                raise UnrenderableMessage(
                    "A tool message answers a tool call, but none comes before it.",
                    blame=Blame(RequestPart.MESSAGES, i, ("role",)),
                )
            was_call = was_call or bool(message.tool_calls)

    def render(self, messages: Sequence[Message], tools: Sequence[Tool], kwargs: Mapping[str, object]) -> "array[int]":
        """Ids [T] of a whole conversation with the prompt for the assistant's turn.

        Without a control token's spelling in a client's text, these are the ids of the template's text by the
        tokenizer. Raises UnrenderableMessage as `spans` does, and for a text that cannot be encoded.
        """
        return self.tokenizer.encode_spans(self.spans(messages, tools, kwargs))

    def spans(self, messages: Sequence[Message], tools: Sequence[Tool], kwargs: Mapping[str, object]) -> list[Span]:
        """The text of a whole conversation with the prompt for the assistant's turn.

        A client's text is untrusted where it spells a control token. Raises UnrenderableMessage: the template refuses,
        or with these arguments it is not append-only.
        """
        if tools and not self.family.shows_tools:
            raise _no_tool_list()
        if self.writer.read_by_template(kwargs):
            self._proofs.check(kwargs)
        sealer = self.writer.sealer(messages, tools, kwargs)
        return sealer.open(self.writer.text(sealer, messages, tools, kwargs, prompt=True))

    def thinking_arguments(self, request: ChatRequest) -> dict[str, object]:
        """The template's own arguments for whether the model reasons, and how much; none where it has none."""
        asked: dict[str, object] = {}
        if request.thinks is not None:
            asked = dict.fromkeys(THINKING_SWITCHES, request.thinks)
        if request.effort is not None:
            asked[EFFORT] = request.effort if request.effort in EFFORTS else EFFORTS[-1]
        return self.writer.read_by_template(asked)

    def is_known(self, kwargs: Mapping[str, object]) -> bool:
        """Whether it is known already if the template is append-only with these arguments: mostly it reads none."""
        return not self.writer.read_by_template(kwargs) or self._proofs.has(kwargs)

    def prove(self, kwargs: Mapping[str, object] | None = None) -> Proof:
        """Whether the template is append-only as the family uses it, with these arguments in every turn."""
        return self._proofs.get(kwargs or {})

    def bridge(
        self,
        tail_ids: Sequence[int],
        reply: Message,
        new: Sequence[Message],
        tools: Sequence[Tool],
        kwargs: Mapping[str, object],
    ) -> Bridge:
        """Ids to append after a node's ids to open the next turn; `tail_ids` are the node's last ids.

        They are the template's close of the assistant's turn, as far as the tail does not end with it already; the
        messages `new`; and the prompt. `reply` is the node's reply; of it only its calls matter, to templates with
        results shown beside calls. Cost is of the new text. Raises UnrenderableMessage: the template refuses, or
        rewrites the text before the new messages. Renders and encodes the new text once; the text around it is kept
        (`Frame`), save that a reply with calls is rendered beside them.
        """
        if tools and not self.family.shows_tools:
            raise _no_tool_list()
        if self._early_roles:
            self._check_late(new)
        shown = () if self.family.tools_before_turns else tuple(tools)
        key = FrameKey(tools=shown, kwargs=kwargs) if shown or kwargs else BARE
        frame, text = self._new_text(key, reply.tool_calls, new)
        closing = (self.family.call_closing if reply.tool_calls else None) or frame.closing
        ids = self.tokenizer.encode_spans(frame.sealer.open(closing + text))
        closing_ids = frame.closing_ids if closing == frame.closing else self.tokenizer.encode(closing)
        last = tail_ids[-1] if tail_ids else None
        if last in self._reply_stops and (not closing_ids or last != closing_ids[0]):
            return Bridge(ids=ids, num_trimmed=1)  # the template writes another stop token in its place
        ids = ids[_overlap(tail_ids, ids, closing_ids) :]
        if last not in self._opening_stops:
            return Bridge(ids=ids)
        # Without the token that it would write twice, or with one to trim that it writes otherwise.
        return Bridge(ids=ids[1:]) if list(ids[:1]) == [last] else Bridge(ids=ids, num_trimmed=1)

    def parser(
        self,
        params: SamplingParams,
        tools: Sequence[Tool],
        *,
        id_prefix: str = "",
        prompt_end: PromptEnd = PromptEnd.SILENT,
        text: TextView = DEFAULT_TEXT,
    ) -> MessageParser:
        """A parser for one reply to a prompt with this end; its calls get the ids `call_{id_prefix}{n}`.

        Without tools calls are text.
        """
        reading = Reading(
            stop=params.stop,
            stop_token_ids=params.stop_token_ids,
            min_tokens=params.min_tokens,
            text=text,
            tools=tuple(tools),
            id_prefix=id_prefix,
            prompt_end=prompt_end,
        )
        if self.family.make_parser is not None:
            return self.family.make_parser(self.tokenizer, reading)
        return ReplyParser(self.tokenizer, self.family.syntax, reading)

    def parse(
        self,
        ids: Sequence[int],
        finish: Finish,
        params: SamplingParams,
        tools: Sequence[Tool],
        *,
        id_prefix: str = "",
        prompt_end: PromptEnd = PromptEnd.SILENT,
    ) -> ParsedReply:
        """A whole reply as a message, read by `parser` at once. Never raises."""
        parser = self.parser(params, tools, id_prefix=id_prefix, prompt_end=prompt_end)
        parser.feed(ids)
        return parser.finish(finish)[1]

    def parse_tokens(
        self,
        ids: Sequence[int],
        finish: Finish,
        params: SamplingParams,
        tools: Sequence[Tool],
        *,
        prompt_end: PromptEnd = PromptEnd.SILENT,
    ) -> tuple[ParsedReply, tuple[ReplyPart, ...]]:
        """A whole reply as a message, and its ids by their kinds: the parts together are all of them."""
        parser = self.parser(params, tools, prompt_end=prompt_end)
        parser.feed(ids)
        return parser.finish(finish)[1], parser.parts()

    def tool_grammar(
        self,
        tools: Sequence[Tool],
        choice: ToolChoice,
        parallel: bool,
        *,
        prompt_end: PromptEnd = PromptEnd.SILENT,
        holder: Holder | None = None,
    ) -> Grammar | None:
        """The grammar to make the model call as `choice` says after a prompt with this end; None: it forces nothing.

        It is of one of `holder`'s kinds, where it can be. Raises InvalidRequest as `forced_calls` does.
        """
        own, added = self.family, self.tokenizer.added_tokens
        return forced_calls(
            tools, choice, parallel, own.syntax, added, prompt_end=prompt_end, calls=own.forced_calls, holder=holder
        )

    def before_answer(self, prompt_end: PromptEnd) -> BeforeAnswer | None:
        """The part before the answer to a prompt with this end; None where the reply is its answer."""
        family, added = self.family, self.tokenizer.added_tokens
        if family.before_answer is not None:
            return family.before_answer(lambda text: marker(text, added))
        return open_reasoning(family.syntax.reasoning, added, prompt_end)

    def prompt_end(self, ids: Sequence[int]) -> PromptEnd:
        """Whether a prompt opened the reasoning; of its ids the last ones will do."""
        marks = self.family.syntax.reasoning
        if marks is None:
            return PromptEnd.SILENT
        sure = self._sure_ends(tuple(ids[-SURE_END_TOKENS:]))
        return sure or marks.end_of(self.tokenizer.decode(ids[-PROMPT_END_TOKENS:]))

    def _sure_end(self, ids: Sequence[int]) -> PromptEnd | None:
        """The end shown by a prompt's last ids whatever comes before; None: their text is too short to show it."""
        text, syntax = self.tokenizer.decode(ids), self.family.syntax
        longest = max(map(len, syntax.markers), default=0)
        return syntax.prompt_end(text) if len(text.rstrip()) > longest + MOST_UTF8_BYTES else None

    def _check_late(self, new: Sequence[Message]) -> None:
        for message in new:
            if message.role in self._early_roles:
                raise UnrenderableMessage(
                    f"The model's chat template moves {message.role.value} messages to the front, so none can follow a"
                    " reply in a session.",
                    blame=Blame(RequestPart.MESSAGES),
                )

    def closing(
        self, tools: Sequence[Tool], kwargs: Mapping[str, object] | None = None, *, has_calls: bool = False
    ) -> str:
        """The template's text after a reply to close its turn, with these tools and arguments."""
        frame = self._frames.get(FrameKey(tools=tuple(tools), kwargs=kwargs or {}))
        return (self.family.call_closing if has_calls else None) or frame.closing

    @property
    def max_trim_tokens(self) -> int:
        """Largest number of a line's last ids left out by a bridge."""
        return 1 if self.family.opening_stops or self.family.reply_stops else 0

    def _new_text(self, key: FrameKey, calls: Sequence[ToolCall], new: Sequence[Message]) -> tuple[Frame, str]:
        """A frame, and the text appended by the template in it, sealed.

        A kept frame may not do: the new messages may have its mark, or it has the date of another day.
        """
        frame = self._frames.get(key)
        may_seal = not occurs(frame.sealer.mark, calls, new)
        if may_seal and (text := frame.new_text(calls, new)) is not None:
            return frame, text
        avoid = tuple(client_strings((Message(role=Role.ASSISTANT, tool_calls=tuple(calls)), *new), (), {}))
        frame = self._frames.make(key, avoid)
        text = frame.new_text(calls, new)
        if text is None:
            raise UnrenderableMessage(
                "The model's chat template is not append-only: new messages change how earlier ones are written."
            )
        if may_seal:
            self._frames.clear()
        return frame, text


def _overlap(tail_ids: Sequence[int], ids: Sequence[int], closing_ids: Sequence[int]) -> int:
    """Number of first ids found at the tail's end already; at most the closing ids at their own beginning."""
    same = len(closing_ids)
    if ids[:same] != closing_ids:
        same = next((at for at, pair in enumerate(zip(ids, closing_ids, strict=False)) if pair[0] != pair[1]), len(ids))
    tail, first = list(tail_ids[-same:]) if same else [], list(ids[:same])
    for num in range(len(tail), 0, -1):
        if tail[-num:] == first[:num]:
            return num
    return 0


def _no_tool_list() -> UnrenderableMessage:
    return UnrenderableMessage("The model's chat template cannot show a tool list.", blame=Blame(RequestPart.TOOLS))
