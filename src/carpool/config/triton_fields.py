"""Holds a text-format tree against Triton's schema: typed values, or an error that names the place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from carpool.config.pbtxt import Field, Message, Scalar, decimal, integer
from carpool.config.rules import nearest, shown
from carpool.config.tokens import Place, TokenKind
from carpool.config.triton_schema import ENUMS, RANGES, FieldSpec, Use, message_fields

Value = str | int | float | bool

_TRUE = ("true", "True", "t", "1")
_FALSE = ("false", "False", "f", "0")


@dataclass(slots=True)
class Fields:
    """A message whose fields have been checked; absent fields read as Triton's defaults."""

    place: Place
    values: dict[str, list[Value]] = field(default_factory=dict)
    messages: dict[str, list[Fields]] = field(default_factory=dict)
    places: dict[str, Place] = field(default_factory=dict)

    def has(self, name: str) -> bool:
        return name in self.places

    def at(self, name: str) -> Place:
        return self.places.get(name, self.place)

    def text(self, name: str) -> str:
        return str(self._last(name, ""))

    def integer(self, name: str) -> int:
        return int(self._last(name, 0))

    def flag(self, name: str) -> bool:
        return bool(self._last(name, False))

    def integers(self, name: str) -> list[int]:
        return [int(value) for value in self.values.get(name, [])]

    def message(self, name: str) -> Fields | None:
        found = self.messages.get(name)
        return found[0] if found else None

    def each(self, name: str) -> list[Fields]:
        return self.messages.get(name, [])

    def _last(self, name: str, default: Value) -> Value:
        found = self.values.get(name)
        return found[-1] if found else default


def check_fields(tree: Message, type_: str = "ModelConfig") -> tuple[Fields, list[str]]:
    """The tree as Triton's message of this type, and the paths of its fields that have no effect here."""
    idle: list[str] = []
    return _message(tree, type_, "", idle), list(dict.fromkeys(idle))


def _message(tree: Message, type_: str, prefix: str, idle: list[str]) -> Fields:
    specs = message_fields(type_)
    assert specs is not None
    result = Fields(tree.place)
    for item in tree.fields:
        spec = specs.get(item.name)
        if spec is None:
            raise item.place.error(f"unknown field {shown(prefix + item.name)}; {_hint(item.name, specs)}")
        _field(item, spec, prefix, result, idle)
    return result


def _hint(name: str, specs: Mapping[str, FieldSpec]) -> str:
    return nearest(name, specs) if specs else "there are no fields here"


def _field(item: Field, spec: FieldSpec, prefix: str, result: Fields, idle: list[str]) -> None:
    path = prefix + item.name
    if spec.use is Use.UNSUPPORTED and not _says_no(item):
        raise item.place.error(f"{path} is not supported: {spec.why}")
    if not spec.repeated and (item.listed or result.has(item.name)):
        raise item.place.error(f"{path} can have one value only")
    result.places.setdefault(item.name, item.place)
    inner: list[str] = idle
    if spec.use is Use.NO_EFFECT:
        inner = []
        idle += [] if _says_no(item) else [path]
    for value in item.values:
        if message_fields(spec.type) is not None:
            if isinstance(value, Scalar):
                raise value.place.error(f"{path} takes a message in braces, not a value")
            result.messages.setdefault(item.name, []).append(_message(value, spec.type, path + ".", inner))
        elif spec.use is not Use.UNSUPPORTED:
            result.values.setdefault(item.name, []).append(_scalar(value, spec.type, path))


def _says_no(item: Field) -> bool:
    """An unsupported feature that is switched off, as in `decoupled: false`, asks for nothing."""
    return all(isinstance(value, Scalar) and value.text in _FALSE for value in item.values)


def _scalar(value: Scalar | Message, type_: str, path: str) -> Value:
    if isinstance(value, Message):
        raise value.place.error(f"{path} takes a value, not a message in braces")
    if type_ == "string":
        if value.kind is not TokenKind.STRING:
            raise value.place.error(f"{path} takes a string in quotes, not {value.text[:64]}")
        return value.text
    if type_ == "bool":
        return _flag(value, path)
    if type_ == "double":
        return decimal(value)
    if type_ in ENUMS:
        return _enum(value, ENUMS[type_], path)
    number = integer(value)
    low, high = RANGES[type_]
    if not low <= number <= high:
        raise value.place.error(f"{path} must be {low} to {high}, not {value.text}")
    return number


def _flag(value: Scalar, path: str) -> bool:
    if value.kind is TokenKind.STRING or value.text not in _TRUE + _FALSE:
        raise value.place.error(f"{path} must be true or false, not {shown(value.text)}")
    return value.text in _TRUE


def _enum(value: Scalar, names: tuple[str, ...], path: str) -> str:
    if value.kind is TokenKind.NUMBER:
        number = integer(value)
        if 0 <= number < len(names):
            return names[number]
    if value.kind is TokenKind.WORD and value.text in names:
        return value.text
    raise value.place.error(f"{path} cannot be {shown(value.text)}; {nearest(value.text, names)}")
