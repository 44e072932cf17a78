"""Reads the settings of protocols of other tools: a TOML file with a table for each."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from carpool.config.regular_file import read_regular
from carpool.config.rules import nearest, shown
from carpool.config.toml_text import parse_toml
from carpool.errors import ConfigError

_MOST_BYTES = 1 << 20


def api_table(file: str, name: str, keys: Collection[str]) -> Mapping[str, Any]:
    """Returns the table of one protocol, empty without a file. Raises `ConfigError` for keys that it does not
    have."""
    table = _tables(file).get(name, {}) if file else {}
    if not isinstance(table, dict):
        raise wrong(file, name, "must be a table")
    for key in table:
        if key not in keys:
            raise wrong(file, name, f"has no {shown(key)}; {nearest(key, sorted(keys))}")
    return table


def wrong(file: str, name: str, what: str) -> ConfigError:
    return ConfigError(f"{file}: [{name}] {what}", field="api_settings")


@cache
def _tables(file: str) -> Mapping[str, Any]:
    try:
        text = read_regular(Path(file), _MOST_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"api_settings cannot be read from {file}: {error}", field="api_settings") from None
    return parse_toml(text, file)
