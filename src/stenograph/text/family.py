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
    """A family's signs in a model's files: all of them. A family without signs is only found by name.

    `tokens` are added tokens; `template` texts found in the chat template, `not_template` texts absent from it.
    `without_template`: the files have none; `any_template`: whether they have one does not matter. With a tekken.json,
    the version in it decides, compared with `tekken`, and not the template.
    """

    tokens: tuple[str, ...] = ()
    template: tuple[str, ...] = ()
    not_template: tuple[str, ...] = ()
    without_template: bool = False
    any_template: bool = False
    tekken: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """A piece of the model's own template, with exactly one occurrence, and its replacement."""

    old: str
    new: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A declaration. `summary` names its models, for people.

    The template is the model's own with the `edits` made; but `template` where it is given, and `spare_template` where
    the model brings none; a family without any is written by `encoder`, or by the one made by `encoder_of_source` from
    the source of the model's own encoder: this is read, never run. A template as it stands may rewrite history: `edits`
    and `fixed_kwargs` make it append-only, and no request can change the latter.

    `roles` are those with a frame in the template; `shows_tools`: it writes out a tool list and calls; None: found by
    rendering. `early_roles` may speak only before the first reply, because the template moves them to the front; None:
    found likewise. `late_roles` are the system's and developer's, if written where they stand; they are always found.
    `tools_before_turns`: the tool list stands before the first turn and changes nothing after it, so a bridge need not
    render it. `form` is the template's form of messages.

    The close of a turn is not declared: it is read off the template; but `call_closing` is, the token to close a reply
    with a call at its end, where it is another. `opening_stops` are tokens that end a reply and also open the next
    message (GLM's `<|user|>` and `<|observation|>`). `reply_stops` may end a reply as it is sampled; in their place a
    bridge puts the closing token (gpt-oss's `<|return|>`).

    `reply_frame` are the template's control tokens around a reply's own text, from the opening of a message to its
    close: a reply that is empty, or was sampled without them, lacks them.

    `make_parser` where replies are not of the marked form described by `syntax`; `forced_calls` is then the grammar of
    calls, and `before_answer` the frame before an answer. `keeps_reasoning_apart`: the template refuses a message with
    its reasoning in the content, so a client has to be shown them apart. `image_placeholder` is the token written by
    the template for an image; None where it takes none.
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
    image_placeholder: str | None = None
    make_parser: Callable[[Tokenizer, Reading], MessageParser] | None = None
