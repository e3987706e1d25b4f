"""Why is this sample bad: bad rollouts, each of which is explained by its findings."""

import asyncio
import json
from typing import Any

from msgspec.structs import force_setattr

from standins.scripted_engine import Script
from stenograph.core.drift import Drift, DriftClass, DriftReport
from stenograph.core.errors import UpstreamUnreachable
from stenograph.core.types import Finish, FinishReason
from stenograph.export.why import Evidence, findings
from stenograph.session.facts import session_facts

from .conftest import Live, assistant, user

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
OUTCOME = {"verdict": "ok", "reward": 1.0}


async def why(live: Live, session: str) -> dict[str, dict[str, Any]]:
    """The findings, by their kind."""
    answer = await live.call("GET", f"/sessions/{session}/why")
    assert answer.status == 200, answer.body
    found = answer.json()["findings"]
    by_kind = {finding["kind"]: finding for finding in found}
    assert len(by_kind) == len(found)
    assert all(finding["told"].endswith(".") or finding["told"].endswith("?") for finding in found), found
    return by_kind


async def opened(live: Live, **options: Any) -> str:
    """A session with a good outcome, so that nothing is to be said of that."""
    session = await live.open(**options)
    assert (await live.call("PUT", f"/sessions/{session}/outcome", OUTCOME)).status == 200
    return session


async def test_of_a_good_rollout_there_is_nothing_to_say(live: Live) -> None:
    session = await opened(live)
    live.says("one")
    assert (await live.chat(session, user("a"))).status == 200
    live.says("two")
    assert (await live.chat(session, user("a"), assistant("one"), user("b"))).status == 200
    answer = (await live.call("GET", f"/sessions/{session}/why")).json()
    assert (answer["findings"], answer["num_turns"], answer["num_requests"]) == ([], 2, 2)
    assert answer["sampled_tokens"] == sum(map(len, live.engine.drawn.values()))


async def test_a_session_without_a_turn_says_so_first(live: Live) -> None:
    found = await why(live, await live.open())
    assert list(found) == ["no_turns", "no_outcome"]
    assert "No request came" in found["no_turns"]["told"]


async def test_an_outcome_is_told_by_what_it_lacks(live: Live) -> None:
    session = await live.open()
    live.says("one")
    await live.chat(session, user("a"))
    assert list(await why(live, session)) == ["no_outcome"]
    await live.call("PUT", f"/sessions/{session}/outcome", {"verdict": "agent_failed"})
    assert "agent_failed" in (await why(live, session))["no_reward"]["told"]
    failed = {"verdict": "infra_failed", "detail": "the sandbox died"}
    await live.call("PUT", f"/sessions/{session}/outcome", failed)
    found = (await why(live, session))["infra_failed"]
    assert (found["gravity"], "the sandbox died" in found["told"]) == ("lost", True)


async def test_a_cut_reply_is_named_by_its_turn(live: Live) -> None:
    session = await opened(live)
    live.says("one tw", finish=Finish(reason=FinishReason.LENGTH))
    await live.chat(session, user("a"))
    found = (await why(live, session))["cut_turn"]
    assert (found["turns"], found["strand"], found["see"]) == ([0], 0, ["?strand=0"])
    assert "1 reply ended at a token limit, the first after" in found["told"]


async def test_a_reply_that_the_client_wrote_anew_is_foreign(live: Live) -> None:
    session = await opened(live, history="linear")
    live.says("one")
    await live.chat(session, user("a"), assistant("not the model's"), user("b"))
    found = (await why(live, session))["foreign_reply"]
    assert (found["gravity"], found["turns"]) == ("wrong", [0])


async def test_a_call_in_another_family_s_format_is_text_that_looks_like_one(live: Live) -> None:
    session = await opened(live)
    live.says('[TOOL_CALLS][{"name": "f", "arguments": {}}]')
    await live.chat(session, user("a"), tools=[TOOL])
    found = (await why(live, session))["unread_call"]
    assert "'[TOOL_CALLS]" in found["told"]
    assert "--family" in found["told"]


async def test_a_broken_call_is_a_parse_fault_and_not_an_unread_one(live: Live) -> None:
    session = await opened(live)
    live.says('<tool_call>\n{"name": "f", "argu\n</tool_call>')
    await live.chat(session, user("a"), tools=[TOOL])
    found = await why(live, session)
    assert list(found) == ["parse_fault"]
    assert "tool_call_not_json" in found["parse_fault"]["told"]


