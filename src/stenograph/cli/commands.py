"""The table of commands: their help, their flags, and each one's entry; and the parser of them.

Parsing a command line imports no command's module, and the table of settings only where a command has some, so
`--version`, `--help` and a mistyped flag answer at once. A command's module reads its own flags; its entry gets all of
them by name, settings as they were typed.
"""

import argparse
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from stenograph.core.errors import StartupError
from stenograph.core.loaded import entry
from stenograph.core.nearest import nearest_name

EXIT_INTERRUPTED = 130
"""The exit code of a command ended by Ctrl-C."""

SERVE_EXAMPLES = """\
examples:
  stenograph serve
      a small model (smollm2-135m, fetched once) in a process of its own, at http://127.0.0.1:8080
  stenograph serve --model ./Qwen3-8B --engine sglang --engine-url http://10.0.0.5:30000
      an SGLang server; --model is the folder whose tokenizer and chat template are used
  stenograph serve --model ./Qwen3-8B --engine vllm --engine-url http://a:8000 --engine-url http://b:8000
      two vLLM servers of the same model: a session stays where its prefix is cached
  STENOGRAPH_API_KEY=$(openssl rand -hex 16) stenograph serve --host 0.0.0.0 --log-format json
      open to the network, with a key, and one JSON object for each line of the log

Each flag is also a STENOGRAPH_... variable and a key of the --config file: docs/settings.md has all names.
The line `stenograph ready at URL` goes to stdout once an engine takes turns; the log goes to stderr.
SIGTERM: drain, exit code 0. Ctrl-C: drain, exit code 130. A second signal ends the drain.
"""

RUN_EXAMPLES = """\
examples:
  stenograph run -- python my_agent.py
      a server with the small model, a session, and the agent with OPENAI_BASE_URL and its like set
  stenograph run --samples out.safetensors --model ./Qwen3-8B --engine vllm --engine-url http://10.0.0.5:8000 \\
      -- claude -p "Fix the tests"
      Claude Code on your own model
  stenograph run --url http://127.0.0.1:8080 -- codex exec "Fix the tests"
      a session of a server that runs

The session is deleted at the end, but never before its samples are written: where FILE cannot be written, they go into
the folder for temporary files, and the session stays.
Every flag of `serve` may stand before the `--`; without --port the server takes a free one. docs/agents.md has a
command for each agent, and the variables that are set.
The exit code is the command's, or 128 + N where signal N ended it.
"""

FORK_EXAMPLES = """\
examples:
  stenograph fork 5f0c... --turn 3 --url http://127.0.0.1:8080 -- claude -p "Fix the tests"
      Claude Code once more, in a folder as it was: turns 0 to 3 are those of the record, the next one is sampled
  stenograph fork 5f0c... --turn 3 --token 17 -n 4 --data-dir DIR -- codex exec "Fix the tests"
      four times, one after another: each continues the reply of turn 3 after its first 17 tokens

A request unlike the recorded ones is refused, with its turn and both spellings. With several forks FILE gets the number
of each. All else is as with `run`.
"""

ROLLOUT_EXAMPLES = """\
examples:
  stenograph rollout reasoning-gym:leg_counting --out legs --group-size 8 --num-tasks 100
      the small model on questions of reasoning-gym (the extra reasoning-gym), eight rollouts of each
  stenograph rollout my_env.py --out mine --url http://127.0.0.1:8080 --concurrency 64
      your own: def tasks() gives a list, async def run(task, session) the reward; on a server that runs

DIR gets rollouts.jsonl, a line for each rollout with reward and error, and samples/, a safetensors file for each.
"""

CHAT_EXAMPLES = """\
examples:
  stenograph chat
      the small model, on a server that is started for it
  stenograph chat --url http://127.0.0.1:8080
      a new session of a server that runs
  stenograph chat --url http://127.0.0.1:8080 --session 5f0c...
      a session that is there, from its last turn on
  echo "What is a stenograph?" | stenograph chat --model ./Qwen3-8B --engine vllm --engine-url http://10.0.0.5:8000
      a line from a pipe

Every flag of `serve` may be given for a server of its own. /help lists the commands; docs/chat.md has more.
"""

