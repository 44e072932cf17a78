"""Keeps what models, servers and files say from steering the terminal that shows it.

A label or an error may hold escape codes: they would move the cursor, rename the window or hide lines. Text
for a terminal goes through here; what is written to a file or a pipe stays as it is.
"""

from __future__ import annotations

import re
import sys
from typing import Any, TextIO

_OWN = ("\x1b[1m", "\x1b[0m")  # bold, as the help pages have it
_PARTS = re.compile(r"(\x1b\[[01]m)")


def printable(text: str) -> str:
    """Returns the text with control characters as \\u and four digits, which JSON reads as the same."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in "\n\t" else _escaped(char) for char in text)


def _escaped(char: str) -> str:
    number = ord(char)
    if number <= 0xFFFF:
        return f"\\u{number:04x}"
    number -= 0x10000
    return f"\\u{0xD800 + (number >> 10):04x}\\u{0xDC00 + (number & 0x3FF):04x}"


class TerminalText:
    """Stands in for a stream that is a terminal. What rich draws goes to the terminal itself: its cells are
    made printable before."""

    def __init__(self, terminal: TextIO) -> None:
        self.rich_proxied_file = terminal

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rich_proxied_file, name)

    def write(self, text: str) -> int:
        parts = (part if part in _OWN else printable(part) for part in _PARTS.split(text))
        self.rich_proxied_file.write("".join(parts))
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)


def guard_terminal() -> None:
    """From here on, this process prints nothing to a terminal that could steer it."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, TerminalText) and stream.isatty():
            setattr(sys, name, TerminalText(stream))
