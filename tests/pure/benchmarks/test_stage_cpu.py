"""The CPU of a chat by stage: each stack counts once, for the innermost stage that it is in."""

import importlib

import pytest

from benchmarks.kit.figures import LABELS
from benchmarks.kit.stage_cpu import BEGINS, REST, STAGES, figure_of, stage_cpu, stage_of

TURN = "stenograph.http.turn_route.TurnRoute"


@pytest.mark.parametrize(
    ("stack", "stage"),
    [
        (("asyncio.run", f"{TURN}.handle", f"{TURN}._admit", "stenograph.http.wire.read_body", "x.read"), "receive"),
        (("asyncio.run", f"{TURN}.handle", f"{TURN}._admit", "stenograph.session.session.Session.check_open"), "admit"),
        (
            (
                f"{TURN}._admit",
                "stenograph.dialects.openai.dialect.ChatDialect.decode",
                "stenograph.dialects.openai.chat.decode_chat",
            ),
            "decode",
        ),
        (("stenograph.session.turn.TurnRun.open", "stenograph.render.renderer.Renderer.bridge"), "render"),
        (("stenograph.engine.http.engine.HttpEngine._exchange", "aiohttp.client.ClientSession._request"), "engine"),
        (("asyncio.run", "aiohttp.client_proto.ResponseHandler.data_received"), "engine"),
        (
            ("stenograph.engine.http.engine.HttpEngine._whole", "stenograph.engine.sglang.chat_wire.decode_reply"),
            "validate",
        ),
        (("stenograph.session.turn.TurnRun.sample", "stenograph.session.turn.TurnRun._read"), "validate"),
        (("stenograph.session.request.RequestRun._commit", "stenograph.offload.memory.untrack"), "commit"),
        ((f"{TURN}.handle", f"{TURN}._whole", "stenograph.http.wire.send_whole", "uvicorn.x.send"), "reply"),
        (("(other threads)",), "workers"),
        (("asyncio.run", "stenograph.http.control_routes.ControlRoutes._health"), REST),
        (("asyncio.run",), REST),
        ((), REST),
    ],
)
def test_a_stack_is_of_the_innermost_stage_that_it_is_in(stack: tuple[str, ...], stage: str) -> None:
    assert stage_of(stack) == stage


def test_the_stages_of_a_chat_add_up_to_its_cpu() -> None:
    stacks = {(f"{TURN}._whole",): 0.25, (f"{TURN}._whole", "x.send"): 0.25, ("asyncio.run",): 1.0}
    found = stage_cpu(stacks, num_chats=100)
    assert found == {figure_of(stage): 0.0 for stage in STAGES} | {"cpu_reply_ms": 5.0, "cpu_rest_ms": 10.0}


@pytest.mark.parametrize("name", [name for name in BEGINS if name.startswith(("stenograph.", "aiohttp"))])
def test_where_a_stage_begins_is_something_that_there_is(name: str) -> None:
    module, names = name.partition(".<locals>")[0], list[str]()
    while True:
        try:
            found = importlib.import_module(module)
            break
        except ModuleNotFoundError:
            module, _, last = module.rpartition(".")
            names.insert(0, last)
    for attribute in names:
        found = getattr(found, attribute)


def test_every_stage_is_a_figure_that_is_shown() -> None:
    assert {figure_of(stage) for stage in STAGES} <= LABELS.keys()
