"""An engine's word about its memory and queue, read from its metrics in Prometheus' text format.

vLLM has 50 KB of them (0.32.0), of which a few lines are wanted: only these are parsed, so that a reading holds the
event loop for a tenth of a millisecond. An engine of several ranks has a line for each. 8 MiB without a wanted line
take 35 ms, and 128 KiB of wanted lines as long: anything larger is an error.
"""

import re
from collections.abc import Iterable
from statistics import fmean

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from stenograph.core.errors import UpstreamInvalid
from stenograph.engine.base import EngineLoad
from stenograph.engine.http.adapter import Ask, passed_through

METRICS_PATH = "/metrics"
MAX_PAGE_BYTES = 8 * 2**20
MAX_WANTED_BYTES = 128 * 2**10
_USES = ("kv_cache_usage_perc", "gpu_cache_usage_perc")
"""vLLM's name of today, and the one of before, which LMDeploy has."""
_NAMES = (*_USES, "num_requests_running", "num_requests_waiting", "num_preemptions_total", "cache_config_info")


async def vllm_load(ask: Ask) -> EngineLoad:
    """A vLLM's. Raises UpstreamError. Source: vLLM's `v1/metrics/loggers.py`."""
    return await _load(ask, "vllm")


async def lmdeploy_load(ask: Ask) -> EngineLoad:
    """An LMDeploy's, where it runs with `--enable-metrics`. Raises UpstreamError. Source: its `metrics/loggers.py`."""
    return await _load(ask, "lmdeploy")


async def _load(ask: Ask, engine: str) -> EngineLoad:
    reply = await ask("GET", METRICS_PATH)
    if reply.status != 200:
        raise passed_through(reply)
    return read_load(reply.body, engine)


def read_load(exposition: bytes, engine: str) -> EngineLoad:
    """The load in an engine's metrics, whose names begin with the engine's. Raises UpstreamInvalid."""
    if len(exposition) > MAX_PAGE_BYTES:
        raise UpstreamInvalid("shape", f"{METRICS_PATH} has {len(exposition)} bytes, at most {MAX_PAGE_BYTES} are read")
    wanted = re.compile(rb"^%s:(?:%s)[ {].*$" % (engine.encode(), "|".join(_NAMES).encode()), re.MULTILINE)
    lines = b"\n".join(wanted.findall(exposition))
    if len(lines) > MAX_WANTED_BYTES:
        told = f"{METRICS_PATH} has {len(lines)} bytes about memory and queues, at most {MAX_WANTED_BYTES} are read"
        raise UpstreamInvalid("shape", told)
    try:
        families = list(text_string_to_metric_families(lines.decode(errors="replace") + "\n"))
    except ValueError as error:
        raise UpstreamInvalid("shape", f"{METRICS_PATH}: {error}") from error
    found: dict[str, list[Sample]] = {}
    for sample in (sample for family in families for sample in family.samples):
        found.setdefault(sample.name.partition(":")[2], []).append(sample)
    uses = next((found[name] for name in _USES if name in found), None)
    if uses is None or "num_requests_running" not in found or "num_requests_waiting" not in found:
        raise UpstreamInvalid("shape", f"{METRICS_PATH} has no {engine}:{_USES[0]}")
    preempted = found.get("num_preemptions_total")
    try:
        return EngineLoad(
            kv_usage=min(fmean(one.value for one in uses), 1.0),
            num_running=_sum(found["num_requests_running"]),
            num_waiting=_sum(found["num_requests_waiting"]),
            kv_tokens=_kv_tokens(found.get("cache_config_info", ())),
            num_preemptions=None if preempted is None else _sum(preempted),
        )
    except (ValueError, OverflowError) as error:
        raise UpstreamInvalid("shape", f"{METRICS_PATH}: {error}") from error


def _sum(samples: Iterable[Sample]) -> int:
    return int(sum(one.value for one in samples))


def _kv_tokens(configs: Iterable[Sample]) -> int | None:
    """The tokens of all ranks; None where one does not say. Older ones have the blocks and their size alone."""
    total = 0
    for labels in (one.labels for one in configs):
        told = (labels.get("kv_cache_size_tokens", ""), labels.get("num_gpu_blocks", ""), labels.get("block_size", ""))
        size, blocks, block = (int(text) if text.isdecimal() else 0 for text in told)
        if not (tokens := size or blocks * block):
            return None
        total += tokens
    return total or None
