"""What models and servers say is shown, and steers no terminal."""

from __future__ import annotations

import io
import json
import sys

import pytest

from carpool.cli import show
from carpool.cli.terminal_text import TerminalText, guard_terminal, printable

HOSTILE = "cat\x1b[2J\x1b]0;title\x07\x9b1m\u202e\r\U000e0001dog"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_what_steers_a_terminal_is_shown_instead() -> None:
    shown = printable(HOSTILE)
    assert shown.isprintable()
    assert json.loads(f'"{shown}"') == HOSTILE
    assert printable("Käse 貓 \n\t") == "Käse 貓 \n\t"


def test_everything_that_is_printed_to_a_terminal_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    out, errors = Terminal(), Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", errors)
    guard_terminal()
    guard_terminal()  # once is enough
    sys.stdout.write(HOSTILE)
    sys.stdout.write("piece\x1b[5n")
    sys.stdout.flush()
    sys.stdout.writelines([HOSTILE])
    sys.stderr.write(HOSTILE)
    show.table(["label", HOSTILE], [[HOSTILE, "1"]], left=["label"])
    show.paragraph(HOSTILE, "· ")
    for written in (out.getvalue(), errors.getvalue()):
        assert "\\u001b[2J" in written
        for mark in ("\x1b[2J", "\x1b]0", "\x1b[5n", "\x07", "\x9b", "\u202e", "\r"):
            assert mark not in written
    sys.stdout.write("\x1b[1mUsage\x1b[0m\n")
    assert out.getvalue().endswith("\x1b[1mUsage\x1b[0m\n"), "the help pages are bold"


def test_a_file_or_a_pipe_gets_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    guard_terminal()
    assert not isinstance(sys.stdout, TerminalText)
    sys.stdout.write(HOSTILE)
    assert out.getvalue() == HOSTILE
