"""Reads `[inputs.NAME]` of model.toml, and says which inputs of a model clients need not send."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

from carpool.config import rules
from carpool.config.model import ModelConfig, ModelSignature, TensorSignature
from carpool.config.settings_part import SettingsPart
from carpool.config.table import TomlTable
from carpool.errors import ConfigError
from carpool.extensions import installed

SIZES, MASK = "orig_target_sizes", "pixel_mask"
"""Inputs that are known by their names: width and height of the picture, and which of its pixels count."""

_KEYS = ("value", "texts", "template", "length")
_MOST_INPUTS = 16
_MOST_NUMBERS = 1 << 20
_MOST_LENGTH = 4096
_PLACE = "{}"


@dataclass(frozen=True, slots=True)
class FilledInput:
    """Describes a constant: `value` is JSON; or `texts`, or a `file` with one in each line, become token
    ids."""

    name: str
    value: str = ""
    texts: tuple[str, ...] = ()
    file: str = ""
    template: str = _PLACE  # in which each text stands
    length: int = 0  # of each row of token ids; 0: as the file or the tokenizer says

    @property
    def tokenized(self) -> bool:
        return bool(self.texts or self.file)


@dataclass(frozen=True, slots=True)
class InputSettings:
    """Holds the constants. Inputs that are known by their names need none."""

    filled: tuple[FilledInput, ...] = ()


def input_settings(config: ModelConfig) -> InputSettings:
    settings = config.extra.get("inputs")
    return settings if isinstance(settings, InputSettings) else InputSettings()


def mask_of(name: str, settings: InputSettings) -> FilledInput | None:
    """Returns the texts whose token ids this input masks, as attention_mask does for input_ids."""
    prefix = name.removesuffix("attention_mask")
    ids = f"{prefix}input_ids"
    return next(
        (one for one in settings.filled if prefix != name and one.name == ids and one.tokenized), None
    )


def constants(settings: InputSettings, signature: ModelSignature) -> Mapping[str, FilledInput]:
    """Returns the inputs that clients do not send at all, in the order of the file."""
    given = {one.name: one for one in settings.filled}
    found = {
        tensor.name: given.get(tensor.name) or mask_of(tensor.name, settings) for tensor in signature.inputs
    }
    return {name: constant for name, constant in found.items() if constant is not None}


# ---- reading model.toml


def _read(top: TomlTable) -> InputSettings | None:
    data = top.data.get("inputs")
    if not isinstance(data, dict) or not data:
        raise top.error("inputs", "holds one table for each input that is filled, like [inputs.NAME]")
    if len(data) > _MOST_INPUTS:
        raise top.error("inputs", f"has {len(data)} tables, more than the {_MOST_INPUTS} allowed")
    filled = (
        _filled(name, TomlTable.checked(top.file, f"inputs.{name}", "inputs", table))
        for name, table in data.items()
    )
    return InputSettings(tuple(filled))


def _filled(name: str, table: TomlTable) -> FilledInput:
    if table.has("value") == table.has("texts"):
        raise ConfigError(
            f"{table.file}: [{table.path}] needs either value, a number or a list of them, or texts"
        )
    if table.has("value"):
        for key in ("template", "length"):
            if table.has(key):
                raise table.error(key, "goes with texts")
        return FilledInput(name, _value(table))
    template = table.text("template") or _PLACE
    if template.count(_PLACE) != 1:
        raise table.error("template", f'must have one {_PLACE} in it, like "a photo of a {_PLACE}"')
    length = table.integer("length", 1, _MOST_LENGTH) or 0
    if isinstance(table.data["texts"], str):
        return FilledInput(name, file=table.inside("texts") or "", template=template, length=length)
    texts = table.texts("texts")
    if not texts:
        raise table.error("texts", "must be a list of strings, or the name of a file with one in each line")
    return FilledInput(name, texts=texts, template=template, length=length)


def _value(table: TomlTable) -> str:
    value = table.data["value"]
    if not _is_numeric(value, 4):
        raise table.error("value", "must be a number, true, false, or a list of them")
    text = json.dumps(value)
    if text.count(",") >= _MOST_NUMBERS:
        raise table.error("value", f"has more than the {_MOST_NUMBERS} numbers allowed")
    return text


def _is_numeric(value: object, depth: int) -> bool:
    if isinstance(value, list):
        return depth > 0 and bool(value) and all(_is_numeric(one, depth - 1) for one in value)
    return isinstance(value, bool | int | float)


# ---- what clients see of the model


def _seen(config: ModelConfig, signature: ModelSignature) -> ModelSignature:
    """Returns the tensors as clients see them. Constants are no inputs; those that are known by their names
    are optional, and a value that a client sends is used."""
    settings = input_settings(config)
    names = {tensor.name for tensor in signature.inputs}
    for one in settings.filled:
        if signature.inputs and one.name not in names:
            raise ConfigError(
                f"{config.name}: [inputs.{one.name}] is for an input that is not in the model file; "
                f"{rules.nearest(one.name, names)}"
            )
    fixed = constants(settings, signature)
    given = [tensor for tensor in signature.inputs if tensor.name not in fixed]
    inputs = tuple(replace(one, optional=True) if one.name in KNOWN else one for one in given)
    rows = {one.rows for one in inputs if not one.optional and one.rows}
    apart = {tensor.rows for tensor in signature.inputs if tensor.name in fixed} - rows - {""}
    outputs = tuple(tensor for tensor in signature.outputs if not _is_of(tensor, apart))
    return ModelSignature(inputs, outputs or signature.outputs)


def _is_of(tensor: TensorSignature, apart: set[str]) -> bool:
    """Returns whether the rows of an output are those of a constant, as text_embeds of texts."""
    return tensor.rows in apart


KNOWN = installed()["inputs"].known_inputs
PART = SettingsPart(
    kind=InputSettings, tables={"inputs": _KEYS}, read=_read, seen=_seen, usual=InputSettings()
)
