"""The embedded engine on torch keeps the laws that it keeps on NumPy, in its own process."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from standins.tiny.llama import CONTEXT, write_tiny_folder
from standins.tiny.model import TinyModel
from stenograph.conformance.check import check_engine
from stenograph.conformance.laws import LAST_LAWS, LAWS
from stenograph.core.errors import StartupError
from stenograph.embedded.engine import EmbeddedEngine
from stenograph.embedded.options import EmbeddedOptions
from stenograph.parts import ForwardKind

from .test_conformance import NOT_OFFERED, embedded

torch = pytest.importorskip("torch", reason="torch is an extra; scripts/test-torch runs these")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("device", ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"])
async def test_the_embedded_engine_on_torch_keeps_the_laws(device: str, tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "tiny")
    model = TinyModel(folder)

    async def score(ids: Sequence[int], num_prompt: int) -> Sequence[float]:
        return model.score(ids, num_prompt)

    options = EmbeddedOptions(threads=1, max_batch=4, kv_tokens=4096, forward=ForwardKind.TORCH, torch_device=device)
    make = embedded(folder, options, "the user asks and", score=score, max_sequence_tokens=CONTEXT)
    report = await check_engine(make, deadline_s=240.0)
    assert set(report.shown) == {*LAWS, *LAST_LAWS} - NOT_OFFERED


async def test_a_device_that_is_not_there_stops_the_start_with_one_line(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "tiny")
    engine = EmbeddedEngine(folder, EmbeddedOptions(forward=ForwardKind.TORCH, torch_device="cuda:99"))
    with pytest.raises(StartupError, match=r"^--torch-device is cuda:99, but torch .* sees \d+ GPUs$"):
        await engine.start()
    await engine.aclose()
