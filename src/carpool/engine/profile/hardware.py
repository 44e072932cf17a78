"""Describes what a measurement depends on besides the model: the processor, the cores we may use, the GPUs;
and how much of the processor others took meanwhile."""

from __future__ import annotations

import os
import platform
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import monotonic
from typing import NamedTuple

from carpool.config.usable_cores import usable_cores

_IDLE, _STEAL = 3, 7  # fields of a line of /proc/stat: those after the last are counted twice
_TICK = os.sysconf("SC_CLK_TCK")
_MOST_GPUS = 64


@dataclass(frozen=True, slots=True)
class Hardware:
    cpu: str
    cores: int  # that this process may use
    gpus: tuple[str, ...] = ()

    def __str__(self) -> str:
        cores = "1 core" if self.cores == 1 else f"{self.cores} cores"
        return ", ".join((self.cpu, cores, *self.gpus))


def hardware(proc: Path = Path("/proc")) -> Hardware:
    return Hardware(
        _field(proc / "cpuinfo", "model name") or platform.machine(),
        usable_cores(),
        tuple(filter(None, (_field(file, "Model") for file in _gpu_files(proc)))),
    )


def gpu_count(proc: Path = Path("/proc"), dev: Path = Path("/dev")) -> int:
    """That this machine shows to us; a runtime may see fewer. A container may have only one of the two."""
    return max(len(_gpu_files(proc)), len(list(dev.glob("nvidia[0-9]*"))[:_MOST_GPUS]))


def _gpu_files(proc: Path) -> list[Path]:
    return sorted((proc / "driver" / "nvidia" / "gpus").glob("*/information"))[:_MOST_GPUS]


def _field(file: Path, name: str) -> str:
    """The value of the first line `name : value`; empty where there is none."""
    try:
        lines = file.read_text("utf-8", "replace").splitlines()
    except OSError:
        return ""
    for line in lines:
        before, _, after = line.partition(":")
        if before.strip() == name:
            return " ".join(after.split())
    return ""


@dataclass(frozen=True, slots=True)
class CpuTaken:
    """Describes what others took meanwhile: shares of the time of our cores that went to the machine below
    and to other processes, and the share of their time in which our threads waited for a core. None: this
    machine does not report it."""

    steal: float = 0.0
    others: float = 0.0
    waited: float | None = None


class CpuReading(NamedTuple):
    """Holds seconds, counted from some beginning: of the cores that we may use, and of our processes on
    them."""

    total: float = 0.0
    busy: float = 0.0
    steal: float = 0.0
    own: float = 0.0
    threads: Mapping[int, tuple[float, float]] = {}  # seconds on a core and waiting for one, by thread


def taken_between(before: CpuReading, after: CpuReading, seconds: float) -> CpuTaken:
    """All are shares from 0 to 1, whatever the counters say. Threads that began meanwhile count, those that
    ended do not."""
    total = after.total - before.total
    if total <= 0:
        return CpuTaken()
    steal = max(0.0, after.steal - before.steal)
    others = max(0.0, after.busy - before.busy - max(0.0, after.own - before.own))
    shares = CpuTaken(min(1.0, steal / total), min(1.0, others / total))
    if not after.threads or seconds <= 0:
        return shares
    both = [(before.threads.get(thread, (0.0, 0.0)), now) for thread, now in after.threads.items()]
    ran, waited = (sum(max(0.0, now[i] - then[i]) for then, now in both) for i in (0, 1))
    side_by_side = max(1.0, (ran + waited) / seconds)  # threads that wanted to run at once
    return replace(shares, waited=min(1.0, waited / seconds / side_by_side))


class CpuWatch:
    """Watches the processors from when it is made. Where nothing can be read, it reports nothing taken."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._began = monotonic()
        self._before = self._reading()

    def read(self) -> CpuTaken:
        return taken_between(self._before, self._reading(), monotonic() - self._began)

    def _reading(self) -> CpuReading:
        ours = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        try:
            lines = [line.split() for line in (self._proc / "stat").read_text("ascii").splitlines()]
            cores = [line for line in lines if line and line[0] in ours] or lines[:1]
            ticks = [[int(field) for field in core[1 : 2 + _STEAL]] for core in cores]
            total, steal = sum(map(sum, ticks)), sum(core[_STEAL] for core in ticks)
            idle = sum(core[_IDLE] + core[_IDLE + 1] for core in ticks)
        except (OSError, ValueError, IndexError):
            return CpuReading()
        pids = _tree(self._proc, os.getpid())
        own = sum(_cpu_ticks(self._proc / str(pid)) for pid in pids)
        threads = {thread: told for pid in pids for thread, told in _schedules(self._proc / str(pid))}
        return CpuReading(total / _TICK, (total - idle - steal) / _TICK, steal / _TICK, own / _TICK, threads)


def process_age(proc: Path = Path("/proc")) -> float:
    """Returns the seconds since this process was started; 0 where that cannot be read."""
    fields = _process_fields(proc / "self")
    try:
        up = float((proc / "uptime").read_text("ascii").split()[0])
        return max(0.0, up - int(fields[19]) / _TICK)
    except (OSError, ValueError, IndexError):
        return 0.0


def _tree(proc: Path, root: int) -> list[int]:
    """Returns this process and all below it."""
    children_of: Callable[[int], list[int]]
    if (proc / f"{root}/task/{root}/children").exists():
        children_of = partial(_children, proc)
    else:  # some kernels do not list them; to look at all processes takes longer the more there are
        children_of = _children_by_parent(proc).__getitem__
    found = [root]
    for pid in found:
        found += children_of(pid)
    return found


def _children(proc: Path, pid: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError):
        for thread in (proc / f"{pid}/task").iterdir():
            with suppress(OSError):
                found += map(int, (thread / "children").read_text("ascii").split())
    return found


def _children_by_parent(proc: Path) -> defaultdict[int, list[int]]:
    found: defaultdict[int, list[int]] = defaultdict(list)
    for entry in proc.iterdir():
        if entry.name.isdigit() and (fields := _process_fields(entry)):
            found[int(fields[1])].append(int(entry.name))
    return found


def _cpu_ticks(process: Path) -> int:
    """Returns the ticks of its own, and of its children that have ended."""
    fields = _process_fields(process)
    return sum(map(int, fields[11:15])) if fields else 0


def _process_fields(process: Path) -> list[str]:
    """Returns the fields after its name, from which anything may stand in brackets; none when it has
    ended."""
    try:
        return (process / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()
    except OSError:
        return []


def _schedules(process: Path) -> Iterator[tuple[int, tuple[float, float]]]:
    with suppress(OSError):
        for thread in (process / "task").iterdir():
            with suppress(OSError, ValueError, IndexError):
                ran, waited = (thread / "schedstat").read_text("ascii").split()[:2]
                yield int(thread.name), (int(ran) / 1e9, int(waited) / 1e9)
