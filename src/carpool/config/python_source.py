"""Reads Python source without running it, one text at a time.

CPython 3.11 counts the depth of every syntax tree that is being made in one number. Where two threads make
one at the same time, as when models are loaded side by side, a correct file may fail with a SystemError.
"""

from __future__ import annotations

import ast
import threading

_one_at_a_time = threading.Lock()


def read_module(source: bytes, name: str) -> ast.Module:
    """Returns the syntax tree of a file. Raises what `ast.parse` raises."""
    with _one_at_a_time:
        return ast.parse(source, name)


def read_expression(text: str) -> ast.Expression:
    """Returns the syntax tree of one expression, for `ast.literal_eval`."""
    with _one_at_a_time:
        return ast.parse(text.lstrip(" \t"), mode="eval")
