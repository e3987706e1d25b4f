"""One answer from the answers of all workers. Pure."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

_SAMPLE = re.compile(rb"([A-Za-z_:][A-Za-z0-9_:]*)(?:\{(.*)\})? (\S+)")


def sums(bodies: Sequence[bytes]) -> bytes:
    """JSON objects as one: numbers are summed, of all else the first stands."""
    decoded = [msgspec.json.decode(body, type=dict[str, Any]) for body in bodies]
    merged = dict(decoded[0])
    for name, value in merged.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            merged[name] = sum(one[name] for one in decoded)
    return msgspec.json.encode(merged)


_SUMMED = frozenset({
    "workers", "num_sessions", "num_held_tokens", "num_in_flight", "turns", "errors", "sampled_tokens", "prompt_tokens",
    "wasted_tokens", "turns_per_s", "sampled_per_s", "prompt_per_s",
})  # fmt: skip


def moment(bodies: Sequence[bytes], *, num_away: int) -> bytes:
    """The console's moment of the reachable workers: counts and rates summed, of latencies the worst."""
    decoded = [msgspec.json.decode(body, type=dict[str, Any]) for body in bodies]
    merged: dict[str, Any] = {**decoded[0], "workers_away": num_away}
    for name in _SUMMED:
        merged[name] = sum(one[name] for one in decoded)
    for name in ("loop_lag", "ttft"):
        found = [one[name] for one in decoded]
        merged[name] = {key: max((one[key] for one in found if one[key] is not None), default=None) for key in found[0]}
        merged[name]["num"] = sum(one["num"] for one in found)
    running = [row for one in decoded for row in one["running"]]
    merged["running"] = sorted(running, key=lambda row: -row["age_s"])
    merged["engines"] = _merged_engines(decoded)
    return msgspec.json.encode(merged)


def readiness(bodies: Sequence[bytes], *, num_away: int) -> tuple[bool, bytes]:
    """Whether all workers are ready, none of them away; and the engines as they see them, each once. Other fields are
    the first worker's."""
    decoded = [msgspec.json.decode(body, type=dict[str, Any]) for body in bodies]
    is_ready, is_paused = not num_away and all(one["ready"] for one in decoded), any(one["paused"] for one in decoded)
    merged = {**decoded[0], "ready": is_ready, "paused": is_paused, "engines": _merged_engines(decoded)}
    return is_ready, msgspec.json.encode(merged)


def engines(bodies: Sequence[bytes]) -> bytes:
    """The engines as all workers see them, each once."""
    return msgspec.json.encode(
        {"engines": _merged_engines([msgspec.json.decode(body, type=dict[str, Any]) for body in bodies])}
    )


def _merged_engines(decoded: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each engine once: our turns are summed, of all else the first stands, and the first state other than ready with
    its detail."""
    merged: dict[tuple[str, str], dict[str, Any]] = {}
    for engine in (engine for one in decoded for engine in one["engines"]):
        seen = merged.setdefault((engine["engine"], engine["name"]), engine)
        if seen is engine:
            continue
        seen["num_running"] += engine["num_running"]
        if seen["state"] == "ready":
            seen["state"], seen["detail"] = engine["state"], engine["detail"] or seen["detail"]
    return [*merged.values()]


def exposition(texts: Mapping[int, bytes]) -> bytes:
    """Prometheus' text of all workers: every sample has its worker as a label, and each family stands once.

    They are not summed: a restarted worker counts from 0, and a sum would go down with it.
    """
    families: dict[bytes, list[bytes]] = {}
    for worker, text in texts.items():
        family: list[bytes] = []
        for line in text.splitlines():
            if line.startswith(b"# HELP "):
                family = families.setdefault(line.split(b" ", 3)[2], [])
            if not line.startswith(b"#"):
                family.append(_labelled(line, worker))
            elif len(family) < 2:  # its help and its type
                family.append(line)
    return b"".join(line + b"\n" for family in families.values() for line in family)


def _labelled(line: bytes, worker: int) -> bytes:
    """A sample with its worker as the first label."""
    sample = _SAMPLE.fullmatch(line)
    assert sample is not None, f"a metric of ours is no sample: {line!r}"
    name, labels, value = sample.groups()
    return b'%b{worker="%d"%b} %b' % (name, worker, b"," + labels if labels else b"", value)
