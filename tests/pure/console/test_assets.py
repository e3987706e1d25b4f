"""The page's files: small, their own, without anything inline, and those of others as they were published."""

import hashlib
import re
from pathlib import Path

import pytest

from stenograph.console.assets import FILES, INDEX, SCRIPT
from stenograph.console.page import VENDORED, joined_script

STATIC = Path(__file__).parents[3] / "src" / "stenograph" / "console" / "static"
MODULES = {path.name: path.read_text() for path in STATIC.glob("*.js")}
MAX_BYTES = 60_000
PUBLISHED = {
    "preact-htm.js": "72284e8e9079c87817145df1110f74e8a2aa040b2fc384922e18dfcb46fc1fd7",
    "uplot.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
}
"""SHA-256 of the files as their packages on npm have them: htm 3.1.1 and uplot 1.6.32."""


def test_the_page_has_less_than_60_kb_compressed() -> None:
    asked = [file for name, file in FILES.items() if not name.endswith(".txt")]
    assert len(asked) >= 5
    assert sum(len(file.compressed) for file in asked) < MAX_BYTES


def test_what_others_wrote_is_as_they_published_it_and_has_its_licence() -> None:
    notice = (STATIC / "vendor" / "NOTICE.txt").read_text()
    scripts = {path.name for path in (STATIC / "vendor").glob("*.js")}
    assert scripts == set(PUBLISHED)
    for name, digest in PUBLISHED.items():
        assert hashlib.sha256((STATIC / "vendor" / name).read_bytes()).hexdigest() == digest
        assert f"{name}\n" in notice
        assert f"sha256 {digest}\n" in notice
    licences = re.findall(r"\((LICENSE-\w+\.txt)\)", notice)
    assert sorted(licences) == sorted(path.name for path in (STATIC / "vendor").glob("LICENSE-*"))


def test_the_page_has_no_inline_script_or_style_and_names_no_other_host() -> None:
    index = FILES[INDEX].text
    assert not re.search(r"<script(?![^>]* src=)|<style|\son\w+=|\sstyle=", index)
    for name in (INDEX, SCRIPT, "console.css", "icon.svg"):
        addresses = re.findall(r"https?://[^\s\"'`)]+", FILES[name].text)
        assert set(addresses) <= {"http://www.w3.org/2000/svg"}, name
    ours = "".join(MODULES.values())
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|dangerouslySet|document\.write|\beval\b", ours)
    assert not re.search(r"\bnew Function\b|setAttribute\(.style|\sstyle=[\"$]", ours)


def test_every_file_that_the_page_names_is_there() -> None:
    named = re.findall(r'(?:src|href)="console/([^"]+)"', FILES[INDEX].text)
    assert len(named) == 4
    assert set(named) <= set(FILES)


def test_modules_are_joined_in_the_order_of_their_imports() -> None:
    joined = FILES[SCRIPT].text
    assert joined == joined_script(MODULES, SCRIPT)
    assert re.findall(r"^import .*", joined, re.MULTILINE) == [joined.splitlines()[0]]
    assert not re.search(r"^ *//", joined, re.MULTILINE)
    assert joined.splitlines()[0].endswith(f'from "./{VENDORED}";')
    assert "\nexport " not in joined
    names = re.findall(r"^(?:async )?(?:const|let|function|class) (\w+)", joined, re.MULTILINE)
    assert len(names) > 100
    assert len(set(names)) == len(names), "two modules have a name in common"
    for module in MODULES.values():  # all of them are there
        first = next(
            line for line in module.splitlines() if line and not line.startswith(("//", "import ", "export {"))
        )
        assert first.removeprefix("export ") in joined


def test_an_import_that_cannot_be_joined_is_refused() -> None:
    for text in ('import other from "./other.js";\n', "export default 1;\n", 'import "./x.js";\n'):
        with pytest.raises(ValueError, match=r"app\.js"):
            joined_script({"app.js": text}, "app.js")


def test_a_name_of_a_module_is_no_other_module_s() -> None:
    """They are one script: a second declaration is an error of the whole page."""
    names = re.findall(r"^(?:async )?(?:const|let|function|class) (\w+)", FILES[SCRIPT].text, re.MULTILINE)
    assert len(names) > 100
    assert sorted(names) == sorted(set(names))
