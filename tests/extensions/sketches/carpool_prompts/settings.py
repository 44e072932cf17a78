"""Reads `[parts.NAME]` of model.toml: the files of one version, and what each is for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from carpool.config.model import ModelConfig, key
from carpool.config.settings_part import SettingsPart
from carpool.config.table import TomlTable

PARTS = ("encoder", "decoder")
_USUALLY_STORED = 2


@dataclass(frozen=True, slots=True)
class PartSettings:
    file: str = key("", pattern=r"[\w.-]{1,64}", form="the name of a file")


@dataclass(frozen=True, slots=True)
class PromptSettings:
    parts: Mapping[str, PartSettings]
    most_stored: int


def prompt_settings(config: ModelConfig) -> PromptSettings | None:
    settings = config.extra.get("prompts_sketch")
    return settings if isinstance(settings, PromptSettings) else None


def _read(top: TomlTable) -> PromptSettings | None:
    table = top.table("parts")
    if table is None:
        return None
    found: dict[str, PartSettings] = {}
    for name in PARTS:
        part = table.table(name)
        if part is None:
            raise table.error(name, "is missing")
        found[name] = PartSettings(part.text("file") or f"{name}.onnx")
    most = table.integer("most_stored", 1, 1 << 16)
    return PromptSettings(found, most or _USUALLY_STORED)


PART = SettingsPart(
    kind=PromptSettings,
    tables={"parts": (*PARTS, "most_stored"), **{f"parts.{name}": ("file",) for name in PARTS}},
    read=_read,
)
