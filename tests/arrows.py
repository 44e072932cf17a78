"""Which files of the server still import which features: a list that only gets shorter.

Every feature shall be a folder below `extensions`. Until it is, HOMES says which files are its own, and
ARROWS which files of the server import one of them. A test compares both with the code.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache

HOMES: Mapping[str, str] = {"text": "backends/hosted/transformers_model"}
"""By feature, where its files are that are not below `extensions` yet: the first that matches counts."""

OUTSIDE = ("lab/", "sim/", "cli/", "demo/", "client/", "ray.py")
"""What no server imports."""

ARROWS: Mapping[str, str] = {}
"""By file of the server, the features whose files it imports."""


@cache
def feature_of(inside: str) -> str:
    """Returns whose file it is; empty: the server's own."""
    if inside.startswith("extensions/") and inside.count("/") > 1:
        return inside.split("/")[1]
    return next((name for name, homes in HOMES.items() if re.match(homes, inside)), "")


def arrows(imports: Mapping[str, Iterable[str]]) -> dict[str, str]:
    """Returns the same of what files import, both named by their places below the package."""
    found = {}
    for importer, imported in imports.items():
        if not feature_of(importer) and not importer.startswith(OUTSIDE):
            features = {feature_of(one) for one in imported} - {""}
            if features:
                found[importer] = " ".join(sorted(features))
    return found
