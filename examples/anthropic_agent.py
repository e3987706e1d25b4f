"""A tool agent as people write them: the official Anthropic SDK, a loop over tool_use, nothing of ours.

    python examples/anthropic_agent.py --url http://127.0.0.1:8080

Only the base URL says that Stenograph is there. The trainer's side, at the end, is three plain HTTP calls: open a
session, read its sample, delete it.
"""

import argparse
import json
import operator
import sys
import urllib.request
from typing import Any

import anthropic

CALCULATE: Any = {
    "name": "calculate",
    "description": "Compute with two whole numbers.",
    "input_schema": {
        "type": "object",
        "properties": {
            "a": {"type": "integer", "minimum": 0, "maximum": 9999},
            "operator": {"type": "string", "enum": ["+", "-", "*"]},
            "b": {"type": "integer", "minimum": 0, "maximum": 9999},
        },
        "required": ["a", "operator", "b"],
        "additionalProperties": False,
    },
}

MAX_TURNS = 4


def calculate(call: Any) -> str:
    """The tool, really executed."""
    functions = {"+": operator.add, "-": operator.sub, "*": operator.mul}
    result = functions[call["operator"]](call["a"], call["b"])
    return f"{call['a']} {call['operator']} {call['b']} = {result}"


def ask(client: anthropic.Anthropic, messages: list[Any], *, forces: bool) -> Any:
    """One turn, printed as the tokens come; the reply joins the conversation exactly as the SDK dumps it."""
    choice = {"type": "tool", "name": "calculate", "disable_parallel_tool_use": True} if forces else {"type": "auto"}
    print("\n[assistant] ", end="", flush=True)
    with client.messages.stream(
        model="smollm2",
        max_tokens=200,
        system="You are a careful assistant. Answer in one short sentence.",
        messages=messages,
        tools=[CALCULATE],
        tool_choice=choice,  # type: ignore[arg-type]
        extra_body={"temperature": 0.6, "seed": 1},
    ) as events:
        for text in events.text_stream:
            print(text, end="", flush=True)
        reply = events.get_final_message()
    print()
    messages.append({"role": "assistant", "content": [block.model_dump() for block in reply.content]})
    return reply


def converse(client: anthropic.Anthropic, question: str) -> None:
    """Ask until the model calls no tool any more. The first call is forced: a small model would guess."""
    print(f"[user] {question}")
    messages: list[Any] = [{"role": "user", "content": question}]
    for turn in range(MAX_TURNS):
        counted = client.messages.count_tokens(
            model="smollm2",
            system="You are a careful assistant. Answer in one short sentence.",
            messages=messages,
            tools=[CALCULATE],
        )
        reply = ask(client, messages, forces=turn == 0)
        used = reply.usage.input_tokens + (reply.usage.cache_read_input_tokens or 0)
        print(f"({counted.input_tokens} tokens counted before, {used} used; {reply.stop_reason})")
        calls = [block for block in reply.content if block.type == "tool_use"]
        if not calls:
            return
        results = []
        for call in calls:
            result = calculate(call.input)
            print(f"[tool] {result}")
            results.append({"type": "tool_result", "tool_use_id": call.id, "content": result})
        messages.append({"role": "user", "content": results})
    sys.exit(f"the model still called tools after {MAX_TURNS} turns")


def http(method: str, url: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, method=method, headers={"content-type": "application/json"})
    with urllib.request.urlopen(request) as response:
        return json.loads(response.read() or b"null")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8080", help="the server (default: %(default)s)")
    parser.add_argument(
        "--question", default="What is 12 * 34? Use the calculate tool.", help="what the agent is asked"
    )
    options = parser.parse_args()

    session = f"{options.url}/sessions/{http('POST', f'{options.url}/sessions', {})['session_id']}"
    with anthropic.Anthropic(base_url=session, api_key="unused") as client:
        converse(client, options.question)
    (sample,) = http("POST", f"{session}/samples", {"format": "json"})["samples"]
    print(f"\n{len(sample['tokens'])} tokens, {sum(sample['loss_mask'])} of them sampled; status {sample['status']}")
    http("DELETE", session)


if __name__ == "__main__":
    main()