RAY_ACTIONS = ("up", "down", "status")
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


class CommandParser(argparse.ArgumentParser):
    """argparse, with one line for a mistake; it names a clearly meant flag or command. Its end is exit code 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(StartupError.exit_code, f"stenograph: {message} (see {self.prog} --help)\n")

    def refuse(self, typed: str, advice: str = "") -> NoReturn:
        """End the process for an unknown argument."""
        typed = typed.split("=", maxsplit=1)[0]  # without its value, which may be a key
        what = "unknown flag" if typed.startswith("-") else "unexpected argument"
        flags = {flag.removeprefix("--") for flag in self._option_string_actions if flag.startswith("--")}
        near = nearest_name(typed.lstrip("-"), flags)
        advice = f"; did you mean --{near}?" if near is not None and f"--{near}" != typed else advice
        self.error(f"{what} {typed}{advice}")

    def check_named(self, arguments: Sequence[str], names: Collection[str], what: str, example: str) -> None:
        """End the process if a command line begins neither with one of `names`, each a `what`, nor with a flag."""
        asked = arguments[0] if arguments else ""
        if not asked:
            self.error(f"name a {what}, for example: {self.prog} {example}")
        if asked not in names and not asked.startswith("-"):
            near = nearest_name(asked, names)
            self.error(f"there is no {what} {asked!r}{f'; did you mean {near}?' if near else ''}")


class _SectionedHelp(argparse.RawDescriptionHelpFormatter):
    """Flags with their help, and the examples as they are written."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command. `settings` are the ones it reads, with help of its `own_help` where it means something else by one; if
    it `has_sections`, all, in their groups. `entry` is a name for `loaded`."""

    entry: str
    help: str
    description: str
    add_arguments: Callable[[argparse.ArgumentParser], None] = lambda _: None
    settings: tuple[str, ...] = ()
    has_sections: bool = False
    own_help: Mapping[str, str] = field(default_factory=dict[str, str])
    usage: str | None = None
    epilog: str | None = None

    def declare(self, parser: argparse.ArgumentParser) -> None:
        """Give a parser the flags of the command, and its help."""
        parser.description, parser.usage, parser.epilog = self.description, self.usage, self.epilog
        if self.has_sections:
            parser.formatter_class = _SectionedHelp
        self.add_arguments(parser)
        if self.has_sections:
            entry("stenograph.cli.settings_table:add_sections")(parser)
        elif self.settings:
            entry("stenograph.cli.settings_table:add_flags")(parser, self.settings, self.own_help)


def _fork_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("session_id", metavar="ID", help="the session to fork; `stenograph inspect DIR` lists them")
    parser.add_argument("--turn", type=int, required=True, metavar="N", help="the last turn that the fork begins with")
    parser.add_argument("--token", type=int, metavar="K", help="of that turn only the first K sampled tokens")
    parser.add_argument(
        "-n", type=_count, default=1, metavar="N", dest="num", help="forks, one after another. Default: 1."
    )
    parser.add_argument("--group", metavar="NAME", help="the group of the forks. Default: the session's.")
    _run_arguments(parser, has_session=False)


def _run_arguments(parser: argparse.ArgumentParser, *, has_session: bool = True) -> None:
    parser.add_argument("--url", help="the address of a running server; without it, one is started and stopped")
    parser.add_argument(
        "--samples",
        type=Path,
        metavar="FILE",
        help="where the samples go: as JSON in a .json file, as Arrow in an .arrow file, else as safetensors",
    )
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="the session as a page that opens anywhere; a new file"
    )
    if has_session:
        parser.add_argument(
            "--session",
            metavar="JSON",
            help="options of the session, as POST /sessions takes them, such as '{\"max_turns\": 50}'",
        )
    parser.add_argument(
        "--keep",
        action="store_true",
        help="do not delete the session; without --url it needs --data-dir or --store, or it ends with the server",
    )


def _rollout_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "env",
        metavar="ENV",
        help="bfcl:NAME, inspect:NAME, reasoning-gym:NAME, verifiers:NAME, or a .py file with tasks() and run()",
    )
    parser.add_argument("--url", help="the address of a running server; without it, one is started and stopped")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", required=True, help="the folder of samples and outcomes; a run goes on in it"
    )
    parser.add_argument("--group-size", type=_count, default=1, metavar="N", help="rollouts of each task. Default: 1.")
    parser.add_argument("--num-tasks", type=_count, metavar="N", help="the first N tasks. Default: all.")
    parser.add_argument("--seed", type=int, metavar="N", help="the environment's own seed, where it has one")
    parser.add_argument("--concurrency", type=_count, default=16, metavar="N", help="rollouts at a time. Default: 16.")
    parser.add_argument("--atif", action="store_true", help="also keep each rollout as a trajectory in Harbor's format")
    parser.add_argument(
        "--agent-timeout", type=float, metavar="SECONDS", help="longest time of an agent; it has failed then"
    )
    parser.add_argument(
        "--fork-at",
        metavar="entropy:N",
        help="run each rollout again from its N least certain tokens, and reward its turns by what becomes of them",
    )
    parser.add_argument("--env-options", metavar="JSON", help="options of the environment")
    parser.add_argument(
        "--session",
        metavar="JSON",
        help="options of each session, as POST /sessions takes them, such as '{\"max_turns\": 50}'",
    )


def _count(text: str) -> int:
    """A number from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a number from 1 on is expected, got {text!r}")
    return int(text)


