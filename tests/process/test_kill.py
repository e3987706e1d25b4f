"""kill -9 of a real server under load, again and again, with clients that ask again: nothing acknowledged is lost.

A few kills here; `scripts/test-crash` sets KILLS for the long run. The same SEED chooses the same clients, replies and
moments, as far as the machine allows: a failure names the seed and the kill.
"""

import asyncio
import contextlib
import os
import random
import shutil
import signal
import sqlite3
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest
from tokenizers import Tokenizer

from standins.sglang_server import SGLangServer
from standins.tiny.llama import write_tiny_folder

from ..crash.book import Book, Lost
from ..crash.load import CLIENTS, END, LARGE_MARK, Gone, Load
from ..crash.warm import WarmParent, WarmServer

NUM_KILLS = int(os.environ.get("KILLS", "6"))
SEED = int(os.environ.get("SEED", "17"))
CHECK_ALL_EVERY = 50
NUM_LOOKED_AT = 3
"""Sessions of which a new server shows what the one before showed, at each start."""

pytestmark = pytest.mark.timeout(120 + 30 * NUM_KILLS)


@dataclass(slots=True)
class Figures:
    """What a run comes to."""

    num_starts_killed: int = 0
    num_checked: int = 0
    ready_s: list[float] = field(default_factory=list[float])
    first_turn_s: list[float] = field(default_factory=list[float])


async def test_kill_9_loses_no_acknowledged_turn_doubles_none_and_changes_no_id(tmp_path: Path) -> None:
    model, folder, log = write_tiny_folder(tmp_path / "tiny"), tmp_path / "data", tmp_path / "log"
    book, figures = Book(len(CLIENTS)), Figures()
    load = Load(book, random.Random(SEED))
    load.large_ids = tuple(Tokenizer.from_file(str(model / "tokenizer.json")).encode(LARGE_MARK).ids)
    async with (
        SGLangServer(answers=load.answer, stop_id=END, remembers=False) as engine,
        WarmParent.started() as warm,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client,
        asyncio.TaskGroup() as tasks,
    ):
        flags = (
            *("--port", "0", "--data-dir", str(folder), "--model", str(model), "--family", "smollm2"),
            *("--engine", "sglang-generate", "--engine-url", engine.url, "--log-level", "error"),
            *("--max-sessions", "40", "--max-held-tokens", "20000"),
            *("--replay", "routed_experts"),
        )
        for number in range(len(CLIENTS)):
            tasks.create_task(load.work(client, number), name=f"client {number}")
        for kill in range(NUM_KILLS):
            draw = random.Random(f"{SEED}/{kill}")
            with named(kill, log):
                durability = draw.choice(["commit", "commit", "interval"])
                began = time.monotonic()
                server = await warm.fork([*flags, "--durability", durability], log)
                if kill % 10 == 3:
                    await kill_while_it_starts(warm, server, draw, figures)
                else:
                    await server.ready()
                    figures.ready_s.append(time.monotonic() - began)
                    await work_until_killed(warm, server, client, load, draw, figures, began)
                everything = kill % CHECK_ALL_EVERY == CHECK_ALL_EVERY - 1
                if folder.joinpath("00.sqlite3").exists():
                    figures.num_checked += book.check_disk(folder, everything=everything)
            if everything:
                say(kill + 1, load, figures)
        with named(NUM_KILLS, log):
            server = await warm.fork(flags, log)
            await server.ready()
            load.url, before = server.url, book.num_acknowledged
            load.up.set()
            await load.until(lambda: book.num_acknowledged >= before + 2 * len(CLIENTS))
            load.is_over = True
            ended = [task for task in asyncio.all_tasks() if task.get_name().startswith("client")]
            if ended:
                await asyncio.wait(ended)
            for rollout in list(book.rollouts.values()):
                if rollout.shot is not None and not rollout.is_deleted:
                    await load.look(client, rollout)
            assert await warm.kill(server, signal.SIGTERM) == 0
            figures.num_checked += book.check_disk(folder, everything=True, is_at_rest=True)
    say(NUM_KILLS, load, figures)
    with pytest.raises(Lost, match="is not there"):  # else the book would see nothing
        book.check_disk(without_its_last_turn(folder, tmp_path / "less"), everything=True, is_at_rest=True)