async def test_two_versions_in_one_strand_are_mixed(live: Live) -> None:
    session = await opened(live)
    for version, messages in (("3", [user("a")]), ("4", [user("a"), assistant("one"), user("b")])):
        live.engine.weight_version = version
        live.says("one")
        assert (await live.chat(session, *messages)).status == 200
    found = (await why(live, session))["mixed_versions"]
    assert (found["turns"], "('3', '4')" in found["told"]) == ([0, 1], True)


async def test_refused_and_broken_requests_are_counted_by_their_error(live: Live) -> None:
    session = await opened(live)
    for _ in range(2):
        assert (await live.chat(session, nonsense=1)).status == 400
    live.engine.plan(Script(ids=(5,), error=UpstreamUnreachable("It broke.")))
    assert (await live.chat(session, user("a"))).status == 502
    answer = (await live.call("GET", f"/sessions/{session}/why")).json()["findings"]
    refused = [(one["count"], one["requests"]) for one in answer if one["kind"] == "refused"]
    assert refused == [(2, [1, 2]), (1, [3])]
    assert "upstream_unreachable (status 502), the first as request 3" in answer[-1]["told"]


async def test_a_client_that_hung_up_is_told_of(live: Live) -> None:
    session = await opened(live)
    live.says("never heard", paused=True)
    asking = asyncio.create_task(live.chat(session, user("a")))
    await live.engine.begun(1)
    asking.cancel()
    await live.engine.idle()
    found = await why(live, session)
    while "lost_client" not in found:  # the row ends after the generation
        found = await why(live, session)
    assert found["lost_client"]["requests"] == [1]


async def test_a_replaced_turn_and_its_tokens_are_counted(live: Live) -> None:
    session = await opened(live, history="linear")
    for text in ("one", "two"):
        live.says(text)
        await live.chat(session, user("a"))
    found = (await why(live, session))["discarded"]
    assert (found["count"], found["gravity"]) == (1, "lost")


async def test_a_side_request_is_left_out_and_the_line_is_not(live: Live) -> None:
    session = await opened(live)
    live.says("a title")
    title = {"role": "system", "content": "You are a title generator. Write a title."}
    assert (await live.chat(session, title, user("hi"))).status == 200
    live.says("one")
    assert (await live.chat(session, user("hi"), tools=[TOOL])).status == 200
    found = (await why(live, session))["side_requests"]
    assert (found["turns"], "1 title" in found["told"]) == ([0], True)


async def test_drift_is_told_by_its_first_place_and_hostile_text_is_quoted(live: Live) -> None:
    session = await opened(live)
    live.says("one")
    await live.chat(session, user("a"))
    facts = session_facts(live.manager.sessions.get(session))
    bad = Drift(
        type=DriftClass.NON_ASSISTANT_TEXT,
        segment_index=2,
        expected_text="<script>\u202e" + "x" * 500,
        actual_text="y",
        detail="",
        start=7,
        end=8,
    )
    spelled = Drift(
        type=DriftClass.ASSISTANT_TEXT, segment_index=2, expected_text="a", actual_text="a", detail="", start=9, end=9
    )
    found = findings(Evidence(facts=facts, reports={0: DriftReport(drifts=(bad, spelled))}))
    assert [one["kind"] for one in found] == ["forbidden_drift", "other_spelling"]
    assert "\\u202e" in found[0]["told"]
    assert len(found[0]["told"]) < 500
    (none,) = findings(Evidence(facts=facts, reports={0: DriftReport(unrenderable="No.")}))
    assert none["kind"] == "unrenderable"


async def test_tokens_that_a_grammar_forced_are_counted(live: Live) -> None:
    """The scripted engine reports none: what an engine does report is in the turn's `forced`."""
    session = await opened(live)
    live.says("one")
    await live.chat(session, user("a"))
    (node,) = live.manager.sessions.get(session).nodes
    num = len(node.turn.sampled.ids)
    force_setattr(node.turn.sampled, "forced", bytes([1] * (num - 1) + [0]))
    assert f"{num - 1} of {num} sampled tokens" in (await why(live, session))["forced_tokens"]["told"]


async def test_an_unknown_session_is_404(live: Live) -> None:
    answer = await live.call("GET", "/sessions/nobody/why")
    assert (answer.status, json.loads(answer.body)["error"]["code"]) == (404, "session_not_found")
