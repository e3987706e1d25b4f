"""The console's scripts as one, for a server's page and for a page in a file. Pure.

The scripts are plain modules, and each imports names from others in a line. One script of all of them is a third
smaller when compressed, and comes with one request; a file cannot import at all.
"""

import base64
import gzip
import hashlib
import html
import re
from collections.abc import Iterator, Mapping

import msgspec

VENDORED = "vendor/preact-htm.js"
"""The one third-party module: it imports nothing, and ends with its exports."""

_COMMENT = re.compile(r"^ *//.*\n", re.MULTILINE)
_IMPORT = re.compile(r'^import \{ ([^}]+) \} from "\./([\w/-]+\.js)";\n', re.MULTILINE)
_EXPORT_LIST = re.compile(r"^export \{[^}]*\};\n", re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async |function |class |const |let ))", re.MULTILINE)
_ITS_EXPORTS = re.compile(r"export\{([^}]*)\};?\s*$")


def joined_script(modules: Mapping[str, str], entry: str) -> str:
    """All modules for `entry` as one module, with imports from the vendored one alone and without lines of comment.
    Raises ValueError for an import other than a line of names."""
    ours: list[str] = []
    names: set[str] = set()
    for name in _in_order(modules, entry, []):
        for found in _IMPORT.finditer(modules[name]):
            if found[2] == VENDORED:
                names.update(found[1].split(", "))
        text = _COMMENT.sub("", _EXPORT.sub("", _EXPORT_LIST.sub("", _IMPORT.sub("", modules[name]))))
        if re.search(r"^(import|export)\b", text, re.MULTILINE):
            raise ValueError(f"{name} has an import or export that is not a line of names")
        ours.append(text)
    return f'import {{ {", ".join(sorted(names))} }} from "./{VENDORED}";\n' + "".join(ours)


def _in_order(modules: Mapping[str, str], name: str, known: list[str]) -> Iterator[str]:
    """The modules needed by one, before it; each once."""
    for found in _IMPORT.finditer(modules[name]):
        if found[2] != VENDORED and found[2] not in known:
            yield from _in_order(modules, found[2], known)
    if name not in known:
        known.append(name)
        yield name


def _as_values(vendored: str) -> str:
    """The vendored module as a value with its exports, for a script without imports."""
    found = _ITS_EXPORTS.search(vendored)
    assert found is not None, "the vendored module ends with its exports"
    pairs = (pair.split(" as ") for pair in found[1].split(","))
    exports = ", ".join(f"{outer}: {inner}" for inner, outer in pairs)
    return f"(() => {{ {vendored[: found.start()]}; return {{ {exports} }}; }})()"


def file_page(
    files: Mapping[str, str], *, session_id: str, documents: Mapping[str, bytes], contents: Mapping[str, bytes]
) -> str:
    """A page in one file. `files` are the page's, by name; `documents` are answers of a server in JSON by their path,
    `contents` those in bytes.

    Nothing is fetched: its policy allows its own script and style, by their hashes, and no address.
    """
    app = re.sub(
        rf'^import (\{{[^}}]+\}}) from "\./{re.escape(VENDORED)}";\n',
        lambda found: f"const {found[1]} = {_as_values(files[VENDORED])};\n",
        files["app.js"],
    )
    scripts = [files["vendor/uplot.js"], app]
    policy = "; ".join(
        (
            "default-src 'none'",
            "script-src " + " ".join(map(_hash_of, scripts)),
            f"style-src {_hash_of(files['console.css'])}",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )
    packed = {path: base64.b64encode(gzip.compress(content, mtime=0)).decode() for path, content in contents.items()}
    told = {path: msgspec.Raw(document) for path, document in documents.items()}
    data = msgspec.json.encode({"session": session_id, "json": told, "bytes": packed}).decode()
    shown = html.escape(session_id)
    return "\n".join(
        (
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta name="color-scheme" content="light dark">\n<title>Session {shown}</title>',
            f'<style>{files["console.css"]}</style>\n</head>\n<body><div id="app"></div>',
            f'<script id="stenograph-data" type="application/json">{_without_markup(data)}</script>',
            f'<script>{scripts[0]}</script>\n<script type="module">{scripts[1]}</script>\n</body>\n</html>\n',
        )
    )


def _hash_of(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _without_markup(data: str) -> str:
    """JSON in which nothing can end its element or begin a comment."""
    return data.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
