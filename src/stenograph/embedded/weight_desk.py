"""Takes commands about weights and pauses, and answers each with one event.

Owns the thread that reads a set of weights while steps go on, one set at a time. The step loop only swaps: what was
read and prepared comes in, what was there goes out, and its memory is given back on the reading thread.
"""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import assert_never

from stenograph.core.errors import StartupError
from stenograph.core.types import RequestId
from stenograph.embedded.engine_core import EngineCore
from stenograph.embedded.forward.base import Forward, PreparedWeights
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
        self._lock = threading.Lock()
        self._is_loading = False

    def obey(self, command: Control) -> None:
        """Begin what a command asks for. Cheap: computes and reads nothing."""
        if command.kind is not ControlKind.LOAD:
            self._loop.between_steps(lambda: self._send(self._done(command)))
        elif self._begins():
            threading.Thread(target=self._load, args=(command,), name="weights", daemon=True).start()
        else:
            self._refuse(command.request_id, "other weights are being loaded")

    def _begins(self) -> bool:
        with self._lock:
            was_loading, self._is_loading = self._is_loading, True
        return not was_loading

    def _done(self, command: Control) -> Controlled:
        """Do what takes no time, between two steps."""
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
        return Controlled(request_id=command.request_id, num_paused=num_paused)

    def _load(self, command: Control) -> None:
        """Read and prepare, have it swapped in, and give back what it replaced."""
        path = Path(command.path)
        try:
            prepared = self._forward.prepare(*load_weights(path))
        except (StartupError, ValueError) as error:
            message = str(error)
            self._refuse(command.request_id, message if message.startswith(str(path)) else f"{path}: {message}")
        except MemoryError:
            self._refuse(command.request_id, f"{path}: there is no memory for a second set of weights")
        else:
            self._swap(command, prepared)
        finally:
            self._is_loading = False

    def _swap(self, command: Control, prepared: PreparedWeights) -> None:
        before: list[PreparedWeights] = []
        swapped = threading.Event()

        def swap() -> None:
            old, num_running = self._core.swap(prepared, command.version)
            before.append(old)
            swapped.set()
            self._send(Controlled(request_id=command.request_id, num_paused=num_running))

        self._loop.between_steps(swap)
        swapped.wait()
        before.pop().free()

    def _refuse(self, request_id: RequestId, problem: str) -> None:
        self._send(Controlled(request_id=request_id, problem=problem))
