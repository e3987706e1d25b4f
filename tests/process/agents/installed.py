"""Agents' own programs, as scripts/test-agents installs them. A run has its own home and reaches this machine alone."""

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from stenograph.model.settings import default_cache_dir

from .conftest import Talk

NOWHERE = "http://127.0.0.1:9"


def outer(home: Path) -> dict[str, str]:
    """The variables of every program: its home, and no other machine within reach."""
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "HTTP_PROXY": NOWHERE,
        "HTTPS_PROXY": NOWHERE,
        "NO_PROXY": "127.0.0.1,localhost",
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """A run of a program: what it printed, also as errors, and how it ended."""

    code: int | None
    printed: str
    errors: str

    @property
    def said(self) -> str:
        """All that it printed."""
        return self.printed + self.errors


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A program of the npm registry. `folder` is its place in the cache, with its version."""

    title: str
    folder: str
    name: str

    def path(self) -> Path:
        """Its file; skips the test where it is not installed."""
        cache = Path(os.environ.get("STENOGRAPH_CACHE") or default_cache_dir(os.environ))
        path = cache / self.folder / "node_modules" / ".bin" / self.name
        if not path.exists():
            pytest.skip(f"{self.title} is not installed: scripts/test-agents installs it where there is npm")
        return path

    async def start(self, home: Path, *arguments: str, environment: Mapping[str, str]) -> asyncio.subprocess.Process:
        """Start it in the folder `work` of a home, which it knows beside these variables and no others."""
        return await asyncio.create_subprocess_exec(
            self.path(),
            *arguments,
            cwd=home / "work",
            env={**outer(home), **environment},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )

    async def run(self, home: Path, *arguments: str, environment: Mapping[str, str]) -> Ran:
        """One run, to its end; where the test is cancelled, so is the program."""
        process = await self.start(home, *arguments, environment=environment)
        try:
            printed, errors = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        return Ran(code=process.returncode, printed=printed.decode(), errors=errors.decode())


async def session_json(talk: Talk, base_url: str, path: str = "") -> Any:
    """What the server tells of a session by its own address, or below it."""
    async with talk.client.get(base_url.removesuffix("/v1") + path) as response:
        assert response.status == 200, await response.text()
        return await response.json()


async def ledger(talk: Talk, base_url: str) -> list[dict[str, Any]]:
    return list((await session_json(talk, base_url, "/ledger"))["requests"])


async def strands(talk: Talk, base_url: str) -> list[dict[str, Any]]:
    return list((await session_json(talk, base_url))["metadata"]["strands"])
