"""Counts how many cores this process may use: those that it may run on, and no more than its control groups'
limits on processor time are worth. A container with a limit sees all cores of its machine; a process that
starts a thread for each of them is stopped for most of every tenth of a second."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from carpool.config.control_groups import ROOT, groups, lines_of

WAITING = {"OMP_WAIT_POLICY": "PASSIVE"}
"""For the environment of processes that compute, unless the user's says otherwise. Threads of OpenMP that
wait for the others of their team spin by default: where cores are shared, they keep the core from the thread
that they wait for, and a step takes many times as long."""


def usable_cores(root: Path = ROOT) -> int:
    """Whole ones, and one at least: a thread more than the limit carries would be stopped with the others."""
    allowed = len(os.sched_getaffinity(0))
    limits = [int(limit + 1e-9) for limit in _limits(root)]
    return max(1, min([allowed, *limits]))


def threads_for(frontends: int) -> int:
    """Returns an equal share of the cores for each of so many front ends."""
    return max(1, usable_cores() // max(1, frontends))


def _limits(root: Path) -> Iterator[float]:
    """In cores, of every group that this process is in."""
    for folder in groups("cpu", root):
        limit = _version_2(folder) if (folder / "cpu.max").is_file() else _version_1(folder)
        if limit is not None:
            yield limit


def _version_2(folder: Path) -> float | None:
    quota, period = [*" ".join(lines_of(folder / "cpu.max")).split(), "", ""][:2]
    return _cores(quota, period)


def _version_1(folder: Path) -> float | None:
    quota, period = ("".join(lines_of(folder / f"cpu.cfs_{each}_us")) for each in ("quota", "period"))
    return _cores(quota, period)


def _cores(quota: str, period: str) -> float | None:
    """Returns None where there is no limit: that is `max`, or -1."""
    if not (quota.isdigit() and period.isdigit() and int(period) > 0):
        return None
    return int(quota) / int(period)
