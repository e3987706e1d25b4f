"""A command about weights is answered whatever happens."""

from pathlib import Path
from queue import SimpleQueue

import pytest

from standins.tiny.llama import write_tiny_folder
from stenograph.core.clock import SystemClock
from stenograph.core.types import RequestId
from stenograph.embedded.engine_core import EngineLimits
from stenograph.embedded.forward.weights import LlamaConfig, LlamaWeights
from stenograph.embedded.loop import EngineLoop
from stenograph.embedded.weight_desk import WeightDesk
from stenograph.embedded.wire import Control, ControlKind, Controlled

from .ledger_forward import LedgerForward, LedgerWeights
from .test_engine_machine import core_of, tokenizer


class FailingForward(LedgerForward):
    """A forward with an error of its own."""

    def prepare(self, config: LlamaConfig, weights: LlamaWeights) -> LedgerWeights:
        raise RuntimeError("a bug")


def test_an_error_that_nobody_thought_of_is_an_answer_and_the_next_update_may_come(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_tiny_folder(tmp_path / "tiny")
    loop = EngineLoop(tokenizer(), num_workers=0, emit=lambda events: None, clock=SystemClock())
    answers: SimpleQueue[Controlled] = SimpleQueue()
    limits = EngineLimits(max_batch=2, kv_tokens=64)
    desk = WeightDesk(FailingForward(limits.num_kv_rows), core_of(limits), loop, answers.put)
    for version in ("1", "2"):
        desk.obey(Control(request_id=RequestId(version), kind=ControlKind.LOAD, path=str(folder), version=version))
        told = answers.get()
        assert (told.request_id, told.version) == (version, "0")
        assert "internal error" in told.problem
        assert "RuntimeError: a bug" in capsys.readouterr().err
    loop.close()
