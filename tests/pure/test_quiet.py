"""What every test keeps to: nothing compared with itself, no seconds of its own, and a deadline.

The deadline is over for what stands still and for what runs to no end, never for what waits for its machine.
"""

import ast
import os
import re
import subprocess
import sys
import textwrap
from itertools import pairwise
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from ..quiet import LEAST_SHARE, MOST_TIMES, QuietWatch, cpu_of_tree

TESTS = Path(__file__).parents[1]

SECONDS_IN_CODE = re.compile(r"timeout=[\d.]+|asyncio\.timeout\(\d|asyncio\.wait_for\(.*, *[\d.]+\)")
MAY_NAME_SECONDS = {
    "service/test_console_browser.py": "a browser, which scripts/test-console has the machine for",
    "service/test_half_requests.py": "pieces that go on until there is an answer",
    "service/test_shared_store.py": "questions that go on until there is an answer",
    "service/test_stores.py": "none: a lock that is held is to be seen at once",
}


def test_no_test_waits_for_a_number_of_seconds() -> None:
    files = sorted(TESTS.rglob("*.py"))
    texts = {str(path.relative_to(TESTS)): path.read_text() for path in files if path.name != Path(__file__).name}
    unmarked = {
        name: [line for line in text.splitlines() if SECONDS_IN_CODE.search(line)] for name, text in texts.items()
    }
    assert {name for name, lines in unmarked.items() if lines} == set(MAY_NAME_SECONDS)


def compared_with_itself(tree: ast.AST) -> list[int]:
    """Lines of comparisons that cannot fail: of a value with itself, as it is or as an element of tuples. A call or a
    property by itself may answer otherwise the second time."""
    found: list[int] = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Compare):
            continue
        for one, other in pairwise((node.left, *node.comparators)):
            pairs = [(one, other)] if isinstance(one, ast.Name) else []
            if isinstance(one, ast.Tuple) and isinstance(other, ast.Tuple):
                pairs = list(zip(one.elts, other.elts, strict=False))
            if any(ast.dump(a) == ast.dump(b) for a, b in pairs):
                found.append(node.lineno)
    return found


def test_no_test_compares_a_value_with_itself() -> None:
    for code in ("a == a", "a == (b, f(c)) == (1, f(c))"):
        assert compared_with_itself(ast.parse(code)) == [1]
    for code in ("f() == f()", "a.b is a.b", "(a, b) == (b, a)"):
        assert compared_with_itself(ast.parse(code)) == []
    found = {str(path): compared_with_itself(ast.parse(path.read_text())) for path in TESTS.rglob("*.py")}
    assert not {name: lines for name, lines in found.items() if lines}


def ends_at(shares: list[float], *, timeout_s: float = 120.0, look_s: float = 5.0) -> float | None:
    """When a test is over whose processes take these shares of a core between looks."""
    now_s = cpu_s = 0.0
    watch = QuietWatch(timeout_s, now_s=now_s, cpu_s=cpu_s)
    for share in shares:
        now_s, cpu_s = now_s + look_s, cpu_s + share * look_s
        if watch.is_over(now_s=now_s, cpu_s=cpu_s):
            return now_s
    return None


def test_a_test_that_stands_still_is_over_after_its_deadline() -> None:
    assert ends_at([0.0] * 100) == 120.0
    assert ends_at([1.0] * 10 + [LEAST_SHARE / 10] * 100) == 50.0 + 120.0


def test_a_test_that_is_busy_to_no_end_is_over_at_last() -> None:
    assert ends_at([1.0] * 1000) == 120.0 * MOST_TIMES


@given(st.lists(st.floats(LEAST_SHARE * 1.01, 2.0), max_size=120 * MOST_TIMES // 5 - 1))
def test_a_test_that_gets_little_of_its_machine_goes_on(shares: list[float]) -> None:
    assert ends_at(shares) is None


def test_the_cpu_of_processes_that_a_test_started_is_its_own() -> None:
    before = cpu_of_tree()
    code = "import time\nwhile time.process_time() < 0.3: pass"
    with subprocess.Popen([sys.executable, "-c", code + "\ninput()"], stdin=subprocess.PIPE) as child:
        while cpu_of_tree() - before < 0.3:  # while it runs
            os.sched_yield()
        child.communicate(b"\n")
    assert cpu_of_tree() - before >= 0.3


def test_a_test_that_hangs_fails_and_one_that_computes_for_longer_than_its_deadline_does_not(tmp_path: Path) -> None:
    tests = tmp_path / "tests"
    tests.mkdir()
    for name in ("conftest.py", "quiet.py"):
        (tests / name).write_text((TESTS / name).read_text())
    (tests / "test_two.py").write_text(
        textwrap.dedent("""
        import threading, time, pytest

        @pytest.mark.timeout(1)
        def test_computes():
            while time.process_time() < 1.2 + BEGAN_S: pass

        @pytest.mark.timeout(1)
        def test_hangs():
            threading.Event().wait()

        BEGAN_S = time.process_time()
        """)
    )
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "--import-mode=importlib",
        "--rootdir",
        ".",
        "-q",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "Timeout (>1.0s) from pytest-timeout" in done.stdout
