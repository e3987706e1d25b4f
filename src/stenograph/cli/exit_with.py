"""Another process's end as a reason to stop: a server started for a trainer does not outlive it.

The kernel says when the process has ended, however it did. It need not be the parent: shells and launchers may stand
between.
"""

import os
import select
import signal
import threading
import time

from stenograph.core.errors import StartupError

POLL_S = 0.5
"""Between two looks where the kernel has no descriptor of a process: it is not Linux, or a sandbox."""


def stop_with(pid: int) -> None:
    """Send this process SIGTERM once process `pid` has ended. Raises StartupError if there is none."""
    descriptor = _descriptor_of(pid)
    if descriptor is None and not _is_there(pid):
        raise StartupError(f"--exit-with names process {pid}, and there is none: it has ended already")
    threading.Thread(target=_wait_and_stop, args=(pid, descriptor), name="exit-with", daemon=True).start()


def _descriptor_of(pid: int) -> int | None:
    """A descriptor, readable once the process has ended, and never another's with the same number."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def _wait_and_stop(pid: int, descriptor: int | None) -> None:
    if descriptor is not None:
        select.select([descriptor], [], [])
        os.close(descriptor)
    while descriptor is None and _is_there(pid):
        time.sleep(POLL_S)
    os.kill(os.getpid(), signal.SIGTERM)


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it is another user's
        return True
    return True