def _chat_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", help="the address of a running server; without it, one is started and stopped")
    parser.add_argument("--session", metavar="ID", help="a session of the server at --url, to go on with")


def _ray_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=RAY_ACTIONS, help="what to do")
    parser.add_argument(
        "--ray-address", default="auto", metavar="ADDRESS", help="the cluster's. Default: the one this machine is in."
    )
    parser.add_argument(
        "--cpus", type=float, default=0.0, metavar="NUMBER", help="CPUs that Ray reserves for each server. Default: 0."
    )


def _fetch_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--folder",
        type=Path,
        metavar="DIR",
        help="a new folder, with config.json, float32 safetensors, tokenizer and chat template; its path is printed",
    )


def _kept_folder(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", metavar="DIR", help="the folder of --data-dir, or of a backup, or the postgresql:// of --store"
    )


def _inspect_arguments(parser: argparse.ArgumentParser) -> None:
    _kept_folder(parser)
    parser.add_argument("session", nargs="?", metavar="ID", help="a session: its turns are listed")


def _check_arguments(parser: argparse.ArgumentParser) -> None:
    _kept_folder(parser)
    parser.add_argument(
        "--samples",
        type=Path,
        action="append",
        metavar="FILE",
        help="a file of samples: safetensors, JSON or Arrow. May be repeated",
    )


def _accounts_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", metavar="URL", help="the server's address")
    parser.add_argument(
        "--by", choices=("group", "session", "step", "cause", "tenant"), default="group", help="the rows"
    )
    parser.add_argument("--group", metavar="NAME", help="only this group")


def _tenant_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("add",), help="what to do")
    parser.add_argument("name", metavar="NAME", help="the tenant's name: letters, digits, - and _")
    parser.add_argument(
        "--key", metavar="KEY", help="the name of a key of its own scopes, also of a tenant that is there"
    )
    parser.add_argument(
        "--scope",
        action="append",
        choices=("rollout", "train", "weights", "admin"),
        help="what its key may do; may be repeated. Default: rollout and train.",
    )


