"""The sampling set by a session's owner, over all requests of its clients. Pure.

A `SamplingRules` changes a request's parameters before anything else reads them. It knows no dialect: its names are
those of `SamplingParams`, and a request says which of them its client gave.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from msgspec.structs import replace

from stenograph.core.blame import Blame, RequestPart
from stenograph.core.chat import TurnRequest
from stenograph.core.errors import StenographError
from stenograph.core.types import SamplingParams

RULED = (
    *("temperature", "top_p", "top_k", "min_p", "seed"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias"),
    *("max_tokens", "stop"),
)
"""The fields of `SamplingParams` for rules to set."""

_NEUTRAL = SamplingParams()


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRules:
    """Values of fields of `SamplingParams`, by name: `default` where a request is silent, `force` in any case.

    Raises ValueError for a name not in RULED, and ParamOutOfRange for a value invalid in any request.
    """

    default: Mapping[str, object] = field(default_factory=dict[str, object])
    force: Mapping[str, object] = field(default_factory=dict[str, object])

    def __post_init__(self) -> None:
        for values in (self.default, self.force):
            if unknown := values.keys() - RULED:
                raise ValueError(f"rules cannot set {sorted(unknown)}")
            SamplingParams(**values)  # type: ignore[arg-type]  # it checks them

    def over(self, lower: "SamplingRules | None") -> "SamplingRules":
        """These rules laid over others, name by name; a forced value still wins over a default."""
        if lower is None:
            return self
        return SamplingRules(default={**lower.default, **self.default}, force={**lower.force, **self.force})

    def applied_to(self, params: SamplingParams, said: frozenset[str]) -> SamplingParams:
        """The parameters under these rules. `said` are the fields given by the client.

        A `min_tokens` above a `max_tokens` of these rules is lowered to it, since this limit is not the client's.
        """
        values = self._imposed(said)
        limit = values.get("max_tokens")
        if isinstance(limit, int):
            values["min_tokens"] = min(params.min_tokens, limit)
        return replace(params, **values)  # checked when the rules were made

    def ruled(self, request: TurnRequest) -> TurnRequest:
        """The request under these rules. `sent` and everything else in it stays as the client wrote it."""
        params, said = request.params, request.said
        unsaid = [name for name in RULED if name not in said and getattr(params, name) != getattr(_NEUTRAL, name)]
        assert not unsaid, f"a dialect read {unsaid} and did not name them in `said`"
        return replace(request, params=self.applied_to(params, said), imposed=frozenset(self._imposed(said)))

    def _imposed(self, said: frozenset[str]) -> dict[str, object]:
        return {**{name: value for name, value in self.default.items() if name not in said}, **self.force}


def blame_session(error: StenographError, imposed: frozenset[str]) -> None:
    """Change an error that blames a field set by the session: it blames no field, and says so."""
    match error.blame:
        case Blame(RequestPart.SAMPLING, path=(str(name), *_)) if name in imposed:
            error.remark_on(f"The session sets {name}, not the request ({_WHERE}).")
        case Blame(RequestPart.MAX_TOKENS) if "max_tokens" in imposed:
            error.remark_on(f"The session sets max_tokens, not the request ({_WHERE}).")
        case _:
            pass


_WHERE = "`sampling` of POST /sessions, or --sampling"
