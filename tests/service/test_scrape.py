"""What a scrape reads on a worker while turns begin and end on the loop."""

import asyncio
import sys
import threading
from collections.abc import Generator

import pytest

from .conftest import Live, user


@pytest.fixture
def threads_change_often() -> Generator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("threads_change_often")
async def test_turns_in_flight_are_counted_while_they_begin_and_end(live: Live) -> None:
    done, seen = threading.Event(), set[int]()

    def scrape() -> None:
        while not done.is_set():
            seen.add(live.manager.num_in_flight)

    sessions = [await live.open() for _ in range(50)]
    scraping = asyncio.ensure_future(asyncio.to_thread(scrape))
    try:
        for _ in range(4):
            for _ in sessions:
                live.says("yes")
            answers = await asyncio.gather(*(live.chat(session, user("Hello")) for session in sessions))
            assert {answer.status for answer in answers} == {200}
    finally:
        done.set()
        await scraping
    assert live.manager.num_in_flight == 0
    assert min(seen) >= 0
    assert max(seen) <= len(sessions)
