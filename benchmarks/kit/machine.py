"""The origin of a figure: commit, versions, machine."""

import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

PACKAGES = ("stenograph", "aiohttp", "httptools", "msgspec", "tokenizers", "minijinja", "uvicorn", "uvloop")
OPTIONAL_PACKAGES = ("fastokens",)


def provenance() -> dict[str, object]:
    """The first fields of an artifact."""
    return {
        **checkout(Path(__file__).parent),
        "versions": _versions(),
        "machine": {
            "cpu": _cpu_model(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
            "kernel": platform.release(),
            "python": sys.version.split()[0],
            "load_average": os.getloadavg()[0],
        },
    }


def checkout(folder: Path) -> dict[str, object]:
    """The commit of a checkout, and whether its source has changes; None twice where it is none."""
    status = _git(folder, "status", "--porcelain", "--", ":/src")
    return {"commit": _git(folder, "rev-parse", "HEAD"), "dirty": None if status is None else bool(status)}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for name in (*PACKAGES, *OPTIONAL_PACKAGES):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _cpu_model() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.processor()
