"""The torch forward against NumPy's: the same logits however lines are cut, placed, batched, shared and copied."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from standins.teacher_forcing import log_softmax
from standins.tiny.llama import CONTEXT, LAYERS, VOCAB, write_tiny_folder
from standins.tiny.mixture import EXPERTS, TOP_K, write_mixture_folder
from stenograph.core.errors import StartupError
from stenograph.embedded.forward.base import Forward, LogitsFor, RowSpan, Segment
from stenograph.embedded.forward.choice import load_forward
from stenograph.embedded.forward.numpy_forward import NumpyForward
from stenograph.embedded.forward.torch_forward import TorchForward
from stenograph.embedded.forward.weights import load_weights
from stenograph.model.files import load_model_files
from stenograph.model.tokenizer import Tokenizer
from stenograph.parts import ForwardKind, TorchDtype

torch = pytest.importorskip("torch", reason="torch is an extra; scripts/test-torch runs these")

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
ROWS = 512
ATOL = 1e-4
IDS = [1, 17, 240, 3, 99, 99, 310, 42, 7, 2, 1, 55]

Rows = list[int]
"""Where a line's positions lie in the store, one by one."""


@pytest.fixture(scope="module")
def reference(folder: Path) -> NumpyForward:
    return NumpyForward(*load_weights(folder), num_kv_tokens=CONTEXT)


@pytest.fixture(scope="module", params=list(itertools.product(DEVICES, (False, True))), ids=str)
def forward(folder: Path, request: pytest.FixtureRequest) -> TorchForward:
    """On each device, decodes attended one by one and together: what a GPU does is tried on the CPU too."""
    device, pads_decodes = request.param
    return TorchForward(*load_weights(folder), num_kv_tokens=ROWS, device=device, pads_decodes=pads_decodes)


def spans_of(rows: Rows) -> tuple[RowSpan, ...]:
    edges = [0, *(at for at in range(1, len(rows)) if rows[at] != rows[at - 1] + 1), len(rows)]
    return tuple(RowSpan(rows[start], rows[end - 1] + 1) for start, end in itertools.pairwise(edges))


def segment(ids: Sequence[int], rows: Rows, start: int = 0, logits_for: LogitsFor = LogitsFor.ALL) -> Segment:
    """`ids` at the positions from `start` of a line that lies in `rows`."""
    spans = spans_of(rows[: start + len(ids)])
    return Segment(ids=np.array(ids, np.intc), start=start, spans=spans, logits_for=logits_for)


def all_logits(model: Forward, ids: Sequence[int]) -> np.ndarray:
    return model.forward([segment(ids, list(range(len(ids))))])


@dataclass(kw_only=True)
class Line:
    """A sequence that is computed bit by bit."""

    ids: list[int]
    rows: Rows
    num_filled: int

    @property
    def num_left(self) -> int:
        return len(self.ids) - self.num_filled


class Store:
    """Rows of a KV store, given out in pieces of any size and order."""

    def __init__(self, draw: Callable[..., int]) -> None:
        self._draw = draw
        self._free = list(range(ROWS))

    def rows(self, num_tokens: int) -> Rows:
        taken: Rows = []
        while len(taken) < num_tokens:
            begin = self._draw(st.integers(0, max(0, len(self._free) - num_tokens)))
            num = self._draw(st.integers(1, num_tokens - len(taken)))
            taken += self._free[begin : begin + num]
            del self._free[begin : begin + num]
        return taken


def fork(line: Line, tail: list[int], store: Store, data: st.DataObject, model: Forward) -> Line:
    """A line that goes on differently: the last rows of what it has in common are its own copies."""
    num_shared = data.draw(st.integers(0, line.num_filled), label="shared")
    num_copied = data.draw(st.integers(0, line.num_filled - num_shared), label="copied")
    num_kept = num_shared + num_copied
    rows = line.rows[:num_shared] + store.rows(num_copied + len(tail))
    for source, target in zip(line.rows[num_shared:num_kept], rows[num_shared:num_kept], strict=True):
        model.copy_kv(source, target, 1)
    return Line(ids=line.ids[:num_kept] + tail, rows=rows, num_filled=num_kept)


