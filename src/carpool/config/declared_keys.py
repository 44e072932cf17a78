"""Reads a table of model.toml as a dataclass declares it: each field is a key, and has its type."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, TypeAlias, TypeVar

from carpool.config import rules
from carpool.config.table import TomlTable

Settings = TypeVar("Settings")
Said: TypeAlias = Mapping[str, Any]
"""What a field says of its key: see `key` in model.py."""
ReadKey: TypeAlias = Callable[[TomlTable, str, Said], object]


def read_declared(
    table: TomlTable, kind: type[Settings], own_ways: Mapping[str, ReadKey] | None = None
) -> Settings:
    """Returns what the table says; keys that it leaves out have the dataclass's defaults. `own_ways` are for
    keys whose type does not say how they are read."""
    ways, values = own_ways or {}, {}
    for each in fields(kind):  # type: ignore[arg-type]
        read = ways.get(each.name) or _BY_TYPE[str(each.type).removesuffix(" | None")]
        values[each.name] = read(table, each.name, each.metadata)
    return kind(**{name: value for name, value in values.items() if value is not None})


def _text(table: TomlTable, key: str, said: Said) -> str | None:
    text = table.text(key, said["choices"]) or None
    if text is not None and not re.fullmatch(said.get("pattern", ".*"), text, re.DOTALL):
        raise table.error(key, f"must be {said['form']}, not {rules.shown(text)}")
    return text


def _per_channel(table: TomlTable, key: str, said: Said) -> tuple[float, ...] | None:
    values = table.numbers(key, said["within"][0], above=said.get("above", False))
    if values is not None and len(values) not in (1, 3):
        raise table.error(key, f"must be one number, or one per channel, not {len(values)} numbers")
    return values


def _size(table: TomlTable, key: str, said: Said) -> tuple[int, int] | None:
    """Returns one number for a square, or height and width."""
    if not isinstance(table.data.get(key), list):
        side = table.integer(key, *said["within"])
        return None if side is None else (side, side)
    sides = table.integers(key, *said["within"]) or ()
    if len(sides) != 2:
        raise table.error(key, f"must be one number, or height and width, not {len(sides)} numbers")
    return sides[0], sides[1]


_BY_TYPE: Mapping[str, ReadKey] = {
    "bool": lambda table, key, _: table.switch(key),
    "int": lambda table, key, said: table.integer(key, *said["within"]),
    "float": lambda table, key, said: table.number(key, *said["within"], above=said.get("above", False)),
    "str": _text,
    "tuple[int, int]": _size,
    "tuple[float, ...]": _per_channel,
    "tuple[str, ...]": lambda table, key, _: table.texts(key),
}
