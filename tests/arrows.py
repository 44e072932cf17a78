"""Which files of the server import which features, each of which is a folder below `extensions`: none. A test
compares ARROWS with the code."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

OUTSIDE = ("lab/", "sim/", "cli/", "demo/", "client/", "ray.py")
"""What no server imports."""

ARROWS: Mapping[str, str] = {}
"""By file of the server, the features whose files it imports."""


def feature_of(inside: str) -> str:
    """Returns whose file it is; empty: the server's own."""
    return inside.split("/")[1] if inside.startswith("extensions/") and inside.count("/") > 1 else ""


def arrows(imports: Mapping[str, Iterable[str]]) -> dict[str, str]:
    """Returns the same of what files import, both named by their places below the package."""
    found = {}
    for importer, imported in imports.items():
        if not feature_of(importer) and not importer.startswith(OUTSIDE):
            features = {feature_of(one) for one in imported} - {""}
            if features:
                found[importer] = " ".join(sorted(features))
    return found
