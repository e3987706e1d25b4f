"""A forked server that ends before it is ready is an error at once, with its own words."""

from pathlib import Path

import pytest

from ..crash.warm import WarmParent


async def test_a_server_that_ends_before_it_is_ready_is_not_waited_for(tmp_path: Path) -> None:
    async with WarmParent.started() as warm:
        server = await warm.fork(["--no-such-flag"], tmp_path / "log")
        with pytest.raises(RuntimeError, match=r"ended before it was ready: [^$]*--no-such-flag"):
            await server.ready()
        assert await warm.end_of(server) != 0
