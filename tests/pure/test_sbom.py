"""The list of a release's parts has every requirement, and every vendored script with the hash of its file."""

import hashlib
import tomllib
from pathlib import Path

import stenograph
from scripts import sbom

ROOT = Path(__file__).parents[2]


def test_every_requirement_and_vendored_file_is_listed_once() -> None:
    listed = sbom.document()["packages"]
    names = [one["name"] for one in listed]
    assert (listed[0]["name"], listed[0]["licenseDeclared"]) == ("stenograph", "Apache-2.0")
    assert len({one["SPDXID"] for one in listed}) == len(names)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = {line.split(">=")[0].lower().replace("_", "-") for line in project["dependencies"]}
    assert asked <= {name.lower().replace("_", "-") for name in names}
    vendor = ROOT / "src/stenograph/console/static/vendor"
    hashes = {hashlib.sha256(path.read_bytes()).hexdigest() for path in vendor.glob("*.js")}
    assert {one["checksums"][0]["checksumValue"] for one in listed if "checksums" in one} == hashes
    related = {one["relatedSpdxElement"] for one in sbom.document()["relationships"]}
    assert related == {one["SPDXID"] for one in listed}


def test_the_version_has_one_place() -> None:
    """pyproject.toml reads it there; so does the sdist, which `scripts/test-packaging` builds."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" not in settings["project"]
    assert settings["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "stenograph.__version__"}
    named = [
        path.name for path in (ROOT / "packaging").glob("*.yaml") if f":{stenograph.__version__}" in path.read_text()
    ]
    assert sorted(named) == ["kubernetes-postgres.yaml", "kubernetes.yaml"]
