"""Which of a version's files is the model: as MLflow's own MLmodel file says it, or by its name."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import PurePosixPath

from carpool.registry.source import BadArtifacts

_ONNX = "model.onnx"
_TORCH = "model.pth"
_READABLE = "onnx, and with allow_pickle = true pytorch"


def flavours(text: str) -> dict[str, dict[str, str]]:
    """The part `flavors` of an MLmodel file: by flavour, its plain values.

    MLflow writes this file in the same few forms of YAML each time: keys, two spaces of depth, plain or
    quoted values. Everything else is passed over, so that nothing it could hold is ever obeyed.
    """
    found: dict[str, dict[str, str]] = {}
    current = ""
    for depth, key, value in _lines(text):
        if depth == 0:
            current = ""
            if key != "flavors" and found:
                break
        elif depth == 2 and not value:
            current = key
            found[key] = {}
        elif depth == 4 and current and value:
            found[current][key] = value
    return found


def _lines(text: str) -> Iterator[tuple[int, str, str]]:
    """Of the block that begins with `flavors:`, and the first one after it."""
    inside = False
    for line in text.splitlines():
        depth = len(line) - len(line.lstrip(" "))
        key, separator, value = line.strip().partition(":")
        if not separator or line.lstrip().startswith(("#", "-")):
            continue
        if depth == 0:
            inside = key == "flavors"
        if inside or depth == 0:
            yield depth, key, value.strip().strip("'\"")


def model_file(text: str, listed: Collection[str], address: str, *, allow_pickle: bool) -> tuple[str, str]:
    """The file that holds the model, and the name under which it is served from a version's folder."""
    if not text:
        if _ONNX in listed:
            return _ONNX, _ONNX
        raise BadArtifacts(f"{address}: neither an MLmodel nor a {_ONNX} is among its files")
    there = flavours(text)
    if "onnx" in there:
        return _checked(there["onnx"].get("data", _ONNX), listed, address), _ONNX
    if "pytorch" in there:
        if not allow_pickle:
            raise BadArtifacts(
                f"{address}: a model of flavour pytorch is a pickle, which runs code when it is read: export "
                "it to ONNX, or set allow_pickle = true in [registry] if you trust whoever may write there"
            )
        data = f"{there['pytorch'].get('model_data', 'data')}/{_TORCH}"
        return _checked(data, listed, address), _TORCH
    named = ", ".join(sorted(there)[:8]) or "none"
    raise BadArtifacts(f"{address}: none of its flavours can be served ({named}); readable: {_READABLE}")


def _checked(data: str, listed: Collection[str], address: str) -> str:
    """A folder may stand for the file in it; a model's other files lie beside it."""
    if data not in listed and f"{data}/{_ONNX}" in listed:
        data = f"{data}/{_ONNX}"
    if data not in listed:
        raise BadArtifacts(f"{address}: MLmodel names the file {data[:80]!r}, which is not there")
    others = [
        one for one in listed if PurePosixPath(one).parent == PurePosixPath(data).parent and one != data
    ]
    if PurePosixPath(data).parent != PurePosixPath() and data.endswith(".onnx") and others:
        raise BadArtifacts(f"{address}: {data} is in a folder, where its other files would not be found")
    return data
