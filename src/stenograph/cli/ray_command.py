"""`stenograph ray up | down | status`: a server on each machine of a Ray cluster.

`up` writes the addresses, a line each; `status` a line for each machine. Exit codes: 0, 1 if `status` finds a machine
whose server does not run; whatever stops the start is a StartupError, as everywhere.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TextIO

from stenograph.deploy.ray import NodeState, report, start, stop

RAY = "ray"
RAY_ACTIONS = ("up", "down", "status")

EXIT_ALL_RUN = 0
EXIT_SOME_MISSING = 1

RAY_EXAMPLES = """\
examples:
  stenograph ray up --model Qwen/Qwen3-8B --engine sglang --engine-url http://10.0.0.5:30000 --store postgresql://db/x
      a server on each machine of this machine's cluster; any of them serves any session. Their addresses go to stdout
  stenograph ray status
  stenograph ray down
      stops all of them, after their turns

Flags of `up` are those of serve, and so are its STENOGRAPH_... variables and its --config file; all of it is read here
and given to each server. --host is each machine's own address unless it is given, and --port 0 is any free one.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayOptions:
    """Options of `ray` that are no settings. `address` is the cluster's."""

    action: Literal["up", "down", "status"]
    address: str
    cpus: float


def ray_command(options: RayOptions, settings: Mapping[str, object], *, out: TextIO) -> int:
    """Do it; returns the exit code. Raises StartupError. `settings` are those that are given, for `up`."""
    match options.action:
        case "up":
            for url in start(settings, address=options.address, cpus=options.cpus):
                print(url, file=out)
        case "down":
            print(f"servers stopped: {stop(address=options.address)}", file=out)
        case "status":
            return _status(options.address, out)
    return EXIT_ALL_RUN


def _status(address: str, out: TextIO) -> int:
    nodes = report(address=address)
    print(f"{'machine':12}  {'address':15}  {'server':8}  url", file=out)
    for node in nodes:
        line = f"{node.machine.number[:12]:12}  {node.machine.address:15}  {node.state:8}  {node.url}"
        print(line.rstrip(), file=out)
    return EXIT_ALL_RUN if all(node.state is NodeState.RUNNING for node in nodes) else EXIT_SOME_MISSING
