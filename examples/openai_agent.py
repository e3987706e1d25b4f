"""An agent as people write them: the official OpenAI SDK, a tool that it really runs, five turns, nothing of ours.

    python examples/openai_agent.py --url http://127.0.0.1:8080

Only the base URL tells that Stenograph is there. The trainer's side, at the end, is three plain HTTP calls: open a
session, read its sample, delete it.
"""

import argparse
import json
import operator
import sys
import urllib.request
from pathlib import Path
from typing import Any

import openai

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "calculate",
            "description": "Compute with two whole numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "minimum": 0, "maximum": 9999},
                    "operator": {"type": "string", "enum": ["+", "-", "*"]},
                    "b": {"type": "integer", "minimum": 0, "maximum": 9999},
                },
                "required": ["a", "operator", "b"],
                "additionalProperties": False,
            },
        },
    }
]

FACT: Any = {
    "type": "json_schema",
    "json_schema": {
        "name": "fact",
        "schema": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 30},
                "country": {"type": "string", "enum": ["France", "Germany", "Italy", "Spain"]},
                "is_capital": {"type": "boolean"},
            },
            "required": ["city", "country", "is_capital"],
            "additionalProperties": False,
        },
    },
}


def calculate(arguments: str) -> str:
    """The tool, really executed."""
    call = json.loads(arguments)
    functions = {"+": operator.add, "-": operator.sub, "*": operator.mul}
    result = functions[call["operator"]](call["a"], call["b"])
    return f"{call['a']} {call['operator']} {call['b']} = {result}"


SEEDS = range(1, 6)
"""Each turn is asked with the first; with the next only if the reply was cut."""


class Agent:
    """Keeps the conversation and sends all of it each turn, as agents do."""

    def __init__(self, client: openai.OpenAI) -> None:
        self.client = client
        self.messages: list[Any] = []
        self.options: Any = {"model": "smollm2", "tools": TOOLS, "temperature": 0.6, "max_tokens": 200}

    def say(self, role: str, content: str, **fields: str) -> None:
        print(f"\n[{role}] {content}")
        self.messages.append({"role": role, "content": content, **fields})

    def ask(self, **options: Any) -> Any:
        """One turn; the reply joins the conversation exactly as the SDK dumps it."""
        for seed in SEEDS:
            choice = self._create(seed=seed, **options).choices[0]
            for call in choice.message.tool_calls or []:
                print(f"\n[assistant calls] {call.function.name}({call.function.arguments})")
            if choice.message.content:
                print(f"\n[assistant] {choice.message.content}")
            if is_whole(choice.finish_reason):
                self.messages.append(choice.message.model_dump(exclude_none=True))
                return choice.message
        sys.exit("every reply was cut; raise max_tokens")

    def ask_streaming(self, **options: Any) -> None:
        """The same, printed as the tokens come."""
        for seed in SEEDS:
            print("\n[assistant, streamed] ", end="", flush=True)
            text, finish = "", None
            for chunk in self._create(stream=True, seed=seed, **options):
                for choice in chunk.choices:
                    print(choice.delta.content or "", end="", flush=True)
                    text, finish = text + (choice.delta.content or ""), choice.finish_reason or finish
            print()
            if is_whole(finish):
                self.messages.append({"role": "assistant", "content": text})
                return
        sys.exit("every reply was cut; raise max_tokens")

    def _create(self, **options: Any) -> Any:
        return self.client.chat.completions.create(messages=self.messages, **{**self.options, **options})


def is_whole(finish_reason: str | None) -> bool:
    """A reply that max_tokens cut cannot be continued, but the same messages may be sent again: that replaces it."""
    if finish_reason == "length":
        print("(cut by max_tokens; asking again with another seed)")
    return finish_reason != "length"


def converse(agent: Agent) -> None:
    agent.say("system", "You are a careful assistant. Answer in one short sentence.")
    agent.say("user", "What is 12 * 34? Use the calculate tool.")
    called = agent.ask(tool_choice="required", parallel_tool_calls=False)
    for call in called.tool_calls:
        agent.say("tool", calculate(call.function.arguments), tool_call_id=call.id)
    agent.ask(tool_choice="none")
    agent.say("user", "Thank you. Say something nice about Paris, in one sentence.")
    agent.ask_streaming(tool_choice="none")
    agent.say("user", "Which country is Paris in, and is it a capital? Answer as JSON.")
    answer = agent.ask(tool_choice="none", response_format=FACT, temperature=0)
    print(f"\n(parsed: {json.loads(answer.content)})")
    agent.say("user", "Goodbye!")
    agent.ask(tool_choice="none")


def show_sample(sample: dict[str, Any], *, full: bool) -> None:
    """The sample as a table: what was sampled, with its logprob, and what was given."""
    prompt = len(sample["tokens"]) - sample["response_length"]
    mask = [0] * prompt + sample["loss_mask"]
    logprobs = [0.0] * prompt + sample["rollout_log_probs"]
    print(f"\n{'index':>6} {'id':>6}  {'token':<22} {'sampled':<8} {'logprob':>9}")
    hidden = 0
    for index, (id_, text, sampled, logprob) in enumerate(
        zip(sample["tokens"], sample["token_texts"], mask, logprobs, strict=True)
    ):
        at_edge = index < 4 or any(mask[max(0, index - 3) : index + 4])
        if not full and not at_edge:
            hidden += 1
            continue
        if hidden:
            print(f"{'…':>6} {'':>6}  ({hidden} tokens that were given; --full shows them)")
            hidden = 0
        print(
            f"{index:>6} {id_:>6}  {text!r:<22} {'yes' if sampled else '-':<8} {f'{logprob:.4f}' if sampled else '':>9}"
        )
    trained = sum(mask)
    print(f"\n{len(mask)} tokens, {trained} of them sampled by the model; status {sample['status']}")


def http(method: str, url: str, body: Any = None) -> bytes:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, method=method, headers={"content-type": "application/json"})
    with urllib.request.urlopen(request) as response:
        return bytes(response.read())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8080", help="the server (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("out/sample.safetensors"), help="where the sample goes")
    parser.add_argument("--full", action="store_true", help="show every token of the sample")
    options = parser.parse_args()

    session = json.loads(http("POST", f"{options.url}/sessions", {"metadata": {"task": "demo"}}))
    print(f"session {session['session_id']}")
    with openai.OpenAI(base_url=session["base_url"], api_key="unused") as client:
        converse(Agent(client))

    samples = f"{options.url}/sessions/{session['session_id']}/samples"
    (sample,) = json.loads(http("POST", samples, {"format": "json", "token_texts": True}))["samples"]
    show_sample(sample, full=options.full)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_bytes(http("POST", samples, {}))
    print(f"sample written to {options.out} ({options.out.stat().st_size} bytes, safetensors)")
    http("DELETE", f"{options.url}/sessions/{session['session_id']}")


if __name__ == "__main__":
    main()
