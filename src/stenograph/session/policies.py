"""Turns that a LoRA samples: their services, and the versions of the LoRA. Loaded by the first one."""

from dataclasses import replace
from pathlib import Path

import msgspec
from msgspec import structs

from stenograph.core.errors import EngineUnavailable, UnexpectedFailure
from stenograph.core.whole_file import replace_file
from stenograph.engine.base import Engine
from stenograph.session.services import TurnServices
from stenograph.session.weights import SyncState, Weights


def services_of(services: TurnServices, policy: str) -> TurnServices:
    """The services of a session's turns. Raises EngineUnavailable where the engine would sample by its own model."""
    if services.engine.capabilities.policies is None:
        kind = services.engine.capabilities.engine
        raise EngineUnavailable(f"The session is sampled by the LoRA {policy!r}, and the engine {kind} takes none.")
    return replace(services, policy=policy, weights=services.weights.of(policy))


class LoraWeights(Weights):
    """The weights of turns by a LoRA. They change with the model's, and by each load of the LoRA.

    `version` is the name that its last load gave, the model's before. What is cached is named by both.
    """

    def __init__(self, model: Weights, lora: str) -> None:
        self._model, self._lora = model, lora
        self._kept = None if model.kept_loras is None else model.kept_loras()
        kept = None if self._kept is None else self._kept.last(lora)
        self.last_loaded = None if kept is None else kept[0]
        """The name that its last load gave, also before a restart."""
        self.loaded = self.last_loaded if kept is not None and kept[1] else None
        """The same, while engines have what it loaded."""
        super().__init__(self.loaded or model.version)
        self.is_paused, self.is_held, self._is_frozen = model.is_paused, model.is_held, model.is_frozen
        self.num_changes = model.num_changes % 2

    def load(self, version: str | None, folder: str = "") -> None:
        """End a load from a folder, under way since `begin_change`. None: no engine has taken it. Raises
        UnexpectedFailure where it cannot be kept; it counts all the same."""
        self.loaded = version or self.loaded
        self.last_loaded = version or self.last_loaded
        self.end_change(version)
        if version is not None and self._model.on_taken is not None:
            self._model.on_taken()
        if version is not None and self._kept is not None:
            self._kept.keep(self._lora, version, folder)

    def name(self, version: str | None) -> None:
        super().name(self.loaded or version)

    def end_change(self, version: str | None) -> None:
        super().end_change(None if version is None else self.loaded or version)

    def follow(self, state: SyncState) -> None:
        super().follow(structs.replace(state, version=self.loaded or state.version))

    def _named(self, version: str | None) -> None:
        super()._named(version)
        if self.loaded is not None:
            self.cached_as = f"{self._model.cached_as or ''}+{self.loaded}"


def last_loaded(model: Weights, lora: str) -> str | None:
    """The version of the last load of a LoRA, also before a restart."""
    if isinstance(weights := model.loras.get(lora), LoraWeights):
        return weights.last_loaded
    kept = None if model.kept_loras is None else model.kept_loras().last(lora)
    return None if kept is None else kept[0]


FILE_NAME = "loras.json"
_LOADS = msgspec.json.Decoder(dict[str, tuple[str, str]])


class LoraFile:
    """The last loads, `{name: [version, folder]}`, in a file beside the sessions. Reads and writes block; both are
    rare."""

    def __init__(self, folder: Path, engine: Engine) -> None:
        self._file, self._engine = folder / FILE_NAME, engine

    def __repr__(self) -> str:
        return f"<LoraFile {self._file}>"

    def last(self, lora: str) -> tuple[str, bool] | None:
        """As `KeptLoras`. Raises UnexpectedFailure for a file of another shape."""
        if (load := self._read().get(lora)) is None:
            return None
        listed = [one.capabilities.policies or {} for one in self._engine.members.values()]
        return load[0], {one[lora] for one in listed if lora in one} == {load[1]}

    def keep(self, lora: str, version: str, folder: str) -> None:
        """As `KeptLoras`."""
        try:
            replace_file(self._file, msgspec.json.encode({**self._read(), lora: (version, folder)}), is_private=True)
        except OSError as error:
            raise UnexpectedFailure(f"Version {version!r} of the LoRA {lora!r} cannot be kept: {error}.") from error

    def _read(self) -> dict[str, tuple[str, str]]:
        try:
            return _LOADS.decode(self._file.read_bytes())
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.DecodeError) as error:
            raise UnexpectedFailure(f"The versions of LoRAs in {str(self._file)!r} cannot be read: {error}.") from error
