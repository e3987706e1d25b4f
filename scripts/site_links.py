"""A hook of mkdocs: a link out of docs/ to a file of the repository is its text alone; the site lacks that file."""

import re
from typing import Any

OUT_OF_DOCS = re.compile(r"\[([^\]]+)\]\(\.\./[^)\s]+\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The page's Markdown without links that lead out of docs/."""
    return OUT_OF_DOCS.sub(r"\1", markdown)
