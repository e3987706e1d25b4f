"""The embedded engine with xgrammar's masks keeps the laws, in its own process; without xgrammar it does not start."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path

import pytest

from stenograph.core.errors import StartupError
from stenograph.core.types import GrammarKind
from stenograph.embedded.options import EmbeddedOptions
from stenograph.embedded.settings import GrammarBackendKind
from stenograph.engine.embedded import EmbeddedEngine
from stenograph.testing.suite.conformance import check_engine
from stenograph.testing.suite.engine_laws import LAST_LAWS, LAWS
from stenograph.testing.tiny.llama import CONTEXT, write_tiny_folder
from stenograph.testing.tiny.model import TinyModel

from .test_conformance import NOT_OFFERED, embedded

HAS_XGRAMMAR = importlib.util.find_spec("xgrammar") is not None
OPTIONS = EmbeddedOptions(threads=1, max_batch=4, kv_tokens=4096, grammar_backend=GrammarBackendKind.XGRAMMAR)


@pytest.mark.timeout(300)
@pytest.mark.skipif(not HAS_XGRAMMAR, reason="xgrammar is an extra; scripts/test-xgrammar runs this")
async def test_the_embedded_engine_with_xgrammar_keeps_the_laws(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "tiny")
    model = TinyModel(folder)

    async def score(ids: Sequence[int], num_prompt: int) -> Sequence[float]:
        return model.score(ids, num_prompt)

    make = embedded(folder, OPTIONS, "the user asks and", score=score, max_sequence_tokens=CONTEXT)
    report = await check_engine(make, deadline_s=240.0)
    assert set(report.shown) == {*LAWS, *LAST_LAWS} - NOT_OFFERED


@pytest.mark.skipif(not HAS_XGRAMMAR, reason="xgrammar is an extra; scripts/test-xgrammar runs this")
async def test_the_engine_with_xgrammar_says_that_it_has_no_lark(tmp_path: Path) -> None:
    engine = EmbeddedEngine(write_tiny_folder(tmp_path / "tiny"), OPTIONS)
    await engine.start()
    assert engine.capabilities.grammars == frozenset(GrammarKind) - {GrammarKind.LARK}
    await engine.aclose()


@pytest.mark.skipif(HAS_XGRAMMAR, reason="xgrammar is installed")
async def test_where_xgrammar_is_not_installed_the_start_is_refused_with_the_command_that_installs_it(
    tmp_path: Path,
) -> None:
    engine = EmbeddedEngine(write_tiny_folder(tmp_path / "tiny"), OPTIONS)
    with pytest.raises(StartupError, match=r"^--grammar-backend is xgrammar, .* pip install xgrammar$"):
        await engine.start()
    await engine.aclose()
