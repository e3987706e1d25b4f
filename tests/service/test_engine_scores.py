"""Scores of given tokens by engines behind HTTP, against their stand-ins on real sockets, and by the embedded one."""

import asyncio
from array import array
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from standins.faults import Answer
from standins.planned_server import AskedRequest
from standins.sglang_server import SGLangServer, made_up_score
from standins.teacher_forcing import line_logprobs
from standins.tiny.llama import write_tiny_folder
from standins.vllm_server import VLLMServer
from stenograph.core.errors import InvalidRequest, StenographError, UpstreamInvalid, UpstreamRefused
from stenograph.core.types import LogprobsKind, RequestId, TopLogprob
from stenograph.embedded.engine import EmbeddedEngine
from stenograph.embedded.forward.numpy_forward import NumpyForward
from stenograph.embedded.forward.weights import load_weights
from stenograph.embedded.options import EmbeddedOptions
from stenograph.engine.http.adapter import AdapterOptions, EngineAdapter
from stenograph.engine.http.engine import HttpEngine, HttpEngineOptions
from stenograph.engine.lmdeploy.adapter import LMDeploy
from stenograph.engine.scoring import ScoreRequest, Scores
from stenograph.engine.sglang.chat import SGLangChat
from stenograph.engine.sglang.generate import SGLangGenerate
from stenograph.engine.vllm.adapter import VLLM

OPTIONS = AdapterOptions(model="stand-in", vocab_size=1000)
LINE = (5, 6, 7, 8, 9)


def asked(ids: Sequence[int] = LINE, start: int = 2, *, num_top: int = 0, policy: str | None = None) -> ScoreRequest:
    return ScoreRequest(request_id=RequestId("r"), ids=array("i", ids), start=start, num_top=num_top, policy=policy)


@asynccontextmanager
async def engine_at(url: str, adapter: EngineAdapter) -> AsyncIterator[HttpEngine]:
    engine = HttpEngine(HttpEngineOptions(url=url), adapter)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.aclose()


@pytest.mark.parametrize("scale_out", [True, False], ids=["generate", "completions"])
async def test_vllm_scores_a_prompt_by_its_policy(scale_out: bool) -> None:
    async with VLLMServer(scale_out=scale_out) as vllm, engine_at(vllm.url, VLLM(OPTIONS)) as engine:
        scores = await engine.score(asked(policy="teacher-lora"))
        assert list(scores.logprobs) == [-2 / 16, -3 / 16, -4 / 16]
        assert scores.version == ("default" if scale_out else None)
        assert vllm.asked[-1].json["model"] == "teacher-lora"
        assert vllm.asked[-1].json["priority"] == 2**31 - 1, "after every turn, with priority scheduling"


@pytest.mark.parametrize("scale_out", [True, False], ids=["generate", "completions"])
@pytest.mark.parametrize("num_top", [0, 1])
async def test_vllm_scores_a_line_as_long_as_its_context(scale_out: bool, num_top: int) -> None:
    """It takes no such prompt, so the last token is the only one that it may sample."""
    async with (
        VLLMServer(scale_out=scale_out, max_model_len=len(LINE)) as vllm,
        engine_at(vllm.url, VLLM(OPTIONS)) as engine,
    ):
        for start in (2, len(LINE) - 1):
            scores = await engine.score(asked(start=start, num_top=num_top))
            assert list(scores.logprobs) == [-at / 16 for at in range(start, len(LINE))]
            assert len(scores.top.ids) == num_top * len(scores.logprobs)
        shorter = await engine.score(asked(LINE[:-1]))
        assert list(shorter.logprobs) == [-2 / 16, -3 / 16]


async def test_a_vllm_of_other_log_probabilities_refuses_a_line_as_long_as_its_context() -> None:
    """Those after the rule that one token alone is allowed would be 0."""
    options = replace(OPTIONS, logprobs=LogprobsKind.SAMPLING)
    async with VLLMServer(max_model_len=len(LINE)) as vllm, engine_at(vllm.url, VLLM(options)) as engine:
        with pytest.raises(UpstreamRefused, match="longer than the maximum model length of 5"):
            await engine.score(asked())


@pytest.mark.parametrize(("low_first", "last"), [(True, 2**31 - 1), (False, -(2**31)), (None, -(2**31))])
@pytest.mark.parametrize("adapter", [SGLangChat, SGLangGenerate])
async def test_sglang_scores_after_everything_else_where_it_schedules_by_priority(
    adapter: type[SGLangChat | SGLangGenerate], low_first: bool | None, last: int
) -> None:
    async with SGLangServer() as sglang:
        for schedules in (True, False):
            sglang.server_info = {
                "enable_priority_scheduling": schedules,
                "schedule_low_priority_values_first": low_first,
            }
            async with engine_at(sglang.url, adapter(OPTIONS)) as engine:
                await engine.score(asked())
            assert sglang.asked[-1].json.get("priority") == (last if schedules else None)


