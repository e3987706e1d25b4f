"""What engines say of their memory and queue: as real ones said it, and where they say something else."""

import json
from pathlib import Path
from typing import Any

import pytest

from stenograph.core.errors import UpstreamError, UpstreamInvalid, UpstreamRefused
from stenograph.engine.base import EngineLoad
from stenograph.engine.exposition import MAX_PAGE_BYTES, MAX_WANTED_BYTES, lmdeploy_load, read_load, vllm_load
from stenograph.engine.http.transport import Headers, HttpReply
from stenograph.engine.sglang.load import MAX_LOADS_BYTES, sglang_load

FOLDER = Path(__file__).parents[2] / "service" / "recordings"
"""A real vLLM 0.32.0 with 12 blocks of 128 tokens, and a real SGLang 0.5.23 with 1,536 tokens, both on a CPU: idle,
with six requests of 150 + 400 tokens, and after them. Of vLLM's page the lines of its own metrics, without buckets."""


def recorded(file: str) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in json.loads((FOLDER / file).read_text(encoding="utf-8"))}


VLLM, SGLANG = recorded("vllm/metrics-0.32.json"), recorded("sglang/loads-0.5.23.json")


class Answering:
    """An `Ask` with one answer."""

    def __init__(self, body: bytes, status: int = 200) -> None:
        self._reply = HttpReply(status=status, content_type="", headers=(), body=body)
        self.asked: list[tuple[str, str]] = []

    async def __call__(self, method: str, target: str, body: bytes = b"", headers: Headers = ()) -> HttpReply:
        self.asked.append((method, target))
        return self._reply


def vllm_page(name: str) -> bytes:
    return "\n".join(VLLM[name]["lines"]).encode()


@pytest.mark.parametrize(
    ("name", "load"),
    [
        ("idle", EngineLoad(kv_usage=0.0, num_running=0, num_waiting=0, kv_tokens=1536, num_preemptions=0)),
        ("full", EngineLoad(kv_usage=10 / 11, num_running=5, num_waiting=1, kv_tokens=1536, num_preemptions=0)),
        ("after", EngineLoad(kv_usage=0.0, num_running=0, num_waiting=0, kv_tokens=1536, num_preemptions=5)),
    ],
)
async def test_a_real_vllm_says_how_full_it_is(name: str, load: EngineLoad) -> None:
    ask = Answering(vllm_page(name))
    assert await vllm_load(ask) == load
    assert ask.asked == [("GET", "/metrics")]


@pytest.mark.parametrize(("name", "running", "waiting", "usage"), [("idle", 0, 0, 0.0), ("queue", 2, 4, 0.6159)])
async def test_a_real_sglang_says_how_full_it_is(name: str, running: int, waiting: int, usage: float) -> None:
    load = await sglang_load(Answering(json.dumps(SGLANG[name]["json"]).encode()))
    told = EngineLoad(
        kv_usage=usage, num_running=running, num_waiting=waiting, kv_tokens=1536, max_running=16, num_preemptions=None
    )
    assert load == told


async def test_ranks_are_one_engine() -> None:
    rank = SGLANG["queue"]["json"]["loads"][0]
    body = json.dumps({"loads": [rank, {**rank, "token_usage": 0.0, "num_waiting_reqs": 0}]}).encode()
    load = await sglang_load(Answering(body))
    assert (load.kv_tokens, load.num_running, load.num_waiting, load.max_running) == (3072, 4, 4, 32)
    assert load.kv_usage == pytest.approx(0.6159 / 2)
    page = vllm_page("full")
    both = read_load(page + b"\n" + page.replace(b'engine="0"', b'engine="1"'), "vllm")
    assert both == EngineLoad(kv_usage=10 / 11, num_running=10, num_waiting=2, kv_tokens=3072, num_preemptions=0)


