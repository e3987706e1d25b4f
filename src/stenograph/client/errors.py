"""The errors of the client: the server's refusals, by their codes, and the remedy for each.

    ClientError
    ├── ServerUnreachable     no server answered, after the retries
    ├── BadPayload            what came is not what a Stenograph server sends
    ├── AgentFailure          raised by an agent: it failed, and nobody else did
    ├── InfraFailure          raised by an agent: something else failed, and the policy is not to blame
    └── ServerRefused         the server answered with an error
        ├── WrongRequest      the call is at fault; the same call fails again
        ├── WrongKey          401, 403: another `api_key`
        ├── SessionGone       404: deleted, expired, or the server was started anew
        ├── TryLater          limits, draining, the engine or the store away: the client has retried it already
        └── ServerFault       the server is at fault; its log has the traceback

The class of a code follows from the tree in `core.errors`: its branches say who broke it.
"""

import json
from collections.abc import Mapping
from typing import cast

from stenograph.core import errors as server

_SHOWN_CHARS = 300


class ClientError(Exception):
    """Any error of the client."""


class ServerUnreachable(ClientError):
    """No server answered, or the connection broke; the message names the server and says how."""


class BadPayload(ClientError):
    """The answer is not a Stenograph server's: another server, or another version."""


class AgentFailure(ClientError):
    """Raise it in an agent on a failure by its own fault or the policy's; `reward` is then its rollout's."""

    def __init__(self, message: str, *, reward: float | Mapping[str, float] | None = None) -> None:
        super().__init__(message)
        self.reward = reward


class InfraFailure(ClientError):
    """Raise it in an agent on a failure beyond the policy's control: the rollout is run again."""


class ServerRefused(ClientError):
    """The server answered with an error. `code` is the server's, empty if another answered; `param` is
    the pointer of the field at fault.

    `should_retry`: the same call may succeed later, in `retry_after_s` seconds if the server said so.
    """

    def __init__(
        self,
        call: str,
        *,
        status: int,
        code: str,
        message: str,
        param: str | None = None,
        should_retry: bool = False,
        retry_after_s: float | None = None,
    ) -> None:
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.should_retry = should_retry
        self.retry_after_s = retry_after_s
        self.advice = _ADVICE_OF_CODES.get(code, _ADVICE[type(self)])
        where = "" if param is None else f" ({param})"
        what = f"{status} {code}".rstrip()
        super().__init__(f"{call}: {what}{where}: {message} {self.advice}".rstrip())


class WrongRequest(ServerRefused):
    """The call is at fault; the same call fails again."""


class WrongKey(ServerRefused):
    """The server requires a key, or another one."""


class SessionGone(ServerRefused):
    """The session is not there any more."""


class TryLater(ServerRefused):
    """Nobody is at fault, or the engine: the same call may succeed later."""


class ServerFault(ServerRefused):
    """The server is at fault."""


_ADVICE: Mapping[type[ServerRefused], str] = {
    ServerRefused: "",
    WrongRequest: "Change the call; the same one fails again.",
    WrongKey: "Give the client the server's key: Client(url, api_key=…).",
    SessionGone: "Open a new session; a session lives until it is deleted, its ttl_s has passed, or its server ends.",
    TryLater: "The client has retried; call again later, or raise retry_s.",
    ServerFault: "See the server's log, which has the traceback.",
}

_ADVICE_OF_CODES: Mapping[str, str] = {
    "samples_inconsistent": "The session's turns make no sample: drop this rollout.",
    "limit_exceeded": "Open fewer sessions at once (concurrency=…), or raise the limit that the message names.",
    "idempotency_mismatch": "The key was used for another call: a bug of the client.",
    "route_not_found": "The server is older than this client, or the address has a path too much.",
    "session_damaged": "Drop this rollout; the server's other sessions are not concerned.",
    "draining": "The server is stopping; the client goes on with its other addresses, if it has any.",
}


def _leaves(cls: type[server.StenographError]) -> list[type[server.StenographError]]:
    below = [leaf for child in cls.__subclasses__() for leaf in _leaves(child)]
    return [cls, *below] if hasattr(cls, "code") else below


def _class_of(leaf: type[server.StenographError]) -> type[ServerRefused]:
    if issubclass(leaf, server.Unauthorized | server.Forbidden):
        return WrongKey
    if issubclass(leaf, server.SessionNotFound):
        return SessionGone
    if issubclass(leaf, server.CallerError):
        return WrongRequest
    return ServerFault if issubclass(leaf, server.InternalError) else TryLater


CLASSES: Mapping[str, type[ServerRefused]] = {leaf.code: _class_of(leaf) for leaf in _leaves(server.StenographError)}
"""By the server's code, the class of the client's error."""


def refusal(call: str, status: int, headers: Mapping[str, str], body: bytes) -> ServerRefused:
    """The error of an answer with another status than 200 and 204. `call` names the call in the message.

    A body other than a Stenograph server's error is shown, cut; its class is by its status then.
    """
    try:
        found = json.loads(body)
        facts = cast("Mapping[str, object]", found.get("error", found))  # routes in SGLang's shape have no `error`
        told, message, param = facts.get("code"), str(facts["message"]), facts.get("param")
        code = told if isinstance(told, str) else ""  # engines and proxies write null there, or the status again
    except (ValueError, KeyError, TypeError, AttributeError):
        code, message, param = "", body[:_SHOWN_CHARS].decode(errors="replace"), None
    by_status = TryLater if status in (429, 502, 503, 504) else WrongRequest if status < 500 else ServerFault
    advised = headers.get("x-should-retry")
    return CLASSES.get(code, by_status)(
        call,
        status=status,
        code=code,
        message=message,
        param=None if param is None else str(param),
        should_retry=by_status is TryLater if advised is None else advised == "true",
        retry_after_s=_seconds(headers.get("retry-after")),
    )


def _seconds(text: str | None) -> float | None:
    return float(text) if text is not None and text.isascii() and text.isdecimal() else None
