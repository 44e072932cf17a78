"""Looks for tests that fail now and then: runs them again and again, each time as on another busy machine.

A round runs the tests once, in shuffled order. Meanwhile threads, callbacks and readers of clocks are delayed
at random (tools/hunt_delays.py), and processes of the run are stopped for moments (SIGSTOP, SIGCONT), as
happens to any process on a machine without a free core. Nothing is retried: a test that failed in one round
of fifty is reported like one that failed in all.

A round has a seed. It decides the order and the delays, but not what the machine does by itself. A test that
failed is reported with the command that repeats its round for it alone:

    .venv/bin/python tools/hunt.py --seed 7 --minutes 3 tests/link/test_link.py::test_a_name

If it never fails alone, repeat the round with the whole file, or with all paths. Then find the cause. A
result that takes time is waited for (tests/waiting.py), a time budget takes its clock as an argument, and a
race in the product is mended there. Longer time-outs and second attempts only make the failure rarer.

Exits with 1 if a test failed.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import secrets
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

ROOT = Path(__file__).parents[1]
SEED, FOLDER = "CARPOOL_HUNT_SEED", "CARPOOL_HUNT_FOLDER"
FAILED, RUNNING, STOPPING = "failed", "running", "stopping"

_BETWEEN_S, _STOPPED_S = (0.05, 0.6), (0.01, 0.25)
_SILENCE_S = 900.0  # in which no test ended: the round hangs
_LOOK_S = 0.5


@dataclass
class Found:
    """One test that failed."""

    seeds: list[int] = field(default_factory=list)
    when: str = ""
    why: str = ""


def main() -> int:
    options = _options()
    found: dict[str, Found] = {}
    began, seed, rounds, ended = time.monotonic(), options.seed, 0, 0
    print(f"hunting for {options.minutes:g} min, first seed {seed}, {options.jobs} processes", flush=True)
    while not rounds or (time.monotonic() - began < options.minutes * 60 and rounds < options.rounds):
        left = began + options.minutes * 60 - time.monotonic()
        with tempfile.TemporaryDirectory(prefix="carpool-hunt-") as folder:
            code, whole = _round(Path(folder), seed, options, max(left, 60.0) if rounds else None)
            for test, when, why in _failures(Path(folder)):
                found.setdefault(test, Found([], when, why)).seeds.append(seed)
                print(
                    f"  failed: {test} ({when})\n          {why}\n          {_again(test, seed)}", flush=True
                )
        rounds, ended = rounds + 1, ended + whole
        print(f"round {rounds}, seed {seed}: {_outcome(code, whole)}", flush=True)
        if code not in (0, 1) and whole:  # no test ran, or not as it should: each round would say so
            return code
        seed += 1
    _table(found, rounds)
    return 1 if found else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "paths",
        nargs="*",
        default=["tests"],
        help="files, folders or tests, as pytest takes them (all tests)",
    )
    add(
        "--minutes",
        type=float,
        default=60.0,
        help="for how long rounds are begun (60); the last one is cut off",
    )
    add("--rounds", type=int, default=10**9, help="at most so many rounds (as many as there is time for)")
    add(
        "--seed", type=int, default=secrets.randbelow(10**6), help="of the first round; the next has one more"
    )
    add("--jobs", type=int, default=(os.cpu_count() or 2) + 2, help="processes that run tests (cores + 2)")
    add(
        "--no-stops",
        action="store_true",
        help="leave processes running; threads and callbacks are delayed still",
    )
    return parser.parse_args()


def _round(folder: Path, seed: int, options: argparse.Namespace, most_s: float | None) -> tuple[int, bool]:
    """Returns pytest's exit code, and whether the round was not cut off."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "hunt_delays", "-p", "no:cacheprovider"]
    command += ["-n", str(options.jobs), "--dist", "loadfile", "--no-loadscope-reorder", "--tb=short"]
    command += [f"--basetemp={folder / 'tmp'}", *options.paths]
    given = {SEED: str(seed), FOLDER: str(folder), "PYTHONPATH": str(Path(__file__).parent)}
    log = folder / "log"
    with log.open("wb") as output:
        run = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **given},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        over = threading.Event()
        stops = threading.Thread(target=_stop_some, args=(run.pid, folder, Random(seed), over))
        if not options.no_stops:
            stops.start()
        try:
            whole = _follow(run, log, folder, most_s)
        finally:
            over.set()
            if stops.ident is not None:
                stops.join()
            _end(run)
    if run.returncode not in (0, 1) and whole:
        print(log.read_text(errors="replace")[-4000:], flush=True)
    return run.returncode, whole


