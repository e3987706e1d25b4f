"""The settings of engines: the kind, the addresses of its servers, and the data asked of them."""

# ruff: noqa: RUF009  (`setting` and `computed` make dataclass fields)

import enum
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from stenograph.core.errors import StartupError
from stenograph.core.settings import (
    Section,
    choice,
    folder,
    matching,
    seconds,
    seconds_or_zero,
    setting,
    text,
    texts,
    whole_number,
)


class EngineKind(enum.StrEnum):
    """Kinds of engines, the samplers of tokens."""

    EMBEDDED = "embedded"
    SGLANG = "sglang"
    SGLANG_GENERATE = "sglang-generate"
    LLAMACPP = "llamacpp"
    VLLM = "vllm"
    LMDEPLOY = "lmdeploy"
    REPLAY = "replay"
    """None: replies are recorded ones."""


MEDIA_TAKERS = (EngineKind.VLLM, EngineKind.SGLANG_GENERATE)
"""Those that may take media: their adapters' `Capabilities.media` is not empty."""


class EngineLogprobs(enum.StrEnum):
    """Kinds of log-probabilities to declare for an engine; the values are those of `LogprobsKind`."""

    RAW = "raw"
    TEMPERED = "tempered"
    SAMPLING = "sampling"


class ReplayKind(enum.StrEnum):
    """Training-only payloads asked of an engine."""

    NONE = "none"
    ROUTED_EXPERTS = "routed_experts"
    INDEXER_TOPK = "indexer_topk"
    ALL = "all"


_ROUTES_ALONE = {
    EngineKind.EMBEDDED: "the embedded engine",
    EngineKind.VLLM: "vLLM",
    EngineKind.LMDEPLOY: "LMDeploy",
}
"""Engines that replay nothing but routed experts."""


def _address(url: str) -> str:
    """An address without slashes at its end. Raises ValueError for one without a host, or with an invalid port."""
    parts = urlsplit(url)
    if not parts.hostname or parts.port == 0:
        raise ValueError(f"{url!r} has no host, or no port that can be connected to")
    return url.rstrip("/")


URLS = texts(
    r"https?://[^\s/?#@,]+(/[^\s?#,]*)?",
    "http or https addresses, without a query, with a port from 1 to 65535",
    normalize=_address,
)


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """The sampling engine, and its address."""

    engine: EngineKind = setting(
        EngineKind.EMBEDDED, choice(EngineKind), "Engine that samples the tokens.", section=Section.ENGINE
    )
    engine_url: tuple[str, ...] = setting(
        (),
        URLS,
        "Address of the engine, for those that are servers; repeatable, for several that serve the same model.",
        shown="none",
    )
    engine_api_key: str | None = setting(
        None,
        matching(r"[!-~]+", "printable ASCII without spaces"),
        "Key that is sent to the engine with every request, as a bearer; a client's own key never is.",
        shown="none",
        secret=True,
    )
    engine_keys: Path | None = setting(
        None,
        folder(),
        'File of keys by engine, where several have different ones: TOML, a line `"http://host:port" = "key"` for each.'
        " Engines that it does not name get `--engine-api-key`.",
        shown="none",
    )
    connect_timeout_s: float = setting(
        5.0, seconds(3600), "Longest time that connecting to the engine may take.", unit="seconds"
    )
    engine_load_interval_s: float = setting(
        1.0,
        seconds_or_zero(3600),
        "How often each of several engines is asked how full its memory is; 0: never, and turns go by our own counts.",
        unit="seconds",
    )
    engine_wait_s: float = setting(
        60.0,
        seconds_or_zero(86400),
        "Longest time that a turn waits here for memory of one of several engines; 0: it waits at the engine.",
        unit="seconds",
    )
    max_reply_bytes: int = setting(
        128 * 2**20,
        whole_number(1024),
        "Largest reply accepted from an engine, as received and as inflated, and largest event of a stream.",
        unit="bytes",
    )
    engine_logprobs: EngineLogprobs | None = setting(
        None,
        choice(EngineLogprobs),
        "Log-probabilities that the engine reports, where it does not run with its defaults: of the model's logits, of"
        " those divided by the temperature, or of the distribution that was sampled from. Two tokens check it each time"
        " that the engine comes up; a wrong one stops the start.",
        shown="the engine's default: tempered with sglang and sglang-generate, raw with the others",
    )
    weight_version: str | None = setting(
        None,
        text(),
        "Name of the weights that the engine starts with, where it reports none; give a number if the trainer"
        " compares versions.",
        shown="0 with the embedded engine, none with others",
    )
    replay: ReplayKind = setting(
        ReplayKind.NONE, choice(ReplayKind), "Training-only payloads that the engine is asked for with each reply."
    )

    def check(self) -> None:
        """Raise StartupError for settings of no use to the engine, or in need of another."""
        is_embedded = self.engine is EngineKind.EMBEDDED
        if self.engine is EngineKind.REPLAY:
            self._check_replay()
            return
        if is_embedded and (self.engine_api_key is not None or self.engine_keys is not None):
            given = "--engine-keys" if self.engine_api_key is None else "--engine-api-key"
            raise StartupError(f"{given} is set, but the embedded engine takes no key: set --engine too")
        if not is_embedded and not self.engine_url:
            raise StartupError(f"--engine {self.engine} needs the address of its server: give --engine-url")
        if is_embedded and self.engine_url:
            raise StartupError(
                "--engine-url is set, but --engine is embedded, which has no address: say which engine it is,"
                " for instance --engine sglang"
            )
        if is_embedded and self.engine_logprobs is not None:
            raise StartupError("--engine-logprobs is set, but the embedded engine reports all kinds")
        if self.engine is EngineKind.LLAMACPP and self.replay is not ReplayKind.NONE:
            raise StartupError("--replay is set, but llama.cpp does not report its experts")
        if self.engine in _ROUTES_ALONE and self.replay in (ReplayKind.INDEXER_TOPK, ReplayKind.ALL):
            raise StartupError(
                f"--replay is {self.replay}, but {_ROUTES_ALONE[self.engine]} reports routed_experts alone"
            )

    def _check_replay(self) -> None:
        """Raise StartupError for settings of an engine where there is none."""
        given: dict[str, object] = {
            "--engine-url": self.engine_url,
            "--engine-api-key": self.engine_api_key,
            "--engine-keys": self.engine_keys,
            "--engine-logprobs": self.engine_logprobs,
            "--replay": self.replay is not ReplayKind.NONE,
        }
        for flag, value in given.items():
            if value:
                raise StartupError(f"{flag} is set, but --engine is replay, which has no engine: leave it out")

    @property
    def loads_weights(self) -> bool:
        """Whether the server computes the model itself, and needs its weights."""
        return self.engine is EngineKind.EMBEDDED
