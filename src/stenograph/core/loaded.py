"""Loads the code named by a command line or a setting, and nothing else.

It is the one place where a module of ours is imported by a text. A table has an entry, `module:name`, for each command,
engine, dialect, family or part; unused ones are not imported. Entries are held to the laws of imports.
"""

import importlib
from typing import Any


def entry(name: str) -> Any:
    """The object named by an entry. Raises ImportError where its module needs a missing package."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)
