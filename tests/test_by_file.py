"""In a run of all tests, files are shared out, and each test in them is run and reported (by_file.py)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_FILES = {
    "pytest.ini": "[pytest]\ntestpaths = tests\naddopts = -p by_file -m 'not slow'\nmarkers = slow",
    "tests/a/test_a.py": """
import os, pytest
@pytest.fixture(scope="module")
def shared():
    yield 1
    open("ended", "x").close()
def test_good(shared): assert shared == 1
def test_bad(shared): assert shared == 2
@pytest.mark.slow
def test_slow(): assert False
@pytest.mark.skip
def test_skipped(): assert False
""",
    "tests/c/test_b.py": "def test_good(): pass",
    "tests/c/test_c.py": "import no_such_module",
    "tests/c/test_d.py": "import pytest\npytest.skip('a whole file', allow_module_level=True)",
    "tests/a/test_e.py": "import pytest\npytestmark = pytest.mark.slow\ndef test_slow(): assert False",
}


def test_each_test_of_a_file_is_reported(tmp_path: Path) -> None:
    for name, text in _FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:hypothesispytest"]
    done = subprocess.run(
        [*command, "-n", "1", "--dist", "loadfile", "--no-loadscope-reorder", "-rA"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(Path(__file__).parent), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 worker [5 items]" in done.stdout
    for line in ("PASSED tests/a/test_a.py::test_good", "FAILED tests/a/test_a.py::test_bad"):
        assert line in done.stdout
    assert "1 failed, 2 passed, 2 skipped, 1 error" in done.stdout
    assert "no_such_module" in done.stdout
    assert (tmp_path / "ended").exists(), "the file's own fixture was not ended"
