"""What libraries write past the logger becomes lines of the log."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from carpool.observe.output import Printed, ProcessOutput, library_of, marked


@pytest.mark.parametrize(
    ("line", "library"),
    [
        ("TIFFFillStrip: Read error on strip 0; got 16872 bytes, expected 4096.", "libtiff"),
        ("_TIFFVSetField: tempfile.tif: Bad value 0 for tag.", "libtiff"),
        ("tempfile.tif: Using code not yet in table.", "libtiff"),
        ("LZWDecode: Not enough data at scanline 0 (short 12 bytes).", "libtiff"),
        ("libpng warning: iCCP: known incorrect sRGB profile", "libpng"),
        ("Corrupt JPEG data: 5 extraneous bytes before marker 0xd9", "libjpeg"),
        ("Premature end of JPEG file", "libjpeg"),
        ("[ WARN:0@0.013] global loadsave.cpp:248 findDecoder imread_('x')", "opencv"),
        ("2026-11-16 05:00:00.1 [W:onnxruntime:, graph.cc:4285 Clean] Removing initializer", "onnxruntime"),
        ("E0000 00:00:1.0  123 tcp_server.cc:1] File descriptor limit reached. Retrying.", "grpc"),
        ("Traceback (most recent call last):", ""),
        ("hello from the model", ""),
    ],
)
def test_a_library_is_known_by_its_lines(line: str, library: str) -> None:
    assert library_of(line) == library


def test_lines_are_put_together_and_cut(caplog: pytest.LogCaptureFixture) -> None:
    output = ProcessOutput(process="engine")
    output.feed(b"libpng war")
    output.feed(b"ning: x\n\n  half\xff")
    assert caplog.messages == ['library-output process=engine library=libpng text="libpng warning: x"']
    output.close()
    assert caplog.messages[1] == 'output process=engine text="  half\\\\xff"'
    output.feed(b"y" * 9000)
    output.close()
    assert len(caplog.messages) == 2 + 5


_ONE_PROCESS = """
import ctypes, os, sys, faulthandler
from carpool.observe.logs import configure
from carpool.observe.output import caught
configure("json", "info")
with caught("json", "info"):
    for _ in range({lines}):
        os.write(2, b"TIFFReadDirectory: Warning, Unknown field with tag 65000.\\n")
    print("printed", file=sys.stderr, flush=True)
    {end}
print("after", file=sys.stderr)
"""


def run(end: str, begin: str = "", lines: int = 1000) -> subprocess.CompletedProcess[str]:
    code = begin + _ONE_PROCESS.format(end=end, lines=lines)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_one_process_catches_its_own() -> None:
    *lines, last = run("pass").stderr.splitlines()
    assert last == "after"
    first, printed, summary = map(json.loads, lines)
    assert (first["event"], first["library"]) == ("library-output", "libtiff")
    assert (printed["event"], printed["text"]) == ("output", "printed")
    assert summary["repeated"] == 999


def test_a_crash_is_not_swallowed() -> None:
    done = run("ctypes.string_at(0)")
    assert done.returncode < 0
    # The handler writes its words in pieces, and a thread may write a whole line of the log between two.
    assert "Fatal Python error: Segmentation fault" in re.sub(r"\{.*\}\n", "", done.stderr)


def test_a_pipe_that_cannot_be_made_larger_will_do() -> None:
    no = "def no(*_): raise PermissionError\nimport fcntl; fcntl.fcntl = no\n"
    done = run("pass", no, lines=9)
    assert done.returncode == 0
    assert done.stderr.splitlines()[-1] == "after"


def test_lines_that_say_how_serious_they_are_keep_their_level(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert marked("as it is", "info") == "as it is\n", "a person reads it"
    monkeypatch.setenv("_CARPOOL_OUTPUT_IS_READ", "1")
    output = ProcessOutput()
    with caplog.at_level("DEBUG", "carpool"):
        output.feed(marked("first\nsecond", "info").encode() + marked("third", "error").encode())
        output.feed(b"unmarked\n\x1eloud\x1ethis is no level\n")
    found = [(record.levelname, record.msg.fields["text"]) for record in caplog.records]
    assert found[:4] == [("INFO", "first"), ("INFO", "second"), ("ERROR", "third"), ("WARNING", "unmarked")]
    assert found[4][0] == "WARNING"


def test_what_is_printed_is_information_line_by_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_CARPOOL_OUTPUT_IS_READ", "1")
    reading, writing = os.pipe()
    printed = Printed(writing)
    print("one", end=" ", file=printed)
    print("line\nand half", end="", file=printed)
    os.close(writing)
    with os.fdopen(reading) as text:
        assert text.read() == "\x1einfo\x1eone line\n"
