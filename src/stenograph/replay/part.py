"""The part: a server living the sessions of a folder again, with an engine behind it or without."""

import asyncio
import re
from collections.abc import AsyncGenerator
from dataclasses import replace
from functools import partial
from pathlib import Path

from stenograph.core.errors import InvalidRequest, StartupError
from stenograph.core.settings import Switch
from stenograph.core.types import Chunk, RequestId
from stenograph.engine.base import Capabilities, Engine, EngineHealth, EngineState, GenerateRequest
from stenograph.engine.settings import EngineKind
from stenograph.http.processes import Processes
from stenograph.http.settings import Settings
from stenograph.model.files import load_model_files
from stenograph.model.tokenizer import Tokenizer
from stenograph.parts import ReplayPace, ReplaySettings, settings_of
from stenograph.replay.manager import ReplayManager, ReplayStorage
from stenograph.session.admission import Capacity, Limits
from stenograph.session.recorded import VOLATILE
from stenograph.store.folder import FILES

REFUSAL = (
    "This server has no engine (--engine replay): it answers requests of sessions in its --data-dir as they were"
    " answered, and no others."
)


class NoEngine(Engine):
    """Stands where an engine would: it samples nothing."""

    def __init__(self, path: Path, vocab_size: int) -> None:
        """`path` is the model's."""
        self._path = path
        self._capabilities = Capabilities(
            engine=EngineKind.REPLAY,
            model=path.name,
            vocab_size=vocab_size,
            max_context_tokens=None,
            grammars=frozenset(),
            streams=True,
        )

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    @property
    def num_running(self) -> int:
        return 0

    async def start(self) -> None:
        files = await asyncio.to_thread(load_model_files, self._path)
        self._capabilities = replace(self._capabilities, model=files.name, max_context_tokens=files.max_context_tokens)

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        raise InvalidRequest(REFUSAL)

    async def abort(self, request_id: RequestId) -> bool:
        return False

    def health(self) -> EngineHealth:
        return EngineHealth(state=EngineState.READY)

    async def aclose(self) -> None:
        """It runs nothing."""


def make_replay(settings: Settings, path: Path, tokenizer: Tokenizer | None, shared: Path | None) -> NoEngine:
    """No engine, for the model at `path`. Arguments are those of `make_engine`."""
    return NoEngine(path, 1 if tokenizer is None else tokenizer.vocab_size)


class ReplayProcesses(Processes):
    """One process, living sessions again."""

    def __init__(self, settings: Settings) -> None:
        """Raises StartupError without sessions to live again."""
        super().__init__()
        folder = settings.data_dir
        if folder is None or not any(folder.glob(FILES)):
            raise StartupError(f"--data-dir: there are no sessions to live again in {str(folder)!r}")
        own = settings_of(ReplaySettings, settings)
        has_engine = settings.engine is not EngineKind.REPLAY
        self.storage_type = partial(ReplayStorage, ignored=tuple(map(re.compile, (*VOLATILE, *own.play_ignores))))
        self.manager_type = partial(
            ReplayManager,
            is_paced=own.play is ReplayPace.RECORDED,
            is_strict=own.strict is Switch.ON or not has_engine,
        )

    def capacity(self, limits: Limits, *, evicts: bool) -> Capacity:
        """Nothing is evicted: lived sessions are in memory alone."""
        return Capacity(limits)
