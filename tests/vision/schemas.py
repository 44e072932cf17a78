"""As much of JSON schema as the answers use."""

from __future__ import annotations

from typing import Any

_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "array": (list,),
    "object": (dict,),
}


def complaints(value: Any, described: dict[str, Any], path: str = "") -> list[str]:
    kind = described.get("type")
    if kind is None:
        return []
    if kind == "boolean" and isinstance(value, bool):
        return []
    if kind == "boolean" or not isinstance(value, _TYPES[kind]) or isinstance(value, bool):
        return [f"{path} is not a {kind}"]
    if kind == "array":
        return [
            found
            for index, item in enumerate(value)
            for found in complaints(item, described["items"], f"{path}[{index}]")
        ]
    if kind != "object":
        return []
    start = f"{path}." if path else ""
    missing = [f"{start}{name} is missing" for name in described["required"] if name not in value]
    unknown = [f"{start}{name} is unknown" for name in value if name not in described["properties"]]
    inner = [
        found
        for name, item in value.items()
        if name in described["properties"]
        for found in complaints(item, described["properties"][name], f"{start}{name}")
    ]
    return [*missing, *unknown, *inner]
