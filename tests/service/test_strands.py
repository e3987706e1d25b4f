"""The strands of a session: conversations with other openings run side by side, and none loses a turn to another."""

from .conftest import Live, assistant, user


async def test_a_request_that_adds_a_message_before_the_first_reply_has_another_opening(live: Live) -> None:
    session = await live.open()
    live.says("main")
    await live.chat(session, user("do it"))
    live.says("a title")
    assert (await live.chat(session, user("do it"), user("write a title"))).status == 200
    live.says("done")
    assert (await live.chat(session, user("do it"), assistant("main"), user("more"))).status == 200
    nodes = live.manager.get(session).nodes
    assert [(node.turn.reply.message.content, node.depth) for node in nodes] == [
        ("main", 1),
        ("a title", 1),
        ("done", 2),
    ]
