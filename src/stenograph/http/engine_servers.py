"""Makes the clients of the engines' servers named in the settings; imports the protocol in use, and no other."""

import math
from collections.abc import Callable, Mapping
from functools import partial

from stenograph.core.clock import Clock
from stenograph.core.errors import StartupError
from stenograph.core.loaded import entry
from stenograph.core.types import LogprobsKind
from stenograph.engine.fleet.fleet import Fleet
from stenograph.engine.fleet.members import FleetMember
from stenograph.engine.http.adapter import AdapterOptions, EngineAdapter
from stenograph.engine.http.engine import HttpEngine, HttpEngineOptions
from stenograph.engine.settings import EngineKind, ReplayKind
from stenograph.http.rule_files import engine_keys_of
from stenograph.http.settings import Settings
from stenograph.model.files import ModelFiles
from stenograph.offload.body_slots import BodySlots

LOGPROBS_CHECK = "stenograph.engine.http.logprobs_check:check_logprobs"


ADAPTERS: Mapping[EngineKind, str] = {
    EngineKind.SGLANG: "stenograph.engine.sglang.chat:SGLangChat",
    EngineKind.SGLANG_GENERATE: "stenograph.engine.sglang.generate:SGLangGenerate",
    EngineKind.VLLM: "stenograph.engine.vllm.adapter:VLLM",
    EngineKind.LMDEPLOY: "stenograph.engine.lmdeploy.adapter:LMDeploy",
    EngineKind.LLAMACPP: "stenograph.engine.llamacpp.adapter:LlamaCpp",
}
"""Every kind of engine server, with the entry of its adapter."""


def make_adapter(settings: Settings, files: ModelFiles) -> EngineAdapter:
    """The protocol of the engine's server.

    Raises StartupError for a replay of another shape than the model's files have.
    """
    if settings.replay in (ReplayKind.ROUTED_EXPERTS, ReplayKind.ALL) and not files.states_vocab_size:
        raise StartupError(f"--replay {settings.replay} needs the model's config.json, and {files.path} has none")
    told = settings.engine_logprobs
    options = AdapterOptions(
        model=files.name,
        vocab_size=files.vocab_size,
        logprobs=None if told is None else LogprobsKind(told),
        replay=settings.replay,
        route_size=0 if files.moe_shape is None else math.prod(files.moe_shape),
        reply_mode=settings.reply,
        max_context_tokens=files.max_context_tokens,
        eos_token_ids=files.eos_token_ids,
        tokenizer_json=files.tokenizer_json,
        states_vocab_size=files.states_vocab_size,
    )
    made: EngineAdapter = entry(ADAPTERS[settings.engine])(options)
    return made


def maker(settings: Settings, files: ModelFiles, body_slots: BodySlots) -> Callable[[str], FleetMember]:
    """A function to make the client of the engine at an address. Engines' replies have body slots of their own."""
    reply_slots, keys, said = body_slots.apart(), engine_keys_of(settings), settings.engine_logprobs
    check = None if said is None else partial(entry(LOGPROBS_CHECK), said=LogprobsKind(said))

    def make(url: str) -> FleetMember:
        adapter = make_adapter(settings, files)  # each learns of its own server
        server = HttpEngineOptions(
            url=url,
            api_key=keys.get(url, settings.engine_api_key),
            connect_timeout_s=settings.connect_timeout_s,
            max_reply_bytes=settings.max_reply_bytes,
            control_timeout_s=settings.request_timeout_s,
            check=check,
        )
        engine = HttpEngine(server, adapter, reply_slots)
        return FleetMember(name=engine.name, engine=engine, url=url)

    return make


def make_fleet(settings: Settings, files: ModelFiles, body_slots: BodySlots, clock: Clock) -> Fleet:
    """The engines at the addresses of the settings; not yet started. Arguments are those of `make_engine`."""
    make = maker(settings, files, body_slots)
    members = [make(url) for url in settings.engine_url]
    return Fleet(
        members,
        clock=clock,
        trial_s=2 * settings.connect_timeout_s,
        make=make,
        load_interval_s=settings.engine_load_interval_s,
        max_wait_s=settings.engine_wait_s,
    )
