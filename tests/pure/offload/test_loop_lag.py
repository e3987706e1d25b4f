"""The loop's lag is observed beat by beat, and the watchdog names what holds the loop."""

import asyncio
import threading

from stenograph.offload.loop_lag import LoopLag, Watchdog


async def test_every_beat_is_observed_until_it_is_closed() -> None:
    beats: list[float] = []
    enough = asyncio.Event()

    def observe(lag_s: float) -> None:
        beats.append(lag_s)
        if len(beats) == 3:
            enough.set()

    lag = LoopLag(observe, name_culprits=True)
    lag.start()
    await enough.wait()
    lag.close()
    assert all(beat >= 0 for beat in beats)


def test_the_watchdog_names_the_function_that_holds_the_loop_once() -> None:
    told = threading.Event()
    reports: list[str] = []

    def report(text: str) -> None:
        reports.append(text)
        told.set()

    def the_culprit() -> None:
        assert told.wait(30)

    watchdog = Watchdog(held_s=0.001, report=report)
    watchdog.start(threading.get_ident())
    the_culprit()
    watchdog.close()
    assert "the_culprit" in reports[0]
    assert len(reports) == 1