def _follow(run: subprocess.Popen[bytes], log: Path, folder: Path, most_s: float | None) -> bool:
    began = heard = time.monotonic()
    said = 0
    while run.poll() is None:
        now, size = time.monotonic(), log.stat().st_size
        if size != said:
            said, heard = size, now
        if now - heard > _SILENCE_S:
            for note in folder.glob(f"{RUNNING}-*"):
                _note(folder, note.read_text(), "hung", f"no test ended for {_SILENCE_S:g} s")
            return False
        if most_s is not None and now - began > most_s:
            return False
        with contextlib.suppress(subprocess.TimeoutExpired):
            run.wait(_LOOK_S)
    return True


def _note(folder: Path, test: str, when: str, why: str) -> None:
    with (folder / FAILED).open("a") as file:
        file.write(json.dumps([test, when, why]) + "\n")


def _end(run: subprocess.Popen[bytes]) -> None:
    """A round that is cut off leaves no process, also none that its tests have started."""
    children = [*_below(run.pid)]
    if run.poll() is None:
        run.send_signal(signal.SIGINT)  # fixtures end what they have begun
        with contextlib.suppress(subprocess.TimeoutExpired):
            run.wait(30.0)
    if run.poll() is None:
        run.kill()
        run.wait()
    for pid in children:
        with _held(pid) as descriptor:
            if descriptor is not None and os.getsid(pid) == run.pid:
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)


# ---- processes that are stopped for moments


def _stop_some(root: int, folder: Path, random: Random, over: threading.Event) -> None:
    while not over.wait(random.uniform(*_BETWEEN_S)):
        some = list(_below(root))
        if not some:
            continue
        pid = random.choice(some)
        # With the lock no test stops a process by itself, which would have to stay stopped.
        with (folder / STOPPING).open("w") as lock, _held(pid) as descriptor:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if descriptor is None or pid not in _below(root) or _state(pid) in "TtZX":
                continue
            try:
                signal.pidfd_send_signal(descriptor, signal.SIGSTOP)
                over.wait(random.uniform(*_STOPPED_S))
            except ProcessLookupError:
                continue
            finally:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(descriptor, signal.SIGCONT)


@contextlib.contextmanager
def _held(pid: int) -> Iterator[int | None]:
    """A descriptor of the process: its number may be another's a moment later."""
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        yield None
        return
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _below(root: int) -> dict[int, int]:
    """The descendants of a process, with their parents."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                parents[int(entry.name)] = int(_stat(int(entry.name))[1])
    found: dict[int, int] = {}
    fresh = {root}
    while fresh:
        fresh = {pid for pid, parent in parents.items() if parent in fresh}
        found.update((pid, parents[pid]) for pid in fresh)
    return found


def _state(pid: int) -> str:
    with contextlib.suppress(OSError):
        return _stat(pid)[0]
    return "X"


def _stat(pid: int) -> list[str]:
    """Its state, its parent, and so on: what stands behind its name."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


# ---- what is said


def _failures(folder: Path) -> list[tuple[str, str, str]]:
    file = folder / FAILED
    return [tuple(json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []


def _again(test: str, seed: int) -> str:
    return f".venv/bin/python tools/hunt.py --seed {seed} --minutes 3 {shlex.quote(test)}"


def _outcome(code: int, whole: bool) -> str:
    if not whole:
        return "cut off"
    return {0: "green", 1: "red"}.get(code, f"pytest ended with {code}")


def _table(found: dict[str, Found], rounds: int) -> None:
    if not found:
        print(f"{rounds} rounds, no test failed")
        return
    print(f"\n{'failed':>6}  {'of':>4}  seed      test")
    for test, one in sorted(found.items(), key=lambda pair: -len(pair[1].seeds)):
        print(f"{len(one.seeds):6}  {rounds:4}  {one.seeds[0]:<8}  {test}: {one.why}")


if __name__ == "__main__":
    sys.exit(main())
