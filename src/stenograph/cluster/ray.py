"""A server on each machine of a Ray cluster: placed, found and stopped. `stenograph ray`, and `start` for a trainer.

Each is a detached actor, named after Ray's id of its machine; Ray starts it again when it ends. It stays on its
machine, and keeps its port. Ray is an extra (`pip install -e '.[ray]'`), imported when it is asked for.
"""

import enum
import importlib
import json
import logging
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, cast

from stenograph.cluster.ray_actor import NodeActor, free_port
from stenograph.cluster.server_process import STOP_S
from stenograph.core.errors import StartupError
from stenograph.core.settings import ENV_PREFIX
from stenograph.http.settings import Settings

NAMESPACE = "stenograph"
"""The namespace of the actors' names."""

START_S = 900.0
"""Longest time for a server to start; weights may have to be fetched."""

LOOK_S = 5.0
"""Longest time for an actor to say its address."""

_NAME = "node-"


class NodeState(enum.StrEnum):
    """The state of a machine's server."""

    RUNNING = "running"
    STARTING = "starting"
    ABSENT = "absent"


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A machine of the cluster: Ray's id of it, and its address."""

    number: str
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """A machine and its server. The `url` is "" unless it runs."""

    machine: Machine
    state: NodeState
    url: str = ""


def start(
    settings: Mapping[str, object] | None = None,
    *,
    address: str = "auto",
    cpus: float = 0.0,
    timeout_s: float = START_S,
) -> list[str]:
    """Place a server on each machine without one, wait until all are ready, and return the addresses of all.

    `settings` are those of `serve`, by the names of docs/settings.md. `address` is the cluster's, where this process is
    not connected to it yet. `cpus` are reserved for each server. Running servers stay as they are. Raises
    StartupError if one does not start: those not started are taken away again, the others stay.
    """
    variables = variables_of(settings or {})
    with _connected(address) as ray:
        begun = [(machine, _actor(ray, machine, variables, cpus)) for machine in _machines(ray)]
        answers = [actor.begin.remote() for _, actor in begun]
        urls: list[str] = []
        problems: dict[str, list[str]] = {}
        for (machine, actor), answer in zip(begun, answers, strict=True):
            try:
                urls.append(ray.get(answer, timeout=timeout_s))
            except Exception as error:  # noqa: BLE001 -- whatever Ray has of it, a sentence is made of it
                ray.kill(actor, no_restart=True)
                problems.setdefault(_problem(error, timeout_s), []).append(machine.address)
        if problems:
            said = "; ".join(f"on {', '.join(where)}: {problem}" for problem, where in problems.items())
            raise StartupError(f"{said} ({len(urls)} servers run)")
        return urls


def report(*, address: str = "auto") -> list[NodeReport]:
    """All machines, and how the server of each is. Raises StartupError."""
    with _connected(address) as ray:
        names = _names(ray)
        return [_report(ray, machine, names) for machine in _machines(ray)]


def stop(*, address: str = "auto") -> int:
    """Stop all servers, after their turns, and take their actors away; the number of them. Raises StartupError."""
    with _connected(address) as ray:
        actors = [ray.get_actor(name, namespace=NAMESPACE) for name in _names(ray)]
        answers = [actor.end.remote() for actor in actors]
        for actor, answer in zip(actors, answers, strict=True):
            with suppress(Exception):  # one that is starting, or has died: it is taken away all the same
                ray.get(answer, timeout=STOP_S)
            ray.kill(actor, no_restart=True)
        return len(actors)


def variables_of(settings: Mapping[str, object]) -> dict[str, str]:
    """Settings as variables of a server's environment. Raises StartupError for a per-machine setting."""
    if settings.get("advertise_url") is not None:
        raise StartupError("--advertise-url is each machine's own: leave it out, and Ray's address of it is taken")
    return {
        ENV_PREFIX + ("CACHE" if name == "cache_dir" else name.upper()): _text(value)
        for name, value in settings.items()
        if value is not None
    }