LINES = st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30), min_size=1, max_size=5)


@settings(deadline=None, max_examples=60)
@given(data=st.data(), lines=LINES, forks=st.lists(st.integers(0, 4), max_size=3))
def test_lines_cut_placed_batched_and_forked_anyhow_get_numpys_logits(
    forward: TorchForward, reference: NumpyForward, data: st.DataObject, lines: list[list[int]], forks: list[int]
) -> None:
    store = Store(data.draw)
    open_lines = [Line(ids=ids, rows=store.rows(len(ids)), num_filled=0) for ids in lines]
    while running := [line for line in open_lines if line.num_left]:
        chosen = data.draw(st.lists(st.sampled_from(range(len(running))), min_size=1, unique=True), label="stepped")
        steps = [(running[at], data.draw(st.integers(1, running[at].num_left))) for at in chosen]
        batch = [
            segment(line.ids[line.num_filled : line.num_filled + num], line.rows, line.num_filled)
            for line, num in steps
        ]
        logits = forward.forward(batch)
        assert logits.dtype == np.float32
        for line, num in steps:
            wanted = all_logits(reference, line.ids[: line.num_filled + num])[line.num_filled :]
            np.testing.assert_allclose(logits[:num], wanted, rtol=0, atol=ATOL)
            logits = logits[num:]
            line.num_filled += num
        assert not len(logits)
        if forks:
            parent = open_lines[forks.pop() % len(open_lines)]
            tail = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6))
            open_lines.append(fork(parent, tail, store, data, forward))


def test_decodes_of_very_different_lengths_have_the_logits_that_each_has_alone(forward: TorchForward) -> None:
    lengths = [1, 2, 3, 63, 64, 65, 150]
    edges = list(itertools.accumulate([0, *lengths]))
    lines = [[(7 * at + begin) % VOCAB for at in range(end - begin)] for begin, end in itertools.pairwise(edges)]
    rows = [list(range(begin, end)) for begin, end in itertools.pairwise(edges)]
    for ids, place in zip(lines, rows, strict=True):
        if len(ids) > 1:
            forward.forward([segment(ids[:-1], place, logits_for=LogitsFor.NONE)])
    last = [segment(ids[-1:], place, len(ids) - 1) for ids, place in zip(lines, rows, strict=True)]
    together = forward.forward(last)
    alone = [forward.forward([one])[0] for one in last]
    np.testing.assert_allclose(together, alone, rtol=0, atol=ATOL)


def test_only_the_logits_that_are_asked_for_come_in_order(forward: TorchForward, reference: NumpyForward) -> None:
    wanted = all_logits(reference, IDS)
    batch = [
        segment(IDS[:5], list(range(5)), logits_for=LogitsFor.LAST),
        segment(IDS, list(range(10, 22)), logits_for=LogitsFor.NONE),
        segment(IDS[:3], list(range(30, 33)), logits_for=LogitsFor.ALL),
    ]
    np.testing.assert_allclose(forward.forward(batch), wanted[[4, 0, 1, 2]], rtol=0, atol=ATOL)
    assert forward.forward(batch[1:2]).shape == (0, VOCAB)


def test_rows_that_other_sequences_left_are_not_read(folder: Path, reference: NumpyForward) -> None:
    forward = TorchForward(*load_weights(folder), num_kv_tokens=64, device="cpu", pads_decodes=True)
    forward._kv.fill_(float("nan"))  # what memory that was never written to may hold
    lines = [list(range(10, 19)), list(range(30, 45))]
    for ids in (IDS[:9], IDS):
        forward.forward([segment(ids[:-1], lines[len(ids) > 9], logits_for=LogitsFor.NONE)])
    last = [segment(ids[-1:], lines[len(ids) > 9], len(ids) - 1) for ids in (IDS[:9], IDS)]
    np.testing.assert_allclose(forward.forward(last), all_logits(reference, IDS)[[8, 11]], rtol=0, atol=ATOL)


