"""Requests for scores, as they come. Pure."""

from typing import Annotated

import msgspec
from msgspec import Meta

from stenograph.core.errors import InvalidRequest
from stenograph.core.messages import Message, Role
from stenograph.core.stated_options import GroupName
from stenograph.dialects.common.json_bodies import decode_json
from stenograph.dialects.common.pointers import shown
from stenograph.dialects.sessions import MAX_LISTED, SESSION_STATES, check_state
from stenograph.engine.scoring import MAX_TOP

MAX_NAMED = 64
"""Most tokens to be scored at one place: each is a pass of its own."""

Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
Words = Annotated[str, Meta(min_length=1, max_length=65536)]
TokenText = Annotated[str, Meta(min_length=1, max_length=256)]
TOKENS_ALONE = ("position", "question")


class ScoreMessage(msgspec.Struct, forbid_unknown_fields=True):
    """A message of another prompt."""

    role: Annotated[str, Meta(extra_json_schema={"enum": ["system", "developer", "user"]})]
    content: str


class ScoreRequestBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Options of scores: tokens, and the model for them. `null` means absent.

    Without `tokens` the sampled tokens of each kept line are scored, those of `strand` alone if it is given; with it,
    each of these instead, at one place: after `question` behind the line, or at `position` of its tokens. `prompt`
    stands in place of the line's first one. `top_k`: the likeliest tokens of each place too.
    """

    name: Name = "scores"
    engine: str | None = None
    policy: Annotated[str, Meta(min_length=1, max_length=512)] | None = None
    strand: Annotated[int, Meta(ge=0, lt=10**6)] | None = None
    prompt: Words | Annotated[list[ScoreMessage], Meta(min_length=1, max_length=1024)] | None = None
    top_k: Annotated[int, Meta(ge=1, le=MAX_TOP)] | None = None
    tokens: Annotated[list[TokenText], Meta(min_length=1, max_length=MAX_NAMED)] | None = None
    position: Annotated[int, Meta(ge=1, lt=2**31)] | None = None
    question: Words | None = None


class ScoreManyBody(ScoreRequestBody, forbid_unknown_fields=True, kw_only=True):
    """The same of many sessions: of the ids `sessions`, in this order, or of those with the `group`, the `state` and
    the metadata `where`, as far as these are given."""

    sessions: Annotated[list[str], Meta(max_length=MAX_LISTED)] | None = None
    group: GroupName | None = None
    state: Annotated[str, Meta(extra_json_schema={"enum": list(SESSION_STATES)})] | None = None
    where: dict[str, object] | None = None


_ONE = msgspec.json.Decoder(ScoreRequestBody)
_MANY = msgspec.json.Decoder(ScoreManyBody)
_ROLES = (Role.SYSTEM, Role.DEVELOPER, Role.USER)


def decode_score(body: bytes) -> ScoreRequestBody:
    """Read the optional body of `POST /sessions/{id}/scores`. Raises InvalidJson or InvalidRequest."""
    known = ScoreRequestBody.__struct_fields__
    return _checked(decode_json(body, _ONE, known=known) if body else ScoreRequestBody())


def decode_score_many(body: bytes) -> ScoreManyBody:
    """Read the body of `POST /scores`. Raises InvalidJson or InvalidRequest."""
    wire = decode_json(body, _MANY, known=ScoreManyBody.__struct_fields__) if body else ScoreManyBody()
    check_state(wire.state)
    filters = [name for name in ("group", "state", "where") if getattr(wire, name) is not None]
    if (wire.sessions is None) is not bool(filters):
        raise InvalidRequest("Say which sessions: give sessions, or else group, state or where.")
    _checked(wire)
    return wire


def one_of(wire: ScoreManyBody) -> ScoreRequestBody:
    """The request for one of its sessions."""
    return ScoreRequestBody(**{name: getattr(wire, name) for name in ScoreRequestBody.__struct_fields__})


def messages_of(prompt: list[ScoreMessage]) -> list[Message]:
    """The messages of another prompt."""
    return [Message(role=Role(one.role), content=one.content) for one in prompt]


def _checked(wire: ScoreRequestBody) -> ScoreRequestBody:
    for name in TOKENS_ALONE:
        if wire.tokens is None and getattr(wire, name) is not None:
            raise InvalidRequest(f"{name} is the place of named tokens: give tokens too.", param=f"/{name}")
    if wire.position is not None and wire.question is not None:
        raise InvalidRequest("Give position or question, not both.", param="/position")
    if wire.tokens is not None and len(set(wire.tokens)) < len(wire.tokens):
        raise InvalidRequest("A token is named twice.", param="/tokens")
    for index, message in enumerate(wire.prompt if isinstance(wire.prompt, list) else ()):
        if message.role not in _ROLES:
            raise InvalidRequest(
                f"A prompt before a recorded reply has the roles {', '.join(_ROLES)}, got {shown(message.role)}.",
                param=f"/prompt/{index}/role",
            )
    return wire
