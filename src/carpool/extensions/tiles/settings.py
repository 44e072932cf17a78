"""Reads `[tiles]` of model.toml and the options of a request: how images are cut, and how what is found in
the tiles becomes one answer. The defaults are sahi's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from carpool.config.model import ModelConfig
from carpool.config.rules import shown
from carpool.config.settings_part import SettingsPart
from carpool.config.table import TomlTable
from carpool.errors import InvalidInput
from carpool.vision.picture_answers import Option, flag, fraction

NAME = "tiles"
TASKS = ("detect", "segment", "pose")
TILE = "tile"  # the option that asks for tiles
NMM, NMS = "nmm", "nms"
IOS, IOU = "ios", "iou"
SMALLEST, LARGEST = 32, 8192
MOST_OVERLAP = 0.9
_LOW_SCORE = 0.1
"""Below such a score so many boxes are kept that merged ones would grow without end: sahi suppresses
instead."""


@dataclass(frozen=True, slots=True)
class TileSettings:
    size: int = 640  # of each side of a tile, in pixels of the image
    overlap: float = 0.2  # of neighbours, as a share of a side
    merge: str = (
        ""  # nmm: join boxes that match; nms: keep the best of them. Empty: nmm, unless the score is low
    )
    metric: str = ""  # ios: their intersection over the smaller area; iou: over both. Empty: as for `merge`
    match: float = 0.5  # boxes match from here on
    per_class: bool = True  # only those of one class do
    whole: bool = True  # the model also sees the whole image, for large objects

    def settled(self, score: float) -> TileSettings:
        """Returns the settings with what was left open, for a model with this lowest score."""
        low = score < _LOW_SCORE
        merge = self.merge or (NMS if low else NMM)
        return replace(self, merge=merge, metric=self.metric or (IOU if low and not self.merge else IOS))


def tile_settings(config: ModelConfig) -> TileSettings | None:
    settings = config.extra.get(NAME)
    return settings if isinstance(settings, TileSettings) else None


# ---- model.toml


def _read(top: TomlTable) -> TileSettings | None:
    table = top.table(NAME)
    if table is None:
        return None
    found = {
        "size": table.integer("size", SMALLEST, LARGEST),
        "overlap": table.number("overlap", 0.0, MOST_OVERLAP),
        "merge": table.text("merge", (NMM, NMS)),
        "metric": table.text("metric", (IOS, IOU)),
        "match": table.number("match", 0.0, 1.0, above=True),
        "per_class": table.switch("per_class"),
        "whole": table.switch("whole"),
    }
    given: dict[str, Any] = {name: value for name, value in found.items() if value is not None}
    return TileSettings(**given)


PART = SettingsPart(
    kind=TileSettings,
    tables={NAME: tuple(field.name for field in fields(TileSettings))},
    read=_read,
    changes_answers=True,
)


# ---- requests


def _size(name: str, text: str) -> int:
    number = int(text) if text.isascii() and text.isdigit() and len(text) <= 5 else -1
    if number and not SMALLEST <= number <= LARGEST:
        expected = f"pixels from {SMALLEST} to {LARGEST}, or 0 for no tiles"
        raise InvalidInput(f"{name} must be {expected}, not {shown(text)}", field=name)
    return number


def _overlap(name: str, text: str) -> float:
    number = fraction(name, text)
    if number > MOST_OVERLAP:
        raise InvalidInput(f"{name} must be at most {MOST_OVERLAP}", field=name)
    return number


def _match(name: str, text: str) -> float:
    number = fraction(name, text)
    if not number:
        raise InvalidInput(f"{name} must be above 0", field=name)
    return number


def _one_of(*words: str) -> Option:
    def read(name: str, text: str) -> str:
        if text not in words:
            raise InvalidInput(f"{name} must be {' or '.join(words)}, not {shown(text)}", field=name)
        return text

    return Option(read, {"type": "string", "enum": list(words)}, "")


def _with(option: Option, description: str) -> Option:
    return replace(option, description=description)


_BOOLEAN = {"type": "boolean"}
OPTIONS: Mapping[str, Option] = {
    TILE: Option(
        _size,
        {"type": "integer", "minimum": 0, "maximum": LARGEST},
        "Cut the image into tiles with sides of so many pixels, ask the model about each, and merge what it "
        "finds; 0: do not, where the model's settings say so.",
    ),
    "overlap": Option(
        _overlap,
        {"type": "number", "minimum": 0, "maximum": MOST_OVERLAP, "default": TileSettings().overlap},
        "Overlap of neighbouring tiles, as a share of their side.",
    ),
    "merge": _with(
        _one_of(NMM, NMS), "With tiles: nmm joins boxes that match, nms keeps the best of them. Default: nmm."
    ),
    "metric": _with(
        _one_of(IOS, IOU),
        "How boxes of tiles match: by their intersection over the smaller area, or over both. Default: ios.",
    ),
    "match": Option(
        _match,
        {"type": "number", "exclusiveMinimum": 0, "maximum": 1, "default": TileSettings().match},
        "From which number on they match.",
    ),
    "per_class": Option(flag, {**_BOOLEAN, "default": True}, "Only boxes of tiles with one class match."),
    "whole": Option(
        flag, {**_BOOLEAN, "default": True}, "With tiles: also ask the model about the whole image."
    ),
}


def read_settings(usual: TileSettings | None, options: Mapping[str, str]) -> TileSettings | None:
    """Returns the settings of a request with these options; None: it wants no tiles, or says nothing of
    them. `usual` are those of its model."""
    given: dict[str, Any] = {
        name: OPTIONS[name].read(name, options[name]) for name in OPTIONS if name in options
    }
    size = given.pop(TILE, None)
    if size == 0 or (size is None and usual is None):
        return None
    sized = {} if size is None else {"size": size}
    return replace(usual or TileSettings(), **sized, **given)
