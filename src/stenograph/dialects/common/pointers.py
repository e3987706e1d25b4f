"""Words and JSON pointers of a request's fields: the place to blame in a body, and the name that was meant. Pure."""

import re
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

from stenograph.core.errors import InvalidRequest
from stenograph.core.nearest import LONGEST_NAME, nearest_name

Known = Iterable[str] | Callable[[str], Iterable[str]]
"""The names open to an object: of the whole value, or by the JSON pointer of the object to blame."""


OTHER_WORDS: Mapping[str, str] = MappingProxyType(
    {
        "max_new_tokens": "max_tokens",
        "max_output_tokens": "max_tokens",
        "max_tokens_to_sample": "max_tokens",
        "n_predict": "max_tokens",
        "num_predict": "max_tokens",
        "stop_sequences": "stop",
        "stop_strings": "stop",
        "random_seed": "seed",
        "repeat_penalty": "repetition_penalty",
    }
)
"""Other servers' names for our fields."""


_PATH = re.compile(r" - at `\$(?P<path>[^`]*)`$")


_STEP = re.compile(r"\.(?P<key>[^.\[\]]+)|\[(?P<index>\d+|\.\.\.)\]")


_UNKNOWN = re.compile(r"^Object contains unknown field `(?P<name>.*?)`")


_MISSING = re.compile(r"^Object missing required field `(?P<name>.*?)`")


def shown(text: str) -> str:
    """A client's text in a message to it: quoted, and cut."""
    return repr(text if len(text) <= LONGEST_NAME else text[:LONGEST_NAME] + "…")


def unknown_role(role: str, known: Iterable[str], at: str, *, remark: str = "") -> InvalidRequest:
    """The error of a message with an unknown role."""
    message = f"Unknown role {shown(role)}; known are {', '.join(known)}.{remark}{nearest(role, known)}"
    return InvalidRequest(message, param=f"{at}/role")


def nearest(name: str, known: Iterable[str], *, other_words: Mapping[str, str] = MappingProxyType({})) -> str:
    """` Did you mean 'x'?`, or nothing if no known name was clearly meant.

    `other_words` are names used elsewhere for known ones.
    """
    names = list(known)
    meant = other_words.get(name)
    near = meant if meant in names else nearest_name(name, names)
    return f" Did you mean {near!r}?" if near is not None else ""


def invalid(text: str, at: str, known: Known) -> InvalidRequest:
    path = _PATH.search(text)
    pointer, message = at, text
    if path is not None:
        pointer, message = at + _pointer(path["path"]), text[: path.start()]
    if unknown := _UNKNOWN.match(message):
        parent = pointer
        pointer += "/" + escaped(unknown["name"][:LONGEST_NAME])
        is_known = path is None or at or callable(known)
        hint = nearest(unknown["name"], _known_in(known, parent), other_words=OTHER_WORDS) if is_known else ""
        message = f"Unknown field {shown(unknown['name'])}.{hint}"
    elif missing := _MISSING.match(message):
        pointer += "/" + escaped(missing["name"])
        message = f"Required field {missing['name']!r} is missing."
    else:
        message = f"{message}."
    return InvalidRequest(message, param=pointer or None)


def _known_in(known: Known, pointer: str) -> Iterable[str]:
    return known(pointer) if callable(known) else known


def _pointer(path: str) -> str:
    """`.a[1].b` to `/a/1/b`. A `[...]` hides a key not named by msgspec: the pointer stops before it."""
    steps: list[str] = []
    for step in _STEP.finditer(path):
        if step["index"] == "...":
            break
        steps.append(step["index"] or escaped(step["key"]))
    return "".join(f"/{step}" for step in steps)


ENGINES_NAMES = {
    "dp_rank": "routed_dp_rank",
    "prefill_dp_rank": "disagg_prefill_dp_rank",
    "num_top_logprobs": "top_logprobs",
    "keeps_stop": "include_stop_str_in_output",
    "separates_reasoning": "separate_reasoning",
    "tokens_as_ids": "return_tokens_as_token_ids",
}
"""The names of fields in OpenAI, vLLM and SGLang, where they differ from ours."""


def pointer_to(*steps: str | int | None) -> str:
    """The JSON pointer of these steps, without the None ones."""
    return "".join(f"/{escaped(str(step))}" for step in steps if step is not None)


def escaped(key: str) -> str:
    """One step of a JSON pointer. Source: RFC 6901, section 3."""
    return key.replace("~", "~0").replace("/", "~1")
