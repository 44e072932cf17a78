"""Defines what compiling the hot modules needs (`make wheel`), and whether this is the compiled form."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mypy_extensions import mypyc_attr
else:

    def mypyc_attr(*_names, **_values):
        """Read by the compiler; says nothing where a module is interpreted."""
        return lambda made: made


__all__ = ["form", "is_compiled", "mypyc_attr", "other_form"]


def is_compiled() -> bool:
    found = find_spec("carpool.core.scheduler")
    return found is not None and found.origin is not None and not found.origin.endswith(".py")


def form() -> str:
    return "compiled" if is_compiled() else "interpreted"


def other_form() -> str:
    """Returns how to get the other form. Of the wheels on an index pip prefers one that is compiled for the
    machine; what it builds from the sources is interpreted."""
    again = "pip install --force-reinstall --no-deps"
    if is_compiled():
        return f"interpreted: {again} --no-binary carpool carpool"
    return f"compiled: {again} carpool, where a wheel is for this machine, or make wheel in a clone"
