"""Each part's settings: every command line reads them, and loads nothing else of a part.

`cli/parts.py` has the parts' entries.
"""

# ruff: noqa: RUF009  (`setting` makes dataclass fields)

import enum
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from stenograph.core.errors import StartupError
from stenograph.core.settings import (
    Kind,
    Section,
    Switch,
    choice,
    folder,
    matching,
    seconds,
    setting,
    texts,
    whole_number,
)

POSTGRES = r"postgres(ql)?://[^\s]+"
"""An address of a database to keep sessions in."""

MIN_LEASE_S = 0.3
"""A lease is renewed three times in its time; shorter ones are lost to a busy event loop."""

_T = TypeVar("_T")


def settings_of(part: type[_T], settings: object) -> _T:
    """A part's own among the settings of a server; their defaults where it was made without them."""
    return settings if isinstance(settings, part) else part()


class ForwardKind(enum.StrEnum):
    """Libraries for the embedded engine's forward pass."""

    NUMPY = "numpy"
    TORCH = "torch"


class TorchDtype(enum.StrEnum):
    """Data types of torch's weights, keys and values."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


TORCH_DEVICE = matching(r"auto|cpu|cuda(:[0-9]{1,3})?", "one of auto, cpu, cuda, cuda:0, cuda:1 and so on")


@dataclass(frozen=True, kw_only=True)
class EmbeddedSettings:
    """Settings of the embedded engine."""

    engine_threads: int = setting(
        1, whole_number(1, 1024), "BLAS threads of the embedded engine.", unit="threads", section=Section.EMBEDDED
    )
    max_batch: int = setting(
        16, whole_number(1, 4096), "Sequences that the embedded engine steps at once.", unit="sequences"
    )
    kv_tokens: int = setting(65536, whole_number(16), "Capacity of the embedded engine's KV cache.", unit="tokens")
    step_tokens: int = setting(
        256,
        whole_number(2, 1_048_576),
        "Most tokens that the embedded engine computes in a step, more than `--max-batch`. Limits a prompt's chunk, "
        "and the wait of sequences that decode.",
        unit="tokens",
    )
    prefix_reuse: Switch = setting(Switch.ON, choice(Switch), "Reuse the KV of earlier turns in the embedded engine.")
    forward: ForwardKind = setting(
        ForwardKind.NUMPY,
        choice(ForwardKind),
        "Library for the embedded engine's forward pass; torch needs `pip install torch`.",
    )
    torch_device: str = setting(
        "auto", TORCH_DEVICE, "Device for `--forward torch`; auto is the first GPU, else the CPU."
    )
    torch_dtype: TorchDtype = setting(
        TorchDtype.FLOAT32, choice(TorchDtype), "Type of weights, keys and values with `--forward torch`."
    )
    tokenize_workers: int = setting(
        0,
        whole_number(0, 64),
        "Threads of the embedded engine's process that tokenize completions and chats without a session; 0: the "
        "server does.",
        unit="threads",
    )

    def check(self) -> None:
        """Raise StartupError for settings in conflict."""
        if self.step_tokens <= self.max_batch:
            raise StartupError(
                f"--step-tokens is {self.step_tokens}, but must be above --max-batch, {self.max_batch}: raise it"
            )
        of_torch: tuple[tuple[str, object, object], ...] = (
            ("--torch-device", self.torch_device, "auto"),
            ("--torch-dtype", self.torch_dtype, TorchDtype.FLOAT32),
        )
        for flag, value, default in of_torch:
            if self.forward is not ForwardKind.TORCH and value != default:
                raise StartupError(f"{flag} is {value}, but --forward is {self.forward}: set --forward torch")


@dataclass(frozen=True, kw_only=True)
class WeightSettings:
    """Settings of new weights."""

    weights_dir: Path | None = setting(
        None,
        folder(),
        "Folder that new weights may be loaded from while the server runs (`POST /update_weights_from_disk`).",
        shown="none: no weights are loaded from disk",
        section=Section.ENGINE,
        after="weight_version",
    )


@dataclass(frozen=True, kw_only=True)
class ScoreSettings:
    """Settings of scores."""

    scores_in_flight: int = setting(
        4,
        whole_number(1, 1024),
        "Most sessions whose tokens are scored at an engine at once (`POST /sessions/{id}/scores`); turns go first in"
        " the embedded engine.",
        unit="sessions",
        section=Section.ENGINE,
        after="weights_dir",
    )


def _price(value: object) -> float:
    """A price. Raises ValueError."""
    if isinstance(value, str) and re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", value):
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1e9:
        raise ValueError
    return float(value)


@dataclass(frozen=True, kw_only=True)
class AccountSettings:
    """Settings of accounts."""

    token_price: float | None = setting(
        None,
        Kind(expected="a number from 0", read=_price),
        "Price of a million sampled tokens, in any currency: `GET /accounts` has costs then.",
        shown="none: no costs",
        section=Section.ENGINE,
        after="scores_in_flight",
    )


@dataclass(frozen=True, kw_only=True)
class TenantSettings:
    """Settings of tenants."""

    tenants: Path | None = setting(
        None,
        folder(),
        "TOML file of tenants: names with hashes of keys, scopes and quotas (`stenograph tenant add`). Read again at"
        " SIGHUP. Needs `--api-key`, the operator's.",
        shown="none: one for all",
        section=Section.SECURITY,
        after="admin_key",
    )
    audit_log: Path | None = setting(
        None,
        folder(),
        "File to which a line of JSON is appended for each change of weights, engines, outcomes and tenants.",
        shown="none",
        section=Section.SECURITY,
        after="tenants",
    )


@dataclass(frozen=True, kw_only=True)
class TraceSettings:
    """Settings of traces."""

    otlp_endpoint: str | None = setting(
        None,
        matching(r"https?://[^\s/?#@,]+(/[^\s?#,]*)?", "an http or https URL, without a query"),
        "Address of an OpenTelemetry collector, to which traces of requests are sent by OTLP over HTTP. It needs the"
        " extra `otel`.",
        shown="none: no traces",
        section=Section.TRACES,
    )


def _server_address(value: object) -> str:
    """An address of a server. Raises ValueError."""
    if not isinstance(value, str) or not re.fullmatch(r"https?://[^\s/?#@]+", value):
        raise ValueError
    url = urlsplit(value)  # it refuses brackets without an address in them
    if not url.hostname or url.port == 0:  # and `port` a number that is none
        raise ValueError
    return value


class ReplayPace(enum.StrEnum):
    """Paces of recorded replies."""

    AT_ONCE = "at-once"
    RECORDED = "recorded"


def _expression(text: str) -> str:
    """A regular expression. Raises ValueError."""
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"{text!r} is no regular expression: {error}") from error
    return text


@dataclass(frozen=True, kw_only=True)
class ReplaySettings:
    """Settings of sessions that are lived again."""

    play: ReplayPace | None = setting(
        None,
        choice(ReplayPace),
        "Answer each request of a session in `--data-dir` as it was answered, at once or at its recorded pace. The"
        " folder is only read. A request that differs is the engine's to answer; with `--engine replay` it is refused.",
        shown="none; at-once with --engine replay",
        section=Section.STORE,
        after="durability",
    )
    play_ignores: tuple[str, ...] = setting(
        (),
        texts(".+", "regular expressions", normalize=_expression),
        "With `--play`: a regular expression for parts of messages that are made anew each time, as numbers of"
        " processes are; repeatable. Those of known agents are ignored anyway.",
        shown="none",
        section=Section.STORE,
        after="play",
    )
    strict: Switch = setting(
        Switch.OFF,
        choice(Switch),
        "With `--play`: refuse a request that differs from its record, also where an engine could answer.",
        section=Section.STORE,
        after="play_ignores",
    )


@dataclass(frozen=True, kw_only=True)
class ClusterSettings:
    """Settings of one server of several processes, and of servers sharing a database."""

    workers: int = setting(
        1,
        whole_number(1, 64),
        "Processes that serve on the one port. Each has sessions of its own, and passes on others' requests.",
        section=Section.SERVER,
        after="port",
    )
    store: str | None = setting(
        None,
        matching(POSTGRES, "an address like postgresql://user@host/database"),
        "PostgreSQL database in which sessions are kept, shared by all servers that have the same one; in place of"
        " `--data-dir`.",
        shown="none",
        section=Section.STORE,
        secret=True,
    )
    advertise_url: str | None = setting(
        None,
        Kind(expected="an address like http://10.0.0.5:8080, without a path", read=_server_address),
        "With `--store`: the address under which the other servers reach this one.",
        shown="that of --host and --port",
    )
    lease_s: float = setting(
        5.0,
        seconds(3600),
        "With `--store`: the time after which the sessions of a server that is dead, or cut off, are taken over. Each"
        " of several workers has a lease.",
        unit="seconds",
    )

    def check(self) -> None:
        """Raise StartupError for settings of servers that share a database, where there is none, and a short lease."""
        if self.store is None and (self.advertise_url is not None or self.lease_s != ClusterSettings.lease_s):
            raise StartupError("--advertise-url and --lease are of servers that share a database: give --store, too")
        if self.lease_s < MIN_LEASE_S:
            raise StartupError(f"--lease is {self.lease_s:g} s, but must be at least {MIN_LEASE_S:g} s")
