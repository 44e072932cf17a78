"""A reader of protobuf's text format that knows no schema: text in, a tree with places out."""

from __future__ import annotations

from dataclasses import dataclass

from carpool.config.tokens import Place, Token, TokenKind, tokenize, unquote
from carpool.errors import ConfigError

MAX_DEPTH = 32
MAX_VALUES = 100_000

_CLOSING = {"{": "}", "<": ">"}


@dataclass(frozen=True, slots=True)
class Scalar:
    """A value as written: `kind` tells "1" from 1 and from a bare word."""

    kind: TokenKind
    text: str
    place: Place


@dataclass(frozen=True, slots=True)
class Message:
    fields: tuple[Field, ...]
    place: Place


@dataclass(frozen=True, slots=True)
class Field:
    """One occurrence of a field; a list `[a, b]` keeps its values together."""

    name: str
    values: tuple[Scalar | Message, ...]
    place: Place
    listed: bool = False


def parse(text: str, file: str = "config.pbtxt") -> Message:
    """The tree of one text-format message; every mistake is a ConfigError with file:line:column."""
    return _Parser(tokenize(text, file)).document()


class _Parser:
    def __init__(self, tokens: list[Token]) -> None:
        self._tokens = tokens
        self._at = 0
        self._depth = 0
        self._values = 0

    def document(self) -> Message:
        start = self._peek.place
        return Message(self._fields(""), start)

    @property
    def _peek(self) -> Token:
        return self._tokens[self._at]

    def _next(self) -> Token:
        token = self._tokens[self._at]
        if token.kind is not TokenKind.END:
            self._at += 1
        return token

    def _take(self, mark: str) -> bool:
        token = self._peek
        if token.kind is TokenKind.MARK and token.text == mark:
            self._at += 1
            return True
        return False

    def _fields(self, closing: str) -> tuple[Field, ...]:
        fields = []
        while not self._ended(closing):
            fields.append(self._field())
            if not self._take(","):
                self._take(";")
        return tuple(fields)

    def _ended(self, closing: str) -> bool:
        token = self._peek
        if token.kind is TokenKind.END:
            if closing:
                raise token.place.error(f'the file ends before a "{closing}"')
            return True
        return bool(closing) and self._take(closing)

    def _field(self) -> Field:
        name = self._next()
        if name.kind is not TokenKind.WORD:
            raise name.place.error(f"a field name was expected, not {name}")
        colon = self._take(":")
        if self._peek.text == "[" and self._peek.kind is TokenKind.MARK:
            return Field(name.text, self._list(colon), name.place, listed=True)
        return Field(name.text, (self._value(name, colon),), name.place)

    def _list(self, colon: bool) -> tuple[Scalar | Message, ...]:
        opening = self._next()
        values: list[Scalar | Message] = []
        if self._take("]"):
            return ()
        while True:
            values.append(self._value(opening, colon))
            if self._take("]"):
                return tuple(values)
            if not self._take(","):
                raise self._peek.place.error(f'"," or "]" was expected in the list, not {self._peek}')

    def _value(self, before: Token, colon: bool) -> Scalar | Message:
        self._values += 1
        if self._values > MAX_VALUES:
            raise before.place.error(f"more than {MAX_VALUES} values, which no settings file has")
        token = self._peek
        if token.kind is TokenKind.MARK and token.text in _CLOSING:
            return self._message()
        if not colon:
            raise token.place.error(f'":" or "{{" was expected after {before}, not {token}')
        return self._scalar()

    def _message(self) -> Message:
        opening = self._next()
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise opening.place.error(f"nested more than {MAX_DEPTH} deep")
        fields = self._fields(_CLOSING[opening.text])
        self._depth -= 1
        return Message(fields, opening.place)

    def _scalar(self) -> Scalar:
        token = self._next()
        if token.kind is TokenKind.STRING:
            text = unquote(token)
            while self._peek.kind is TokenKind.STRING:
                text += unquote(self._next())
            return Scalar(TokenKind.STRING, text, token.place)
        if token.kind is TokenKind.MARK and token.text == "-":
            number = self._next()
            if number.kind is not TokenKind.NUMBER and number.text.lower() not in ("inf", "infinity", "nan"):
                raise number.place.error(f'a number was expected after "-", not {number}')
            return Scalar(TokenKind.NUMBER, "-" + number.text, token.place)
        if token.kind in (TokenKind.NUMBER, TokenKind.WORD):
            return Scalar(token.kind, token.text, token.place)
        raise token.place.error(f"a value was expected, not {token}")


def integer(scalar: Scalar) -> int:
    """The whole number a scalar stands for, in decimal, 0x or leading-zero octal."""
    digits = scalar.text.lstrip("-")
    sign = -1 if scalar.text.startswith("-") else 1
    base = 16 if digits[:2].lower() == "0x" else 8 if digits[:1] == "0" and len(digits) > 1 else 10
    try:
        if scalar.kind is not TokenKind.NUMBER:
            raise ValueError
        return sign * int(digits, base)
    except ValueError:
        raise scalar.place.error(f"a whole number was expected, not {_written(scalar)}") from None


def decimal(scalar: Scalar) -> float:
    """The number a scalar stands for; 1.5f, inf and whole numbers count."""
    try:
        if scalar.kind is TokenKind.STRING:
            raise ValueError
        if scalar.text.lstrip("-")[:2].lower() == "0x":
            return float(integer(scalar))
        return float(scalar.text if scalar.text[-3:].lower() == "inf" else scalar.text.rstrip("fF"))
    except (ValueError, OverflowError, ConfigError):
        raise scalar.place.error(f"a number was expected, not {_written(scalar)}") from None


def _written(scalar: Scalar) -> str:
    return f'the string "{scalar.text[:64]}"' if scalar.kind is TokenKind.STRING else scalar.text[:64]
