"""A session as trajectories in Harbor's format (ATIF 1.7, PyPI `harbor` 0.26.0), with ids and log-probabilities.

A step for each message; those of the agent that were sampled here have `metrics` with the exact ids of prompt and
reply. A tool's message is the observation of the step that called it. Assistant messages that came with a request were
sampled elsewhere: they are `is_copied_context`, not to be trained. The session's other conversations are
`subagent_trajectories`. The log-probabilities are those of the samples (docs/samples.md).
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, cast

from stenograph import __version__
from stenograph.client.samples import Reward
from stenograph.client.session import RolloutSession

SCHEMA = "ATIF-v1.7"
IMAGES = ("image/jpeg", "image/png", "image/gif", "image/webp")

Step = dict[str, Any]


async def session_trajectory(session: RolloutSession, *, reward: Reward | None = None) -> dict[str, object] | None:
    """The trajectory of a session, to be written as JSON; None for one without a turn. `reward` goes into its `extra`:
    a session learns its own at the end."""
    main = await session.view()
    strands = cast("list[Mapping[str, Any]]", cast("Mapping[str, object]", main["metadata"])["strands"])
    views = {int(one["strand"]): await session.view(strand=int(one["strand"])) for one in strands}
    return trajectory(main, views, strands, reward=reward)


def trajectory(
    main: Mapping[str, Any],
    views: Mapping[int, Mapping[str, Any]],
    strands: Sequence[Mapping[str, Any]],
    *,
    reward: Reward | None = None,
) -> dict[str, object] | None:
    """The trajectory of the main strand's view; those of other strands are within. Pure."""
    session_id, records = str(main["session_id"]), main["records"]
    if not records:
        return None
    by_last = {view["records"][-1]["request_id"]: strand for strand, view in views.items() if view["records"]}
    mine = by_last.get(records[-1]["request_id"])
    rows = {int(row["strand"]): row for row in strands}
    found = _line(session_id, records, rows.get(-1 if mine is None else mine, {}))
    others = [
        _line(session_id, view["records"], rows[strand])
        for strand, view in views.items()
        if strand != mine and view["records"]
    ]
    if others:
        found["subagent_trajectories"] = others
    if reward is not None:
        found["extra"] = {**found["extra"], "reward": reward}
    return found


def _line(session_id: str, records: Sequence[Mapping[str, Any]], strand: Mapping[str, Any]) -> dict[str, Any]:
    steps: list[Step] = []
    num_known = 0
    for record in records:
        messages: Sequence[Mapping[str, Any]] = record["request"].get("messages") or []
        for message in messages[num_known:]:
            _add(steps, message)
        steps.append(_sampled(record))
        num_known = len(messages) + 1
    for number, step in enumerate(steps, 1):
        step["step_id"] = number
    metrics = [step["metrics"] for step in steps if "metrics" in step]
    tools = cast("list[object]", records[-1]["request"].get("tools") or [])
    agent: dict[str, object] = {
        "name": strand.get("client") or "unknown",
        "version": "unknown",
        "model_name": records[-1]["policy"],
        "tool_definitions": [one for one in tools if isinstance(one, dict)] or None,
        "extra": {name: strand[name] for name in ("kind", "agent_id", "strand") if strand.get(name) is not None},
    }
    return {
        "schema_version": SCHEMA,
        "session_id": session_id,
        "trajectory_id": f"{session_id}-{records[-1]['node_id']}",
        "agent": {name: value for name, value in agent.items() if value is not None},
        "steps": steps,
        "final_metrics": {
            **{f"total_{name}": sum(one[name] for one in metrics) for name in _COUNTS},
            "total_steps": len(steps),
        },
        "extra": {"recorder": f"stenograph {__version__}"},
    }


_COUNTS = ("prompt_tokens", "completion_tokens", "cached_tokens")


def _add(steps: list[Step], message: Mapping[str, Any]) -> None:
    """A message that came with a request: a step, or an observation of the last step of the agent."""
    role, content = message["role"], _content(message.get("content"))
    if role in ("tool", "function"):
        step = next((one for one in reversed(steps) if one["source"] == "agent"), None)
        if step is not None:
            calls = {call["tool_call_id"] for call in step.get("tool_calls", ())}
            result = {"content": content, "source_call_id": message.get("tool_call_id")}
            if result["source_call_id"] not in calls:
                del result["source_call_id"]
            step.setdefault("observation", {"results": []})["results"].append(result)
            return
    if role == "assistant":
        steps.append({"source": "agent", **_said(message), "is_copied_context": True})
        return
    source = "user" if role in ("user", "tool", "function") else "system"
    steps.append({"source": source, "message": content})


def _sampled(record: Mapping[str, Any]) -> Step:
    """The agent's step of a turn."""
    choice = record["response"]["choices"][0]
    meta = choice["meta_info"]
    triples = meta["output_token_logprobs"]
    tempered = meta.get("output_token_tempered_logprobs")
    extra = {
        "logprobs_kind": meta["logprobs_kind"] if tempered is None else "tempered",
        "finish_reason": choice["finish_reason"],
        "weight_versions": record["weight_versions"],
    }
    return {
        "source": "agent",
        "timestamp": datetime.fromtimestamp(record["timestamp"], UTC).isoformat(),
        "model_name": record["policy"],
        **_said(choice.get("message") or {"content": choice.get("text")}),
        "metrics": {
            "prompt_tokens": len(record["request"]["input_ids"]),
            "completion_tokens": len(triples),
            "cached_tokens": meta["cached_tokens"],
            "prompt_token_ids": record["request"]["input_ids"],
            "completion_token_ids": [one[1] for one in triples],
            "logprobs": tempered if tempered is not None else [one[0] for one in triples],
            "extra": extra,
        },
        "llm_call_count": 1,
        "extra": {"request_id": record["request_id"], "node_id": record["node_id"]},
    }


def _said(message: Mapping[str, Any]) -> Step:
    """An assistant's message, its reasoning and its calls."""
    found: Step = {"message": _content(message.get("content"))}
    if message.get("reasoning_content"):
        found["reasoning_content"] = message["reasoning_content"]
    if calls := [_call(one) for one in message.get("tool_calls") or ()]:
        found["tool_calls"] = calls
    return found


def _call(call: Mapping[str, Any]) -> Step:
    """A call; arguments other than an object stand in its `extra` as they are."""
    function = call["function"]
    given = function["arguments"]
    try:
        arguments = json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError):
        arguments = None
    found: Step = {"tool_call_id": call["id"], "function_name": function["name"], "arguments": arguments}
    return found if isinstance(arguments, dict) else {**found, "arguments": {}, "extra": {"arguments": given}}


def _content(content: object) -> str | list[dict[str, object]]:
    if isinstance(content, list):
        return list(_parts(cast("list[Mapping[str, Any]]", content)))
    return "" if content is None else str(content)


def _parts(parts: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, object]]:
    """Text and images; another part as text of its JSON."""
    for part in parts:
        url = str(cast("Mapping[str, object]", part.get("image_url") or {}).get("url", ""))
        kind = url.removeprefix("data:").partition(";")[0] if url.startswith("data:") else ""
        if part.get("type") == "text":
            yield {"type": "text", "text": str(part["text"])}
        elif kind in IMAGES:
            yield {"type": "image", "source": {"media_type": kind, "path": url}}
        else:
            yield {"type": "text", "text": json.dumps(part)}
