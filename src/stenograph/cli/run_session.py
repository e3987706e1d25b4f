"""The session of a run from its opening to the moment when nothing of it is owed to anybody.

It is deleted at the end unless it is to be kept, and never before the requested files are written: a rollout costs
money.
"""

import contextlib
import threading
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Self

from stenograph.cli.run_report import left_out_line, report_lines, say
from stenograph.cli.run_samples import Lack, NotSaved, SavedSamples, save_samples
from stenograph.cli.session_calls import CallFailed, ServerCalls
from stenograph.cli.terminal_text import safe_line
from stenograph.core.errors import StartupError
from stenograph.core.loaded import entry

EXIT_NOT_WRITTEN = 1
RETRY_S = 5.0
"""Pause between two tries to write a file, if it can be written nowhere or is not given."""

_MEANWHILE = {
    Lack.PLACE: f"make room, and the samples are written within {RETRY_S:g} s",
    Lack.SAMPLES: f"it is asked again every {RETRY_S:g} s",
}
"""The remedy for a lack, while a server stays for it."""


class RunSession:
    """A session while its command runs, and its fate after. `is_begun` is set when the command starts.

    `samples` and `html` are the wanted files. `kept_in` is the place where the session is once this process has ended,
    as a person would name it; None: the server ends with the run, and its memory with it. `has_ended` tells whether the
    server has.
    """

    def __init__(
        self,
        calls: ServerCalls,
        session_id: str,
        *,
        samples: Path | None,
        html: Path | None,
        keep: bool,
        kept_in: str | None,
        has_ended: Callable[[], bool],
    ) -> None:
        self._calls = calls
        self._id = session_id
        self._samples = samples
        self._html = html
        self._keep = keep
        self._kept_in = kept_in
        self._has_ended = has_ended
        self._is_owed = samples is not None or html is not None
        self._is_gone = False
        self.is_begun = False

    def __repr__(self) -> str:
        return f"<RunSession {self._id}{' owed' if self._is_owed else ''}>"

    @property
    def console(self) -> str:
        """The address of the session's page."""
        return f"{self._calls.url}/console#/session/{self._id}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Delete the session, or say where it is."""
        if not self.is_begun or not (self._keep or self._is_owed):
            with contextlib.suppress(CallFailed):
                self._calls.delete(self._id)
        elif self._is_gone:
            say(f"session {self._id} is gone: somebody has deleted it, or its time was over")
        elif self._kept_in is None:
            say(f"session {self._id} ends with its server; not all that was asked for was written")
        elif self._kept_in == self._calls.url:
            say(f"session {self._id} stays: {self.console}, and POST /sessions/{self._id}/samples")
        else:
            say(f"session {self._id} stays in {self._kept_in}: `stenograph export` writes its samples from there")

    def finished(self, code: int) -> int:
        """Write the wanted files of the session, then report on it; returns the exit code of the run."""
        is_written = self._samples is None or self._write_samples(self._samples)
        if self._html is not None:
            is_written &= self._write_page(self._html)
        self._is_owed = not is_written
        with _told("report on the session"):
            for line in report_lines(self._calls, self._id):
                say(safe_line(line))
        with _told("say what is out of the ordinary"):
            for finding in self._calls.why(self._id):
                say(safe_line(f"  {finding['gravity']}: {finding['told']}"))
        return code or (0 if is_written else EXIT_NOT_WRITTEN)

    def _write_samples(self, file: Path) -> bool:
        """Whether the samples are where they were asked for. If a session would end with its server, wait until its
        samples are given and have a place, or it is gone, or a signal ends the run."""
        saved, is_told = None, False
        while saved is None:
            try:
                saved = save_samples(self._calls, self._id, file)
            except NotSaved as error:
                self._is_gone = error.lack is Lack.SESSION
                if self._kept_in is not None or self._is_gone or self._has_ended():
                    say(f"NO SAMPLES: {error}")
                    return False
                if not is_told:
                    say(f"NO SAMPLES YET: {error}")
                    say(
                        f"the server at {self._calls.url} has the session in its memory, and stays:"
                        f" {_MEANWHILE[error.lack]}; Ctrl-C gives them up"
                    )
                is_told = True
                threading.Event().wait(RETRY_S)
        self._tell_of(saved)
        return saved.as_asked

    def _tell_of(self, saved: SavedSamples) -> None:
        say(saved.line)
        if saved.left_out:
            say(left_out_line(saved.left_out))

    def _write_page(self, file: Path) -> bool:
        try:
            say(entry("stenograph.cli.served_page:write_served_page")(self._calls, self._id, file))
        except StartupError as error:
            say(f"NO PAGE: {error}")
            return False
        return True


@contextlib.contextmanager
def _told(what: str) -> Generator[None]:
    """While inside, a failed call is a line, and so is an answer in another form, as a server of another version gives
    it: the steps after it are not lost."""
    try:
        yield
    except CallFailed as error:
        say(f"cannot {what}: {error}")
    except (KeyError, TypeError) as error:
        say(f"cannot {what}: the server answers in another form, is it of another version? {error!r}")
