"""Errors as clients see them, byte for byte: status, body and the headers that say whether to try again.

`recordings/errors/as_sent.json` holds the answer to each request below. Authors of clients read an error's pointer and
words, so a change of either is seen here. To record anew, delete the file and run this test.
"""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from stenograph.core.kinds import HistoryKind
from stenograph.core.types import Finish, FinishReason
from stenograph.text.renderer import Renderer

from .conftest import Answer, Live, assistant, user
from .test_native_sessions import STREAMING
from .test_native_sessions import rig_of as native_rig
from .test_way_of_a_chat import rig_of as sglang_chat

RECORDING = Path(__file__).parent / "recordings" / "errors" / "as_sent.json"
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
HI = [user("hi")]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
FORCED = {"tools": [TOOL], "tool_choice": "required"}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}

DECODING: dict[str, tuple[str, Any]] = {
    "not json": (CHAT, b"{"),
    "not utf-8": (COMPLETION, b'{"prompt": "\xff"}'),
    "no messages": (CHAT, {}),
    "empty messages": (CHAT, {"messages": []}),
    "unknown field": (CHAT, {"messages": HI, "temprature": 1}),
    "unknown field of a completion": (COMPLETION, {"prompt": "x", "max_new_tokens": 1}),
    "role": (CHAT, {"messages": [*HI, {"role": "usr", "content": "x"}]}),
    "content part": (CHAT, {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]}),
    "tool type": (CHAT, {"messages": HI, "tools": [{"type": "web_search"}]}),
    "tool choice": (CHAT, {"messages": HI, "tool_choice": "required"}),
    "max_tokens": (CHAT, {"messages": HI, "max_tokens": 0}),
    "max_completion_tokens": (CHAT, {"messages": HI, "max_completion_tokens": 0}),
    "min_new_tokens": (CHAT, {"messages": HI, "min_new_tokens": -1}),
    "top_logprobs": (CHAT, {"messages": HI, "logprobs": True, "top_logprobs": 21}),
    "two grammars": (CHAT, {"messages": HI, "regex": "a", "ebnf": "root ::= 'a'"}),
    "template argument": (CHAT, {"messages": HI, "chat_template_kwargs": {"messages": 1}}),
    "stream options": (CHAT, {"messages": HI, "stream_options": {}}),
    "n": (COMPLETION, {"prompt": "x", "n": 2}),
    "echo": (COMPLETION, {"prompt": "x", "echo": True}),
    "id in a list": (COMPLETION, {"prompt": [[1], [2, -3]]}),
    "no prompt": (COMPLETION, {"prompt": []}),
    "session history": ("/sessions", {"history": "round"}),
    "session matcher": ("/sessions", {"matcher": "a.b"}),
    "session metadata": ("/sessions", {"metadata": {"x": "y" * 70_000}}),
    "abort": ("/abort_request", {"abort_all": False}),
    "detokenize": ("/detokenize", {"tokens": [9999]}),
}
"""Requests that are refused while they are read."""

BEYOND: dict[str, tuple[str, Any]] = {
    "no session": ("/sessions/none" + CHAT, {"messages": HI}),
    "no route": ("/nothing", {}),
    "not passed on": ("/v1/embeddings", {}),
    "foreign id": (COMPLETION, {"prompt": [1, 9999]}),
    "foreign id of a list": (COMPLETION, {"prompt": [[1], [2, 9999]]}),
    "no ids": (COMPLETION, {"prompt": ""}),
    "no ids in a list": (COMPLETION, {"prompt": ["a", ""]}),
    "surrogate in a message": (CHAT, b'{"messages": [{"role": "user", "content": "\\ud800"}]}'),
    "surrogate in a prompt": (COMPLETION, b'{"prompt": ["a", "\\ud800"]}'),
    "tools cannot be shown": (CHAT, {"messages": HI, "tools": [TOOL]}),
    "calls cannot be shown": (CHAT, {"messages": [*HI, {"role": "assistant", "tool_calls": [CALL]}, *HI]}),
    "tool result without a call": (CHAT, {"messages": [*HI, {"role": "tool", "tool_call_id": "c", "content": "x"}]}),
    "forced call": (CHAT, {"messages": HI, **FORCED}),
    "prompt too long": (CHAT, {"messages": [user("x" * 5000)]}),
    "prompt as long as the context": (COMPLETION, {"prompt": [5] * 4096}),
    "second prompt too long": (COMPLETION, {"prompt": [[5], [5] * 5000]}),
    "max_tokens too many": (CHAT, {"messages": HI, "max_tokens": 5000}),
    "max_completion_tokens too many": (CHAT, {"messages": HI, "max_completion_tokens": 5000}),
    "max_tokens too many for a completion": (COMPLETION, {"prompt": "a", "max_tokens": 5000}),
    "too many prompts": (COMPLETION, {"prompt": ["a"] * 5}),
    "argument not append-only": (CHAT, {"messages": HI, "chat_template_kwargs": {"add_generation_prompt": 1}}),
}
"""Requests that are read, and refused by what comes after."""

