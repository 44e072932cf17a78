"""A process of the server as its parent holds it: what it logs, prints and says when it dies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

PARENT = """
import asyncio, sys
from carpool.observe.logs import configure, finish
from carpool.link.child_process import Child

async def main():
    child = Child("noisy_child", sys.argv[1])
    child.control.send("go")
    print(await child.watch(lambda message: None))

configure("json", "info")
asyncio.run(main())
finish()
"""
CHILD = """
import ctypes, os, sys, warnings
from carpool.observe.logs import configure, finish, logger
from carpool.observe.output import keep_stream

configure("json", "info", keep_stream())
logger("child").info("logged")
os.write(1, b"on stdout\\n")
for number in range(2000):
    os.write(2, b"libpng warning: iCCP: known incorrect sRGB profile\\n")
warnings.warn("from Python")
finish()
if sys.argv[1] == "crash":
    ctypes.string_at(0)
"""


def run(folder: Path, how: str) -> tuple[str, list[dict[str, object]]]:
    """What the parent printed, and the log, of which every line must be JSON."""
    (folder / "noisy_child.py").write_text(dedent(CHILD))
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        [sys.executable, "-c", PARENT, how],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    return done.stdout.strip(), [json.loads(line) for line in done.stderr.splitlines()]


def test_what_is_written_past_the_logger_is_logged_and_counted(tmp_path: Path) -> None:
    code, log = run(tmp_path, "end")
    assert code == "0"
    assert {line["event"] for line in log if line["part"] == "child"} == {"logged"}
    assert [line["part"] for line in log if "from Python" in str(line.get("text"))] == ["py.warnings"]
    assert [line["text"] for line in log if line["event"] == "output"] == ["on stdout"]
    first, summary = [line for line in log if line["event"] == "library-output"]
    assert (first["library"], first["process"], summary["repeated"]) == ("libpng", "end", 1999)


def test_last_words_are_heard(tmp_path: Path) -> None:
    code, log = run(tmp_path, "crash")
    assert code == "-11"
    assert any(line.get("text") == "Fatal Python error: Segmentation fault" for line in log)
