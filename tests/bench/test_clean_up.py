"""Benchmarks that are told to stop leave no process behind."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import textwrap
from contextlib import suppress
from pathlib import Path

import pytest

from load.processes import tree_cpu
from waiting import until

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
STARTING = sorted(
    path.stem for path in BENCHMARKS.glob("*.py") if re.search(r"^    run_program\(", path.read_text(), re.M)
)
PATIENCE = 60.0
_PR_SET_CHILD_SUBREAPER = 36


def below() -> set[int]:
    return set(tree_cpu(os.getpid())) - {os.getpid()}


def left_behind(command: list[str], number: int, grown: int, seconds: float) -> set[int]:
    """What lives on after it was told to stop, some time after so many processes were below us."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)  # whoever is left behind comes to us
    before = below()
    process = subprocess.Popen(command, cwd=BENCHMARKS, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        with suppress(AssertionError):  # or as far as it came
            until(lambda: process.poll() is not None or len(below() - before) >= grown, seconds=seconds)
        with suppress(subprocess.TimeoutExpired):
            process.wait(2.0)  # in the middle of something
        process.send_signal(number)
        said, _ = process.communicate(timeout=PATIENCE)
        left = below() - before
    finally:
        process.kill()
        for pid in below() - before:
            os.kill(pid, signal.SIGKILL)
        process.wait()
    if process.returncode not in (0, 128 + number):  # it ended before, or because of that
        assert b"Error" not in said.splitlines()[-1], said.decode(errors="replace")[-2000:]
    return left


@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.conformance)],
    ids=["TERM", "INT"],
)
def test_orphans_and_those_in_sessions_of_their_own(tmp_path: Path, number: int) -> None:
    """A child whose parent is gone, and one that no signal to a group reaches."""
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent(
            f"""
            import subprocess, sys, time
            sys.path[:0] = [{str(BENCHMARKS)!r}]
            from load.program import run_program

            def main():
                subprocess.run(["sh", "-c", "sleep 300 &"])
                subprocess.Popen(["sleep", "300"], start_new_session=True)
                time.sleep(300)

            run_program(main, "program")
            """
        )
    )
    assert left_behind([sys.executable, str(program)], number, 3, PATIENCE) == set()


@pytest.mark.conformance
@pytest.mark.parametrize("name", STARTING)
def test_no_process_is_left_behind(name: str) -> None:
    assert left_behind([sys.executable, f"{name}.py", "--quick"], signal.SIGTERM, 4, 20.0) == set()


def test_those_that_start_servers_are_known() -> None:
    """By what they use: each has to end as `run_program` has it."""
    users = [
        path.stem
        for path in BENCHMARKS.glob("*.py")
        if re.search(r"Popen\(|carpool_server\(|starting\(|Server\(|^from peers", path.read_text(), re.M)
    ]
    assert set(users) <= set(STARTING)
