"""The notebooks of examples/notebooks run, every cell, against a real server with a real model; a step learns."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OWN = {
    "IPYTHONDIR": "ipython",
    "JUPYTER_DATA_DIR": "data",
    "JUPYTER_RUNTIME_DIR": "runtime",
    "JUPYTER_CONFIG_DIR": "of",
}
"""The folders of Jupyter, else below a person's home."""

pytestmark = [pytest.mark.weights, pytest.mark.timeout(600)]


def outputs_of(name: str, folder: Path) -> list[dict[str, object]]:
    """What the cells put out, of a run now."""
    environment = os.environ | {variable: str(folder / place) for variable, place in OWN.items()}
    environment |= {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "OPENBLAS_NUM_THREADS": "1",
    }
    command = [sys.executable, str(ROOT / "scripts" / "notebooks.py"), "--into", str(folder), name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    cells = json.loads((folder / name).read_text(encoding="utf-8"))["cells"]
    return [output for cell in cells if cell["cell_type"] == "code" for output in cell["outputs"]]


def printed(outputs: list[dict[str, object]]) -> str:
    return "".join(str("".join(one["text"])) for one in outputs if isinstance(one.get("text"), list))


def test_a_session_token_by_token(tmp_path: Path, smollm2_path: Path) -> None:
    outputs = outputs_of("session.ipynb", tmp_path)
    assert "it begins with them: True" in printed(outputs)
    tables = [data["text/html"] for one in outputs if isinstance(data := one.get("data"), dict) and "text/html" in data]
    assert "<th>temperature</th>" in str(tables)  # a sample as a table
    sampled = re.search(r"(\d+) trained", str(tables))
    assert sampled is not None
    assert str(tables).count("p = ") == int(sampled[1]) > 0  # each sampled token, with its probability


def test_a_grpo_step(tmp_path: Path, smollm2_path: Path) -> None:
    said = printed(outputs_of("grpo_step.ipynb", tmp_path))
    apart = re.search(r"at most (\S+) nats apart", said)
    assert apart is not None
    assert float(apart[1]) < 1e-4
    losses = [float(loss) for loss in re.findall(r"loss (\S+?),? ", said)]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    assert "{'1'}\n" in said  # the version of the weights that sampled after the step
