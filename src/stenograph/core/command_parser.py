"""A parser of a command line, with one line for a mistake in it. Knows no command."""

import argparse
from collections.abc import Collection, Sequence
from typing import NoReturn

from stenograph.core.errors import StartupError
from stenograph.core.nearest import nearest_name


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
