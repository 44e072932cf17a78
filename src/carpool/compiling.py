"""Defines what the compiled form of the hot modules needs to be told (`make wheel`), and whether this is
it."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mypy_extensions import mypyc_attr
else:

    def mypyc_attr(*_names, **_values):
        """Read by the compiler; says nothing where a module is interpreted."""
        return lambda made: made


__all__ = ["is_compiled", "mypyc_attr"]


def is_compiled() -> bool:
    found = find_spec("carpool.core.scheduler")
    return found is not None and found.origin is not None and not found.origin.endswith(".py")
