"""Loads the code of a command by its name: `stenograph --version` must not import a server.

It is the one place where a module of ours is imported by a text. What a command needs to read its flags is imported as
everywhere; what it needs to do its work is an entry, `module:function`, in `cli/commands.py`.
"""

import importlib
from collections.abc import Callable
from typing import Any


def entry(name: str) -> Callable[..., Any]:
    """The function that an entry names."""
    module, _, function = name.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return found
