"""The same model with other knobs: a folder of links to its files, and settings of its own."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

from carpool.config.repository import PBTXT, TOML, VERSION, ModelSource
from carpool.config.rules import read_settings
from carpool.errors import InvalidInput
from carpool.lab.sweep.sweep_order import Setting

_PLAIN = re.compile(r"[A-Za-z0-9_-]+")


def check_place(place: Path) -> None:
    """A single file of several versions could not be told from the others in a folder of links."""
    if place.is_file() and VERSION.fullmatch(place.parent.name):
        raise InvalidInput(f"{place} is one of a model's versions: name the model's folder instead")


def make_variant(source: ModelSource, place: Path, setting: Setting, under: Path) -> Path:
    """The folder to serve: `under`/…/NAME. Nothing of the model itself is touched or copied."""
    home = place if place.is_dir() else place.parent
    folder = under / source.config.name
    folder.mkdir(parents=True)
    for entry in home.iterdir():
        if entry.name not in (PBTXT, TOML):
            (folder / entry.name).symlink_to(entry.resolve())
    if (home / PBTXT).exists():
        text = pbtxt_with_knobs(read_settings(home / PBTXT), setting)
        (folder / PBTXT).write_text(text, "utf-8")
        return folder
    before = read_settings(home / TOML) if (home / TOML).exists() else ""
    settings = tomllib.loads(before)
    if place.is_file():
        settings["file"] = place.name
    (folder / TOML).write_text(toml_with_knobs(settings, setting), "utf-8")
    return folder


def toml_with_knobs(settings: dict[str, Any], setting: Setting) -> str:
    """Without the model's own promise and batching."""
    own = ("slo_ms", "slo_may_grow", "batching", "name")
    kept = {key: value for key, value in settings.items() if key not in own}
    kept["batching"] = {"max_delay_ms": setting.max_delay_ms}
    if setting.max_batch is not None:
        kept["max_batch"] = setting.max_batch
    return "".join(f"{_key(key)} = {_toml(value)}\n" for key, value in kept.items())


def _toml(value: Any) -> str:
    """On one line: tables are written inside."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(key)} = {_toml(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, str):
        return json.dumps(value).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


def _key(key: str) -> str:
    return key if _PLAIN.fullmatch(key) else _toml(key)


def pbtxt_with_knobs(text: str, setting: Setting) -> str:
    from google.protobuf import text_format

    from carpool.config.triton_text import read_text

    config = read_text(text, PBTXT).message
    config.ClearField("dynamic_batching")
    config.dynamic_batching.max_queue_delay_microseconds = round((setting.max_delay_ms or 0.0) * 1e3)
    if setting.max_batch is not None:
        config.max_batch_size = setting.max_batch
    return str(text_format.MessageToString(config))
