"""Runs the notebooks of examples/notebooks in a folder of their own; with --write their outputs are kept in them.

`--into FOLDER` writes them with their outputs there instead.
"""

import argparse
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

nbformat: Any = import_module("nbformat")  # without types
nbclient: Any = import_module("nbclient")

NOTEBOOKS = Path(__file__).parents[1] / "examples" / "notebooks"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME.ipynb", help="all by default")
    parser.add_argument("--write", action="store_const", dest="into", const=NOTEBOOKS, help="keep the outputs in them")
    parser.add_argument("--into", type=Path, metavar="FOLDER", help="write them with their outputs there")
    asked = parser.parse_args()
    for path in [NOTEBOOKS / name for name in asked.names] or sorted(NOTEBOOKS.glob("*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        with tempfile.TemporaryDirectory() as folder:
            runner = nbclient.NotebookClient(notebook, timeout=1200, resources={"metadata": {"path": folder}})
            runner.execute(cleanup_kc=True)
        for cell in notebook.cells:
            cell.metadata.pop("execution", None)  # times
            if cell.cell_type == "code":  # progress bars, and warnings that name a folder of this machine
                cell.outputs = [one for one in cell.outputs if one.get("name") != "stderr"]
        if asked.into is not None:
            nbformat.write(notebook, asked.into / path.name)
        print(f"{path.name}: {sum(cell.cell_type == 'code' for cell in notebook.cells)} cells")  # noqa: T201


if __name__ == "__main__":
    main()
