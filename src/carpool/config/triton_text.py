"""Reads Triton's ModelConfig from config.pbtxt or from JSON: the message, and where each of its fields
stands.

protobuf reads both. What it says badly or not at all is said here: unknown names with the nearest valid one,
fields given twice, and which field a value was for.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import orjson
from google.protobuf import json_format, text_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message_factory import GetMessageClass

from carpool.config.rules import MAX_FILE_BYTES, nearest, shown
from carpool.errors import ConfigError
from carpool.wire.proto import is_repeated, message_class

MAX_VALUES = 100_000
_MAX_MESSAGE = 200  # characters of what protobuf says
_ModelConfig = message_class("ModelConfig")

# A word before a colon or an opening bracket is a field's name; the possessive quantifiers keep it linear.
_TOKEN = re.compile(
    r"""\#[^\n]* | (?P<string>"(?:\\.|[^"\\\n])*+"? | '(?:\\.|[^'\\\n])*+'?)
    | (?P<name>[A-Za-z_]\w*+)(?=(?:\s|\#[^\n]*+)*+[:{<\[]) | (?P<value>[\w.+-]+) | (?P<mark>[{}<>\[])""",
    re.VERBOSE,
)
_ESCAPE = re.compile(r"""\\(?P<known>[xuUnrtabfv\\'"]|[0-3][0-7]{2}|[0-7]{1,2}(?![0-7]))?""")
_PLACED = re.compile(r"\d+:\d+ : ")
_PUNCTUATION = re.compile(r'Expected ("[}>\],]"|identifier)')
_TAKES = {
    FieldDescriptor.CPPTYPE_INT32: f"a whole number from {-(2**31)} to {2**31 - 1}",
    FieldDescriptor.CPPTYPE_INT64: f"a whole number from {-(2**63)} to {2**63 - 1}",
    FieldDescriptor.CPPTYPE_UINT32: f"a whole number from 0 to {2**32 - 1}",
    FieldDescriptor.CPPTYPE_UINT64: f"a whole number from 0 to {2**64 - 1}",
    FieldDescriptor.CPPTYPE_DOUBLE: "a number",
    FieldDescriptor.CPPTYPE_FLOAT: "a number",
    FieldDescriptor.CPPTYPE_BOOL: "true or false",
    FieldDescriptor.CPPTYPE_STRING: "a string in quotes",
    FieldDescriptor.CPPTYPE_MESSAGE: "a message in braces",
}


@dataclass(frozen=True, slots=True)
class TextSource:
    """Holds what was read; `where` names a place in it, given a path like `input[1].dims`."""

    message: Any
    where: Callable[[str], str]

    def error(self, path: str, message: str) -> ConfigError:
        return ConfigError(f"{self.where(path)}: {message}")

    def given(self, into: Collection[str]) -> Iterator[tuple[str, str]]:
        """Yields the fields that are set, those of the messages `into` too: each without numbers, and with
        them.

        What is switched off, as in `decoupled: false`, is as good as absent.
        """
        waiting = [(self.message, "", "")]
        while waiting:
            message, outer, numbered = waiting.pop(0)
            for field, value in message.ListFields():
                path, place = outer + field.name, numbered + field.name
                yield path, place
                if path in into and is_repeated(field):
                    waiting += [(item, f"{path}.", f"{place}[{n}].") for n, item in enumerate(value)]
                elif path in into:
                    waiting.append((value, f"{path}.", f"{place}."))


def read_text(text: str, file: str) -> TextSource:
    """Every mistake is a ConfigError with file:line:column."""
    fields = _Fields(text, file)
    try:
        return TextSource(text_format.Parse(text, _ModelConfig()), fields.where)
    except text_format.ParseError as error:
        raise fields.translated(error) from None


@dataclass(frozen=True, slots=True)
class _Field:
    offset: int
    path: str
    descriptor: FieldDescriptor


class _Fields:
    """The fields of a text and their paths; only messages that can be many are numbered."""

    def __init__(self, text: str, file: str) -> None:
        self._text = text
        self._file = file
        self._found: dict[str, _Field] = {}  # where each path stands first
        self._named: list[_Field] = []  # every name in the text
        self._scan()

    def where(self, path: str) -> str:
        """What is not in the text is blamed on the message that lacks it."""
        while path and path not in self._found:
            path = path.rpartition(".")[0]
        return self._place(self._found[path].offset if path else 0)

    def _place(self, offset: int) -> str:
        line_start = self._text.rfind("\n", 0, offset) + 1
        return f"{self._file}:{self._text.count(chr(10), 0, offset) + 1}:{offset - line_start + 1}"

    def _scan(self) -> None:
        """The text may be wrong in any way: what cannot be followed is left for the parser to say."""
        numbers: Counter[str] = Counter()
        message: Descriptor | None = _ModelConfig.DESCRIPTOR
        prefix, path, values = "", "", 0
        field: FieldDescriptor | None = None
        outer: list[tuple[Descriptor | None, str, FieldDescriptor | None, str]] = []
        for token in _TOKEN.finditer(self._text):
            mark = token["mark"]
            values += token["value"] is not None or mark in ("{", "<")
            if values > MAX_VALUES:
                raise self._error(
                    token.start(), f"more than {MAX_VALUES} values, too many for a settings file"
                )
            if token["string"]:
                self._check_escapes(token)
            elif token["name"] and message is not None:
                path = prefix + token["name"]
                field = self._look_up(token, message, path)
            elif mark == "[" and field is not None and not is_repeated(field):
                raise self._error(token.start(), f"{_plain(path)} can have one value only")
            elif mark in ("{", "<"):
                outer.append((message, prefix, field, path))
                if field is not None and is_repeated(field):
                    numbers[path] += 1
                    path = f"{path}[{numbers[path] - 1}]"
                    self._found[path] = _Field(token.start(), path, field)
                message = field.message_type if field is not None else None
                prefix = f"{path}."
                field = None
            elif mark in ("}", ">") and outer:
                message, prefix, field, path = outer.pop()

    def _look_up(self, token: re.Match[str], message: Descriptor, path: str) -> FieldDescriptor:
        field = message.fields_by_name.get(token["name"])
        if field is None:
            raise self._error(token.start(), _unknown(_plain(path), token["name"], message))
        if path in self._found and not is_repeated(field):
            raise self._error(token.start(), f"{_plain(path)} can have one value only")
        self._named.append(_Field(token.start(), path, field))
        self._found.setdefault(path, self._named[-1])
        return field

    def _check_escapes(self, token: re.Match[str]) -> None:
        """Python's codec, which reads them for protobuf, only warns of those that it does not know."""
        for escape in _ESCAPE.finditer(token[0]):
            if escape["known"] is None:
                text = token[0][escape.start() : escape.start() + 4]
                raise self._error(token.start() + escape.start(), f"unknown escape at {text}")

    def _error(self, offset: int, message: str) -> ConfigError:
        return ConfigError(f"{self._place(offset)}: {message}")

    def translated(self, error: text_format.ParseError) -> ConfigError:
        """Returns the error with the name of the field that the value is for, and what it takes."""
        line, column = error.GetLine() or 1, error.GetColumn() or 1
        lines = self._text.split("\n")
        said = _PLACED.sub("", str(error), count=1)
        said = said.removeprefix(f"'{lines[line - 1]}': ").removeprefix("'': ")[:_MAX_MESSAGE]
        place = f"{self._file}:{line}:{column}"
        offset = sum(len(before) + 1 for before in lines[: line - 1]) + column - 1
        at = bisect_right(self._named, offset, key=lambda field: field.offset) - 1
        if at < 0 or _PUNCTUATION.match(said) or "oneof" in said:
            return ConfigError(f"{place}: {said}")
        word = re.match(r"\w*", self._text[offset:])
        takes = _takes(self._named[at].descriptor, word[0] if word else "", said)
        return ConfigError(f"{place}: {_plain(self._named[at].path)} {takes}")


def _takes(field: FieldDescriptor, word: str, said: str) -> str:
    if field.enum_type is not None:
        return f"cannot be {shown(word)}; {nearest(word, field.enum_type.values_by_name)}"
    return f"takes {_TAKES[field.cpp_type]}: {said}"


def _unknown(path: str, name: str, message: Descriptor) -> str:
    valid = message.fields_by_name
    hint = nearest(name, valid) if valid else "there are no fields here"
    return f"unknown field {shown(path)}; {hint}"


def _plain(path: str) -> str:
    """Returns it as the documentation names a field: without the numbers."""
    return re.sub(r"\[\d+\]", "", path)


def read_json(text: str) -> TextSource:
    """Every mistake is a ConfigError that names the field at fault."""
    if len(text) > MAX_FILE_BYTES:
        raise ConfigError(f"config: larger than {MAX_FILE_BYTES} bytes", field="config")
    try:
        document = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"config: not valid JSON: {error}", field="config") from None
    if not isinstance(document, dict):
        raise ConfigError('config: must be an object like {"max_batch_size": 8}', field="config")
    values = list(islice(_values(document, _ModelConfig.DESCRIPTOR, ""), MAX_VALUES + 1))
    if len(values) > MAX_VALUES:
        raise ConfigError(f"config: more than {MAX_VALUES} values", field="config")
    try:
        message = json_format.ParseDict(document, _ModelConfig())
        return TextSource(message, lambda path: f"config.{path}" if path else "config")
    except json_format.ParseError as error:
        _blame(values)
        raise ConfigError(f"config: {str(error)[:_MAX_MESSAGE]}", field="config") from None