@pytest.mark.parametrize("adapter", [SGLangChat, SGLangGenerate])
async def test_sglang_scores_a_prompt_and_samples_nothing(adapter: type[SGLangChat | SGLangGenerate]) -> None:
    async with SGLangServer() as sglang, engine_at(sglang.url, adapter(OPTIONS)) as engine:
        scores = await engine.score(asked(num_top=2, policy="lora"))
        assert list(scores.logprobs) == [made_up_score(at, LINE[at]) for at in (2, 3, 4)]
        best = (TopLogprob(id=0, logprob=-0.5), TopLogprob(id=1, logprob=-1.5))
        assert (scores.top.rows(2), scores.version) == ((best,) * 3, "default")
        body = sglang.asked[-1].json
        assert (body["lora_path"], body["sampling_params"]["max_new_tokens"]) == ("lora", 0)
        whole = await engine.score(asked(start=1))
        assert list(whole.logprobs) == [made_up_score(at, LINE[at]) for at in (1, 2, 3, 4)]


ROWS = [[None, 6, None], [-1.0, 7, None], [-1.0, 8, None], [-1.0, 9, None]]


@pytest.mark.parametrize(
    ("rows", "law"),
    [
        (ROWS[:3], "has_logprobs"),
        ([*ROWS[:2], [-1.0, 100, None], ROWS[3]], "has_logprobs"),
        ([*ROWS[:3], [None, 9, None]], "has_logprobs"),
        ([*ROWS[:3], [0.5, 9, None]], "logprob_finite"),
        ([], "has_logprobs"),
    ],
)
async def test_a_reply_that_scores_other_tokens_is_refused(rows: list[object], law: str) -> None:
    async def lies(request: AskedRequest) -> Answer | None:
        if request.method != "POST" or request.json.get("rid") != "r":
            return None
        told = f'{{"meta_info": {{"id": "r", "input_token_logprobs": {rows}}}}}'.replace("None", "null")
        return Answer(body=told.encode())

    async with SGLangServer(routes=lies) as sglang, engine_at(sglang.url, SGLangGenerate(OPTIONS)) as engine:
        with pytest.raises(UpstreamInvalid) as raised:
            await engine.score(asked())
        assert raised.value.law == law


async def test_a_refusal_of_the_engine_is_passed_on() -> None:
    async def refuses(request: AskedRequest) -> Answer | None:
        is_scoring = request.json.get("rid") == "r"
        return Answer(status=404, body=b'{"error": {"message": "no such model"}}') if is_scoring else None

    async with SGLangServer(routes=refuses) as sglang, engine_at(sglang.url, SGLangGenerate(OPTIONS)) as engine:
        with pytest.raises(UpstreamRefused):
            await engine.score(asked())


async def test_scores_nobody_waits_for_are_aborted_at_the_engine() -> None:
    came, aborted = asyncio.Event(), asyncio.Event()

    async def holds(request: AskedRequest) -> Answer | None:
        if request.path == "/abort_request" and request.json["rid"] == "r":
            aborted.set()
        if request.json.get("sampling_params", {}).get("max_new_tokens") == 0:
            came.set()
            await aborted.wait()
        return None

    async with SGLangServer(routes=holds) as sglang, engine_at(sglang.url, SGLangGenerate(OPTIONS)) as engine:
        waiting = asyncio.ensure_future(engine.score(asked()))
        await came.wait()
        waiting.cancel()
        await aborted.wait()


async def test_an_engine_without_scores_says_which_have_them() -> None:
    engine = HttpEngine(HttpEngineOptions(url="http://127.0.0.1:9"), LMDeploy(OPTIONS))
    with pytest.raises(InvalidRequest, match=r"lmdeploy scores no tokens: the embedded engine, vLLM and SGLang do"):
        await engine.score(asked())


async def test_the_embedded_engine_scores_beside_its_turns_and_refuses_a_policy(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "tiny")
    engine = EmbeddedEngine(folder, EmbeddedOptions(threads=1, max_batch=4, kv_tokens=2048))
    await engine.start()
    try:
        line = [1, *range(5, 90)]
        scores = await engine.score(asked(line, 3, num_top=2))
        config, weights = load_weights(folder)
        model = NumpyForward(config, weights, num_kv_tokens=config.max_context)
        assert list(scores.logprobs) == pytest.approx(line_logprobs(model, line, 3), abs=1e-4)
        assert isinstance(scores, Scores)
        assert len(scores.top.ids) == 2 * (len(line) - 3)
        for bad in (asked(policy="x"), asked([1, 10_000], 1)):
            with pytest.raises(StenographError) as raised:
                await engine.score(bad)
            assert raised.value.status == 400
        assert engine.num_running == 0
    finally:
        await engine.aclose()


@pytest.mark.parametrize(("start", "num_top"), [(0, 0), (5, 0), (1, 21), (1, -1)])
def test_a_pass_without_a_scored_token_cannot_be_asked_for(start: int, num_top: int) -> None:
    with pytest.raises(ValueError, match=r"cannot be scored|alternatives"):
        asked(start=start, num_top=num_top)
