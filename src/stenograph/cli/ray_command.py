"""`stenograph ray up | down | status`: a server on each machine of a Ray cluster.

`up` writes the addresses, a line each; `status` a line for each machine. Exit codes: 0, 1 if `status` finds a machine
without a running server; whatever stops the start is a StartupError, as everywhere.
"""

import os
import sys
from typing import Any, TextIO

from stenograph.cli.settings_table import SETTINGS, given_settings, load_settings
from stenograph.cluster.ray import NodeState, report, start, stop
from stenograph.core.errors import StartupError

EXIT_ALL_RUN = 0
EXIT_SOME_MISSING = 1


def ray(options: dict[str, Any]) -> int:
    """Carry out `ray`; returns the exit code. Raises StartupError, for a bad setting too."""
    action, address, cpus = options.pop("action"), options.pop("ray_address"), options.pop("cpus")
    config = options.pop("config")
    given = [setting.flag for setting in SETTINGS if options[setting.name] is not None]
    if action != "up":
        if given or config is not None:
            raise StartupError(f"{given[0] if given else '--config'} is of ray up, not of ray {action}")
        if action == "status":
            return _status(address, sys.stdout)
        print(f"servers stopped: {stop(address=address)}")
        return EXIT_ALL_RUN
    settings = given_settings(options, os.environ, config)
    own = {"advertise_url": "http://each-machine"} if "store" in settings else {}
    load_settings({**options, **own}, os.environ, config)
    for url in start(settings, address=address, cpus=cpus):
        print(url)
    return EXIT_ALL_RUN


def _status(address: str, out: TextIO) -> int:
    nodes = report(address=address)
    print(f"{'machine':12}  {'address':15}  {'server':8}  url", file=out)
    for node in nodes:
        line = f"{node.machine.number[:12]:12}  {node.machine.address:15}  {node.state:8}  {node.url}"
        print(line.rstrip(), file=out)
    return EXIT_ALL_RUN if all(node.state is NodeState.RUNNING for node in nodes) else EXIT_SOME_MISSING