_Value = tuple[str, FieldDescriptor, Any]


def _values(document: Mapping[str, Any], message: Descriptor, prefix: str) -> Iterator[_Value]:
    """Each single value with its place; lists and objects are where the schema has them."""
    seen: set[str] = set()
    for key, given in document.items():
        field = message.fields_by_name.get(key) or message.fields_by_camelcase_name.get(key)
        if field is None:
            raise ConfigError(f"config.{prefix}{key[:64]}: {_unknown(_plain(prefix + key), key, message)}")
        if given is None:  # how JSON leaves a field out
            continue
        path = f"config.{prefix}{field.name}"
        if path in seen:
            raise ConfigError(f"{path}: is given twice")
        seen.add(path)
        items: Iterable[tuple[str, Any]] = [(path, given)]
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            if not isinstance(given, dict):
                raise ConfigError(f'{path}: takes an object like {{"key": …}}')
            items = [(f"{path}.{name[:64]}", item) for name, item in given.items()]
            field = field.message_type.fields_by_name["value"]
        elif is_repeated(field):
            if not isinstance(given, list):
                raise ConfigError(f"{path}: takes a list")
            items = [(f"{path}[{number}]", item) for number, item in enumerate(given)]
        for place, item in items:
            yield from _single(place, field, item)


def _single(place: str, field: FieldDescriptor, value: Any) -> Iterator[_Value]:
    if field.message_type is not None:
        if not isinstance(value, dict):
            raise ConfigError(f"{place}: takes an object with the fields of a {field.message_type.name}")
        yield place, field, None  # it counts, also where it is empty
        yield from _values(value, field.message_type, f"{place.removeprefix('config.')}.")
    elif isinstance(value, dict | list) or value is None:
        raise ConfigError(f"{place}: takes one value, not {'null' if value is None else 'a list or object'}")
    else:
        yield place, field, value


def _blame(values: Iterable[_Value]) -> None:
    """Tries the values one by one, since protobuf does not always say which of them it means."""
    for place, field, value in values:
        if value is None:
            continue
        try:
            alone = [value] if is_repeated(field) else value
            json_format.ParseDict({field.name: alone}, GetMessageClass(field.containing_type)())
        except json_format.ParseError as error:
            said = str(error).partition(" field: ")[2].partition(" at Model")[0][:_MAX_MESSAGE]
            raise ConfigError(f"{place}: {_takes(field, str(value), said)}", field="config") from None
