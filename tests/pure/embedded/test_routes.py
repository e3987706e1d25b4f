"""The routes that the engine reports of a turn: each row from the forward that computed the next token."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from standins.tiny.llama import LAYERS, write_tiny_folder
from standins.tiny.mixture import TOP_K, write_mixture_folder
from stenograph.core.types import RequestId
from stenograph.embedded.forward.base import LogitsFor, RowSpan, Segment
from stenograph.embedded.forward.numpy_forward import NumpyForward
from stenograph.embedded.forward.weights import load_weights
from stenograph.model.tokenizer import Tokenizer

from .conftest import Bench

PROMPT = [1, 17, 240, 3, 99, 99, 310, 42, 7, 2, 1, 55, 8, 9, 10, 11, 12, 13, 14, 15]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    base = tmp_path_factory.mktemp("mixtures")
    return write_mixture_folder(base / "old"), write_mixture_folder(base / "new", seed=1)


@pytest.fixture
def mixed(folders: tuple[Path, Path], tokenizer: Tokenizer) -> Callable[..., Bench]:
    return lambda **limits: Bench(load_weights(folders[0]), tokenizer, **limits)


def reported(bench: Bench, name: str, *, routes_from: int = 0) -> np.ndarray:
    """The rows of a turn that has ended; no earlier chunk has any."""
    *others, last = bench.chunks[name]
    assert all(chunk.replay is None for chunk in others)
    assert last.replay is not None
    assert last.replay.routed_experts is not None
    assert last.replay.first_row == routes_from
    return last.replay.routed_experts.values.reshape(-1, LAYERS, TOP_K)


def in_one_pass(folder: Path, ids: list[int]) -> np.ndarray:
    """The routes of a line, but of its last token, in one pass of its own."""
    forward = NumpyForward(*load_weights(folder), num_kv_tokens=len(ids))
    span = RowSpan(0, len(ids) - 1)
    forward.forward([Segment(ids=np.array(ids[:-1], np.intc), start=0, spans=(span,), logits_for=LogitsFor.NONE)])
    routes = forward.routes([span])
    assert routes is not None
    return routes


def test_a_turn_reports_a_row_for_each_token_but_the_last(
    folders: tuple[Path, Path], mixed: Callable[..., Bench]
) -> None:
    bench = mixed(step_tokens=17)
    bench.add("all", PROMPT, routes_from=0)
    bench.add("new", PROMPT, routes_from=len(PROMPT) - 3, seed=4)
    bench.add("none", PROMPT)
    bench.run()
    for name, first in (("all", 0), ("new", len(PROMPT) - 3)):
        expected = in_one_pass(folders[0], PROMPT + bench.ids(name))
        np.testing.assert_array_equal(reported(bench, name, routes_from=first), expected[first:])
    assert bench.chunks["none"][-1].replay is None


def test_a_cached_prefix_has_the_routes_of_the_forward_that_computed_it(
    folders: tuple[Path, Path], mixed: Callable[..., Bench]
) -> None:
    bench = mixed()
    bench.add("first", PROMPT)
    bench.run()
    longer = [*PROMPT, *bench.ids("first")[:3], 77, 78]
    bench.add("second", longer, routes_from=0)
    bench.run()
    assert bench.chunks["second"][-1].num_cached_tokens >= len(PROMPT)
    expected = in_one_pass(folders[0], longer + bench.ids("second"))
    np.testing.assert_array_equal(reported(bench, "second"), expected)


def test_preempted_turns_report_the_rows_that_sampled(folders: tuple[Path, Path], mixed: Callable[..., Bench]) -> None:
    bench = mixed(kv_tokens=96, step_tokens=24)
    for number in range(4):
        bench.add(f"turn {number}", [*PROMPT[number:], 60 + number], routes_from=0, max_tokens=40, seed=number)
    bench.run()
    assert bench.core.num_preempted
    for number in range(4):
        expected = in_one_pass(folders[0], [*PROMPT[number:], 60 + number, *bench.ids(f"turn {number}")])
        np.testing.assert_array_equal(reported(bench, f"turn {number}"), expected)


def test_a_turn_over_a_swap_has_each_row_from_the_forward_that_sampled(
    folders: tuple[Path, Path], mixed: Callable[..., Bench]
) -> None:
    bench = mixed()
    bench.add("over", PROMPT, routes_from=0, max_tokens=12)
    while len(bench.chunks.get("over", ())) < 5:
        bench.step()
    forward = NumpyForward(*load_weights(folders[0]), num_kv_tokens=4096)
    bench.core.swap(forward.prepare(*load_weights(folders[1])), "new")
    bench.run()
    versions = [chunk.weight_version for chunk in bench.chunks["over"]]
    assert versions == ["v"] * 5 + ["new"] * 7
    old, new = (in_one_pass(folder, PROMPT + bench.ids("over")) for folder in folders)
    border = len(PROMPT) - 1 + 5
    np.testing.assert_array_equal(reported(bench, "over"), np.concatenate([old[:border], new[border:]]))
    assert (old[:border] != new[:border]).any()


@pytest.mark.parametrize("has_token", [False, True])
def test_what_an_admission_found_counts_only_if_a_token_was_sampled_with_it(
    folders: tuple[Path, Path], mixed: Callable[..., Bench], has_token: bool
) -> None:
    """A swap forgets it; `cached_from` names the weights that computed what is counted."""
    bench = mixed(step_tokens=17)
    bench.add("first", PROMPT)
    bench.run()
    bench.add("over", [*PROMPT, *range(60, 100)], routes_from=0)
    bench.step()
    assert "over" not in bench.chunks, "a part of its prompt is computed"
    while has_token and "over" not in bench.chunks:
        bench.step()
    forward = NumpyForward(*load_weights(folders[0]), num_kv_tokens=4096)
    bench.core.swap(forward.prepare(*load_weights(folders[1])), "new")
    bench.run()
    *_, last = bench.chunks["over"]
    assert (last.num_cached_tokens, last.cached_from) == ((len(PROMPT), "v") if has_token else (0, "new"))
    weights, version = (folders[0], "v") if has_token else (folders[1], "new")
    assert bench.chunks["over"][0].weight_version == version
    expected = in_one_pass(weights, [*PROMPT, *range(60, 100)])
    np.testing.assert_array_equal(reported(bench, "over")[: len(expected)], expected)


def test_an_aborted_turn_reports_what_it_sampled_and_an_empty_one_nothing(mixed: Callable[..., Bench]) -> None:
    bench = mixed(max_batch=1)
    bench.add("cut", PROMPT, routes_from=0)
    bench.add("empty", PROMPT, routes_from=0)
    for _ in range(3):
        bench.step()
    for name in ("cut", "empty"):
        event = bench.core.abort(RequestId(name))
        assert event is not None
        bench.take([event])
    assert len(reported(bench, "cut")) == len(PROMPT) - 1 + len(bench.ids("cut"))
    assert bench.chunks["empty"][-1].replay is None


def test_a_swap_to_a_mixture_of_another_shape_is_refused(folders: tuple[Path, Path], tmp_path: Path) -> None:
    forward = NumpyForward(*load_weights(folders[0]), num_kv_tokens=4096)
    with pytest.raises(ValueError, match="it has another shape"):
        forward.prepare(*load_weights(write_tiny_folder(tmp_path / "dense")))
