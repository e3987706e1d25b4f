"""The settings of dialects: the request fields to take, and how much of an engine's reply to pass on."""

# ruff: noqa: RUF009  (`setting` and `computed` make dataclass fields)

import enum
from dataclasses import dataclass

from stenograph.core.kinds import ReplyMode
from stenograph.core.settings import Section, choice, setting, texts, whole_number


class DialectKind(enum.StrEnum):
    """The clients' protocols. OpenAI's chat and completions are one, its Responses another."""

    OPENAI = "openai"
    RESPONSES = "responses"
    ANTHROPIC = "anthropic"
    GEMINI = "gemini"


_KINDS = tuple(DialectKind)
HOSTS = texts(r"[A-Za-z0-9._-]+|[0-9A-Fa-f:]+", "host names or addresses, without a port", normalize=str.lower)


class UnknownFields(enum.StrEnum):
    """Treatment of a request field unknown to its dialect."""

    REFUSE = "refuse"
    RECORD = "record"


FILE_FORMATS = ("safetensors", "json", "arrow")
"""Formats of a file of samples; the first is the default."""
SAMPLE_FORMATS = (*FILE_FORMATS, "tree")
"""Formats of a session's samples."""


@dataclass(frozen=True, kw_only=True)
class DialectSettings:
    """Settings for reading requests and writing replies."""

    reply: ReplyMode = setting(
        ReplyMode.PASSTHROUGH,
        choice(ReplyMode),
        "Give clients an engine's reply whole, or without routed_experts and indexer_topk.",
        section=Section.ENGINE,
    )
    dialects: tuple[str, ...] = setting(
        _KINDS,
        texts("|".join(_KINDS), f"names of protocols, of {', '.join(_KINDS)}"),
        "A protocol that clients speak; repeatable like `--api-key`. What the others need is not loaded, and their"
        " paths are not there.",
        shown=", ".join(_KINDS),
        section=Section.REQUESTS,
    )
    unknown_fields: UnknownFields = setting(
        UnknownFields.REFUSE, choice(UnknownFields), "Refuse a request's unknown fields, or only record them."
    )
    max_media_bytes: int = setting(
        20 * 2**20, whole_number(1), "Largest image that a request may have.", unit="bytes", section=Section.LIMITS
    )
    max_media_items: int = setting(
        256, whole_number(1), "Images that the messages of one request may have.", unit="images"
    )
    fetch_media: tuple[str, ...] = setting(
        (),
        HOSTS,
        "A host from which images named by URL are fetched; repeatable like `--api-key`.",
        shown="none: images come in the request",
        section=Section.SECURITY,
    )