def _export_arguments(parser: argparse.ArgumentParser) -> None:
    formats = entry("stenograph.dialects.settings:FILE_FORMATS")
    parser.add_argument(
        "folder",
        metavar="DIR",
        help="the folder of --data-dir, or of a backup, or postgresql:// of --store; for a page also a server's URL",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="the file of samples to write; a new one")
    parser.add_argument("--session", metavar="ID", help="the session of a page")
    parser.add_argument("--html", type=Path, metavar="FILE", help="the page to write; a new file")
    parser.add_argument("--format", choices=formats, default=formats[0], help="of the file. Default: safetensors.")
    parser.add_argument("--include-side", action="store_true", help="strands of every kind, not of the work alone")
    parser.add_argument(
        "--include-failed", action="store_true", help="also rollouts whose outcome is that infrastructure failed"
    )


COMMANDS: Mapping[str, Command] = {
    "serve": Command(
        entry="stenograph.cli.serve_command:serve",
        help="run the server",
        description="Run the server until SIGTERM or Ctrl-C.",
        has_sections=True,
        usage="stenograph serve [--model MODEL] [--engine ENGINE --engine-url URL] [flags]",
        epilog=SERVE_EXAMPLES,
    ),
    "run": Command(
        entry="stenograph.cli.run_command:run",
        help="run an agent on a session, and write its samples",
        description="Run a command with a session's address in its environment, and write the samples when it ends.",
        add_arguments=_run_arguments,
        has_sections=True,
        usage="stenograph run [--url URL] [--samples FILE] [--html FILE] [--session JSON] [--keep] [flags of serve]"
        " -- COMMAND [ARGUMENTS]",
        epilog=RUN_EXAMPLES,
    ),
    "fork": Command(
        entry="stenograph.cli.fork_command:fork",
        help="run an agent anew from a turn or a token of a session on",
        description="Fork a session, and run a command on the fork. It begins anew: its requests for the turns before"
        " get their recorded replies, and the model samples from the place of the fork on.",
        add_arguments=_fork_arguments,
        has_sections=True,
        usage="stenograph fork ID --turn N [--token K] [-n N] [--url URL] [--samples FILE] [--html FILE] [--keep]"
        " [flags of serve] -- COMMAND [ARGUMENTS]",
        epilog=FORK_EXAMPLES,
    ),
    "rollout": Command(
        entry="stenograph.cli.rollout_command:rollout",
        help="run an environment's tasks on sessions, and keep samples and outcomes",
        description="Run groups of rollouts of an environment's tasks, and keep each one's samples and outcome in a"
        " folder. Interrupted, the same command goes on. Exit code: 0 every agent ended, 1 rollouts were lost by"
        " infrastructure (the same command runs them again), 2 nothing was begun.",
        add_arguments=_rollout_arguments,
        has_sections=True,
        usage="stenograph rollout ENV --out DIR [--url URL] [--group-size N] [--num-tasks N] [flags of serve]",
        epilog=ROLLOUT_EXAMPLES,
    ),
    "chat": Command(
        entry="stenograph.cli.chat_command:chat",
        help="talk to a model in the terminal, with ids and stages on demand",
        description="Talk to a model through a session. A line is a message; one that begins with / is a command.",
        add_arguments=_chat_arguments,
        has_sections=True,
        usage="stenograph chat [--url URL [--session ID]] [flags of serve]",
        epilog=CHAT_EXAMPLES,
    ),
    "ray": Command(
        entry="stenograph.cli.ray_command:ray",
        help="run a server on each machine of a Ray cluster",
        description="Place a server on each machine of a Ray cluster that has none, list them, or stop them all. Ray"
        " starts a server again that ends. Needs the extra `ray`.",
        add_arguments=_ray_arguments,
        has_sections=True,
        usage="stenograph ray {up,down,status} [--ray-address ADDRESS] [flags of serve]",
        epilog=RAY_EXAMPLES,
    ),
    "fetch": Command(
        entry="stenograph.cli.fetch_command:fetch",
        help="fetch the model's weights",
        description="Fetch the model into the cache and print its path. With --folder, write a GGUF model such as the"
        " default one as a folder in Hugging Face's layout, for torch and trainers.",
        add_arguments=_fetch_arguments,
        settings=("model", "engine", "engine_url", "cache_dir"),
    ),
    "verify": Command(
        entry="stenograph.cli.verify_command:verify_command",
        help="check that a model's sessions are exact in tokens",
        description="Check that the model's chat template is append-only, and that its sessions are exact in tokens:"
        " every kind of conversation is rendered, bridged and parsed. With --engine (and --engine-url, of one that is a"
        " server) a session is played with it too. Exit code: 0 it holds, 1 it does not, 2 it could not be checked,"
        " because a file cannot be read or the engine does not answer.",
        settings=(
            "model",
            "family",
            "chat_template_kwargs",
            "engine",
            "engine_url",
            "engine_api_key",
            "engine_keys",
            "connect_timeout",
            "request_timeout",
            "engine_threads",
            "cache_dir",
        ),
    ),
    "inspect": Command(
        entry="stenograph.cli.store_commands:inspect",
        help="list the sessions that a server kept, or the turns of one",
        description="List the sessions in a folder of --data-dir, or the turns of one. Changes nothing, and needs no"
        " server: a folder that one holds is refused.",
        add_arguments=_inspect_arguments,
    ),
    "check": Command(
        entry="stenograph.cli.store_commands:check",
        help="check that what a server kept is what was written, or that samples are what it holds",
        description="Read every row of every session in a folder of --data-dir, and hold it to its digest, its place"
        " and the sums of its session. With --samples, hold the samples of a file to the sessions that they are of"
        " instead: ids, loss mask, log-probabilities, session and turns. Changes nothing, and needs no server: a"
        " folder that one holds is refused. Exit code: 0 all is whole, 1 a fault was found, each on a line, 2 it could"
        " not be checked.",
        add_arguments=_check_arguments,
    ),
    "export": Command(
        entry="stenograph.cli.page_command:export",
        help="write the samples of all sessions that a server kept, or one session as a page",
        description="Write the training samples of every session in a folder of --data-dir into one file, as the"
        " server would give them. Changes nothing, and needs no server, but the --model with which the sessions"
        " were made. With --session and --html write one session as a page that opens anywhere and fetches nothing;"
        " it may also be that of a running server, whose URL is given. Exit code: 0 all were exported, 1 a session"
        " could not be, each on a line, 2 nothing was begun.",
        add_arguments=_export_arguments,
        settings=("model", "family", "chat_template_kwargs", "cache_dir", "require_logprobs", "api_key"),
        own_help={
            "api_key": "The key of the server whose URL is given, for a page; of no use for a folder. As the variable"
            " STENOGRAPH_API_KEY it does not stand in the list of processes."
        },
    ),
    "accounts": Command(
        entry="stenograph.cli.accounts_command:accounts",
        help="show where the sampled tokens of a running server went",
        description="Print the fate of all tokens that a running server's engines sampled, and their cost where it has"
        " --token-price.",
        add_arguments=_accounts_arguments,
        settings=("api_key",),
        own_help={"api_key": "The server's key."},
    ),
    "tenant": Command(
        entry="stenograph.cli.tenant_command:tenant",
        help="add a tenant to the file of --tenants, and print its key",
        description="Add a tenant to the file of --tenants, and print its key, once: the file has its hash alone. A"
        " running server takes it at SIGHUP.",
        add_arguments=_tenant_arguments,
        settings=("tenants",),
        own_help={"tenants": "The file; it is made if it is not there."},
    ),
    "bench": Command(
        entry="stenograph.cli.bench_command:become_bench",
        help="measure the server: see `stenograph bench --help`",
        description="Measure the server on this machine.",
    ),
}
"""All commands, in the order of `stenograph --help`."""
