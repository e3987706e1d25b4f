"""Writes the parts of a release as SPDX 2.3 in JSON: the package, its requirements as installed here, vendored scripts.

    scripts/sbom > stenograph.spdx.json

Reads the metadata of its environment, and NOTICE.txt of the console's vendored scripts. Asks no network.
"""

import json
import re
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

NOTICE = Path(__file__).parents[1] / "src/stenograph/console/static/vendor/NOTICE.txt"
ROOT_NAME = "stenograph"


def required(name: str) -> Iterator[Distribution]:
    """A package and all that it requires without extras, each once, in the order in which they are met."""
    seen: set[str] = set()
    waiting = [name]
    while waiting:
        asked = re.sub(r"[-_.]+", "-", waiting.pop(0)).lower()
        if asked in seen:
            continue
        seen.add(asked)
        try:
            found = distribution(asked)
        except PackageNotFoundError:  # for another platform or Python
            continue
        yield found
        needs = (one for one in found.requires or () if "extra ==" not in one)
        waiting += [match[0] for one in needs if (match := re.match(r"[\w.-]+", one))]


def package(name: str, version: str, licence: str, purl: str, declared: str = "NOASSERTION") -> dict[str, Any]:
    """A part. `declared` is its licence as an SPDX expression, where it states one; `licence` are its own words."""
    return {
        "SPDXID": "SPDXRef-" + re.sub(r"[^\w.-]", "-", f"{name}-{version}").replace("_", "-"),
        "name": name,
        "versionInfo": version,
        "downloadLocation": "NOASSERTION",
        "filesAnalyzed": False,
        "licenseConcluded": "NOASSERTION",
        "licenseDeclared": declared,
        "licenseComments": licence,
        "copyrightText": "NOASSERTION",
        "externalRefs": [
            {"referenceCategory": "PACKAGE-MANAGER", "referenceType": "purl", "referenceLocator": purl},
        ],
    }


def installed() -> Iterator[dict[str, Any]]:
    for one in required(ROOT_NAME):
        name, facts = one.metadata["Name"], one.metadata
        said = [facts[key].splitlines()[0] for key in ("License-Expression", "License") if key in facts]
        declared = said[:1] if "License-Expression" in facts else []
        yield package(name, one.version, (said or ["not said"])[0], f"pkg:pypi/{name.lower()}@{one.version}", *declared)


def vendored() -> Iterator[dict[str, Any]]:
    """The scripts of NOTICE.txt: a name, its file of an npm package, its licences, its hash."""
    for block in NOTICE.read_text(encoding="utf-8").split("\n\n")[1:]:
        lines = block.strip().splitlines()
        name, version = lines[1].split(",")[0].split()
        licence = "; ".join(line.strip() for line in lines[1:] if "LICENSE" in line)
        row = package(name, version, licence, f"pkg:npm/{name.lower()}@{version}")
        sha256 = re.search(r"sha256 ([0-9a-f]{64})", block)
        assert sha256 is not None, f"{lines[0]} has no hash"
        yield row | {"checksums": [{"algorithm": "SHA256", "checksumValue": sha256[1]}]}


def related(element: str, kind: str, other: dict[str, Any]) -> dict[str, str]:
    return {"spdxElementId": element, "relationshipType": kind, "relatedSpdxElement": other["SPDXID"]}


def document() -> dict[str, Any]:
    packages = [*installed(), *vendored()]
    root = packages[0]
    made = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "spdxVersion": "SPDX-2.3",
        "dataLicense": "CC0-1.0",
        "SPDXID": "SPDXRef-DOCUMENT",
        "name": f"{ROOT_NAME}-{root['versionInfo']}",
        "documentNamespace": f"https://spdx.org/spdxdocs/{ROOT_NAME}-{root['versionInfo']}-{made}",
        "creationInfo": {"created": made, "creators": ["Tool: scripts/sbom"]},
        "packages": packages,
        "relationships": [
            {
                "spdxElementId": "SPDXRef-DOCUMENT",
                "relationshipType": "DESCRIBES",
                "relatedSpdxElement": root["SPDXID"],
            },
            *(related(root["SPDXID"], "CONTAINS" if "checksums" in one else "DEPENDS_ON", one) for one in packages[1:]),
        ],
    }


if __name__ == "__main__":
    json.dump(document(), sys.stdout, indent=1)
    sys.stdout.write("\n")