def test_weights_that_are_only_read_stay_as_they_are(folder: Path, reference: NumpyForward) -> None:
    config, weights = load_weights(folder)
    weights.embed.flags.writeable = False
    before = weights.embed.tobytes()
    model = TorchForward(config, weights, num_kv_tokens=ROWS, device="cpu")
    np.testing.assert_allclose(all_logits(model, IDS), all_logits(reference, IDS), rtol=0, atol=ATOL)
    assert weights.embed.tobytes() == before


@pytest.mark.parametrize("device", DEVICES)
def test_bfloat16_is_the_same_model_less_exactly(device: str, folder: Path, reference: NumpyForward) -> None:
    model = TorchForward(*load_weights(folder), num_kv_tokens=ROWS, device=device, dtype=TorchDtype.BFLOAT16)
    got, wanted = all_logits(model, IDS), all_logits(reference, IDS)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, wanted, rtol=0, atol=0.03 * np.abs(wanted).max())
    assert np.abs(got - wanted).max() > ATOL  # or it was computed in float32


def test_an_id_position_or_row_out_of_range_is_refused_before_anything_is_written(forward: TorchForward) -> None:
    before = all_logits(forward, IDS)
    kept = segment([5], [*range(12), 12], 12)
    refused = [
        ([segment([5, VOCAB], [12, 13])], "ids must be from 0 to 319"),
        ([segment([-1], [12])], "ids must be from 0 to 319"),
        ([segment([5], list(range(100, 357)), 256)], "more positions than 256"),
        ([kept, segment([5, 6], [ROWS - 1, ROWS])], "not among 512 rows"),
        ([], "at least one segment"),
    ]
    for batch, message in refused:
        with pytest.raises(ValueError, match=message):
            forward.forward(batch)
    for source, target in ((ROWS - 4, 0), (0, ROWS - 4), (-1, 0)):
        with pytest.raises(ValueError, match="5 rows"):
            forward.copy_kv(source, target, 5)
    np.testing.assert_allclose(
        forward.forward([segment(IDS[-1:], list(range(12)), 11)])[0], before[-1], rtol=0, atol=ATOL
    )


def test_a_device_that_torch_does_not_see_is_one_line(folder: Path) -> None:
    with pytest.raises(StartupError, match=r"^--torch-device is cuda:99, but torch .* sees \d+ GPUs$"):
        TorchForward(*load_weights(folder), num_kv_tokens=ROWS, device="cuda:99")


def test_a_store_larger_than_memory_is_one_line(folder: Path) -> None:
    with pytest.raises(StartupError, match=rf"^{2**40} KV tokens and the model do not fit on cpu: .+$"):
        TorchForward(*load_weights(folder), num_kv_tokens=2**40, device="cpu")


@pytest.mark.parametrize("num_kv_tokens", [0, -1])
def test_a_store_for_no_tokens_is_refused(num_kv_tokens: int, folder: Path) -> None:
    with pytest.raises(ValueError, match="at least one token"):
        TorchForward(*load_weights(folder), num_kv_tokens=num_kv_tokens, device="cpu")


PROMPT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\nTell me about the sea.<|im_end|>\n<|im_start|>assistant\n"
)


@pytest.mark.weights
@pytest.mark.timeout(600)
@pytest.mark.parametrize("device", DEVICES)
def test_smollm2_samples_the_same_64_tokens_with_the_same_logprobs(device: str, smollm2_path: Path) -> None:
    prompt = Tokenizer(load_model_files(smollm2_path).tokenizer_json).encode(PROMPT).tolist()

    def greedy(kind: ForwardKind) -> tuple[list[int], list[float]]:
        model = load_forward(smollm2_path, kind=kind, device=device, dtype=TorchDtype.FLOAT32, num_kv_tokens=256)
        line, logprobs, num_filled = list(prompt), [], 0
        for _ in range(64):
            row = model.forward([segment(line[num_filled:], list(range(len(line))), num_filled, LogitsFor.LAST)])[0]
            num_filled = len(line)
            line.append(int(row.argmax()))
            logprobs.append(float(log_softmax(row.astype(np.float64))[line[-1]]))
        return line[len(prompt) :], logprobs

    (ids, logprobs), (wanted_ids, wanted) = greedy(ForwardKind.TORCH), greedy(ForwardKind.NUMPY)
    assert ids == wanted_ids
    np.testing.assert_allclose(logprobs, wanted, rtol=0, atol=1e-3)


