"""A crowd of small requests at once, more than are served in a pass of the loop, of which some hang up."""

import asyncio
import json
from urllib.parse import urlsplit

import aiohttp

from standins.scripted_engine import Script, ScriptedEngine
from stenograph.core.types import Finish, FinishReason
from stenograph.offload.body_slots import SERVED_IN_A_PASS
from stenograph.text.renderer import Renderer

from .conftest import END, Live, running, user

YES = Script(ids=(10, END), finish=Finish(reason=FinishReason.STOP, matched=END))


async def test_of_a_crowd_some_hang_up_and_the_others_are_answered_and_every_session_goes_on(
    renderer: Renderer,
) -> None:
    engine = ScriptedEngine(vocab_size=320, max_context_tokens=4096, model=lambda _: YES)
    async with running(engine, renderer) as (url, manager), aiohttp.ClientSession() as client:
        live = Live(url=url, engine=engine, renderer=renderer, manager=manager, client=client)
        sessions = [await live.open(history="linear") for _ in range(8 * SERVED_IN_A_PASS)]
        address = urlsplit(url)
        connections = [await asyncio.open_connection(address.hostname, address.port) for _ in sessions]
        body = json.dumps({"messages": [user("Hello")]}).encode()
        for index, (session, (_, writer)) in enumerate(zip(sessions, connections, strict=True)):
            path = f"/sessions/{session}/v1/chat/completions"
            writer.write(
                b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % (path.encode(), len(body)) + body
            )
            if index % 2:
                writer.close()
        for reader, writer in connections[::2]:
            assert (await reader.readline()).split()[1] == b"200"
            writer.close()
        # Who hung up is heard of by now or while the next chat is let in; either way nothing of it is in the way.
        answers = await asyncio.gather(*(live.chat(session, user("Again")) for session in sessions))
        assert {answer.status for answer in answers} == {200}
        assert manager.num_in_flight == 0
        assert engine.num_running == 0
        assert {len(manager.sessions.get(session).nodes) for session in sessions} == {1}
