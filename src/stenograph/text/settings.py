"""The renderer's settings: the model's family, and its chat template's arguments."""

# ruff: noqa: RUF009  (`setting` and `computed` make dataclass fields)

from collections.abc import Mapping
from dataclasses import dataclass

from stenograph.core.settings import Section, Switch, choice, computed, json_object, setting, text


@dataclass(frozen=True, kw_only=True)
class RenderSettings:
    """Settings for turning messages into tokens."""

    family: str = setting(
        "auto", text(), "The model's family, which renders and parses its turns.", section=Section.MODEL
    )
    chat_template_kwargs: Mapping[str, object] = computed(
        dict[str, object],
        json_object(),
        "Arguments of the chat template in every turn; a session's override them, and a request's override both.",
        shown="none",
    )
    allow_special_in_text: Switch = setting(
        Switch.OFF,
        choice(Switch),
        "Whether a control token that a user, a tool or a file spells in plain text becomes that token.",
    )
