"""`stenograph rollout ENV --out DIR`: runs an environment's tasks on sessions, and keeps samples and outcomes.

The sessions are of a running server (`--url`), or of one started here with `serve`'s flags. Owns the exit code: 0 all
rollouts ended by their agents, 1 some were lost by infrastructure, 130 interrupted, 2 nothing could be begun.
"""

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

from stenograph.cli.commands import EXIT_INTERRUPTED
from stenograph.cli.run_command import ended_by_signals, json_object
from stenograph.cli.run_report import say
from stenograph.cli.run_server import ServerWish
from stenograph.client.client import Client
from stenograph.client.errors import WrongKey, WrongRequest
from stenograph.core.errors import StartupError
from stenograph.envs.base import Environment, WrongEnvironment, environment
from stenograph.envs.branches import ForkPlan
from stenograph.envs.folder import RolloutFolder
from stenograph.envs.rollout import Member, RolloutPlan, members_of, run_rollouts, summary


def rollout(options: dict[str, Any]) -> int:
    """Carry out `rollout`; returns the exit code. Raises StartupError, for a bad setting too."""
    session = json_object("--session", options.pop("session"))
    env, env_options = options.pop("env"), json_object("--env-options", options.pop("env_options"))
    seed, folder = options.pop("seed"), RolloutFolder(options.pop("out"))
    fork_at = options.pop("fork_at")
    server = ServerWish.of(options)
    facts = {"environment": env, "options": env_options, "seed": seed, "session": session}
    plan = RolloutPlan(
        facts=facts if fork_at is None else {**facts, "fork_at": fork_at},
        fork_at=None if fork_at is None else _fork_plan(fork_at),
        seed=seed,
        session=session,
        timeout_s=options.pop("agent_timeout"),
        **options,
    )
    api_key = server.settings.api_key[0] if server.settings.api_key else None
    try:
        made = environment(env, env_options)
        members = members_of(made, plan)
        with contextlib.ExitStack() as stack:
            stack.enter_context(folder.held(plan.facts))
            stack.enter_context(ended_by_signals())
            url = stack.enter_context(server.reached()).calls.url
            asyncio.run(_run(Client(url, api_key=api_key), made, members, folder, plan))
    except (WrongEnvironment, WrongKey, WrongRequest) as error:
        raise StartupError(str(error)) from error
    except OSError as error:
        raise StartupError(f"stopped: {error}; the same command goes on with {folder.path}") from error
    except KeyboardInterrupt:
        say(f"interrupted; the same command goes on with {folder.path}")
        return EXIT_INTERRUPTED
    for line in summary(folder):
        say(line)
    return 0 if all(one.end != "infra_failed" for one in folder) else 1


def _fork_plan(text: str) -> ForkPlan:
    try:
        return ForkPlan.of(text)
    except ValueError as error:
        raise StartupError(f"--fork-at: {error}") from error


async def _run(
    client: Client, made: Environment, members: Sequence[Member], folder: RolloutFolder, plan: RolloutPlan
) -> None:
    async with client:
        await run_rollouts(client, made, members, folder, plan)
