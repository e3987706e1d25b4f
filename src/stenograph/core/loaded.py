"""Loads the code of what a command line or a setting names, and of nothing else.

It is the one place where a module of ours is imported by a text. A table has an entry, `module:name`, for each
command, engine, dialect, family or part; what is not used is not imported. Entries are held to the laws of imports.
"""

import importlib
from typing import Any


def entry(name: str) -> Any:
    """The object that an entry names. Raises ImportError where its module needs a package that is not installed."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)
