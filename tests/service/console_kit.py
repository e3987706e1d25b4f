"""Sessions for the console to show: ten rollouts that are bad, each in a way of its own, and large and hostile ones."""

import asyncio
from array import array
from collections.abc import Sequence
from typing import Any

from msgspec.structs import force_setattr

from standins.scripted_engine import Script
from stenograph.core.chat import ParsedReply
from stenograph.core.messages import Message, Role
from stenograph.core.stages import StageTimes
from stenograph.core.types import Finish, FinishReason, RequestId, SampledTurn, WeightSpan, token_ids
from stenograph.session.session import Session
from stenograph.trajectory.turn import CommittedTurn, PromptContext, TurnStatus

from .conftest import END, Live, assistant, user

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
HOSTILE = (
    "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
    "</pre></div>\u202egnp.exe\u202c \u2066isolated\u2069 \x1b[31mred\x1b[0m \x00 javascript:alert(1) ${1+1} {{7*7}}"
)
PROSE = "The quick brown fox reads file.py, runs the tests, and finds that 3 of 14 fail.\nIt looks at each of them.\n\n"
LONG_REPLY = "The answer to the first question is that there are forty-two of them, more or less."


async def good(live: Live, *, reward: float = 1.0, group: str | None = None, **options: Any) -> str:
    """A session whose outcome is known, of so far no turn."""
    session = await live.open(**options, **({} if group is None else {"group": group}))
    await live.call("PUT", f"/sessions/{session}/outcome", {"verdict": "ok", "reward": reward})
    return session


async def two_turns(live: Live, session: str, **fields: Any) -> None:
    """Two turns of a plain conversation."""
    live.says("Twelve times thirty-four is 408.")
    assert (await live.chat(session, user("What is 12 * 34?"), **fields)).status == 200
    live.says("408 and one is 409.")
    line = [user("What is 12 * 34?"), assistant("Twelve times thirty-four is 408."), user("And one more?")]
    assert (await live.chat(session, *line, **fields)).status == 200


async def template_bug(live: Live) -> str:
    """A prompt that is not what the template writes."""
    session = await good(live)
    await two_turns(live, session)
    (_, node) = live.manager.sessions.get(session).nodes
    ids = node.turn.new_prompt_ids
    ids[len(ids) - 6] = live.renderer.tokenizer.encode("X")[0]
    return session


async def cut_reply(live: Live) -> str:
    """A reply that ended at its token limit."""
    session = await good(live)
    live.says("Twelve times thirty-", finish=Finish(reason=FinishReason.LENGTH))
    await live.chat(session, user("What is 12 * 34?"))
    return session


async def forced_grammar(live: Live) -> str:
    """A reply most of whose tokens a grammar forced."""
    session = await good(live)
    await two_turns(live, session)
    node = live.manager.sessions.get(session).nodes[0]
    num = len(node.turn.sampled.ids)
    force_setattr(node.turn.sampled, "forced", bytes([1] * (num - 4) + [0] * 4))
    return session


async def stale_weights(live: Live) -> str:
    """Turns that two versions of the weights sampled."""
    session = await good(live)
    for version, messages in (("3", [user("a")]), ("4", [user("a"), assistant("one"), user("b")])):
        live.engine.weight_version = version
        live.says("one")
        await live.chat(session, *messages)
    live.engine.weight_version = None
    return session


async def side_request(live: Live) -> str:
    """A request for a title beside the work."""
    session = await good(live)
    live.says("A title")
    await live.chat(session, {"role": "system", "content": "You are a title generator. Write a title."}, user("hi"))
    await two_turns(live, session, tools=[TOOL])
    return session


async def lost_client(live: Live) -> str:
    """A client that hung up while its reply was sampled."""
    session = await good(live)
    await two_turns(live, session)
    live.says("never heard", paused=True)
    num = len(live.engine.requests)
    asking = asyncio.create_task(live.chat(session, user("hello?")))
    await live.engine.begun(num + 1)
    asking.cancel()
    await live.engine.idle()
    while (await live.call("GET", f"/sessions/{session}/ledger")).json()["requests"][-1]["ended"] is None:
        pass  # the row ends after the generation
    return session


async def wrong_tool_parser(live: Live) -> str:
    """A call in another family's format, which nobody read."""
    session = await good(live)
    live.says('[TOOL_CALLS][{"name": "f", "arguments": {}}]')
    await live.chat(session, user("Call f."), tools=[TOOL])
    return session


async def infra_failure(live: Live) -> str:
    """A rollout whose sandbox died."""
    session = await live.open()
    await two_turns(live, session)
    failed = {"verdict": "infra_failed", "detail": "the sandbox died"}
    await live.call("PUT", f"/sessions/{session}/outcome", failed)
    return session


