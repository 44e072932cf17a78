"""Says which extensions tools/without.py has removed from this copy of the checkout; elsewhere, none.

What shows two features together needs both of them; the pages and goldens describe the whole server.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

import pytest

Row = TypeVar("Row")

ABSENT = frozenset(os.environ.get("WITHOUT_EXTENSIONS", "").split())

in_whole_server = pytest.mark.skipif(bool(ABSENT), reason="an extension was removed, which is described too")


def needs(*names: str) -> pytest.MarkDecorator:
    """Marks a test that needs these extensions beside those of its folder."""
    return pytest.mark.skipif(bool(ABSENT.intersection(names)), reason="an extension was removed")


def rows(names: str, *given: Row) -> Sequence[Row]:
    """Returns cases of a test that need these extensions."""
    return () if ABSENT.intersection(names.split()) else given
