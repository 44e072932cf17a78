"""The repository index, as front ends see it too: they know nothing else of how models are loaded."""

from __future__ import annotations

from typing import NamedTuple

UNLOADED = "unloaded"


class IndexLine(NamedTuple):
    """`version` and `state` are empty for a model that was found and never loaded."""

    name: str
    version: str = ""
    state: str = ""
    reason: str = ""
