"""Takes commands about weights and pauses, and answers each with one event.

Owns the thread that reads a set of weights while steps go on, one set at a time. The step loop only swaps: the prepared
set comes in, the old one goes out, and the next set is read to its memory.
"""

import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import assert_never

from stenograph.core.errors import StartupError
from stenograph.embedded.engine_core import EngineCore
from stenograph.embedded.forward.base import Forward, PreparedWeights
from stenograph.embedded.forward.weight_memory import WeightMemory
from stenograph.embedded.forward.weights import load_weights
from stenograph.embedded.loop import EngineLoop
from stenograph.embedded.wire import Control, ControlKind, Controlled


class WeightDesk:
    """The commands of one engine. `send` may be called on any thread."""

    def __init__(
        self, forward: Forward, core: EngineCore, loop: EngineLoop, send: Callable[[Controlled], None]
    ) -> None:
        self._forward = forward
        self._core = core
        self._loop = loop
        self._send = send
        self._spare: WeightMemory | None = None  # owned by the reading thread
        self._lock = threading.Lock()
        self._is_loading = False

    def obey(self, command: Control) -> None:
        """Begin a command's work. Cheap: computes and reads nothing."""
        if command.kind is not ControlKind.LOAD:
            self._loop.between_steps(lambda: self._send(self._done(command)))
        elif self._begins():
            threading.Thread(target=self._load, args=(command,), name="weights", daemon=True).start()
        else:
            self._send(Controlled(request_id=command.request_id, problem="other weights are being loaded"))

    def _begins(self) -> bool:
        with self._lock:
            was_loading, self._is_loading = self._is_loading, True
        return not was_loading

    def _done(self, command: Control) -> Controlled:
        """Carry out an immediate command, between two steps."""
        core, num_paused = self._core, 0
        match command.kind:
            case ControlKind.PAUSE | ControlKind.RETRACT:
                num_paused = core.pause(retracts=command.kind is ControlKind.RETRACT)
            case ControlKind.RESUME:
                core.resume()
            case ControlKind.FLUSH:
                core.flush()
            case ControlKind.NAME:
                core.weight_version = command.version
            case ControlKind.LOAD:
                raise AssertionError("weights are loaded on a thread of their own")
            case _:
                assert_never(command.kind)
        return Controlled(request_id=command.request_id, num_paused=num_paused, version=core.weight_version)

    def _load(self, command: Control) -> None:
        """Read, prepare, have the set swapped in, keep the memory of the replaced one; then answer, for the next to
        come."""
        path, problem, num_running = Path(command.path), "", 0
        spare, self._spare = self._spare, None  # what is refused may be larger: its memory goes
        try:
            num_running = self._swap(self._forward.prepare(*load_weights(path, spare)), command.version)
        except (StartupError, ValueError) as error:
            problem = str(error) if str(error).startswith(str(path)) else f"{path}: {error}"
        except MemoryError:
            problem = f"{path}: there is no memory for a second set of weights"
        except Exception:  # noqa: BLE001 -- a trainer and all new turns wait for the answer
            traceback.print_exc()
            problem = f"{path}: an internal error while it was loaded; the log has it"
        finally:
            self._is_loading = False
        version = self._core.weight_version
        self._send(Controlled(request_id=command.request_id, problem=problem, num_paused=num_running, version=version))

    def _swap(self, prepared: PreparedWeights, version: str) -> int:
        """Swap between two steps; returns how many requests ran then."""
        done: Future[tuple[PreparedWeights, int]] = Future()
        self._loop.between_steps(lambda: done.set_result(self._core.swap(prepared, version)))
        before, num_running = done.result()
        self._spare = before.free()
        return num_running
