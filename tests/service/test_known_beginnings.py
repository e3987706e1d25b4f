"""A chat is read the same whether or not its bytes begin like the last request's: no message of one line stands for
another line's, whatever protocols the session is spoken with."""

import asyncio
import itertools
import json
from dataclasses import dataclass, field
from typing import Any

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from .conftest import Answer, Live, assistant, user

THOUGHT = "<think>\n{}\n</think>\n\n{}"


async def strands_of(live: Live, session: str) -> list[dict[str, Any]]:
    view = (await live.call("GET", f"/sessions/{session}")).json()
    return list(view["metadata"]["strands"])


async def test_a_chat_goes_on_with_a_fork_that_another_protocol_opened(live: Live) -> None:
    session = await live.open()
    live.says(THOUGHT.format("I think.", "one"))
    assert (await live.chat(session, user("hi"))).status == 200
    live.says("two")
    line = [user("hi"), assistant("one"), user("b")]
    assert (await live.chat(session, *line)).status == 200
    live.says("three")
    line += [assistant("mine"), user("c")]
    body = {"model": "tiny", "max_tokens": 50, "messages": line}
    assert (await live.call("POST", f"/sessions/{session}/v1/messages", body)).status == 200
    live.says("four")
    assert (await live.chat(session, *line, assistant("three"), user("d"))).status == 200
    assert [(row["num_turns"], row["continues"]) for row in await strands_of(live, session)] == [(2, None), (2, 0)]
    prompts = [live.renderer.tokenizer.decode(request.prompt.ids) for request in live.engine.requests]
    assert ["I think." in prompt for prompt in prompts] == [False, True, False, False]


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """A message of a conversation. `reasoning` is an assistant's, None if there is none or the client drops it."""

    text: str
    reasoning: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A request: in `protocol`, of the conversation that number `base` from the end ended with, changed in `change`.

    `sends` reasoning back; the reply has some if it `thinks`.
    """

    protocol: str
    base: int
    change: str
    sends: bool
    thinks: bool


@dataclass(slots=True)
class Talk:
    """Conversations, each a user's and an assistant's message in turn, the last an assistant's; at first the empty."""

    lines: list[list[Said]] = field(default_factory=lambda: [[]])

    def asked(self, step: Step, number: int) -> list[Said]:
        line = list(self.lines[-1 - step.base % len(self.lines)])
        match step.change:
            case "reply" if line:
                line[-1] = Said(text=f"mine {number % 2}", reasoning="own" if number % 3 == 0 else None)
            case "first reply" if line:
                line[1] = Said(text="mine", reasoning=None)
            case "shorter" if line:
                line = line[:-2]
            case _:
                pass
        kept = [said if step.sends else Said(text=said.text) for said in line]
        return [*kept, Said(text=f"q{len(line)}{step.change[:1] if number % 2 else ''}")]


def chat_body(asked: list[Said]) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    for index, said in enumerate(asked):
        message = assistant(said.text) if index % 2 else user(said.text)
        messages.append(message if said.reasoning is None else {**message, "reasoning_content": said.reasoning})
    return {"messages": messages}


def messages_body(asked: list[Said]) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    for index, said in enumerate(asked):
        blocks = [{"type": "text", "text": said.text}]
        if said.reasoning is not None:
            blocks.insert(0, {"type": "thinking", "thinking": said.reasoning, "signature": "none"})
        messages.append({"role": "assistant" if index % 2 else "user", "content": blocks})
    return {"model": "tiny", "max_tokens": 50, "messages": messages}


def responses_body(asked: list[Said]) -> dict[str, Any]:
    items = [
        {"type": "message", "role": "assistant" if index % 2 else "user", "content": said.text}
        for index, said in enumerate(asked)
    ]
    return {"model": "tiny", "input": items}


def gemini_body(asked: list[Said]) -> dict[str, Any]:
    contents = [
        {"role": "model" if index % 2 else "user", "parts": [{"text": said.text}]} for index, said in enumerate(asked)
    ]
    return {"contents": contents}


PROTOCOLS = {
    "chat": ("v1/chat/completions", chat_body),
    "messages": ("v1/messages", messages_body),
    "responses": ("v1/responses", responses_body),
    "gemini": ("v1beta/models/tiny:generateContent", gemini_body),
}

steps = st.lists(
    st.builds(
        Step,
        protocol=st.sampled_from(["chat", "chat", "chat", *PROTOCOLS]),
        base=st.integers(0, 3),
        change=st.sampled_from(["", "", "reply", "first reply", "shorter"]),
        sends=st.booleans(),
        thinks=st.booleans(),
    ),
    min_size=2,
    max_size=9,
)

_spaces = itertools.count(1)


async def send(live: Live, session: str, protocol: str, asked: list[Said], *, is_known: bool) -> Answer:
    """The request; a chat that is not to be known begins with blanks that no other has."""
    path, body_of = PROTOCOLS[protocol]
    body = json.dumps(body_of(asked)).encode()
    if not is_known:
        body = b"{" + b" " * next(_spaces) + body[1:]
    return await live.call("POST", f"/sessions/{session}/{path}", body)


async def outcome(live: Live, session: str) -> list[Any]:
    """All that the session is: its strands, with the prompts, the messages and the rewrites of each."""
    found: list[Any] = []
    for row in await strands_of(live, session):
        view = (await live.call("GET", f"/sessions/{session}?strand={row['strand']}")).json()
        requests = [(record["request"]["input_ids"], record["request"]["messages"]) for record in view["records"]]
        rewrites = [record.get("rewrites") for record in view["records"]]
        found.append((row, requests, rewrites, view["metadata"]["discarded"]))
    return found


def step(protocol: str, *, base: int = 0, change: str = "", thinks: bool = False) -> Step:
    return Step(protocol=protocol, base=base, change=change, sends=False, thinks=thinks)


async def test_what_a_session_becomes_does_not_depend_on_whose_bytes_a_chat_begins_with(live: Live) -> None:
    loop = asyncio.get_running_loop()

    async def played(plan: list[Step], history: str) -> tuple[list[Any], list[Any]]:
        sessions = [await live.open(history=history) for _ in range(2)]
        talk = Talk()
        for number, one in enumerate(plan):
            asked = talk.asked(one, number)
            reply = Said(text=f"r{number}", reasoning=f"t{number}" if one.thinks else None)
            said = reply.text if reply.reasoning is None else THOUGHT.format(reply.reasoning, reply.text)
            answers: list[Answer] = []
            for session, is_known in zip(sessions, (True, False), strict=True):
                live.says(said)
                answers.append(await send(live, session, one.protocol, asked, is_known=is_known))
                if answers[-1].status != 200:
                    assert (await live.chat(None, user("takes what was planned"))).status == 200
            assert answers[0].status == answers[1].status, [answer.body for answer in answers]
            if answers[0].status == 200:
                talk.lines.append([*asked, reply])
        return await outcome(live, sessions[0]), await outcome(live, sessions[1])

    @settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(plan=steps, history=st.sampled_from(["strands", "strands", "linear", "tree"]))
    @example(
        plan=[step("chat", thinks=True), step("chat"), step("messages", change="reply"), step("chat")],
        history="strands",
    )
    def fuzz(plan: list[Step], history: str) -> None:
        known, whole = asyncio.run_coroutine_threadsafe(played(plan, history), loop).result()
        assert known == whole

    await asyncio.to_thread(fuzz)