async def compaction(live: Live) -> str:
    """Work that went on in another strand after its beginning was rewritten."""
    session = await good(live)
    live.says(LONG_REPLY)
    await live.chat(session, {"role": "system", "content": "Be brief."}, user("first"), tools=[TOOL])
    live.says("two")
    resumed = [{"role": "system", "content": "Be brief. Resumed."}, user("first"), assistant(LONG_REPLY), user("go on")]
    await live.chat(session, *resumed, tools=[TOOL])
    return session


async def other_spelling(live: Live) -> str:
    """A reply that the model wrote in single bytes."""
    session = await good(live)
    tokenizer = live.renderer.tokenizer
    ids = tuple(id_ for char in "the other" for id_ in tokenizer.encode(char))
    live.engine.plan(Script(ids=(*ids, END), finish=Finish(reason=FinishReason.STOP, matched=END)))
    await live.chat(session, user("Write it."))
    return session


BAD = {
    "forbidden_drift": template_bug,
    "cut_turn": cut_reply,
    "forced_tokens": forced_grammar,
    "mixed_versions": stale_weights,
    "side_requests": side_request,
    "lost_client": lost_client,
    "unread_call": wrong_tool_parser,
    "infra_failed": infra_failure,
    "chapters": compaction,
    "other_spelling": other_spelling,
}
"""Ten bad rollouts, by the finding that explains each."""


async def hostile(live: Live) -> str:
    """Texts that would be markup, code and commands if anything took them for that."""
    session = await live.open(metadata={"task": HOSTILE}, group="<b>group</b>")
    live.says(HOSTILE)
    await live.chat(session, {"role": "system", "content": HOSTILE}, user(HOSTILE + "x" * 30_000), tools=[TOOL])
    live.says('<tool_call>\n{"name": "f", "argu' + HOSTILE + "\n</tool_call>")
    await live.chat(session, user(HOSTILE), tools=[TOOL])
    return session


async def group_of(live: Live, name: str, num: int) -> list[str]:
    """Rollouts of one task, each with a reward, whose replies part at different places."""
    sessions: list[str] = []
    for number in range(num):
        session = await good(live, reward=round(number % 4 / 4, 2), group=name)
        live.says("Twelve times thirty-four is " + "four hundred"[: 2 + number] + ".")
        await live.chat(session, user("What is 12 * 34?"))
        sessions.append(session)
    return sessions


async def branches(live: Live) -> str:
    """A tree with three branches."""
    session = await live.open(history="tree")
    first = [user("What is 12 * 34?")]
    live.says("408.")
    await live.chat(session, *first)
    for reply in ("Yes.", "No.", "Perhaps."):
        live.says(reply)
        await live.chat(session, *first, assistant("408."), user("Sure?"))
    live.says("Because.")
    await live.chat(session, *first, assistant("408."), user("Sure?"), assistant("No."), user("Why?"))
    return session


def make_large(session: Session, alphabet: Sequence[int], *, num_tokens: int, num_turns: int) -> None:
    """Give a linear session turns with so many tokens of an alphabet, as if they had been sampled."""
    strand, parent = session.strands.only, session.latest
    assert strand is not None, "a linear session has one strand"
    num = num_tokens // num_turns
    for number in range(num_turns):
        ids = array("i", (alphabet[(number * 7919 + index) % len(alphabet)] for index in range(num)))
        sampled = token_ids(ids[num // 4 :])
        turn = CommittedTurn(
            request_id=RequestId(f"{number:032x}"),
            new_prompt_ids=token_ids(ids[: num // 4]),
            sampled=SampledTurn(
                ids=sampled,
                logprobs=array("d", (-((index * 37) % 97) / 24 for index in range(len(sampled)))),
                sampling_logprobs=None,
                top_logprobs=None,
                finish=Finish(reason=FinishReason.STOP),
                weights=(WeightSpan(version=str(number // 3), start=0, end=len(sampled)),),
                num_cached_tokens=0,
                times=None,
            ),
            status=TurnStatus.COMPLETED,
            messages=(Message(role=Role.USER, content=f"question {number}"),),
            reply=ParsedReply(message=Message(role=Role.ASSISTANT, content=f"answer {number}")),
            context=PromptContext(),
            stages=StageTimes(start=0.0, render=0.01, decode_tokens=1.0 + number / 10),
        )
        attachment = strand.history.after(parent, turn.messages)
        assert attachment is not None
        parent, _ = session.strands.commit(strand, attachment, turn, None)
