"""Settings that come with a request to load: Triton's ModelConfig as JSON, read by the rules of config.pbtxt.

The JSON becomes the tree that the text format would give, so every check and every message is the same.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from carpool.config.model import ModelConfig
from carpool.config.pbtxt import MAX_VALUES, Field, Message, Scalar
from carpool.config.rules import MAX_FILE_BYTES, shown
from carpool.config.tokens import Place, TokenKind
from carpool.config.triton import tree_config
from carpool.config.triton_schema import ENUMS, FieldSpec, Use, message_fields
from carpool.errors import ConfigError

_WHERE = "config"
_NUMBER = re.compile(r"-?[0-9]{1,20}")
_UPPER = re.compile(r"[A-Z]")
_NUMBERS = ("int32", "uint32", "int64", "uint64", "double")


@dataclass(frozen=True, slots=True)
class _JsonPlace(Place):
    """Somewhere in the JSON: a path says more than a line."""

    path: str = ""

    def __str__(self) -> str:
        return f"{_WHERE}.{self.path}" if self.path else _WHERE


def read_override(text: str, folder: Path, name: str) -> tuple[ModelConfig, list[str]]:
    """The settings of the model of this name, and the warnings. A ConfigError names the field at fault."""
    if len(text) > MAX_FILE_BYTES:
        raise ConfigError(f"{_WHERE}: larger than {MAX_FILE_BYTES} bytes, which is too long", field=_WHERE)
    try:
        document = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"{_WHERE}: not valid JSON: {error}", field=_WHERE) from None
    if not isinstance(document, dict):
        raise ConfigError(f'{_WHERE}: must be an object like {{"max_batch_size": 8}}', field=_WHERE)
    tree = _Reader().message(document, "ModelConfig", "")
    config, warnings = tree_config(tree, folder / _WHERE, name)
    if config.name != name:
        raise ConfigError(
            f"{_WHERE}.name: {shown(config.name)} is not the model to be loaded, {shown(name)}", field=_WHERE
        )
    return config, warnings


class _Reader:
    def __init__(self) -> None:
        self._values = 0

    def message(self, document: Mapping[str, Any], type_: str, path: str) -> Message:
        specs = message_fields(type_) or {}
        prefix = f"{path}." if path else ""
        fields = []
        for key, value in document.items():
            name = key if key in specs else _UPPER.sub(lambda upper: "_" + upper.group().lower(), key)
            if name not in specs:
                name = key  # unknown, which the schema's own check will say
            if value is not None:  # null is how JSON leaves a field out
                field = self._field(name, value, specs.get(name), prefix + name)
                fields += [field] if field is not None else []
        return Message(tuple(fields), _place(path))

    def _field(self, name: str, value: Any, spec: FieldSpec | None, path: str) -> Field | None:
        place = _place(path)
        if spec is None:
            return Field(name, (Scalar(TokenKind.WORD, "?", place),), place)
        if spec.use is Use.NO_EFFECT and value in ("", [], {}):
            return None  # what a server lists to be complete asks for nothing
        if not spec.repeated:
            return Field(name, (self._value(value, spec.type, path),), place)
        values: list[Scalar | Message]
        if "->" in spec.type:
            if not isinstance(value, dict):
                raise place.error('takes an object like {"key": …}')
            values = [self._entry(key, item, spec.type, path) for key, item in value.items()]
        elif isinstance(value, list):
            values = [self._value(item, spec.type, f"{path}[{n}]") for n, item in enumerate(value)]
        else:
            raise place.error("takes a list")
        return Field(name, tuple(values), place, listed=True)

    def _entry(self, key: str, value: Any, type_: str, path: str) -> Message:
        """One entry of a map; its key is a string in JSON, whatever it is elsewhere."""
        key_type, value_type = type_.split("->")
        path = f"{path}.{key[:64]}"
        place = _place(path)
        return Message(
            (
                Field("key", (self._value(key, key_type, path),), place),
                Field("value", (self._value(value, value_type, path),), place),
            ),
            place,
        )

    def _value(self, value: Any, type_: str, path: str) -> Scalar | Message:
        self._values += 1
        if self._values > MAX_VALUES:
            raise _place(path).error(f"more than {MAX_VALUES} values, which no settings have")
        if isinstance(value, dict):
            return self.message(value, type_, path)
        return _scalar(value, type_, _place(path))


def _scalar(value: Any, type_: str, place: Place) -> Scalar:
    if isinstance(value, bool):
        return Scalar(TokenKind.WORD, "true" if value else "false", place)
    if isinstance(value, float) and value.is_integer() and type_ != "double":
        value = int(value)
    if isinstance(value, int | float):
        return Scalar(TokenKind.NUMBER, str(value), place)
    if isinstance(value, str):
        return Scalar(_kind(value, type_), value, place)
    raise place.error("takes one value, not a list")


def _kind(text: str, type_: str) -> TokenKind:
    """JSON writes the names of enums, and numbers that are too long for it, as strings."""
    if type_ in ENUMS:
        return TokenKind.WORD
    if type_ in _NUMBERS and _NUMBER.fullmatch(text):
        return TokenKind.NUMBER
    return TokenKind.STRING


def _place(path: str) -> Place:
    return _JsonPlace(_WHERE, 0, 0, path)
