"""Reads `[limit]` of model.toml."""

from __future__ import annotations

from dataclasses import dataclass

from carpool.config.declared_keys import read_declared
from carpool.config.model import key
from carpool.config.settings_part import SettingsPart
from carpool.config.table import TomlTable


@dataclass(frozen=True, slots=True)
class LimitSettings:
    at_once: int = key(4, within=(1, 1000))


def _read(top: TomlTable) -> LimitSettings | None:
    table = top.table("limit")
    return None if table is None else read_declared(table, LimitSettings)


PART = SettingsPart(kind=LimitSettings, tables={"limit": ("at_once",)}, read=_read)
