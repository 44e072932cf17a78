"""Writes the model.toml that says what was found of a model: a new one, or one that stands there and lacks
it.

What stands there is kept as it is, with its comments: only keys that it does not have are added.
"""

from __future__ import annotations

import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

from carpool.config.model import ImageSettings, ModelConfig
from carpool.config.presets import PIXELS, PRESETS
from carpool.config.repository import TOML
from carpool.errors import ConfigError
from carpool.vision.geometry import scale_of
from carpool.vision.picture_input import FLOATS
from carpool.vision.plans.settings import Described, VisionSettings

LABELS = "labels.txt"
_HEADING = "# What is known of this model. Every line may be changed: docs/configuration.md has them all."
_NOT_WRITTEN = ("layout", "decode")

Keys = dict[str, Any]


def settings_text(config: ModelConfig, said: Described, before: str = "") -> str:
    """`before` is what stands in the file now."""
    top, tables = _found(config, said)
    if not before.strip():
        return _new_text(said, top, tables)
    document = _parsed(before, config)
    if config.preset is not None and document.get("preset") != config.preset:
        document = _parsed(with_preset_text(before, config.preset, config)[0], config)
    for key, value in top.items():
        document.setdefault(key, value)
    for name, found in tables.items():
        table = document.setdefault(name, {})
        for key, value in found.items():
            table.setdefault(key, value)
    return _dumped(document)


def with_preset_text(before: str, preset: str, config: ModelConfig) -> tuple[str, list[str]]:
    """Returns the same settings with this preset, and which keys of [image] it replaces."""
    document = _parsed(before, config)
    document["preset"] = preset
    if _needs_file(config):
        document.setdefault("file", config.file)
    image = document.get("image", {})
    gone = [key for key in PIXELS if key in image]
    for key in gone:
        del image[key]
    return _dumped(document), gone


def named_file(before: str, config: ModelConfig) -> str | None:
    """Returns the file that these settings are for; None: they do not say."""
    found = _parsed(before, config).get("file")
    return None if found is None else str(found)


def check_whose(before: str, config: ModelConfig) -> None:
    """Raises a ConfigError where the settings that stand there are those of another file in the folder."""
    named = named_file(before, config)
    if named not in (None, config.file):
        target = config.path / TOML
        raise ConfigError(
            f'{target} is for file = "{named}", not for {config.file}: move one of them to its own folder',
            field="file",
        )


def refers_to_labels(text: str) -> bool:
    """Returns whether settings name the file that is written beside them."""
    return bool(tomllib.loads(text).get("labels") == LABELS)


def _parsed(text: str, config: ModelConfig) -> Any:
    import tomlkit
    from tomlkit.exceptions import TOMLKitError

    try:
        return tomlkit.parse(text)
    except TOMLKitError as error:
        raise ConfigError(f"{config.path / 'model.toml'}: {error}") from None


def _dumped(document: Any) -> str:
    import tomlkit

    return tomlkit.dumps(document)


def _needs_file(config: ModelConfig) -> bool:
    return bool(config.file) and not str(config.file).startswith("model.")


def _found(config: ModelConfig, said: Described) -> tuple[Keys, dict[str, Keys]]:
    """Returns the keys at the top, and those of each table."""
    vision = said.vision
    top: Keys = {"file": config.file} if _needs_file(config) else {}
    if vision is None:
        return top, {}
    top["task"] = str(vision.task)
    if config.preset is not None:
        top["preset"] = config.preset
    if vision.labels:
        inside = config.labels and not Path(config.labels).is_absolute()
        top["labels"] = config.labels if inside else LABELS
    tables = {"image": image} if (image := _image(config, vision)) else {}
    if vision.table is not None:
        tables[str(vision.task)] = _plain(vision.table)
    return top, tables


def _image(config: ModelConfig, vision: VisionSettings) -> Keys:
    """What is known, and not what is assumed: that stays to be said. What a preset says is not repeated."""
    image, usual = vision.image, ImageSettings()
    kept = {name: value for name, value in _plain(image).items() if value != _listed(getattr(usual, name))}
    if config.preset is not None:
        said = config.image_keys or ()
        kept = {name: value for name, value in kept.items() if name not in PIXELS or name in said}
    else:
        kept |= {} if "resize" in vision.assumed else {"resize": image.resize}
        floats = vision.input.datatype in FLOATS and "mean" not in vision.assumed
        kept |= {"scale": scale_of(image, vision.input.datatype)} if floats else {}
    return {name: value for name, value in kept.items() if name not in _NOT_WRITTEN}


def _plain(table: object) -> Keys:
    found = ((one.name, getattr(table, one.name)) for one in fields(table))  # type: ignore[arg-type]
    return {name: _listed(value) for name, value in found if value is not None}


def _listed(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def _new_text(said: Described, top: Keys, tables: dict[str, Keys]) -> str:
    """Returns it with comments: what it was found by, and what else may be said."""
    vision = said.vision
    asked = [f"needed before it takes images: {said.ask}"] if said.ask else []
    lines = [_HEADING, *(f"# - {' '.join(line.split())}" for line in (*said.evidence, *asked)), ""]
    lines += [f"{key} = {_value(value)}" for key, value in top.items()]
    if "task" not in top:
        could = said.tasks or ("detect",)
        others = ", ".join(map(_value, could[1:]))
        lines.append(f"# task = {_value(could[0])}{f'  # or {others}' if others else ''}")
    if "preset" not in top and (vision is None or vision.assumed):
        lines.append(f'# preset = "torchvision"  # whose pixels it was trained with: {", ".join(PRESETS)}')
    if "labels" not in top:
        lines.append(f"# labels = {_value(LABELS)}  # a class a line")
    lines.append("# slo_ms = 50  # latency SLO: answer within this many ms, or reject early")
    for name, found in tables.items():
        lines += ["", f"[{name}]", *(f"{key} = {_value(value)}" for key, value in found.items())]
    return "\n".join(lines) + "\n"


def _value(value: object) -> str:
    """Returns it as TOML writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    return repr(value)
