"""`stenograph rollout ENV --out DIR`: runs an environment's tasks on sessions, and keeps samples and outcomes.

The sessions are of a running server (`--url`), or of one started here with `serve`'s flags. Owns the exit code: 0 all
rollouts ended by their agents, 1 some were lost by infrastructure, 130 interrupted, 2 nothing could be begun.
"""

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from stenograph.cli.commands import EXIT_INTERRUPTED
from stenograph.cli.run_command import check_url, ended_by_signals, json_object
from stenograph.cli.run_report import say
from stenograph.cli.run_server import OwnServer, serve_flags
from stenograph.client.client import Client
from stenograph.client.errors import WrongKey, WrongRequest
from stenograph.core.errors import StartupError
from stenograph.envs.base import Environment, WrongEnvironment, environment
from stenograph.envs.folder import RolloutFolder
from stenograph.envs.rollout import Member, RolloutPlan, members_of, run_rollouts, summary


def rollout(options: dict[str, Any]) -> int:
    """Carry out `rollout`; returns the exit code. Raises StartupError, for a bad setting too."""
    own = {name: options.pop(name) for name in ("env", "url", "out", "group_size", "num_tasks", "seed", "concurrency")}
    timeout_s, session = options.pop("agent_timeout"), json_object("--session", options.pop("session"))
    env_options = json_object("--env-options", options.pop("env_options"))
    flags, settings = serve_flags(options, is_started=own["url"] is None)
    check_url(own["url"], flags)
    plan = RolloutPlan(
        facts={"environment": own["env"], "options": env_options, "seed": own["seed"], "session": session},
        num_tasks=own["num_tasks"],
        seed=own["seed"],
        group_size=own["group_size"],
        concurrency=own["concurrency"],
        timeout_s=timeout_s,
        session=session,
    )
    folder = RolloutFolder(cast("Path", own["out"]))
    api_key = settings.api_key[0] if settings.api_key else None
    try:
        made = environment(own["env"], env_options)
        members = members_of(made, plan)
        with contextlib.ExitStack() as stack:
            stack.enter_context(folder.held(plan.facts))
            stack.enter_context(ended_by_signals())
            server = None if own["url"] is not None else stack.enter_context(OwnServer.started(flags, say))
            url = own["url"] if server is None else server.url
            asyncio.run(_run(Client(url, api_key=api_key), made, members, folder, plan))
    except (WrongEnvironment, WrongKey, WrongRequest) as error:
        raise StartupError(str(error)) from error
    except KeyboardInterrupt:
        say(f"interrupted; the same command goes on with {folder.path}")
        return EXIT_INTERRUPTED
    for line in summary(folder):
        say(line)
    return 0 if all(one.end != "infra_failed" for one in folder) else 1


async def _run(
    client: Client, made: Environment, members: Sequence[Member], folder: RolloutFolder, plan: RolloutPlan
) -> None:
    async with client:
        await run_rollouts(client, made, members, folder, plan)
