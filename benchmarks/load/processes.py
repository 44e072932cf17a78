"""CPU time as the kernel counts it: of a process and all below it, and of the whole machine."""

import os
from dataclasses import dataclass
from pathlib import Path

_TICK = os.sysconf("SC_CLK_TCK")
_PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class MachineCpu:
    """Seconds of CPU since boot, over all cores: spent here, of that in interrupts, and taken by the host."""

    busy: float
    steal: float
    interrupts: float = 0.0


def cores() -> int:
    return os.cpu_count() or 1


def machine() -> MachineCpu:
    """Read the first line of /proc/stat. Interrupts count as busy; some kernels charge the process that they
    came upon for them too, others nobody."""
    return _read_core((_PROC / "stat").read_text().split("\n", 1)[0])


def each_core() -> dict[int, MachineCpu]:
    """The same of every core, by its number."""
    lines = [line for line in (_PROC / "stat").read_text().splitlines() if line.startswith("cpu")]
    return {int(line[3 : line.index(" ")]): _read_core(line) for line in lines if line[3].isdigit()}


def _read_core(line: str) -> MachineCpu:
    user, nice, system, _idle, _iowait, irq, softirq, steal = (int(f) / _TICK for f in line.split()[1:9])
    return MachineCpu(user + nice + system + irq + softirq, steal, interrupts=irq + softirq)


def tree_cpu(root: int) -> dict[int, float]:
    """CPU seconds (user + system) of `root` and of every process below it, by process id."""
    parents: dict[int, int] = {}
    seconds: dict[int, float] = {}
    for entry in _PROC.iterdir():
        if entry.name.isdigit() and (fields := _stat(entry)):
            parents[int(entry.name)] = int(fields[1])
            seconds[int(entry.name)] = (int(fields[11]) + int(fields[12])) / _TICK
    members = {root} & seconds.keys()
    while grown := {pid for pid, parent in parents.items() if parent in members} - members:
        members |= grown
    return {pid: seconds[pid] for pid in members}


def tree_total(root: int) -> float:
    """CPU seconds of `root` and all below it, those that have ended included: whoever waits for the end of a
    process takes over its account. The difference of two readings leaves nothing of theirs out."""
    return sum(_charged(_PROC / str(pid)) for pid in tree_cpu(root))


def _charged(entry: Path) -> float:
    """User and system time of a process, and of its ended children that it has waited for."""
    fields = _stat(entry) or ["0"] * 15
    return sum(map(int, fields[11:15])) / _TICK


def session(leader: int) -> list[int]:
    """Who is in the session that this process began, even if it has ended and others took its children."""
    numbers = [entry for entry in _PROC.iterdir() if entry.name.isdigit()]
    return [int(e.name) for e in numbers if (fields := _stat(e)) and int(fields[3]) == leader]


def thread_cpu(pid: int) -> dict[int, float]:
    """CPU seconds (user + system) of every thread of a process, by thread id."""
    tasks = (_PROC / str(pid) / "task").iterdir()
    read = {int(task.name): _stat(task) for task in tasks}
    return {tid: (int(f[11]) + int(f[12])) / _TICK for tid, f in read.items() if f}


def command_line(pid: int) -> list[str]:
    """As it was started; empty when the process is gone."""
    try:
        text = (_PROC / str(pid) / "cmdline").read_text(errors="replace")
    except OSError:
        return []
    return text.rstrip("\0").split("\0")


def spent(before: dict[int, float], after: dict[int, float]) -> float:
    """CPU seconds between two readings of a tree; a process born in between counts from zero."""
    return sum(value - before.get(pid, 0.0) for pid, value in after.items())


def _stat(entry: Path) -> list[str] | None:
    """The fields of /proc/<pid>/stat after the command name, or None when the process is gone."""
    try:
        text = (entry / "stat").read_text()
    except OSError:
        return None
    return text[text.rindex(")") + 2 :].split()


def anonymous_memory(root: int) -> int:
    """Bytes of memory of their own of `root` and of every process below it: no files, nothing shared."""
    return sum(_anonymous(pid) for pid in tree_cpu(root))


def _anonymous(pid: int) -> int:
    try:
        lines = (_PROC / str(pid) / "status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))
