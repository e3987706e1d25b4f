"""Runs the notebooks of examples/notebooks in a folder of their own; with --write their outputs are kept in them."""

import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

nbformat: Any = import_module("nbformat")  # of the extra `docs`, which the type checkers do without
nbclient: Any = import_module("nbclient")

NOTEBOOKS = Path(__file__).parents[1] / "examples" / "notebooks"


def main() -> None:
    asked = [one for one in sys.argv[1:] if not one.startswith("-")]
    for path in [NOTEBOOKS / name for name in asked] or sorted(NOTEBOOKS.glob("*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        with tempfile.TemporaryDirectory() as folder:
            runner = nbclient.NotebookClient(notebook, timeout=1200, resources={"metadata": {"path": folder}})
            runner.execute(cleanup_kc=True)
        for cell in notebook.cells:
            cell.metadata.pop("execution", None)  # times
            if cell.cell_type == "code":  # progress bars, and warnings that name a folder of this machine
                cell.outputs = [one for one in cell.outputs if one.get("name") != "stderr"]
        if "--write" in sys.argv:
            nbformat.write(notebook, path)
        sys.stdout.write(f"{path.name}: {sum(cell.cell_type == 'code' for cell in notebook.cells)} cells\n")


if __name__ == "__main__":
    main()
