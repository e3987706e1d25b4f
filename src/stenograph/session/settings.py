"""The settings of sessions: their histories, their limits, and how a turn ends."""

# ruff: noqa: RUF009  (`setting` and `computed` make dataclass fields)

import enum
from dataclasses import dataclass
from pathlib import Path

from stenograph.core.kinds import AfterLength, Compat, HistoryKind, SaltMode
from stenograph.core.settings import Section, Switch, choice, folder, seconds, setting, text, whole_number


class OverBudget(enum.StrEnum):
    """Treatment of a `max_tokens` beyond the context's room."""

    REFUSE = "refuse"
    CLAMP = "clamp"


class RequiredLogprobs(enum.StrEnum):
    """Kinds of log-probabilities that samples may be required to have; the value is that of `LogprobsKind`."""

    TEMPERED = "tempered"


@dataclass(frozen=True, kw_only=True)
class SessionSettings:
    """Sessions' defaults and limits."""

    history: HistoryKind = setting(
        HistoryKind.STRANDS,
        choice(HistoryKind),
        "The history of sessions that do not say which they want: a line for each opening of a conversation, one line"
        " for the whole session, or a tree.",
        section=Section.SESSIONS,
    )
    compat: Compat | None = setting(
        None,
        choice(Compat),
        "The contract of another server: `miles` makes sessions linear, and refuses to continue after a reply that its"
        " token limit cut off.",
        shown="none: Stenograph's own",
    )
    after_length: AfterLength = setting(
        AfterLength.CLOSE,
        choice(AfterLength),
        "If a client continues after a reply that its token limit cut off: close the reply, or refuse (409).",
    )
    matcher: str = setting(
        "harness",
        text(),
        "Rule by which a replayed message is the stored one: harness, strict, loose_tool_call, role_content,"
        " or the dotted path of a Python object with `matches(stored, given)`.",
    )
    sampling: Path | None = setting(
        None,
        folder(),
        "JSON file of the sampling that every session has, as in `sampling` of `POST /sessions`:"
        ' `{"default": {…}, "force": {…}}`; a session\'s own values are laid over it.',
        shown="none",
    )
    side_rules: Path | None = setting(
        None,
        folder(),
        "TOML file of rules, in front of those that are shipped: what a strand of a session is for, and what is"
        " rewritten.",
        shown="none",
    )
    canonical: str = setting(
        "default",
        text(),
        "The rules that rewrite requests, for sessions that name none: `default`, `off`, or the names of rules that are"
        " added to the default ones, separated by commas.",
    )
    support: Switch = setting(
        Switch.OFF,
        choice(Switch),
        "Whether sessions that do not say so record which ids could be sampled beside each token, where a grammar or"
        " truncation rules some out; with an engine that reports it.",
    )
    cache_salt: SaltMode = setting(
        SaltMode.FOLLOW,
        choice(SaltMode),
        "The version of the weights by which the engine's cache is kept apart, for sessions that do not say: the one"
        " that a session began with, the one that samples now, or none.",
    )
    require_logprobs: RequiredLogprobs | None = setting(
        None,
        choice(RequiredLogprobs),
        "Log-probabilities that every trained token must have: samples with a turn that has none are refused (422).",
        shown="none: a sample says which it has",
    )
    max_sessions: int = setting(
        10_000, whole_number(1), "Sessions that may be in memory at once.", unit="sessions", section=Section.LIMITS
    )
    max_in_flight: int = setting(256, whole_number(1), "Turns that may run at once in the whole server.", unit="turns")
    max_held_tokens: int = setting(
        10**9, whole_number(1), "Tokens that all sessions together may hold before turns are refused.", unit="tokens"
    )
    max_nodes: int = setting(4096, whole_number(1), "Turns that a tree history may hold.", unit="turns")
    max_strands: int = setting(1000, whole_number(1), "Strands that a session with strands may have.", unit="strands")
    max_staleness: int | None = setting(
        None,
        whole_number(0),
        "Changes of the weights after which a session that nobody has claimed is abandoned: its turns end, and its"
        " requests get 410.",
        unit="versions",
        shown="none: never",
    )
    session_ttl_s: float | None = setting(
        None,
        seconds(10 * 365 * 86400),
        "Time without a chat after which a session is dropped.",
        unit="seconds",
        shown="none: kept until deleted",
    )
    over_budget: OverBudget = setting(
        OverBudget.REFUSE,
        choice(OverBudget),
        "For a `max_tokens` that exceeds what the context leaves: refuse the request, or clamp it to what is left.",
        section=Section.REQUESTS,
    )
