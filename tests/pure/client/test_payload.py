"""Samples out of the server's payload: exact, and never anything else than samples or BadPayload."""

import contextlib
import json
import struct
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from stenograph.client.errors import CLASSES, BadPayload, ServerRefused, refusal
from stenograph.client.samples import META, decoded
from stenograph.core import errors

TOKENS = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=9)


@st.composite
def payloads(draw: st.DrawFn) -> tuple[bytes, list[dict[str, Any]]]:
    """A payload as the library writes it, and the samples that are in it."""
    samples: list[dict[str, Any]] = []
    tensors: dict[str, Any] = {}
    for index in range(draw(st.integers(0, 3))):
        tokens = draw(TOKENS)
        length = draw(st.integers(0, len(tokens)))
        mask = draw(st.lists(st.integers(0, 1), min_size=length, max_size=length))
        nats = draw(st.lists(st.floats(-50, 0), min_size=length, max_size=length))
        tensors[f"tokens.{index}"] = np.array(tokens, np.int64)
        tensors[f"loss_mask.{index}"] = np.array(mask, np.uint8)
        tensors[f"rollout_log_probs.{index}"] = np.array(nats, np.float64)
        if draw(st.booleans()):
            tensors[f"rollout_routed_experts.{index}"] = np.zeros((len(tokens) - 1, 2, 2), np.int32)
        spans = [{"version": "3", "start": 0, "end": len(tokens)}]
        samples.append(
            {
                "tokens": tokens, "mask": mask, "nats": nats, "status": "completed", "weight_versions": ["3"],
                "weight_spans": spans, "raw_log_probs": draw(st.none() | st.just(nats)), "sampling_log_probs": None,
                "turns": [], "response": "☃", "reward": 1.0, "outcome": None, "metadata": {"a": 1},
            }
        )  # fmt: skip
    meta = json.dumps({"samples": samples, "session_metadata": {}, "empty_reason": None if samples else "no_records"})
    tensors[META] = np.frombuffer(meta.encode(), np.uint8)
    return safetensors.numpy.save(tensors), samples


@given(payloads())
def test_a_payload_is_decoded_as_the_library_decodes_it(made: tuple[bytes, list[dict[str, Any]]]) -> None:
    payload, samples = made
    tensors = safetensors.numpy.load(payload)
    found = decoded(payload)
    assert len(found) == len(samples)
    assert (found.empty_reason is None) is bool(samples)
    for index, (got, sample) in enumerate(zip(found, samples, strict=True)):
        assert got.tokens.tolist() == sample["tokens"]
        assert got.loss_mask.tolist() == sample["mask"]
        assert got.log_probs.tolist() == sample["nats"]
        assert (got.raw_log_probs is None) == (sample["raw_log_probs"] is None)
        experts = tensors.get(f"rollout_routed_experts.{index}")
        assert (got.routed_experts is None) == (experts is None)
        assert got.routed_experts is None or got.routed_experts.shape == experts.shape
        for view in (got.tokens, got.log_probs, got.routed_experts):
            assert view is None or not view.size or np.shares_memory(view, np.frombuffer(payload, np.uint8))
        assert got.prompt_length + got.response_length == len(sample["tokens"])
        assert got.weight_spans[0].version == "3"
    assert list(found[:1]) == [found[0]] if samples else not found[:1]


@given(payloads(), st.data())
def test_a_payload_that_is_cut_or_changed_is_samples_or_bad(made: tuple[bytes, Any], data: st.DataObject) -> None:
    payload = bytearray(made[0])
    for _ in range(data.draw(st.integers(0, 3))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(payload[: data.draw(st.integers(0, len(payload)))])
    with contextlib.suppress(BadPayload):
        decoded(cut)


@given(st.binary(max_size=200) | st.builds(lambda text: struct.pack("<Q", len(text)) + text, st.binary(max_size=200)))
def test_any_bytes_are_samples_or_bad(payload: bytes) -> None:
    with pytest.raises(BadPayload):
        decoded(payload)


def test_every_code_of_the_server_has_a_class_and_something_to_do() -> None:
    leaves = [errors.StenographError]
    for cls in leaves:
        leaves += cls.__subclasses__()
    codes = {cls.code: cls for cls in leaves if hasattr(cls, "code")}
    assert set(CLASSES) == set(codes)
    for code, cls in CLASSES.items():
        body = json.dumps({"error": {"message": "It is so.", "type": "t", "code": code, "param": "/a"}}).encode()
        made = refusal("GET /x", codes[code].status, {"x-should-retry": "true", "retry-after": "3"}, body)
        assert type(made) is cls
        assert (made.code, made.param, made.should_retry, made.retry_after_s) == (code, "/a", True, 3.0)
        assert made.advice
        assert str(made).startswith(f"GET /x: {codes[code].status} {code} (/a): It is so. ")


@given(st.binary(max_size=50), st.integers(400, 599), st.text(max_size=4))
def test_an_error_of_any_other_server_is_a_refusal(body: bytes, status: int, after: str) -> None:
    made = refusal("GET /x", status, {"retry-after": after}, body)
    assert isinstance(made, ServerRefused)
    assert made.status == status
    assert made.code or str(made).startswith(f"GET /x: {status}: ")
