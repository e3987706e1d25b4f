"""What measures the house counts a tiny tree as it is written, and sees who imports whom, by a text too."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.house.source import Size, code_tokens, nevers, size_of

ROOT = Path(__file__).parents[3]

CHAT = '''"""A docstring is no code."""

# Nor is a comment.


class Chat:
    """Nor this."""

    def said(self) -> str:
        """Nor this."""
        return "said"  # the text is one token
'''

TREE = {
    "core/types.py": "",
    "console/page.py": "from stenograph.core import types\n",
    "dialects/openai/chat.py": CHAT,
    "dialects/gemini/chat.py": "import stenograph.dialects.openai.chat\n",
    "trajectory/turn.py": "from stenograph.core import types\n",
    "export/samples.py": "from stenograph.trajectory import turn\nfrom stenograph.session.turn import Turn\n",
    "store/rows.py": "\nfrom stenograph.dialects.openai.chat import Chat\n",
    "engine/base.py": "def f():\n    from stenograph.dialects.openai import chat\n",
    "session/turn.py": "from stenograph.cluster.postgres import lease\n",
    "cluster/postgres/lease.py": "",
    "http/app.py": "import importlib\nmake = importlib.import_module('stenograph.console.page')\n",
    "cli/main.py": "from stenograph.console import page\n",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in TREE.items():
        file = tmp_path / "stenograph" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        (file.parent / "__init__.py").touch()
    return tmp_path


def test_tokens_are_those_of_code() -> None:
    # class Chat : def said ( self ) -> str : return "said"
    assert code_tokens(CHAT) == 13
    assert code_tokens('"""Only a docstring."""\n') == 0
    assert code_tokens('x = """a text"""\n') == 3


def test_size_is_of_the_files_given(tree: Path) -> None:
    files = [tree / "stenograph/dialects/openai/chat.py", tree / "stenograph/core/types.py"]
    assert size_of(files) == Size(files=2, classes=1, lines=11, tokens=13)


def test_each_import_against_a_rule_is_found_with_its_line(tree: Path) -> None:
    assert nevers(tree) == {
        "no protocol stands on another": ["dialects/gemini/chat.py:1 imports dialects/openai/chat"],
        "export is on trajectory alone": ["export/samples.py:2 imports session/turn"],
        "records are no client's protocol": ["store/rows.py:2 imports dialects/openai/chat"],
        "an engine knows no client's protocol": ["engine/base.py:2 imports dialects/openai/chat"],
        "a session knows no other process": ["session/turn.py:1 imports cluster/postgres/lease"],
        "the core imports no part": [
            "http/app.py:2 imports console/page",
            "session/turn.py:1 imports cluster/postgres/lease",
        ],
    }


def test_another_checkout_is_measured_by_its_source_alone(tree: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.house", str(tree)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    told = json.loads(done.stdout.splitlines()[-1])
    assert (told["classes"], sum(told["nevers"].values())) == (1, 7)
