"""The words of protobuf's text format: names, numbers, strings and punctuation, each with its place."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

from carpool.config.rules import shown
from carpool.errors import ConfigError

_MAX_NUMBER = 64  # characters; longer digits only cost time
_TOKEN = re.compile(
    r"""(?P<space>(?:[ \t\r\n\v\f]+|\#[^\n]*)+)
    |(?P<word>[A-Za-z_][A-Za-z0-9_]*)
    |(?P<number>(?:0[xX][0-9a-fA-F]+|(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?[fF]?)(?![A-Za-z0-9_.]))
    |(?P<string>"(?:[^"\\\n]|\\[^\n])*"|'(?:[^'\\\n]|\\[^\n])*')
    |(?P<mark>[{}<>\[\]:,;-])""",
    re.VERBOSE,
)
_ESCAPE = re.compile(r"\\(?:([0-7]{1,3})|[xX]([0-9a-fA-F]{1,2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))")
_SIMPLE = {"n": 10, "r": 13, "t": 9, "a": 7, "b": 8, "f": 12, "v": 11, "\\": 92, "'": 39, '"': 34, "?": 63}


class TokenKind(enum.Enum):
    WORD = "word"
    NUMBER = "number"
    STRING = "string"
    MARK = "mark"
    END = "end"


@dataclass(frozen=True, slots=True)
class Place:
    """Where something stands in a file, for messages."""

    file: str
    line: int
    column: int

    def error(self, message: str) -> ConfigError:
        return ConfigError(f"{self}: {message}")

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"


@dataclass(frozen=True, slots=True)
class Token:
    kind: TokenKind
    text: str
    place: Place

    def __str__(self) -> str:
        return "the end of the file" if self.kind is TokenKind.END else shown(self.text)


def tokenize(text: str, file: str) -> list[Token]:
    """All tokens of a file, ending with one END."""
    tokens: list[Token] = []
    at, line, line_start = 0, 1, 0
    while at < len(text):
        place = Place(file, line, at - line_start + 1)
        match = _TOKEN.match(text, at)
        if match is None:
            raise place.error(_unreadable(text[at]))
        at = match.end()
        if match.lastgroup == "space":
            newlines = match.group().count("\n")
            if newlines:
                line += newlines
                line_start = text.rindex("\n", 0, at) + 1
            continue
        kind = TokenKind(match.lastgroup)
        if kind is TokenKind.NUMBER and len(match.group()) > _MAX_NUMBER:
            raise place.error(f"the number {shown(match.group())} is too long")
        tokens.append(Token(kind, match.group(), place))
    tokens.append(Token(TokenKind.END, "", Place(file, line, at - line_start + 1)))
    return tokens


def _unreadable(char: str) -> str:
    if char in "\"'":
        return "a string that does not end on its line"
    if char.isdigit() or char == ".":
        return "a number that cannot be read"
    return f"unexpected character {char!r}"


def unquote(token: Token) -> str:
    """The text a string token stands for."""
    body = token.text[1:-1]
    if "\\" not in body:
        return body
    data = bytearray()
    at = 0
    while at < len(body):
        end = body.find("\\", at)
        end = len(body) if end < 0 else end
        data += body[at:end].encode("utf-8", "surrogatepass")
        at = end
        if at < len(body):
            escape = _ESCAPE.match(body, at)
            assert escape is not None  # the token pattern lets no lone backslash through
            data += _unescape(escape, token)
            at = escape.end()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise token.place.error("the escapes in this string do not make UTF-8 text") from None


def _unescape(escape: re.Match[str], token: Token) -> bytes:
    octal, byte, short, long, char = escape.groups()
    if octal is not None or byte is not None:
        value = int(octal, 8) if octal is not None else int(byte, 16)
        if value > 255:
            raise token.place.error(f"the escape {escape.group()} is larger than a byte")
        return bytes([value])
    if short is not None or long is not None:
        code = int(short or long, 16)
        if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
            raise token.place.error(f"the escape {escape.group()} is no character")
        return chr(code).encode()
    if char not in _SIMPLE:
        raise token.place.error(f"unknown escape {escape.group()}")
    return bytes([_SIMPLE[char]])
