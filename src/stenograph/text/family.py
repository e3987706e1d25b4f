"""The declaration of a model family: facts about its files, template and replies. Code only where facts do not do.

A family is one value in one file; `families/__init__.py` lists them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from stenograph.core.messages import Role
from stenograph.model.tokenizer import Tokenizer
from stenograph.text.call_syntax import CallGrammar, Marker
from stenograph.text.grammar.held import BeforeAnswer
from stenograph.text.reading import MessageParser, Reading
from stenograph.text.reply_syntax import ReplySyntax
from stenograph.text.template.input import MessageForm
from stenograph.text.template.template import Template


@dataclass(frozen=True, slots=True, kw_only=True)
class Signs:
    """Signs in a model's files that it is of a family: all of them. A family without signs is only found by name.

    `tokens` are added tokens; `template` texts that the chat template has, `not_template` such as it has not.
    `without_template`: the files have none; `any_template`: whether they have one does not matter. Of a model with a
    tekken.json the version that it names decides, which is `tekken`, and not the template.
    """

    tokens: tuple[str, ...] = ()
    template: tuple[str, ...] = ()
    not_template: tuple[str, ...] = ()
    without_template: bool = False
    any_template: bool = False
    tekken: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """A piece of the model's own template, which occurs exactly once, and what is written instead."""

    old: str
    new: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A declaration. `summary` says for people which models it is of.

    The template is the model's own with the `edits` made; but `template` where it is given, and `spare_template` where
    the model brings none; or, of a family without any, what `encoder` makes, or the one `encoder_of_source` makes of
    the source of the encoder that the model brings, which is read, never run. A template as it stands may rewrite
    history: `edits` and `fixed_kwargs`, which no request can change, are what makes it append-only.

    `roles` are those that the template has a frame for; `shows_tools`: it writes out a tool list and calls; None: what
    the template is seen to write. `early_roles` may speak only before the first reply, because the template moves them
    to the front; None: as seen too. `late_roles` are the system's and developer's that are written where they stand;
    they are always seen. `tools_before_turns`: the tool list stands before the first turn and changes
    nothing after it, so a bridge need not render it. `form` is how the template wants to be given messages.

    What closes a turn is not declared: it is read off the template; but `call_closing` is, the token that closes a
    reply which ends with a call, where that is another. `opening_stops` are tokens that end a reply and also open the
    next message (GLM's `<|user|>` and `<|observation|>`). `reply_stops` are those that may end a reply as it is
    sampled, and in whose place a bridge puts the one that closes it (gpt-oss's `<|return|>`).

    `reply_frame` are the control tokens that the template frames a reply's own text with, from the one that opens a
    message to the one that closes it: a reply that is empty, or was sampled without them, lacks them.

    `make_parser` where replies are not of the marked form that `syntax` describes; `forced_calls` is then how calls
    are forced, and `before_answer` the frame that comes before an answer. `keeps_reasoning_apart`: the template refuses
    a message whose content has its reasoning, so a client has to be shown them apart.
    """

    name: str
    summary: str
    signs: Signs | None = None
    edits: tuple[Edit, ...] = ()
    template: str | None = None
    spare_template: str | None = None
    encoder: Template | None = None
    encoder_of_source: Callable[[str], Template] | None = None
    fixed_kwargs: Mapping[str, object] = field(default_factory=dict[str, object])
    roles: frozenset[Role] | None = None
    early_roles: frozenset[Role] | None = None
    late_roles: frozenset[Role] | None = None
    shows_tools: bool | None = None
    tools_before_turns: bool = False
    form: MessageForm = MessageForm()
    syntax: ReplySyntax = ReplySyntax()
    opening_stops: tuple[str, ...] = ()
    reply_stops: tuple[str, ...] = ()
    call_closing: str | None = None
    reply_frame: tuple[str, ...] = ()
    forced_calls: CallGrammar | None = None
    before_answer: Callable[[Marker], BeforeAnswer] | None = None
    keeps_reasoning_apart: bool = False
    make_parser: Callable[[Tokenizer, Reading], MessageParser] | None = None
