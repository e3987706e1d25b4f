"""Images through the whole server, before a stand-in of vLLM: exact ids on both sides, or nothing is recorded."""

import base64
import hashlib
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from itertools import pairwise
from typing import Any

import aiohttp
import pytest

from standins.planned_server import ReplyScript
from standins.tiny.tokenizer import tiny_tokenizer_json
from standins.vllm_server import Range, VLLMServer, expansion_length
from stenograph.engine.http.adapter import AdapterOptions
from stenograph.engine.http.engine import HttpEngine, HttpEngineOptions
from stenograph.engine.vllm.adapter import VLLM
from stenograph.http.loaded_model import make_renderer
from stenograph.store.base import SessionStore
from stenograph.store.folder import DataFolder
from stenograph.store.sqlite import SqliteStore
from stenograph.text.renderer import Renderer

from .conftest import END, Answer, assistant, running, tiny_files, user
from .test_durable import folder
from .test_vllm_sessions import Rig

__all__ = ["folder"]

PAD = "<|image_pad|>"
TOKENS = ("<|vision_start|>", "<|vision_end|>", PAD)
TEMPLATE = """
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}
{%- if message.content is string %}{{ message.content }}
{%- else %}{% for part in message.content %}
{{- '<|vision_start|><|image_pad|><|vision_end|>' if part.type == 'image' else part.text }}
{%- endfor %}{% endif %}{{ '<|im_end|>\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

Report = Callable[[list[int], list[Range]], tuple[list[int], list[Range]] | None]


@pytest.fixture(scope="module")
def seeing() -> Renderer:
    """The tiny model with images."""
    files = replace(tiny_files(), tokenizer_json=tiny_tokenizer_json(more=TOKENS), chat_template=TEMPLATE)
    return make_renderer(files, "qwen2.5-vl")


@asynccontextmanager
async def rig_of(
    renderer: Renderer,
    report: Report = lambda *told: told,
    store: SessionStore | None = None,
    settings: dict[str, Any] | None = None,
    vocab_size: int = 320,
    **options: Any,
) -> AsyncIterator[Rig]:
    pad = renderer.tokenizer.added_tokens.get(PAD)
    async with VLLMServer(dev_mode=True, image_token=pad, report=report, **options) as vllm:
        known = AdapterOptions(model="tiny", vocab_size=vocab_size, max_context_tokens=4096, eos_token_ids=(END,))
        engine = HttpEngine(HttpEngineOptions(url=vllm.url), VLLM(known))
        await engine.start()
        try:
            served = running(engine, renderer, store=store, **(settings or {}))
            async with served as (url, _), aiohttp.ClientSession() as client:
                yield Rig(url, vllm, renderer, client)
        finally:
            await engine.aclose()


@pytest.fixture
async def rig(seeing: Renderer) -> AsyncIterator[Rig]:
    async with rig_of(seeing) as rig:
        yield rig


def image(number: int) -> bytes:
    """Bytes that no server of ours looks into."""
    return b"\x89PNG" + bytes([number * 7 % 256, number])


def part(number: int) -> dict[str, Any]:
    url = f"data:image/png;base64,{base64.b64encode(image(number)).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def sees(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


async def samples(rig: Rig, session: str) -> list[Any]:
    answer = await rig.call("POST", f"/sessions/{session}/samples", {"format": "json"})
    assert answer.status == 200, answer.body
    return list(answer.json()["samples"])


def effective_of(rig: Rig, logical: list[int], numbers: list[int]) -> list[int]:
    pad, lengths = rig.renderer.tokenizer.added_tokens[PAD], iter(numbers)
    spread = ([id_] * (expansion_length(image(next(lengths))) if id_ == pad else 1) for id_ in logical)
    return [id_ for ids in spread for id_ in ids]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_line_with_images_goes_to_the_engine_as_logical_ids_and_into_samples_as_effective_ones(
    rig: Rig, stream: bool
) -> None:
    rig.says("one", "two", "three")
    session = await rig.session()
    messages = [sees(text("what is "), part(1), text(" and "), part(2))]
    prompts: list[list[int]] = []
    for number, reply in enumerate(["one", "two", "three"]):
        answer = await rig.chat(session, *messages, stream=stream)
        assert answer.status == 200, answer.body
        asked = rig.vllm.requests[-1].json
        prompts.append(asked["token_ids"])
        messages += [assistant(reply), sees(part(3 + number), text("?")) if number == 0 else user("and?")]
    sent = [[one["uuid"] for one in asked.json["content_parts"]] for asked in rig.vllm.requests]
    assert [len(one) for one in sent] == [2, 3, 3]
    assert sent[1][:2] == sent[0]
    assert sent[2] == sent[1]
    for before, after in pairwise(prompts):
        assert after[: len(before)] == before, "the logical ids only grow"
    (sample,) = await samples(rig, session)
    replies = [[*rig.renderer.tokenizer.encode(reply), END] for reply in ("one", "two", "three")]
    line = effective_of(rig, prompts[-1], [1, 2, 3]) + replies[-1]
    assert sample["tokens"] == line
    assert [row["sha256"] for row in sample["media"]] == sent[2]
    pad = rig.renderer.tokenizer.added_tokens[PAD]
    for row, number in zip(sample["media"], [1, 2, 3], strict=True):
        assert row["length"] == expansion_length(image(number))
        assert set(line[row["start"] : row["start"] + row["length"]]) == {pad}
        assert line[row["start"] - 1] != pad != line[row["start"] + row["length"]]
    given = len(line) - sample["response_length"]
    trained = [id_ for id_, mask in zip(line[given:], sample["loss_mask"], strict=True) if mask]
    assert trained == [id_ for reply in replies for id_ in reply]


def lengthened(ids: list[int], found: list[Range]) -> tuple[list[int], list[Range]]:
    """The first image stands for one id more than it did."""
    at = found[0]["offset"]
    moved = [{**one, "offset": one["offset"] + 1} for one in found[1:]]
    return [*ids[:at], ids[at], *ids[at:]], [{**found[0], "length": found[0]["length"] + 1}, *moved]


LIES: dict[str, Report] = {
    "another id": lambda ids, found: ([ids[0] + 1, *ids[1:]], found),
    "an id more": lambda ids, found: ([*ids, 5], found),
    "a range less": lambda ids, found: (ids, found[:-1]),
    "no ranges": lambda ids, _: (ids, []),
    "a range moved": lambda ids, found: (ids, [{**found[0], "offset": found[0]["offset"] + 1}, *found[1:]]),
    "a range beyond": lambda ids, found: (ids, [*found[:-1], {**found[-1], "length": 2**20}]),
    "an id outside the vocabulary": lambda ids, found: ([320, *ids[1:]], found),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
async def test_a_report_that_does_not_collapse_to_the_logical_ids_is_502_and_nothing_is_kept(
    seeing: Renderer, lie: Report, stream: bool
) -> None:
    async with rig_of(seeing, lie) as rig:
        session = await rig.session()
        rig.says("seen")
        answer = await rig.chat(session, sees(part(1), part(2)), stream=stream)
        assert b"upstream_invalid" in answer.body
        assert answer.status == 502
        assert await rig.records(session) == []


async def test_an_image_that_stood_for_other_ids_before_is_502_and_the_line_stays(seeing: Renderer) -> None:
    lies = [False]

    def report(ids: list[int], found: list[Range]) -> tuple[list[int], list[Range]]:
        return lengthened(ids, found) if lies[0] else (ids, found)

    async with rig_of(seeing, report) as rig:
        session = await rig.session()
        rig.says("seen", "again", "again")
        messages = [sees(part(1))]
        assert (await rig.chat(session, *messages)).status == 200
        messages += [assistant("seen"), user("once more")]
        lies[0] = True
        answer = await rig.chat(session, *messages)
        assert (answer.status, b"prompt_agrees" in answer.body) == (502, True)
        lies[0] = False
        assert (await rig.chat(session, *messages)).status == 200
        assert len(await rig.records(session)) == 2


async def test_a_placeholder_spelled_in_a_text_is_text(rig: Rig) -> None:
    rig.says("seen")
    session = await rig.session()
    spelled = f"{PAD}<|vision_start|>{PAD}<|vision_end|>"
    assert (await rig.chat(session, sees(text(spelled), part(1), text(spelled)))).status == 200
    (sample,) = await samples(rig, session)
    pad = rig.renderer.tokenizer.added_tokens[PAD]
    assert rig.vllm.requests[-1].json["token_ids"].count(pad) == 1
    (row,) = sample["media"]
    assert sample["tokens"].count(pad) == row["length"]
    assert rig.renderer.tokenizer.decode(rig.vllm.requests[-1].json["token_ids"]).count(PAD) == 5


async def test_a_placeholder_that_the_model_sampled_is_never_taken_for_a_later_image_s(rig: Rig) -> None:
    session = await rig.session()
    rig.says(f"seen{PAD}", "more")
    messages = [sees(part(1))]
    reply = (await rig.chat(session, *messages)).json()["choices"][0]["message"]
    answer = await rig.chat(session, *messages, reply, sees(part(2)))
    assert answer.status == 400
    assert f"The model has sampled {PAD}" in answer.json()["error"]["message"]


async def test_the_same_text_with_another_picture_is_another_message(rig: Rig) -> None:
    rig.says("seen", "changed", "opened")
    session = await rig.session()
    first = [sees(part(1), text("?")), assistant("seen")]
    assert (await rig.chat(session, *first[:1])).status == 200
    assert (await rig.chat(session, *first, sees(part(2)))).status == 200
    assert (await rig.chat(session, sees(part(3), text("?")), first[1], sees(part(2)))).status == 200
    found = await samples(rig, session)
    assert sorted(len(sample["media"]) for sample in found) == [2, 2]
    assert len({sample["media"][0]["sha256"] for sample in found}) == 2, "of two openings are two lines"


async def test_usage_counts_effective_tokens(rig: Rig) -> None:
    rig.says("seen")
    answer = await rig.chat(await rig.session(), sees(part(1)))
    logical = rig.vllm.requests[-1].json["token_ids"]
    assert answer.json()["usage"]["prompt_tokens"] == len(logical) + expansion_length(image(1)) - 1


async def test_an_engine_without_a_report_of_its_ids_is_not_given_images(seeing: Renderer) -> None:
    async with rig_of(seeing, scale_out=False) as rig:
        answer = await rig.chat(await rig.session(), sees(part(1)))
    assert answer.status == 400
    assert "vllm" in answer.json()["error"]["message"]


async def test_a_model_without_a_placeholder_is_not_given_images(renderer: Renderer) -> None:
    async with rig_of(renderer) as rig:
        answer = await rig.chat(await rig.session(), sees(part(1)))
    assert answer.status == 400
    assert answer.json()["error"]["code"] == "unrenderable_message"


def refused(answer: Answer) -> str:
    assert answer.status == 400, answer.body
    return str(answer.json()["error"]["param"])


async def test_parts_that_are_no_images_are_refused_where_they_stand(rig: Rig) -> None:
    session = await rig.session()
    wrong = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=A"}}
    assert refused(await rig.chat(session, sees(text("a"), wrong))) == "/messages/0/content/1/image_url/url"
    assert refused(await rig.chat(session, sees({"type": "image_url"}))) == "/messages/0/content/0/image_url"
    both = {**part(1), "text": "a"}
    assert refused(await rig.chat(session, sees(both))) == "/messages/0/content/0/text"
    system = {"role": "system", "content": [part(1)]}
    assert refused(await rig.chat(session, system, user("a"))) == "/messages/0/content/0/type"
    assert rig.vllm.requests == []


async def seen(rig: Rig, session: str) -> Answer:
    rig.says("seen")
    return await rig.chat(session, sees(text("a"), part(1)))


async def test_a_line_with_images_is_not_scored_without_them(rig: Rig) -> None:
    session = await rig.session()
    assert (await seen(rig, session)).status == 200
    num_asked = len(rig.vllm.requests)
    for wanted in ({}, {"prompt": "another"}, {"tokens": ["y"]}):
        answer = await rig.call("POST", f"/sessions/{session}/scores", wanted)
        assert answer.status == 400, answer.body
        assert "image" in answer.json()["error"]["message"]
    assert len(rig.vllm.requests) == num_asked


async def test_a_prompt_of_ids_does_not_go_on_with_a_line_of_images(rig: Rig) -> None:
    session = await rig.session()
    assert (await seen(rig, session)).status == 200
    asked = rig.vllm.requests[-1].json["token_ids"]
    line = [*asked, *rig.renderer.tokenizer.encode("seen"), END]
    rig.says("more")
    prompt = {"model": "m", "prompt": [*line, 5, 6]}
    answer = await rig.call("POST", f"/sessions/{session}/v1/completions", prompt)
    assert answer.status == 400, answer.body
    assert "image" in answer.json()["error"]["message"]
    assert len(await rig.records(session)) == 1


async def test_a_prompt_with_images_is_not_truncated(rig: Rig) -> None:
    chat = {"messages": [sees(text("a"), part(1))], "truncate_prompt_tokens": 3}
    answer = await rig.call("POST", "/v1/chat/completions", chat)
    assert refused(answer) == "/truncate_prompt_tokens"
    assert rig.vllm.requests == []


async def test_arrow_samples_name_their_images(rig: Rig) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    session = await rig.session()
    assert (await seen(rig, session)).status == 200
    (sample,) = await samples(rig, session)
    answer = await rig.call("POST", f"/sessions/{session}/samples", {"format": "arrow"})
    (row,) = pyarrow.ipc.open_stream(answer.body).read_all().to_pylist()
    assert row["media"] == sample["media"]


def pictures(*numbers: int) -> list[dict[str, Any]]:
    """Items of Responses: one message with these images."""
    shown = [{"type": "input_image", "image_url": part(number)["image_url"]["url"]} for number in numbers]
    return [{"role": "user", "content": shown}]


async def respond(rig: Rig, session: str, items: Any, **fields: Any) -> Answer:
    return await rig.call("POST", f"/sessions/{session}/v1/responses", {"input": items, **fields})


@pytest.mark.parametrize("has_store", [False, True], ids=["memory", "store"])
async def test_a_response_goes_on_with_the_images_of_the_one_before(
    seeing: Renderer, folder: DataFolder, has_store: bool
) -> None:
    store = await SqliteStore.open(folder) if has_store else None
    async with rig_of(seeing, store=store) as rig:
        session = await rig.session()
        rig.says("seen", "more", "all", "anew")
        first = (await respond(rig, session, pictures(1, 2))).json()
        second = (await respond(rig, session, "and?", previous_response_id=first["id"])).json()
        third = await respond(rig, session, pictures(3), previous_response_id=second["id"])
        assert third.status == 200, third.body
        other = await respond(rig, session, "?", previous_response_id=second["id"], instructions="Look again.")
        assert other.status == 200, other.body
        asked = [one.json for one in rig.vllm.requests]
        sent = [[one["uuid"] for one in each["content_parts"]] for each in asked]
        assert [len(one) for one in sent] == [2, 2, 3, 2]
        assert sent[0] == sent[1] == sent[3] == sent[2][:2]
        assert asked[0]["content_parts"] == asked[1]["content_parts"] == asked[3]["content_parts"]
        for before, after in pairwise(asked[:3]):
            assert after["token_ids"][: len(before["token_ids"])] == before["token_ids"]
        found = await samples(rig, session)
        assert sorted(len(sample["media"]) for sample in found) == [2, 3]
    if store is not None:
        await store.aclose()


async def test_a_response_whose_images_are_gone_is_refused(seeing: Renderer, folder: DataFolder) -> None:
    store = await SqliteStore.open(folder)
    async with rig_of(seeing, store=store) as rig:
        session = await rig.session()
        rig.says("seen")
        first = (await respond(rig, session, pictures(1))).json()
    await store.aclose()
    with closing(sqlite3.connect(folder.file())) as raw:
        raw.executescript("DELETE FROM media")
        raw.commit()
    store = await SqliteStore.open(folder)
    async with rig_of(seeing, store=store) as rig:
        answer = await respond(rig, session, "and?", previous_response_id=first["id"])
        assert answer.status == 400, answer.body
        assert "no longer has the image" in answer.json()["error"]["message"]
        assert len(await rig.records(session)) == 1
    await store.aclose()


@pytest.mark.parametrize(
    ("limit", "said"),
    [({"max_media_items": 3}, "at most 3 images"), ({"max_body_bytes": 200}, "204 bytes; at most 200")],
    ids=["number", "bytes"],
)
async def test_the_images_of_the_response_before_count(seeing: Renderer, limit: dict[str, int], said: str) -> None:
    async with rig_of(seeing, settings=limit) as rig:
        session = await rig.session()
        rig.says(*["seen"] * 90)
        answer, num_images = await respond(rig, session, pictures(0)), 1
        while answer.status == 200:
            answer = await respond(rig, session, pictures(num_images), previous_response_id=answer.json()["id"])
            num_images += 1
        assert answer.status == 400
        assert said in answer.json()["error"]["message"]
        assert answer.json()["error"]["param"].startswith(("/previous_response_id", "/input/0"))


async def test_equal_bytes_under_two_types_are_each_message_s_own(seeing: Renderer) -> None:
    async with rig_of(seeing) as rig:
        session, other = await rig.session(), await rig.session()
        rig.says("seen", "more", "again")
        gif = {"type": "image_url", "image_url": {"url": part(1)["image_url"]["url"].replace("png", "gif")}}
        assert (await rig.chat(session, sees(part(1), gif))).status == 200
        urls = [one["url"] for one in rig.vllm.requests[-1].json["content_parts"]]
        assert [url.split(";")[0] for url in urls] == ["data:image/png", "data:image/gif"]
        (record,) = await rig.records(session)
        assert [one["media_type"] for one in record["request"]["messages"][0]["media"]] == ["image/png", "image/gif"]
        assert (await rig.chat(other, sees(gif))).status == 200
        for own, media_type in ((session, "image/png"), (other, "image/gif")):
            answer = await rig.call("GET", f"/sessions/{own}/media/{hashlib.sha256(image(1)).hexdigest()}")
            assert answer.headers["content-type"] == media_type


async def test_the_context_left_counts_the_tokens_of_images(rig: Rig) -> None:
    session = await rig.session()
    answer = await seen(rig, session)
    usage = answer.json()["usage"]
    left = int(answer.headers["x-stenograph-remaining-tokens"])
    assert left == 4096 - usage["total_tokens"]


async def test_a_reply_under_a_grammar_is_scored_with_its_images(rig: Rig) -> None:
    session = await rig.session()
    rig.says("{}")
    answer = await rig.chat(session, sees(text("a"), part(1)), response_format={"type": "json_object"})
    assert answer.status == 200, answer.body
    asked, scored = rig.vllm.requests[-1].json, rig.vllm.asked[-1].json
    assert scored["content_parts"] == asked["content_parts"]
    (sample,) = await samples(rig, session)
    num_sampled = sample["response_length"]
    assert scored["token_ids"] == [*asked["token_ids"], *sample["tokens"][-num_sampled:]]
    assert sample["rollout_log_probs"] == list(rig.vllm._scores(sample["tokens"]))[-num_sampled:]


async def test_a_budget_of_tokens_and_a_session_s_count_are_of_effective_ones(rig: Rig) -> None:
    rig.says("seen", "more")
    whole = await rig.call("POST", "/sessions", {"max_total_tokens": 4000})
    session = whole.json()["session_id"]
    first = await rig.chat(session, sees(text("a"), part(1)))
    left = int(first.headers["x-stenograph-session-remaining-tokens"])
    assert left == 4000 - first.json()["usage"]["total_tokens"]
    second = await rig.chat(session, sees(text("a"), part(1)), assistant("seen"), sees(part(2)))
    assert second.status == 200, second.body
    total = second.json()["usage"]["total_tokens"]
    assert int(second.headers["x-stenograph-session-remaining-tokens"]) == 4000 - total
    (sample,) = await samples(rig, session)
    assert len(sample["tokens"]) == total
    row = next(one for one in (await rig.call("GET", "/sessions")).json()["sessions"] if one["session_id"] == session)
    assert row["num_tokens"] == total


@pytest.mark.parametrize("stream", [False, True])
async def test_a_turn_that_is_aborted_before_its_images_are_reported_has_no_sample(
    seeing: Renderer, stream: bool
) -> None:
    """Its effective ids are known to nobody; a line that it follows has the sample of the turns before it."""
    reported = [True]
    async with rig_of(seeing, lambda ids, found: (ids, found) if reported[0] else None) as rig:
        alone, session = await rig.session(), await rig.session()
        chat = [sees(text("a"), part(1))]
        rig.says("seen")
        assert (await rig.chat(session, *chat)).status == 200
        before = await samples(rig, session)
        reported[0] = False
        for id_, messages in ((alone, chat), (session, [*chat, assistant("seen"), sees(part(2))])):
            rig.vllm.plan(ReplyScript(ids=(), finish="abort"))
            answer = await rig.chat(id_, *messages, stream=stream)
            assert answer.status == 200, answer.body
            assert (await rig.records(id_))[-1]["status"] == "aborted"
        answer = await rig.call("POST", f"/sessions/{alone}/samples", {"format": "json"})
        assert (answer.json()["samples"], answer.json()["empty_reason"]) == ([], "no_records")
        (now,) = await samples(rig, session)
        assert (now["tokens"], now["media"]) == (before[0]["tokens"], before[0]["media"])
        reported[0] = True
        rig.says("more")
        assert (await rig.chat(session, *chat, assistant("seen"), sees(part(2)))).status == 200
        assert [len(one["media"]) for one in await samples(rig, session)] == [2]


async def test_a_reply_given_again_after_a_restart_has_its_usage_and_what_was_left(
    seeing: Renderer, folder: DataFolder
) -> None:
    said: list[Any] = []
    session = ""
    for _ in range(2):
        store = await SqliteStore.open(folder)
        async with rig_of(seeing, store=store) as rig:
            rig.says("seen")
            if not session:
                opened = await rig.call("POST", "/sessions", {"max_total_tokens": 4000})
                session = opened.json()["session_id"]
            path, chat = f"{rig.url}/sessions/{session}/v1/chat/completions", {"messages": [sees(text("a"), part(1))]}
            async with rig.client.post(path, json=chat, headers={"idempotency-key": "k"}) as answer:
                assert answer.status == 200
                told = {key: value for key, value in answer.headers.items() if "remaining" in key.lower()}
                said.append(((await answer.json())["usage"], told))
            assert len(rig.vllm.requests) == (len(said) == 1)
        await store.aclose()
    assert said[0] == said[1]


async def test_two_openings_of_a_tree_with_equal_logical_ids_are_two_samples(rig: Rig) -> None:
    rig.says("one", "other")
    session = (await rig.call("POST", "/sessions", {"history": "tree"})).json()["session_id"]
    for number in (1, 2):
        assert (await rig.chat(session, sees(text("?"), part(number)))).status == 200
    shown = [row["sha256"] for sample in await samples(rig, session) for row in sample["media"]]
    assert shown == [hashlib.sha256(image(number)).hexdigest() for number in (1, 2)]
