"""The dialects that the settings name, made for one server; no other is imported."""

from collections.abc import Mapping

from stenograph.core.loaded import entry
from stenograph.dialects.base import Spoken
from stenograph.dialects.settings import DialectKind
from stenograph.http.settings import Settings
from stenograph.text.renderer import Renderer

DIALECTS: Mapping[DialectKind, str] = {
    DialectKind.OPENAI: "stenograph.dialects.openai.dialect:spoken",
    DialectKind.ANTHROPIC: "stenograph.dialects.anthropic.dialect:spoken",
    DialectKind.RESPONSES: "stenograph.dialects.responses.dialect:spoken",
    DialectKind.GEMINI: "stenograph.dialects.gemini.dialect:spoken",
}
"""Where each is made. Its paths are looked for in this order."""


def spoken_by(settings: Settings, renderer: Renderer, model: str) -> Spoken:
    """The dialects of the settings."""
    facts = {
        "token_text": renderer.tokenizer.token_text,
        "model": model,
        "unknown_fields": settings.unknown_fields,
    }
    found: list[Spoken] = [entry(made)(**facts) for kind, made in DIALECTS.items() if kind in settings.dialects]
    return Spoken(
        turns=tuple(turn for one in found for turn in one.turns),
        counters=tuple(counter for one in found for counter in one.counters),
        held=next((one.held for one in found if one.held is not None), None),
    )
