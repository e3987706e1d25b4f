"""`check_engine`: does an engine keep the laws of `engine.base`? For the author of an adapter, in one call of a test.

    async def test_my_engine_keeps_the_laws() -> None:
        report = await check_engine(my_engine)
        assert not report.not_offered.keys() - {"two_weight_versions"}

`my_engine` makes an `EngineUnderTest` and cleans up behind it. A law without a hook in it is reported as not offered,
never as kept; the laws themselves are in `laws` and `grammar_laws`.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import cast

from stenograph.conformance.lab import EngineUnderTest, Lab, NotOffered
from stenograph.conformance.laws import LAST_LAWS, LAWS, Law

Make = Callable[[], AbstractAsyncContextManager[EngineUnderTest]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conformance:
    """The findings of a check: proven laws, and laws with something missing, by name."""

    engine: str
    shown: Collection[str]
    not_offered: Mapping[str, str]

    def __str__(self) -> str:
        rows = [f"  {law}: shown" for law in self.shown]
        rows += [f"  {law}: not offered: {missing}" for law, missing in self.not_offered.items()]
        return "\n".join((f"{self.engine}:", *rows))


async def check_engine(make: Make, *, deadline_s: float = 60.0) -> Conformance:
    """Test every law on engines started by `make`, one or two of them. `deadline_s` is for each law.

    Raises AssertionError, naming each broken law and how.
    """
    outcomes: dict[str, NotOffered | AssertionError | None] = {}
    name = ""
    for laws in (LAWS, LAST_LAWS):
        async with make() as under_test:
            name, lab = under_test.engine.capabilities.engine, Lab(under_test)
            for law, show in laws.items():
                outcomes[law] = await _outcome(law, show, lab, deadline_s)
    broken = [f"\n  {law}: {error}" for law, error in outcomes.items() if isinstance(error, AssertionError)]
    assert not broken, f"{name} breaks {len(broken)} laws:{''.join(broken)}"
    not_offered = {law: str(missing) for law, missing in outcomes.items() if missing is not None}
    return Conformance(
        engine=name, shown=[law for law, error in outcomes.items() if error is None], not_offered=not_offered
    )


async def _outcome(law: str, show: Law, lab: Lab, deadline_s: float) -> NotOffered | AssertionError | None:
    """None where the law was shown."""
    if (why := lab.under_test.not_offered.get(law)) is not None:
        return NotOffered(why)
    try:
        await _shown(show, lab, deadline_s)
    except (NotOffered, AssertionError) as error:
        return error
    return None


async def _shown(show: Law, lab: Lab, deadline_s: float) -> None:
    """Show one law. Raises AssertionError for whatever goes wrong, or NotOffered."""
    try:
        async with asyncio.timeout(deadline_s):
            await show(lab)
            if lab.under_test.num_running is not None:
                await lab.until_idle()
    except (AssertionError, NotOffered):
        raise
    except TimeoutError as error:
        raise AssertionError(f"it took more than {deadline_s:g} s") from error
    except Exception as error:  # an engine may raise anything, and each is a way to break the law
        first = _first_of(error)
        if isinstance(first, NotOffered | AssertionError):
            raise first from error
        raise AssertionError(f"{type(first).__name__}: {first}") from error


def _first_of(error: Exception) -> Exception:
    """The error itself, or the first of a group of parallel tasks."""
    if not isinstance(error, ExceptionGroup):
        return error
    return _first_of(cast("ExceptionGroup[Exception]", error).exceptions[0])
