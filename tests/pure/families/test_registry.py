"""The registry of families: each row is the family that it names, and loads no other."""

import subprocess
import sys
from pathlib import Path

import pytest

from standins.tiny.llama import write_tiny_folder
from stenograph.families import FAMILIES, Known

PROGRAM = """
import sys
from pathlib import Path
from stenograph.families import family_for
from stenograph.model.files import load_model_files
family = family_for(load_model_files(Path(sys.argv[1])))
print(family.name, *sorted(name for name in sys.modules if name.startswith("stenograph.families.")))
"""


@pytest.mark.parametrize("known", FAMILIES, ids=lambda known: known.name)
def test_a_row_names_its_family_and_one_of_its_signs(known: Known) -> None:
    """A sign in the template alone would not do where a template does not matter."""
    family = known.family()
    assert family.name == known.name
    if family.signs is None:
        assert known.sign == ""
        return
    needs_token = family.signs.tekken is not None or family.signs.any_template or family.signs.without_template
    assert known.sign in (*family.signs.tokens, *(() if needs_token else family.signs.template))


def test_a_model_loads_the_families_whose_signs_it_has(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path)
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(folder)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["chatml", "stenograph.families.chatml"]
