"""Makes the engine that the settings name: a client of one server, a fleet of several, or the embedded engine."""

from collections.abc import Callable
from pathlib import Path

from stenograph.core.clock import Clock
from stenograph.core.errors import StartupError
from stenograph.core.settings import Switch
from stenograph.core.types import LogprobsKind
from stenograph.embedded.options import FIRST_VERSION, EmbeddedOptions
from stenograph.engine.base import Engine
from stenograph.engine.embedded import EmbeddedEngine
from stenograph.engine.fleet.fleet import Fleet, FleetMember
from stenograph.engine.http.adapter import EngineAdapter
from stenograph.engine.http.engine import HttpEngine, HttpEngineOptions
from stenograph.engine.llamacpp.adapter import LlamaCpp
from stenograph.engine.llamacpp.text import pieces_of
from stenograph.engine.lmdeploy.adapter import LMDeploy
from stenograph.engine.settings import EngineKind, ReplayKind
from stenograph.engine.sglang.chat import SGLangChat
from stenograph.engine.sglang.generate import SGLangGenerate
from stenograph.engine.vllm.adapter import VLLM
from stenograph.http.rule_files import engine_keys_of
from stenograph.http.settings import Settings
from stenograph.model.fast_encoder import EncoderKind
from stenograph.model.files import ModelFiles
from stenograph.offload.body_slots import BodySlots


def make_adapter(settings: Settings, files: ModelFiles) -> EngineAdapter | None:
    """The protocol of the engine's server; None for the embedded engine, which has no server.

    Raises StartupError for a replay whose shape the model's files do not have.
    """
    if settings.replay in (ReplayKind.ROUTED_EXPERTS, ReplayKind.ALL) and not files.states_vocab_size:
        raise StartupError(f"--replay {settings.replay} needs the model's config.json, and {files.path} has none")
    told = settings.engine_logprobs
    tempered = LogprobsKind.TEMPERED if told is None else LogprobsKind(told)
    raw = LogprobsKind.RAW if told is None else LogprobsKind(told)
    match settings.engine:
        case EngineKind.EMBEDDED:
            return None
        case EngineKind.SGLANG:
            return SGLangChat(
                model=files.name,
                vocab_size=files.vocab_size,
                replay=settings.replay,
                reply_mode=settings.reply,
                logprobs=tempered,
            )
        case EngineKind.SGLANG_GENERATE:
            return SGLangGenerate(
                model=files.name, vocab_size=files.vocab_size, replay=settings.replay, logprobs=tempered
            )
        case EngineKind.LMDEPLOY:
            return LMDeploy(
                model=files.name,
                vocab_size=files.vocab_size,
                eos_token_ids=files.eos_token_ids,
                replay=settings.replay,
                logprobs=raw,
            )
        case EngineKind.LLAMACPP:
            pieces = pieces_of(files.tokenizer_json, files.vocab_size)
            return LlamaCpp(
                model=files.name,
                vocab_size=files.vocab_size,
                pieces=pieces,
                states_vocab_size=files.states_vocab_size,
                logprobs=raw,
            )
        case EngineKind.VLLM:
            return VLLM(
                model=files.name,
                vocab_size=files.vocab_size,
                max_context_tokens=files.max_context_tokens,
                eos_token_ids=files.eos_token_ids,
                replay=settings.replay,
                logprobs=raw,
            )


def maker(settings: Settings, files: ModelFiles, body_slots: BodySlots) -> Callable[[str], FleetMember]:
    """A function that makes the client of the engine at an address. Engines' replies have body slots of their own."""
    reply_slots, keys = body_slots.apart(), engine_keys_of(settings)

    def make(url: str) -> FleetMember:
        adapter = make_adapter(settings, files)  # each learns of its own server
        assert adapter is not None, "the embedded engine has no address"
        server = HttpEngineOptions(
            url=url,
            api_key=keys.get(url, settings.engine_api_key),
            connect_timeout_s=settings.connect_timeout_s,
            max_reply_bytes=settings.max_reply_bytes,
            control_timeout_s=settings.request_timeout_s,
        )
        engine = HttpEngine(server, adapter, reply_slots)
        return FleetMember(name=engine.name, engine=engine, url=url)

    return make


def make_engine(
    settings: Settings,
    files: ModelFiles,
    path: Path,
    body_slots: BodySlots,
    clock: Clock,
    encoder: EncoderKind = EncoderKind.REFERENCE,
    *,
    shared: Path | None = None,
) -> Engine:
    """The engine that the settings name, or a fleet of those at its addresses; not yet started.

    `body_slots` are those of the clients' bodies: engines' replies have slots of their own. `encoder` is what the
    server encodes with. `shared` is the socket of an embedded engine that other processes use too.
    """
    if settings.engine_url and settings.engine is not EngineKind.EMBEDDED:
        make = maker(settings, files, body_slots)
        members = [make(url) for url in settings.engine_url]
        return Fleet(members, clock=clock, trial_s=2 * settings.connect_timeout_s, make=make)
    return EmbeddedEngine(path, embedded_options(settings, encoder), shared=shared)


def embedded_options(settings: Settings, encoder: EncoderKind) -> EmbeddedOptions:
    """The options of the embedded engine's process."""
    return EmbeddedOptions(
        threads=settings.engine_threads,
        max_batch=settings.max_batch,
        kv_tokens=settings.kv_tokens,
        step_tokens=settings.step_tokens,
        reuses_prefixes=settings.prefix_reuse is Switch.ON,
        forward=settings.forward,
        torch_device=settings.torch_device,
        torch_dtype=settings.torch_dtype,
        grammar_backend=settings.grammar_backend,
        tokenize_workers=settings.tokenize_workers,
        encoder=encoder if settings.tokenize_workers else EncoderKind.REFERENCE,
        weight_version=settings.weight_version or FIRST_VERSION,
    )