GRAMMARS: dict[str, Any] = {
    "response_format": {"response_format": SCHEMA},
    "structured_outputs": {"structured_outputs": {"regex": "a"}},
    "guided_grammar": {"guided_grammar": "start: /a/"},
    "ebnf": {"ebnf": 'root ::= "a"'},
    "choice": {"guided_choice": ["a"]},
}
SAMPLING: dict[str, Any] = {
    "stop": {"stop": "a"},
    "seed": {"seed": 1},
    "sampling_seed": {"sampling_seed": 1},
    "min_tokens and stop": {"min_tokens": 1, "stop": "a"},
    "min_new_tokens and stop": {"min_new_tokens": 1, "stop": "a"},
    "presence_penalty": {"presence_penalty": 1.0},
    "min_tokens": {"min_tokens": 2},
    "min_new_tokens": {"min_new_tokens": 2},
    "no_stop_trim": {"no_stop_trim": True, "stop": "a"},
    "include_stop_str_in_output": {"include_stop_str_in_output": True, "stop": "a"},
    "tokens as ids": {"return_tokens_as_token_ids": True, "logprobs": True},
    "logprobs": {"logprobs": True, "top_logprobs": 2},
    "foreign stop id": {"stop_token_ids": [9999]},
    "foreign bias": {"logit_bias": {"9999": 1}},
    "temperature": {"temperature": 50.0},
    "max_tokens": {"max_tokens": 5000},
    "max_completion_tokens": {"max_completion_tokens": 5000},
    "truncation": {"truncate_prompt_tokens": -1},
}


def seen(status: int, headers: Any, body: str) -> dict[str, Any]:
    names = ("content-type", "x-should-retry", "retry-after", "allow")
    return {"status": status, "headers": {name: headers[name] for name in names if name in headers}, "body": body}


def shown(answer: Answer) -> dict[str, Any]:
    """A refusal; of what is not refused only that."""
    if answer.status == 200:
        return {"status": 200}
    return seen(answer.status, answer.headers, answer.body.decode())


async def of_requests(live: Live) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (path, body) in {**DECODING, **BEYOND}.items():
        found[name] = shown(await live.call("POST", path, body))
    found["method"] = shown(await live.call("GET", CHAT))
    found["method of a session's chat"] = shown(await live.call("PUT", "/sessions/none" + COMPLETION))
    found["two slashes"] = shown(await live.call("POST", "/sessions/none" + CHAT + "//", {}))
    found["media type"] = shown(await live.call("POST", CHAT, b"x", content_type="text/plain"))
    found["query"] = shown(await live.call("GET", "/sessions?limit=0"))
    return found