async def test_older_names_and_lmdeploys_are_read() -> None:
    page = (
        b'lmdeploy:gpu_cache_usage_perc{engine="0",model_name="a } b"} 0.25\n'
        b'lmdeploy:num_requests_running{engine="0"} 3.0\nlmdeploy:num_requests_waiting{engine="0"} 1.0\n'
    )
    assert await lmdeploy_load(Answering(page)) == EngineLoad(kv_usage=0.25, num_running=3, num_waiting=1)
    blocks = b'\nvllm:cache_config_info{block_size="16",num_gpu_blocks="573"} 1.0\n'
    assert read_load(page.replace(b"lmdeploy", b"vllm") + blocks, "vllm").kv_tokens == 16 * 573
    silent = b'\nvllm:cache_config_info{block_size="16",num_gpu_blocks="None"} 1.0\n'
    assert read_load(page.replace(b"lmdeploy", b"vllm") + silent, "vllm").kv_tokens is None


@pytest.mark.parametrize("read", [vllm_load, lmdeploy_load, sglang_load])
@pytest.mark.parametrize("body", [b"", b"{}", b"vllm:kv_cache_usage_perc{ nonsense", b'{"loads": [{}]}', b"\xff"])
async def test_what_is_no_load_is_an_error_of_the_engine(read: Any, body: bytes) -> None:
    with pytest.raises(UpstreamInvalid):
        await read(Answering(body))
    with pytest.raises(UpstreamRefused):
        await read(Answering(b'{"detail":"Not Found"}', status=404))
    assert issubclass(UpstreamRefused, UpstreamError)


@pytest.mark.parametrize("number", ["NaN", "-1.0", "+Inf", "1e400"])
@pytest.mark.parametrize("name", ["kv_cache_usage_perc", "num_requests_waiting", "num_preemptions_total"])
def test_numbers_that_cannot_be_are_an_error_of_the_engine(name: str, number: str) -> None:
    lines = [line for line in VLLM["full"]["lines"] if not line.startswith(f"vllm:{name}{{")]
    page = "\n".join([*lines, f'vllm:{name}{{engine="0"}} {number}']).encode()
    if (name, number) in {("kv_cache_usage_perc", "+Inf"), ("kv_cache_usage_perc", "1e400")}:
        assert read_load(page, "vllm").kv_usage == 1.0
    else:
        with pytest.raises(UpstreamInvalid):
            read_load(page, "vllm")


def sglang_ranks(**told: Any) -> bytes:
    rank = {**SGLANG["queue"]["json"]["loads"][0], **told}
    return json.dumps({"loads": [rank, rank]}).encode()


@pytest.mark.parametrize(
    "told",
    [
        {"max_total_num_tokens": 10**400},
        {"max_total_num_tokens": 10**300},
        {"max_total_num_tokens": 10**16},
        {"num_running_reqs": 10**300},
        {"max_running_requests": 10**300},
        {"token_usage": -1.0},
        {"token_usage": 1e308, "max_total_num_tokens": 10**400},
    ],
    ids=str,
)
async def test_numbers_beyond_any_engine_are_an_error_of_an_sglang(told: dict[str, Any]) -> None:
    with pytest.raises(UpstreamInvalid):
        await sglang_load(Answering(sglang_ranks(**told)))


@pytest.mark.parametrize("number", ["1e300", "9" * 400])
def test_numbers_beyond_any_engine_are_an_error_of_a_vllm(number: str) -> None:
    for line in (
        f'vllm:cache_config_info{{kv_cache_size_tokens="{number}"}} 1.0',
        f'vllm:num_requests_running{{engine="1"}} {number}',
        f'vllm:num_preemptions_total{{engine="1"}} {number}',
    ):
        if "kv_cache" in line and not number.isdecimal():
            continue  # text, like vLLM's "None"
        with pytest.raises(UpstreamInvalid):
            read_load(f"{chr(10).join(VLLM['full']['lines'])}\n{line}".encode(), "vllm")


async def test_a_page_too_large_to_be_read_at_once_is_an_error_of_the_engine() -> None:
    page = vllm_page("full") + b"\n"
    other = b'vllm:other{a="b"} 1.0\n'
    assert read_load(page + other * 10_000, "vllm") == read_load(page, "vllm")
    for large in (page + other * (MAX_PAGE_BYTES // len(other)), page * (MAX_WANTED_BYTES // 256)):
        with pytest.raises(UpstreamInvalid, match="bytes"):
            read_load(large, "vllm")
    with pytest.raises(UpstreamInvalid, match="bytes"):
        await sglang_load(Answering(sglang_ranks() + b" " * MAX_LOADS_BYTES))
