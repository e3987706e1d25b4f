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
    return replace(services, policy=policy, weights=compared(services.weights, policy))


def compared(model: Weights, lora: str) -> Weights:
    """The weights of a LoRA, compared with the engines' lists as they are now."""
    weights = model.of(lora)
    assert isinstance(weights, LoraWeights), "those of a LoRA"
    weights.compare()
    return weights


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
        self._folder = "" if kept is None else kept[1]
        """The folder of its last load; empty after an unload."""
        self._is_guarded = False
        """Whether each engine refuses turns by another folder than it was told to load: until an unload."""
        self.loaded = self._listed()
        """The name that its last load gave, while engines have what it loaded."""
        super().__init__(self.loaded or model.version)
        self.is_paused, self.is_held, self._is_frozen = model.is_paused, model.is_held, model.is_frozen
        self.num_changes = model.num_changes % 2

    def load(self, version: str | None, folder: str = "") -> None:
        """End a load from a folder, under way since `begin_change`. None: no engine has taken it. Raises
        UnexpectedFailure where it cannot be kept; it counts all the same."""
        if version is not None:
            self.loaded = self.last_loaded = version
            self._folder, self._is_guarded = folder, True
        self.end_change(version)
        if version is not None and self._model.on_taken is not None:
            self._model.on_taken()
        if version is not None and self._kept is not None:
            self._kept.keep(self._lora, version, folder)

    def unload(self, *, is_gone: bool) -> None:
        """End an unload, under way since `begin_change`. `is_gone`: no engine lists the LoRA; one loaded later by
        another way has the model's version. Raises as `load`."""
        self._is_guarded = False
        if not is_gone or self.last_loaded is None or not self._folder:
            self.end_change(None)
            return
        self._folder, self.loaded = "", None
        self._took(self._model.version)
        self._let_in()
        if self._kept is not None:
            self._kept.keep(self._lora, self.last_loaded, "")

    def compare(self) -> None:
        """Take the last load's version while engines list its folder alone, else the model's: a change of weights."""
        if not self._is_guarded and not self.is_changing and (loaded := self._listed()) != self.loaded:
            self.loaded = loaded
            self.num_changes += 1
            self._took(loaded or self._model.version)

    def _listed(self) -> str | None:
        is_listed = self._folder and self._kept is not None and self._kept.folders(self._lora) == {self._folder}
        return self.last_loaded if is_listed else None

    def age_of(self, version: str) -> int | None:
        if self.loaded is None and self.last_loaded is not None:  # its numbers are not the model's
            names = self._names[::-1]
            return names.index(version) if version in names else None
        return super().age_of(version)

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
        elif self.last_loaded is not None and not self._folder:
            self.cached_as = f"{self._model.cached_as or ''}+{self.last_loaded}-unloaded"


def last_loaded(model: Weights, lora: str) -> str | None:
    """The version of the last load of a LoRA, also before a restart."""
    if isinstance(weights := model.loras.get(lora), LoraWeights):
        return weights.last_loaded
    kept = None if model.kept_loras is None else model.kept_loras().last(lora)
    return None if kept is None else kept[0]


FILE_NAME = "loras.json"
_LOADS = msgspec.json.Decoder(dict[str, tuple[str, str]])


class LoraFile:
    """The last loads, `{name: [version, folder]}`, in a file beside the sessions; without a folder none are kept. Reads
    and writes block; both are rare."""

    def __init__(self, folder: Path | None, engine: Engine) -> None:
        self._file, self._engine = None if folder is None else folder / FILE_NAME, engine

    def __repr__(self) -> str:
        return f"<LoraFile {self._file}>"

    def last(self, lora: str) -> tuple[str, str] | None:
        """As `KeptLoras`. Raises UnexpectedFailure for a file of another shape."""
        return self._read().get(lora)

    def folders(self, lora: str) -> set[str]:
        """As `KeptLoras`."""
        listed = [one.capabilities.policies or {} for one in self._engine.members.values()]
        return {one[lora] for one in listed if lora in one}

    def keep(self, lora: str, version: str, folder: str) -> None:
        """As `KeptLoras`."""
        if self._file is None:
            return
        try:
            replace_file(self._file, msgspec.json.encode({**self._read(), lora: (version, folder)}), is_private=True)
        except OSError as error:
            raise UnexpectedFailure(f"Version {version!r} of the LoRA {lora!r} cannot be kept: {error}.") from error

    def _read(self) -> dict[str, tuple[str, str]]:
        if self._file is None:
            return {}
        try:
            return _LOADS.decode(self._file.read_bytes())
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.DecodeError) as error:
            raise UnexpectedFailure(f"The versions of LoRAs in {str(self._file)!r} cannot be read: {error}.") from error
