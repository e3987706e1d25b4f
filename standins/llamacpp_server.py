"""A real llama.cpp server in a child process (llamacpp_child.py), which a test starts, stops for a while, and kills."""

import signal
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

END_GRACE_S = 10.0


class LlamaCppServer:
    """A server of `model`, a GGUF file, with `slot_tokens` of context for each of `slots` requests at a time.

    `is_exact`: with the flags that make it as exact as it can be (docs/engines.md). Runs from `__enter__` to
    `__exit__`; its address stays the same over `kill` and `revive`.
    """

    def __init__(self, model: Path, *, slot_tokens: int, slots: int, is_exact: bool = True) -> None:
        self.url = ""
        self.is_paused = False
        self._arguments = [str(model), str(slot_tokens), str(slots)]
        self._precision = "exact" if is_exact else "default"
        self._process: subprocess.Popen[str] | None = None

    def __repr__(self) -> str:
        return f"<LlamaCppServer {self.url or 'not started'}>"

    def __enter__(self) -> "LlamaCppServer":
        self.revive()
        return self

    def __exit__(self, *_: object) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(signal.SIGCONT)
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(END_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        _close(process)

    def revive(self) -> None:
        """Start it. Blocks until it answers; raises RuntimeError if it never does."""
        assert self._process is None, "it runs already"
        command = [sys.executable, "-P", str(Path(__file__).with_name("llamacpp_child.py")), *self._arguments]
        process = subprocess.Popen(
            [*command, str(urlsplit(self.url).port or 0), self._precision],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert process.stdout is not None
        self._process, self.is_paused = process, False
        self.url = process.stdout.readline().strip()
        if not self.url:
            raise RuntimeError(f"llama.cpp did not start: exit code {process.wait()}")

    def kill(self) -> None:
        """End it without a word, also while it is stopped."""
        process, self._process = self._process, None
        assert process is not None, "it does not run"
        process.kill()
        process.wait()
        _close(process)

    def pause(self) -> None:
        """Hold it still."""
        self.is_paused = True
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        self.is_paused = False
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None, "it does not run"
        self._process.send_signal(number)


def _close(process: "subprocess.Popen[str]") -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
