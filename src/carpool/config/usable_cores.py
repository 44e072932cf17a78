"""Counts how many cores this process may use: those that it may run on, and no more than its control groups'
limits on processor time are worth. A container with a limit sees all cores of its machine; whoever starts a
thread for each of them is stopped for most of every tenth of a second."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

WAITING = {"OMP_WAIT_POLICY": "PASSIVE"}
"""For the environment of processes that compute, unless the user's says otherwise. Threads of OpenMP that
wait for the others of their team spin by default: where cores are shared, they keep the core from the thread
that they wait for, and a step takes many times as long."""


def usable_cores(root: Path = Path("/")) -> int:
    """Whole ones, and one at least: a thread more than the limit carries would be stopped with the others."""
    allowed = len(os.sched_getaffinity(0))
    limits = [int(limit + 1e-9) for limit in _limits(root)]
    return max(1, min([allowed, *limits]))


def _limits(root: Path) -> Iterator[float]:
    """In cores, of every group that this process is in: what holds for a group holds for those within."""
    for mount, group in _places(root):
        for folder in (group, *group.parents):
            limit = _version_2(folder) if (folder / "cpu.max").is_file() else _version_1(folder)
            if limit is not None:
                yield limit
            if folder == mount:
                break


def _places(root: Path) -> Iterator[tuple[Path, Path]]:
    """Yields where groups are mounted that can limit processor time, and this process's own group there."""
    own: dict[str, str] = {}  # by kind of mount
    for line in _lines(root / "proc/self/cgroup"):
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if number == "0" and not controllers:
            own["cgroup2"] = path
        elif "cpu" in controllers.split(","):
            own["cgroup"] = path
    for line in _lines(root / "proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        place, kind = before.split(" "), [*after.split(" "), "", "", ""][:3]
        if len(place) < 5 or kind[0] not in own:
            continue
        if kind[0] == "cgroup" and "cpu" not in kind[2].split(","):
            continue
        mount = root / place[4].lstrip("/")
        yield mount, mount / _within(own[kind[0]], place[3])


def _within(path: str, shown: str) -> PurePosixPath:
    """Returns a group's path below the one that the mount shows, which in a container is often the group
    itself."""
    group = PurePosixPath(path)
    if ".." in group.parts or not group.is_relative_to(shown):
        return PurePosixPath()
    return group.relative_to(shown)


def _version_2(folder: Path) -> float | None:
    quota, period = [*" ".join(_lines(folder / "cpu.max")).split(), "", ""][:2]
    return _cores(quota, period)


def _version_1(folder: Path) -> float | None:
    quota, period = ("".join(_lines(folder / f"cpu.cfs_{each}_us")) for each in ("quota", "period"))
    return _cores(quota, period)


def _cores(quota: str, period: str) -> float | None:
    """Returns None where there is no limit: that is `max`, or -1."""
    if not (quota.isdigit() and period.isdigit() and int(period) > 0):
        return None
    return int(quota) / int(period)


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text("utf-8", "replace").splitlines()
    except OSError:
        return []
