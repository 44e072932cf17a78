"""What the compiled form of a module needs to be told, and nothing where it is interpreted."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

T = TypeVar("T")

if TYPE_CHECKING:
    from mypy_extensions import mypyc_attr
else:

    def mypyc_attr(*_names, **_values):
        return lambda made: made


__all__ = ["mypyc_attr"]
