"""One table of a model.toml: its keys are known, and their values have the type that is asked for."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from carpool.config import rules
from carpool.config.known_keys import KEYS, owners
from carpool.errors import ConfigError
from carpool.extension import Extension


def keys_of(section: str) -> tuple[str, ...]:
    """Returns the keys of a table; of an extension's, its settings are imported to know them."""
    if not section:
        return (*KEYS[""], *owners())
    owner = owners().get(section.partition(".")[0])
    return KEYS[section] if owner is None else _tables_of(owner)[section]


def every_key() -> dict[str, tuple[str, ...]]:
    """Returns every key by table, for messages and for the reference in docs/. All settings are imported."""
    found = {**KEYS, "": keys_of("")}
    for owner in owners().values():
        found |= _tables_of(owner)
    return found


def _tables_of(extension: Extension) -> Mapping[str, tuple[str, ...]]:
    tables: Mapping[str, tuple[str, ...]] = extension.part(extension.settings).tables
    return tables


@dataclass(frozen=True, slots=True)
class TomlTable:
    """`path` is how messages name the table, `section` is its name among all keys."""

    file: str
    path: str
    section: str
    data: Mapping[str, object]

    @classmethod
    def checked(cls, file: str, path: str, section: str, data: object) -> TomlTable:
        if not isinstance(data, dict):
            raise ConfigError(f"{file}: {path} must be a table, not {_kind(data)}")
        table = cls(file, path, section, data)
        for key in data:
            if key not in keys_of(section):
                raise ConfigError(
                    f"{file}: unknown key {rules.shown(table.name(key))}; {_suggestion(key, section)}"
                )
        return table

    def name(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key

    def where(self, key: str) -> str:
        return f"{self.file}: {self.name(key)}"

    def error(self, key: str, message: str) -> ConfigError:
        return ConfigError(f"{self.where(key)} {message}")

    def has(self, key: str) -> bool:
        return key in self.data

    def text(self, key: str, choices: Collection[str] = ()) -> str | None:
        value = self.data.get(key)
        if value is None:
            return None
        if not isinstance(value, str):
            raise self.error(key, f"must be a string, not {_kind(value)}")
        if choices and value not in choices:
            raise self.error(key, f"cannot be {rules.shown(value)}; {rules.nearest(value, choices)}")
        return value

    def inside(self, key: str) -> str | None:
        """Returns the name of a file, which must lie inside the model's folder."""
        name = self.text(key)
        return None if name is None else rules.check_inside(name, self.where(key))

    def switch(self, key: str) -> bool | None:
        value = self.data.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.error(key, f"must be true or false, not {_kind(value)}")
        return value

    def flag(self, key: str) -> bool:
        """Off unless it is said."""
        return self.switch(key) or False

    def integer(self, key: str, low: int, high: int) -> int | None:
        value = self.data.get(key)
        return None if value is None else self._integer(key, value, low, high)

    def integers(self, key: str, low: int, high: int) -> tuple[int, ...] | None:
        values = self._list(key, "whole numbers")
        return None if values is None else tuple(self._integer(key, value, low, high) for value in values)

    def number(
        self, key: str, low: float, high: float = float("inf"), *, above: bool = False
    ) -> float | None:
        """A number from low to high; `above` leaves low itself out."""
        value = self.data.get(key)
        return None if value is None else self._number(key, value, low, high, above)

    def numbers(self, key: str, low: float, *, above: bool = False) -> tuple[float, ...] | None:
        """Returns a list of numbers; a single one is a list of one."""
        if not isinstance(self.data.get(key), list):
            value = self.number(key, low, above=above)
            return None if value is None else (value,)
        values = self._list(key, "numbers") or []
        return tuple(self._number(key, value, low, float("inf"), above) for value in values)

    def texts(self, key: str) -> tuple[str, ...]:
        values = self._list(key, "strings") or []
        for value in values:
            if not isinstance(value, str) or not value:
                raise self.error(key, f"must be a list of strings, not of {_kind(value)}")
        return tuple(str(value) for value in values)

    def table(self, key: str) -> TomlTable | None:
        if not self.has(key):
            return None
        section = f"{self.section}.{key}" if self.section else key
        return TomlTable.checked(self.file, self.name(key), section, self.data[key])

    def tables(self, key: str) -> list[TomlTable]:
        values = self._list(key, "tables") or []
        section = f"{self.section}.{key}" if self.section else key
        return [
            TomlTable.checked(self.file, f"{self.name(key)}[{n}]", section, value)
            for n, value in enumerate(values)
        ]

    def _list(self, key: str, of: str) -> list[object] | None:
        value = self.data.get(key)
        if value is not None and not isinstance(value, list):
            raise self.error(key, f"must be a list of {of}, not {_kind(value)}")
        return value

    def _integer(self, key: str, value: object, low: int, high: int) -> int:
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.error(key, f"must be a whole number, not {_kind(value)}")
        if not low <= value <= high:
            raise self.error(key, f"must be {low} to {high}, not {str(value)[:64]}")
        return value

    def _number(self, key: str, value: object, low: float, high: float, above: bool) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.error(key, f"must be a number, not {_kind(value)}")
        fits = low < value <= high if above else low <= value <= high
        if not fits or abs(value) > 1e18:
            most = "" if high == float("inf") else f" and at most {high:g}"
            least = f"above {low:g}" if above else f"{low:g} or more"
            raise self.error(key, f"must be {least}{most}, not {str(value)[:64]}")
        return float(value)


def _suggestion(key: str, section: str) -> str:
    homes = [name for name, keys in every_key().items() if key in keys and name not in ("", section)]
    if homes:
        return "it belongs in " + " or ".join(f"[{home}]" for home in homes)
    if section and key in keys_of(""):
        return "it belongs at the top of the file, before the first table"
    return rules.nearest(key, keys_of(section))


def _kind(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    names = {int: "a whole number", float: "a number", str: "a string", list: "a list", dict: "a table"}
    return names.get(type(value), "a date or time")
