"""`make hunt` finds tests that depend on their order or on a moment, and says how to repeat them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SEED = "3"
SOUND = """
def test_sound():
    assert True
"""
LATE = """
import os, threading, time
def test_depends_on_a_moment():
    looks = [time.monotonic() for _ in range(2000)]
    assert looks[-1] - looks[0] < 0.001
"""
ORDER = """
import pytest
seen = []
@pytest.mark.parametrize("number", range(12))
def test_depends_on_the_order(number):
    seen.append(number)
    assert seen == list(range(number + 1))
"""
STOPPED = """
import signal, subprocess, sys, time
from pathlib import Path
def test_whom_it_stops_stays_stopped():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    child.send_signal(signal.SIGSTOP)
    state = Path(f"/proc/{child.pid}/stat")
    end = time.monotonic() + 30.0
    while state.read_text().split()[2] != "T":
        assert time.monotonic() < end
    for _ in range(200):
        time.sleep(0.01)
        assert state.read_text().split()[2] == "T"
    child.kill()
    child.wait()
"""


@pytest.mark.conformance
def test_it_finds_what_fails_now_and_then_and_says_how_to_repeat_it(tmp_path: Path) -> None:
    files = {"sound": SOUND, "late": LATE, "order": ORDER, "stopped": STOPPED}
    paths = [tmp_path / f"test_{name}.py" for name in files]
    for path, text in zip(paths, files.values(), strict=True):
        path.write_text(text)
    kept = tmp_path / "kept"
    kept.mkdir()
    options = f"--jobs 2 --rounds 1 --seed {SEED}".split()
    command = [sys.executable, "tools/hunt.py", *options, *map(str, paths)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={"TMPDIR": str(kept)})
    assert done.returncode == 1, done.stdout + done.stderr
    assert "test_late.py::test_depends_on_a_moment" in done.stdout
    assert "test_order.py::test_depends_on_the_order" in done.stdout
    assert not re.search("test_(sound|stopped)", done.stdout)
    assert f"tools/hunt.py --seed {SEED} --minutes 3" in done.stdout
    assert list(kept.iterdir()) == []
