"""The folder of a run of rollouts: samples and outcomes of each ended rollout, so that an interrupted run goes on.

    run.json            what the folder is of: environment, options, seed, session
    rollouts.jsonl      a line for each ended rollout, written after its samples are on the disk
    samples/*.safetensors    a rollout's payload, as the server gave it (docs/samples.md); *.fork0.…: its branches'
    atif/*.json         with --atif: a rollout as a trajectory

A line cut by a crash is dropped, and its rollout run again. Blocks.
"""

import fcntl
import json
import os
import re
import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import cast

from stenograph.client.samples import DecodedSamples, Reward, decoded
from stenograph.client.session import RolloutEnd
from stenograph.core.whole_file import replace_file
from stenograph.envs.base import WrongEnvironment

MAX_NAME_CHARS = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedRollout:
    """One line. `number` counts a task's rollouts from 0. `samples` is the payload's place in the folder, None where
    there is none; `num_trained` counts its trained tokens. `error` is one line, None where it ended `ok`;
    `trajectory_error` is one too, why its trajectory could not be made. `branches` are rows of `branch_row`,
    `branches_error` why there are none."""

    task: str
    number: int
    session: str | None
    end: RolloutEnd
    reward: Reward | None
    seconds: float
    num_tries: int
    num_trained: int
    samples: str | None
    error: str | None
    trajectory_error: str | None = None
    branches: Sequence[Mapping[str, object]] = ()
    branches_error: str | None = None


class RolloutFolder:
    """The folder of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._ended: dict[tuple[str, int], EndedRollout] = {}
        self._writing = threading.Lock()

    def __repr__(self) -> str:
        return f"<RolloutFolder {self.path}, {len(self._ended)} rollouts>"

    def __iter__(self) -> Iterator[EndedRollout]:
        return iter(self._ended.values())

    @contextmanager
    def held(self, facts: Mapping[str, object]) -> Generator[None]:
        """While inside, the folder is there, has what it had, and no other run writes to it.

        Raises WrongEnvironment where another run holds it, and where it is of other facts, with the difference.
        """
        with ExitStack() as stack:
            self._open(stack, facts)
            yield

    def _open(self, stack: ExitStack, facts: Mapping[str, object]) -> None:
        try:
            (self.path / "samples").mkdir(parents=True, exist_ok=True)
            fcntl.flock(stack.enter_context((self.path / "lock").open("w")), fcntl.LOCK_EX | fcntl.LOCK_NB)
            run = self.path / "run.json"
            if run.exists():
                self._check(json.loads(run.read_text()), facts)
            else:
                replace_file(run, json.dumps(facts, indent=1).encode())
        except BlockingIOError as error:
            raise WrongEnvironment(f"another run writes to {self.path}") from error
        except (OSError, ValueError) as error:
            raise WrongEnvironment(f"cannot use the folder {self.path}: {error}") from error
        self.read()

    def read(self) -> None:
        """Read the lines. Raises WrongEnvironment for a file other than such lines."""
        log = self.path / "rollouts.jsonl"
        lines = log.read_bytes().splitlines(keepends=True) if log.exists() else []
        if lines and not lines[-1].endswith(b"\n"):
            cut = lines.pop()
            os.truncate(log, log.stat().st_size - len(cut))
        try:
            for line in lines:
                ended = EndedRollout(**json.loads(line))
                self._ended[ended.task, ended.number] = ended
        except (ValueError, TypeError) as error:
            raise WrongEnvironment(f"{log} is no list of rollouts: {error}") from error

    def is_done(self, task: str, number: int) -> bool:
        """Whether this rollout need not be run again: the agent ended it, not infrastructure and not the run's end."""
        ended = self._ended.get((task, number))
        return ended is not None and ended.end in ("ok", "agent_failed")

    def keep(self, place: str, payload: bytes) -> None:
        """Put a payload on the disk. Raises OSError."""
        replace_file(self.path / place, payload)

    def add(self, ended: EndedRollout, payload: bytes | None, trajectory: Mapping[str, object] | None = None) -> None:
        """Keep a rollout: its samples and trajectory first, then its line, all on the disk when it returns. Any thread
        may call it. Raises OSError, and then keeps no part of the line."""
        if payload is not None:
            assert ended.samples is not None
            replace_file(self.path / ended.samples, payload)
        if trajectory is not None:
            (self.path / "atif").mkdir(exist_ok=True)
            name = f"{_name_of(ended.task)}.{ended.number}.json"
            replace_file(self.path / "atif" / name, json.dumps(trajectory).encode())
        line = json.dumps(asdict(ended)).encode() + b"\n"
        with self._writing, (self.path / "rollouts.jsonl").open("ab", buffering=0) as log:
            end = log.tell()
            try:
                if log.write(line) != len(line):
                    raise OSError(f"a line of {log.name} was cut: is the disk full?")
                os.fsync(log.fileno())
            except OSError:
                log.truncate(end)
                raise
        self._ended[ended.task, ended.number] = ended

    def samples(self, ended: EndedRollout) -> DecodedSamples | None:
        """A rollout's samples. Raises OSError, and BadPayload for a damaged file."""
        return None if ended.samples is None else decoded((self.path / ended.samples).read_bytes())

    def _check(self, was: object, now: Mapping[str, object]) -> None:
        if not isinstance(was, dict):
            raise ValueError("its run.json is no object")
        was, wants = cast("dict[str, object]", was), json.loads(json.dumps(now))
        for name in {**was, **wants}:
            if was.get(name) != wants.get(name):
                raise WrongEnvironment(
                    f"{self.path} is of a run with {name} {was.get(name)!r}, and this one has {wants.get(name)!r}:"
                    " name another folder"
                )


def place_of(task: str, number: int, *, branch: int | None = None) -> str:
    """The place of the samples of a rollout, or of a branch of it, in the folder."""
    return f"samples/{_name_of(task)}.{number}{'' if branch is None else f'.fork{branch}'}.safetensors"


def _name_of(task: str) -> str:
    """A task's name among files. Its id may hold anything; the name is of letters, and has a digest where it is not the
    id itself: no two tasks have the same."""
    name = re.sub(r"[^A-Za-z0-9._-]", "_", task)[:MAX_NAME_CHARS]
    if name != task:
        name += f"-{blake2b(task.encode('utf-8', 'surrogatepass'), digest_size=8).hexdigest()}"
    return name
