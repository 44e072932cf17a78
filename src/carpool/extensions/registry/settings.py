"""Reads the table [registry] of a model.toml: which addresses the model's versions come from; and the file in
the model's folder that says which of them are served."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from carpool.config.declared_keys import read_declared
from carpool.config.model import ModelConfig, SpecificVersions, key
from carpool.config.regular_file import read_regular
from carpool.config.settings_part import SettingsPart
from carpool.config.table import TomlTable
from carpool.errors import ConfigError

ADDRESS = r"models:/(?P<name>[^/@:\s]{1,256})(?:@(?P<alias>[\w.-]{1,256})|/(?P<version>[1-9]\d{0,17}))"
_FORM = 'like "models:/detector@champion" or "models:/detector/7"'
STATE_FILE = ".registry.json"
_MOST_STATE = 4 << 20


def _address(default: str) -> Any:
    return key(default, pattern=ADDRESS, form=_FORM)


@dataclass(frozen=True, slots=True)
class RegistrySettings:
    """Describes where a model's versions come from."""

    stable: str = _address("")
    candidate: str = _address("")  # what it points to is rolled out, if that differs
    poll_s: float = key(30.0, within=(1, 86400))
    write_back: bool = True  # tags and metrics of a version
    move_alias: bool = False  # when a candidate has become stable, the stable alias follows
    allow_pickle: bool = False  # flavours that run code when they are read


class Address(NamedTuple):
    """Represents what `models:/name@alias` or `models:/name/7` means: one of the last two is empty."""

    name: str
    alias: str
    version: str


def read_address(text: str, where: str = "the address") -> Address:
    found = re.fullmatch(ADDRESS, text)
    if found is None:
        raise ConfigError(f"{where} must be {_FORM}, not {text[:80]!r}", field="registry")
    return Address(found["name"], found["alias"] or "", found["version"] or "")


def is_address(text: str) -> bool:
    return text.startswith("models:/")


def read_state(folder: Path) -> Mapping[str, Any]:
    """Returns what is known of the registry in a model's folder; nothing, if it was never asked."""
    try:
        document = json.loads(read_regular(folder / STATE_FILE, _MOST_STATE))
    except (OSError, ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def served_versions(folder: Path) -> tuple[int, ...]:
    """Returns those that are to be served, of the ones that lie in the folder."""
    versions = read_state(folder).get("serve")
    if not isinstance(versions, list):
        return ()
    return tuple(sorted({number for number in versions if type(number) is int and number > 0}))


def registry_settings(config: ModelConfig) -> RegistrySettings | None:
    """Returns a model's; None: it follows no registry."""
    settings = config.extra.get("registry")
    return settings if isinstance(settings, RegistrySettings) else None


def _read(top: TomlTable) -> RegistrySettings | None:
    table = top.table("registry")
    if table is None:
        return None
    registry = read_declared(table, RegistrySettings)
    if not registry.stable:
        raise top.error("registry.stable", 'is needed: an address like "models:/detector@champion"')
    if top.has("versions"):
        raise top.error("versions", "and [registry] contradict each other; the registry chooses the version")
    names = {read_address(address).name for address in (registry.stable, registry.candidate) if address}
    if len(names) > 1:
        raise top.error(
            "registry.candidate", f"must be of the same model as stable: {' and '.join(sorted(names))}"
        )
    return registry


def _as_fetched(config: ModelConfig, folder: Path) -> ModelConfig:
    """Returns the settings with the versions that were fetched and are to be served."""
    registry, versions = registry_settings(config), served_versions(folder)
    if registry is None:
        return config
    if not versions:
        raise ConfigError(f"{config.name}: {registry.stable} was not fetched from the registry yet")
    return replace(config, versions=SpecificVersions(versions))


PART = SettingsPart(
    kind=RegistrySettings,
    tables={"registry": tuple(each.name for each in fields(RegistrySettings))},
    read=_read,
    in_folder=_as_fetched,
)
