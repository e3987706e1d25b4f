"""Another process's end as a reason to stop: a server that was started for a trainer does not outlive it.

The kernel says when the process has ended, however it did. It need not be the parent, so that shells and launchers may
stand between.
"""

import os
import select
import signal
import threading
import time

from stenograph.core.errors import StartupError

POLL_S = 0.5
"""Between two looks where the kernel has no descriptor of a process: it is not Linux."""


def stop_with(pid: int) -> None:
    """Send this process SIGTERM once process `pid` has ended. Raises StartupError if there is none."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError as error:
        raise StartupError(f"--exit-with names process {pid}, and there is none: it has ended already") from error
    except PermissionError:
        pass  # somebody else's
    threading.Thread(target=_wait_and_stop, args=(pid,), name="exit-with", daemon=True).start()


def _wait_and_stop(pid: int) -> None:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        pass  # a moment ago
    except (AttributeError, OSError):  # another system, or a sandbox
        while _is_there(pid):
            time.sleep(POLL_S)
    else:
        select.select([descriptor], [], [])
        os.close(descriptor)
    os.kill(os.getpid(), signal.SIGTERM)


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
