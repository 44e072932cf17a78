"""Parses the TOML of settings files, whose size in parts, depth and values is checked before.

What parses TOML takes quadratic time and memory for a key of many parts. One look at the text, in time that
grows with its length, finds such a file and names the line.
"""

from __future__ import annotations

import re
import tomllib
from typing import Any

from carpool.errors import ConfigError

MAX_VALUES = 100_000
MAX_PARTS = 32
MAX_DEPTH = 32

# Strings and comments are stepped over, also where their end is missing; the possessive quantifiers keep it
# linear. What is left are the marks between keys and values.
_TOKEN = re.compile(
    r'''\#[^\n]*+ | """(?:[^"\\]|\\.|"(?!""))*+(?:"{3,5})?+ | "(?:[^"\\\n]|\\[^\n])*+"?+
    | \'\'\'(?:[^']|'(?!''))*+(?:'{3,5})?+ | '[^'\n]*+'?+ | (?P<mark>[.,=\[\]{}\n])''',
    re.VERBOSE | re.DOTALL,
)

_TABLE = re.compile(r"\s*\[{1,2}\s*([^\]\n]+?)\s*\]")
_KEY = re.compile(r"\s*([\w.\"'-]+)\s*=")
_SHOWN = 80  # characters of a key in a message


def parse_toml(text: str, file: str) -> dict[str, Any]:
    """Returns the tables of a file. What cannot be parsed, or is too much, is a `ConfigError`."""
    _check(text, file)
    try:
        return tomllib.loads(text)
    except ValueError as error:  # also what int() says about thousands of digits
        twice = _set_twice(text)
        if "overwrite" in str(error) and twice is not None:
            key, first, line = twice
            raise _error(file, line, f"{key} is set twice: on line {first}, too") from None
        raise ConfigError(f"{file}: {error}") from None


def _set_twice(text: str) -> tuple[str, int, int] | None:
    """Returns a key of a line of its own that stands twice in its table, and both lines: the parser names
    neither. A table that is an element of a list begins anew."""
    known: dict[tuple[str, str], int] = {}
    table = ""
    for number, line in enumerate(text.splitlines(), 1):
        if (head := _TABLE.match(line)) is not None:
            table = f"{head[1]}#{number}" if line.lstrip().startswith("[[") else head[1]
        elif (found := _KEY.match(line)) is not None:
            first = known.setdefault((table, found[1]), number)
            if first != number:
                return found[1][:_SHOWN], first, number
    return None


def _check(text: str, file: str) -> None:
    """Limits what a parser has to build. A number such as 1.5 counts as two parts, which harms nothing."""
    parts, depth, values, line = 1, 0, 0, 1
    for token in _TOKEN.finditer(text):
        mark = token["mark"]
        if mark is None:
            line += token[0].count("\n")
        elif mark == ".":
            parts += 1
        else:
            parts = 1
            line += mark == "\n"
            depth += (mark in "[{") - (mark in "]}")
            values += mark in ",=["
        if parts > MAX_PARTS:
            raise _error(file, line, f"a key of more than {MAX_PARTS} parts; a part with dots needs quotes")
        if depth > MAX_DEPTH:
            raise _error(file, line, f"nested too deep: more than {MAX_DEPTH} brackets are open")
        if values > MAX_VALUES:
            raise _error(file, line, f"more than {MAX_VALUES} values, too many for a settings file")


def _error(file: str, line: int, why: str) -> ConfigError:
    return ConfigError(f"{file}:{line}: {why}")
