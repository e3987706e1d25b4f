"""The dialects named in the settings, made for one server; no other is imported."""

from collections.abc import Mapping

from msgspec.structs import replace

from stenograph.core.loaded import entry
from stenograph.core.messages import MediaLimits
from stenograph.dialects.base import Spoken
from stenograph.dialects.settings import DialectKind
from stenograph.http.count_route import CountRoute
from stenograph.http.part import Core
from stenograph.http.settings import Settings
from stenograph.http.turn_route import TurnRoute
from stenograph.offload.body_slots import BodySlots
from stenograph.text.renderer import Renderer

DIALECTS: Mapping[DialectKind, str] = {
    DialectKind.OPENAI: "stenograph.dialects.openai.dialect:ROW",
    DialectKind.ANTHROPIC: "stenograph.dialects.anthropic.dialect:ROW",
    DialectKind.RESPONSES: "stenograph.dialects.responses.dialect:ROW",
    DialectKind.GEMINI: "stenograph.dialects.gemini.dialect:ROW",
}
"""The row of each. Its paths are looked for in this order."""


def spoken_by(settings: Settings, renderer: Renderer, model: str) -> Spoken:
    """The dialects of the settings."""
    facts = {
        "token_text": renderer.tokenizer.token_text,
        "model": model,
        "unknown_fields": settings.unknown_fields,
    }
    found: list[Spoken] = [entry(row).speak(**facts) for kind, row in DIALECTS.items() if kind in settings.dialects]
    return Spoken(
        turns=tuple(turn for one in found for turn in one.turns),
        counters=tuple(counter for one in found for counter in one.counters),
        held=next((one.held for one in found if one.held is not None), None),
    )


def turn_routes(core: Core, body_slots: BodySlots) -> list[TurnRoute | CountRoute]:
    """The routes of the dialects: for turns, and for counts alone."""
    sought, settings = frozenset(name.encode() for name in core.services.kind_rules.headers), core.settings
    media = MediaLimits(
        max_bytes=settings.max_media_bytes,
        max_items=settings.max_media_items,
        max_named_bytes=settings.max_body_bytes,
        fetches=bool(settings.fetch_media),
    )
    turns = [
        TurnRoute(dialect=dialect, core=core, body_slots=body_slots, sought_headers=sought, media=media)
        for dialect in core.spoken.turns
    ]
    held = replace(media, fetches=False)
    counts = [
        CountRoute(dialect=dialect, core=core, body_slots=body_slots, sought_headers=sought, media=held)
        for dialect in core.spoken.counters
    ]
    return [*turns, *counts]
