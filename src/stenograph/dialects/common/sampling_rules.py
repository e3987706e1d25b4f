"""Reads sampling rules: `sampling` of `POST /sessions`, and the file of `--sampling`. Pure.

Names and checks are the chat route's, whatever dialect a session's requests come in.
"""

import msgspec

from stenograph.core.errors import InvalidRequest
from stenograph.core.sampling_rules import SamplingRules
from stenograph.dialects.common.json_bodies import decode_json
from stenograph.dialects.common.pointers import OTHER_WORDS, nearest, shown
from stenograph.dialects.common.sampling import sampling_params
from stenograph.dialects.common.sampling_fields import WireSampling, WireSamplingValues


class WireSamplingRules(msgspec.Struct, forbid_unknown_fields=True):
    """Sampling that a session sets: a `default` stands where a request is silent, a `force`d value whatever it says."""

    default: WireSamplingValues | None = None
    force: WireSamplingValues | None = None


_RULES = msgspec.json.Decoder(WireSamplingRules)
_PARTS = WireSamplingRules.__struct_fields__
_NAMES = WireSamplingValues.__struct_fields__


def decode_rules(text: bytes) -> SamplingRules:
    """Read rules from a JSON text of their own. Raises InvalidJson or InvalidRequest, with a JSON pointer."""
    try:
        wire = decode_json(text, _RULES)
    except InvalidRequest as error:
        name_known(error, at="")
        raise
    return sampling_rules(wire, at="")


def sampling_rules(wire: WireSamplingRules, *, at: str) -> SamplingRules:
    """The rules at a JSON pointer. Raises InvalidRequest as the chat route does, with the value's pointer."""
    return SamplingRules(default=_values(wire.default, f"{at}/default"), force=_values(wire.force, f"{at}/force"))


def _values(wire: WireSamplingValues | None, at: str) -> dict[str, object]:
    """The values by the names of `SamplingParams`; these are the same names."""
    if wire is None:
        return {}
    request = WireSampling(**msgspec.structs.asdict(wire))
    try:
        read = sampling_params(
            request,
            max_tokens=wire.max_tokens,
            max_tokens_name="max_tokens",
            num_top_logprobs=0,
            top_logprobs_name="top_logprobs",
        )
    except InvalidRequest as error:
        error.param = f"{at}{error.param}"
        raise
    return {name: getattr(read.params, name) for name in _NAMES if name in read.said}


def name_known(error: InvalidRequest, *, at: str) -> None:
    """Raise InvalidRequest with the known names, if the error is of an unknown name in the rules at `at`."""
    param = error.param or ""
    if not param.startswith(f"{at}/"):
        return
    match param[len(at) + 1 :].split("/"):
        case [name] if name not in _PARTS:
            known = _PARTS
        case [part, name] if part in _PARTS and name not in _NAMES:
            known = _NAMES
        case _:
            return
    hint = nearest(name, known, other_words=OTHER_WORDS)
    raise InvalidRequest(
        f"Unknown field {shown(name)}: sampling sets {', '.join(known)}.{hint}", param=param
    ) from error