def variables_at(variables: Mapping[str, str], machine: Machine, port: int) -> tuple[dict[str, str], str]:
    """The variables of one machine's server, and its address for others."""
    host = f"[{machine.address}]" if ":" in machine.address else machine.address
    url = f"http://{host}:{port}"
    own = {ENV_PREFIX + "HOST": machine.address, **variables, ENV_PREFIX + "PORT": str(port)}
    if ENV_PREFIX + "STORE" in variables:
        own[ENV_PREFIX + "ADVERTISE_URL"] = url
    return own, url


def _text(value: object) -> str:
    if isinstance(value, Mapping):
        return json.dumps(value)
    if isinstance(value, list | tuple):
        return ",".join(map(str, cast("Sequence[object]", value)))
    return str(value)


def _library() -> Any:
    """Ray. Raises StartupError, with the way to get it."""
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise StartupError("stenograph on a Ray cluster needs ray: pip install -e '.[ray]'") from error


@contextmanager
def _connected(address: str) -> Generator[Any]:
    """Ray, connected to a cluster: by whoever calls, or for as long as this lasts. Raises StartupError."""
    ray = _library()
    if ray.is_initialized():
        yield ray
        return
    try:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.WARNING)
    except (ConnectionError, ValueError, RuntimeError) as error:
        problem = " ".join(str(error).split())
        raise StartupError(
            f"there is no Ray cluster at {address!r} (`ray start --head` makes one): {problem}"
        ) from error
    try:
        yield ray
    finally:
        ray.shutdown()


def _machines(ray: Any) -> list[Machine]:
    return [Machine(number=node["NodeID"], address=node["NodeManagerAddress"]) for node in ray.nodes() if node["Alive"]]


def _names(ray: Any) -> list[str]:
    """The names of the present actors."""
    found = ray.util.list_named_actors(all_namespaces=True)
    return [one["name"] for one in found if one["namespace"] == NAMESPACE and one["name"].startswith(_NAME)]


def _actor(ray: Any, machine: Machine, variables: Mapping[str, str], cpus: float) -> Any:
    """The actor of a machine, placed if there is none."""
    name = _NAME + machine.number
    with suppress(ValueError):  # there is none
        return ray.get_actor(name, namespace=NAMESPACE)
    stays = importlib.import_module("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy(
        machine.number, soft=False
    )
    port = int(variables.get(ENV_PREFIX + "PORT", str(Settings.port)))
    if port == 0:  # found once, so that the server has it again when it is started again
        looking = ray.remote(free_port).options(num_cpus=0, scheduling_strategy=stays)
        port = ray.get(looking.remote(machine.address))
    own, url = variables_at(variables, machine, port)
    placing = ray.remote(NodeActor).options(
        name=name,
        namespace=NAMESPACE,
        lifetime="detached",
        max_restarts=-1,
        num_cpus=cpus,
        scheduling_strategy=stays,
        get_if_exists=True,
    )
    return placing.remote(own, url)


def _report(ray: Any, machine: Machine, names: Sequence[str]) -> NodeReport:
    name = _NAME + machine.number
    if name not in names:
        return NodeReport(machine=machine, state=NodeState.ABSENT)
    url = ""
    with suppress(Exception):  # it is being started, or started again
        url = ray.get(ray.get_actor(name, namespace=NAMESPACE).url.remote(), timeout=LOOK_S)
    return NodeReport(machine=machine, state=NodeState.RUNNING if url else NodeState.STARTING, url=url)


def _problem(error: Exception, timeout_s: float) -> str:
    """The reason why an actor has not begun, in a line."""
    cause = getattr(error, "cause", None) or error
    if type(cause).__name__ == "GetTimeoutError":
        return f"the server was not ready after {timeout_s:g} s"
    return " ".join(str(cause).split()) or type(cause).__name__