def without_its_last_turn(folder: Path, copy: Path) -> Path:
    """A copy of a folder that has lost a turn: of those that are the last row of their session, the last written."""
    shutil.copytree(folder, copy)
    raw = sqlite3.connect(copy / "00.sqlite3", isolation_level=None)
    raw.execute(
        "DELETE FROM rows WHERE place = (SELECT max(place) FROM rows AS one WHERE substr(body, 2, 1) = x'01'"
        " AND seq = (SELECT max(seq) FROM rows WHERE session = one.session))"
    )
    raw.close()
    return copy


async def kill_while_it_starts(warm: WarmParent, server: WarmServer, draw: random.Random, figures: Figures) -> None:
    """Kill a server at a random moment of its start."""
    usual_s = at(sorted(figures.ready_s), 0.5)
    with contextlib.suppress(TimeoutError):  # a moment of the clock is what is wanted
        async with asyncio.timeout(draw.random() * usual_s):
            await server.is_ready.wait()
    await warm.kill(server)
    figures.num_starts_killed += 1


async def work_until_killed(
    warm: WarmParent,
    server: WarmServer,
    client: aiohttp.ClientSession,
    load: Load,
    draw: random.Random,
    figures: Figures,
    began: float,
) -> None:
    """Let clients work until a random moment: after some turns, or just when the engine has said something."""
    book, load.url = load.book, server.url
    load.up.set()
    shown = [one for one in book.rollouts.values() if one.shot is not None and not one.is_delete_asked]
    for rollout in draw.sample(shown, min(NUM_LOOKED_AT, len(shown))):
        with contextlib.suppress(Gone):  # its client has deleted it meanwhile
            await load.look(client, rollout)
    turns, generations = book.num_acknowledged, load.num_generated
    await load.until(lambda: book.num_acknowledged > turns)
    figures.first_turn_s.append(time.monotonic() - began)
    if draw.random() < 0.4:
        num = turns + draw.randrange(1, 80)
        await load.until(lambda: book.num_acknowledged >= num)
    else:
        num = generations + draw.randrange(1, 80)
        await load.until(lambda: load.num_generated >= num)
    for _ in range(draw.randrange(20)):  # the moments between two events are to be hit, too
        await asyncio.sleep(0)
    load.up.clear()
    await warm.kill(server)


@contextlib.contextmanager
def named(kill: int, log: Path) -> Iterator[None]:
    """A failure says how it is had again, and what the servers said."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"SEED={SEED} KILLS={NUM_KILLS}, kill {kill}; the servers said: {log.read_text()[-2000:]!r}")
        raise


def say(num: int, load: Load, figures: Figures) -> None:
    """A line of progress, and of figures at the end."""
    book, ready = load.book, sorted(figures.ready_s)
    first = sorted(figures.first_turn_s)
    num_deleted = sum(one.is_deleted for one in book.rollouts.values())
    sys.stdout.write(
        f"\n{num} kills ({figures.num_starts_killed} during a start), seed {SEED}: {book.num_acknowledged} turns"
        f" acknowledged in {len(book.rollouts)} sessions ({num_deleted} deleted), {load.num_asked_again} requests asked"
        f" again, {book.num_in_doubt} turns kept whose answer was lost; {figures.num_checked} turns compared: 0 lost,"
        f" 0 doubled, 0 wrong ids; start to ready p50 {at(ready, 0.5):.2f} s, p99 {at(ready, 0.99):.2f} s,"
        f" to the first turn p50 {at(first, 0.5):.2f} s, p99 {at(first, 0.99):.2f} s\n"
    )
    sys.stdout.flush()


def at(values: list[float], share: float) -> float:
    return values[min(len(values) - 1, int(share * len(values)))] if values else 0.0