async def of_sessions(live: Live) -> dict[str, Any]:
    """What a session's history refuses."""
    found: dict[str, Any] = {}
    session = await live.open(history="linear")
    chat = f"/sessions/{session}{CHAT}"
    live.says("one")
    await live.chat(session, user("a"))
    live.says("two")
    history = [user("a"), assistant("one"), user("b")]
    await live.chat(session, *history)
    history.append(assistant("two"))
    for name, body in {
        "other history": {"messages": [user("z"), *history[1:], user("c")]},
        "shorter history": {"messages": [user("z")]},
        "nothing to answer": {"messages": history},
        "other template arguments": {"messages": [*history, user("c")], "chat_template_kwargs": {"x": 1}},
        "truncation on a session": {"messages": [*history, user("c")], "truncate_prompt_tokens": 1},
        "role in a session": {"messages": [*history, {"role": "tool", "tool_call_id": "c", "content": "x"}]},
    }.items():
        found[f"session: {name}"] = shown(await live.call("POST", chat, body))
    completion = f"/sessions/{session}{COMPLETION}"
    found["session: other ids"] = shown(await live.call("POST", completion, {"prompt": [5, 6]}))
    found["session: several prompts"] = shown(await live.call("POST", completion, {"prompt": [[5], [6]]}))
    cut = await live.open(after_length="refuse", history="linear")
    live.says("cut", finish=Finish(reason=FinishReason.LENGTH))
    await live.chat(cut, user("a"))
    answer = await live.chat(cut, user("a"), assistant("cut"), user("b"))
    found["session: cut"] = shown(answer)
    full = await live.open(max_turns=1, history=HistoryKind.TREE)
    live.says("one")
    await live.chat(full, user("a"))
    found["session: full"] = shown(await live.chat(full, user("b")))
    for name, body in {"format": {"format": "csv"}, "token_texts": {"token_texts": True}, "what": {"x": 1}}.items():
        found[f"samples: {name}"] = shown(await live.call("POST", f"/sessions/{session}/samples", body))
    return found


def written(fields: dict[str, Any], path: str) -> dict[str, Any]:
    """Fields as a route takes them: a completion's logprobs are a number."""
    if path == CHAT or "logprobs" not in fields:
        return fields
    return {**{name: value for name, value in fields.items() if name != "top_logprobs"}, "logprobs": 2}


@asynccontextmanager
async def native(kind: str, renderer: Renderer) -> AsyncIterator[Any]:
    make_server, make_dialect = STREAMING[kind]
    async with native_rig(make_server, make_dialect, renderer) as rig:
        yield rig


async def of_engine(kind: str, renderer: Renderer) -> dict[str, Any]:
    """What one kind of engine refuses, of a chat and of a completion."""
    found: dict[str, Any] = {}
    async with native(kind, renderer) as rig:
        for name, fields in {**SAMPLING, **GRAMMARS}.items():
            for path, body in ((CHAT, {"messages": HI}), (COMPLETION, {"prompt": "a"})):
                rig.stand_in.plan(rig.script("ok"))
                async with rig.client.post(rig.url + path, json={**body, **written(fields, path)}) as answer:
                    if answer.status != 200:
                        text = (await answer.read()).decode()
                        found[f"{kind}: {name} at {path}"] = seen(answer.status, answer.headers, text)
                rig.stand_in.unplan()
    return found


async def of_sglang_chat(renderer: Renderer) -> dict[str, Any]:
    found: dict[str, Any] = {}
    async with sglang_chat(renderer) as rig:
        for name, fields in {**SAMPLING, **GRAMMARS, "forced": {**FORCED, "regex": "a"}}.items():
            rig.sglang.plan(rig.script("ok"))
            answer = await rig.call("POST", CHAT, {"messages": HI, **fields})
            if answer.status != 200:
                found[f"sglang chat: {name}"] = shown(answer)
            rig.sglang.unplan()
    return found


async def test_errors_are_sent_as_they_were_recorded(
    live: Live, renderer: Renderer, serve: Callable[..., AbstractAsyncContextManager[Live]]
) -> None:
    async with serve(max_in_flight=4) as small:
        found = await of_requests(small)
    found |= await of_sessions(live)
    for kind in ("sglang-generate", "lmdeploy", "vllm"):
        found |= await of_engine(kind, renderer)
    found |= await of_sglang_chat(renderer)
    if not RECORDING.exists():
        RECORDING.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
        pytest.fail(f"recorded anew: {RECORDING}")
    recorded = json.loads(RECORDING.read_text())
    assert sorted(found) == sorted(recorded)
    assert {name: one for name, one in found.items() if one != recorded[name]} == {}