@pytest.mark.parametrize("device", DEVICES)
def test_swapped_weights_compute_as_a_forward_of_their_own(folder: Path, tmp_path: Path, device: str) -> None:
    other = load_weights(write_tiny_folder(tmp_path / "other", seed=1))
    forward = TorchForward(*load_weights(folder), num_kv_tokens=CONTEXT, device=device)
    line = Segment(ids=np.array(IDS, np.intc), start=0, spans=(RowSpan(0, len(IDS)),), logits_for=LogitsFor.ALL)
    before = forward.forward([line])
    old = forward.swap(forward.prepare(*other))
    expected = NumpyForward(*other, num_kv_tokens=CONTEXT).forward([line])
    np.testing.assert_allclose(forward.forward([line]), expected, rtol=0, atol=ATOL)
    forward.swap(old).free()
    np.testing.assert_allclose(forward.forward([line]), before, rtol=0, atol=ATOL)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", list(TorchDtype))
def test_weights_are_read_to_the_memory_of_those_before_only_where_nothing_computes_in_it(
    folder: Path, tmp_path: Path, device: str, dtype: TorchDtype
) -> None:
    folders = [folder, *(write_tiny_folder(tmp_path / str(seed), seed=seed) for seed in (1, 2))]
    line = Segment(ids=np.array(IDS, np.intc), start=0, spans=(RowSpan(0, len(IDS)),), logits_for=LogitsFor.ALL)
    alone = [TorchForward(*load_weights(one), num_kv_tokens=CONTEXT, device=device, dtype=dtype) for one in folders]
    expected = [model.forward([line]) for model in alone]
    forward = TorchForward(*load_weights(folder), num_kv_tokens=CONTEXT, device=device, dtype=dtype)
    memory = None
    for at in (1, 2, 0, 1):
        prepared = forward.prepare(*load_weights(folders[at], memory))
        memory = forward.swap(prepared).free()
        np.testing.assert_array_equal(forward.forward([line]), expected[at])
        assert (memory is not None) is (device == "cpu" and dtype is TorchDtype.FLOAT32)


@pytest.mark.parametrize("normalizes", [True, False])
def test_a_mixture_has_numpys_logits_and_routes_its_own_and_given(normalizes: bool, tmp_path: Path) -> None:
    loaded = load_weights(write_mixture_folder(tmp_path / "mixture", normalizes=normalizes))
    ids, spans = np.array(IDS * 3, np.intc), (RowSpan(2, 2 + 3 * len(IDS)),)
    others = np.random.default_rng(0).permuted(np.tile(np.arange(EXPERTS), (len(ids), LAYERS, 1)), axis=-1)[..., :TOP_K]
    others[5:9, 1, 0] = -1
    for routes in (None, others.astype(np.intc)):
        made = [Segment(ids=ids, start=0, spans=spans, logits_for=LogitsFor.ALL, routes=routes)]
        numpy, other = NumpyForward(*loaded, num_kv_tokens=ROWS), TorchForward(*loaded, num_kv_tokens=ROWS)
        np.testing.assert_allclose(other.forward(made), numpy.forward(made), atol=ATOL)
        for model in (numpy, other):
            model.copy_kv(2, 100, 8)
        for rows in (spans, (RowSpan(4, 6), RowSpan(100, 108))):
            expected, found = numpy.routes(rows), other.routes(rows)
            assert expected is not None
            assert found is not None
            assert found.dtype == expected.dtype
            np.testing.assert_array_equal(found, expected)
