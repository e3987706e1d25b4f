"""Loss of power under load, on a filesystem that forgets what was not synced: `commit` loses nothing that was
acknowledged, `interval` at most the last second, and neither a store.

`scripts/test-crash` installs what this needs, and sets LOSSES; SEED chooses the moments, and which sectors come to the
disk that nobody had synced.
"""

import asyncio
import os
import random
import shutil
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
from tokenizers import Tokenizer

from standins.planned_server import AskedRequest, ReplyScript
from standins.sglang_server import SGLangServer
from standins.tiny.llama import write_tiny_folder

from ..crash.book import Book, Lost
from ..crash.load import CLIENTS, END, LARGE_MARK, Load
from ..crash.power import Disk, why_not
from ..crash.warm import WarmParent

NUM_LOSSES = int(os.environ.get("LOSSES", "6"))
SEED = int(os.environ.get("SEED", "17"))
MOST_LOST_S = 2.0
"""`interval` begins to sync a second after the first write: the rest is for a machine that is busy."""

pytestmark = [pytest.mark.power, pytest.mark.timeout(120 + 60 * NUM_LOSSES)]


@dataclass(slots=True)
class Rig:
    """A disk, servers on it, and an engine."""

    warm: WarmParent
    engine: SGLangServer
    root: Path
    flags: tuple[str, ...]
    load: Load
    client: aiohttp.ClientSession
    large_ids: tuple[int, ...]

    def begin(self, name: str) -> Load:
        """Clients who know nothing yet."""
        self.load = Load(Book(len(CLIENTS)), random.Random(f"{SEED}/{name}"), name=name, large_ids=self.large_ids)
        return self.load

    def copy(self) -> Path:
        """What the disk has, as it would be looked at elsewhere."""
        shutil.rmtree(self.root / "copy", ignore_errors=True)
        shutil.copytree(self.root / "disk" / "data", self.root / "copy")
        return self.root / "copy"

    async def life(self, name: str, durability: str, check: Callable[[], None], *, lies: bool = False) -> float:
        """Mount, `check`, serve, and lose power at a random moment: when that was."""
        draw, load = random.Random(f"{SEED}/{name}/life"), self.load
        async with Disk.mounted(self.root / "disk", self.root / "kept") as disk:
            check()
            server = await self.warm.fork([*self.flags, "--durability", durability], self.root / "log")
            await server.ready()
            if lies:
                disk.lie()
            load.url, turns = server.url, load.book.num_acknowledged
            load.up.set()
            num = turns + draw.randrange(1, 100 if durability == "commit" else 400)  # more than a second of turns
            await load.until(lambda: load.book.num_acknowledged >= num)
            for _ in range(draw.randrange(20)):  # the moments between two events are to be hit, too
                await asyncio.sleep(0)
            lost_at = time.monotonic()
            await disk.lose_power(0 if draw.random() < 0.3 else draw.randrange(1, 2**31))
            load.up.clear()
            await self.warm.kill(server)
        return lost_at


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    if reason := why_not():
        pytest.skip(reason)
    model = write_tiny_folder(tmp_path / "tiny")

    def answer(asked: AskedRequest) -> ReplyScript:
        return made.load.answer(asked)

    async with (
        SGLangServer(answers=answer, stop_id=END, remembers=False) as engine,
        WarmParent.started() as warm,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client,
    ):
        flags = (
            *("--port", "0", "--data-dir", str(tmp_path / "disk" / "data"), "--model", str(model)),
            *("--family", "smollm2", "--engine", "sglang-generate", "--engine-url", engine.url),
            *("--max-sessions", "40", "--replay", "routed_experts", "--log-level", "error"),
        )
        large_ids = tuple(Tokenizer.from_file(str(model / "tokenizer.json")).encode(LARGE_MARK).ids)
        load = Load(Book(len(CLIENTS)), random.Random(SEED))
        made = Rig(warm, engine, tmp_path, flags, load, client, large_ids)
        yield made


@asynccontextmanager
async def clients(rig: Rig) -> AsyncIterator[None]:
    """Clients at work, until the end."""
    tasks = [
        asyncio.create_task(rig.load.work(rig.client, number), name=f"client {number}")
        for number in range(len(CLIENTS))
    ]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    for end in ended:
        if isinstance(end, Exception):
            raise end


async def test_with_commit_a_loss_of_power_loses_no_acknowledged_turn(rig: Rig) -> None:
    load, num_checked = rig.begin("commit"), 0

    def check(*, everything: bool = False) -> None:
        nonlocal num_checked
        if (rig.root / "disk" / "data" / "00.sqlite3").exists():
            num_checked += load.book.check_disk(rig.copy(), everything=everything, may_be_torn=True)
        else:
            assert not load.book.num_acknowledged

    async with clients(rig):
        for loss in range(NUM_LOSSES):
            try:
                await rig.life(f"{loss}", "commit", check)
            except BaseException as error:
                error.add_note(f"SEED={SEED} LOSSES={NUM_LOSSES}, loss {loss}")
                raise
            if loss % 25 == 24:
                say("commit", loss + 1, load.book, f"{num_checked} turns compared")
    async with Disk.mounted(rig.root / "disk", rig.root / "kept"):
        check(everything=True)
    say("commit", NUM_LOSSES, load.book, f"{num_checked} turns compared: 0 lost, 0 doubled, 0 wrong ids")


async def test_with_interval_a_loss_of_power_loses_the_last_second_at_most(rig: Rig) -> None:
    oldest_s, num_lossy, num_turns = 0.0, 0, 0
    rig.begin("first")
    async with clients(rig):
        await rig.life("first", "commit", lambda: None)  # else there may be no schema yet to look at
    for loss in range(max(1, NUM_LOSSES // 4)):
        load = rig.begin(f"interval {loss}")
        try:
            async with clients(rig):
                lost_at = await rig.life(f"interval {loss}", "interval", lambda: None)
            num_turns += load.book.num_acknowledged
            async with Disk.mounted(rig.root / "disk", rig.root / "kept"):
                copy = rig.copy()
            age_s = load.book.forget_last_second(copy, lost_at, most_s=MOST_LOST_S)
            load.book.touched.update(load.book.rollouts)
            load.book.check_disk(copy, may_be_torn=True)
        except BaseException as error:
            error.add_note(f"SEED={SEED} LOSSES={NUM_LOSSES}, interval, loss {loss}")
            raise
        oldest_s, num_lossy = max(oldest_s, age_s), num_lossy + (age_s > 0)
    say("interval", loss + 1, None, f"{num_turns} turns, {num_lossy} lost some, the oldest {oldest_s:.2f} s before it")
    assert num_lossy, "a disk that forgets would have shown that nothing is synced yet"


async def test_a_disk_that_only_says_that_it_syncs_loses_turns_and_the_book_sees_it(rig: Rig) -> None:
    load = rig.begin("lies")
    async with clients(rig):
        await rig.life("lies", "commit", lambda: None, lies=True)
    async with Disk.mounted(rig.root / "disk", rig.root / "kept"):
        with pytest.raises(Lost, match=r"gone|not there"):
            load.book.check_disk(rig.copy(), may_be_torn=True)


def say(durability: str, num: int, book: Book | None, words: str) -> None:
    turns = "" if book is None else f"{book.num_acknowledged} turns acknowledged in {len(book.rollouts)} sessions, "
    sys.stdout.write(f"\n{num} losses of power, {durability}, seed {SEED}: {turns}{words}\n")
    sys.stdout.flush()
