"""Reads how busy the machine is, for the metrics page."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

# Fields of the first line of /proc/stat; those after steal are counted twice.
_IDLE, _IOWAIT, _STEAL = 3, 4, 7


class HostReading(NamedTuple):
    cpu_utilization: float  # 0 to 1
    memory_total_bytes: float
    memory_used_bytes: float


class Host:
    """Reads the machine's processors and memory from /proc at the scrape.

    Utilization is a mean since the reading before, so one object belongs to one scraper.
    """

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._utilization = 0.0
        self._before = self._ticks()

    def read(self) -> HostReading:
        busy, total = self._ticks()
        elapsed = total - self._before[1]
        if elapsed > 0:  # else the clock has not ticked since, and the last answer still holds
            share = (busy - self._before[0]) / elapsed
            self._utilization = min(max(share, 0.0), 1.0)  # the kernel's idle time can run backwards
            self._before = busy, total
        sizes: dict[str, float] = {}
        for line in (self._proc / "meminfo").read_text("ascii").splitlines():
            name, _, rest = line.partition(":")
            if name in ("MemTotal", "MemAvailable"):
                sizes[name] = int(rest.split()[0]) * 1024.0
        total_bytes = sizes["MemTotal"]
        return HostReading(self._utilization, total_bytes, total_bytes - sizes["MemAvailable"])

    def _ticks(self) -> tuple[int, int]:
        with (self._proc / "stat").open(encoding="ascii") as file:
            fields = [int(field) for field in file.readline().split()[1 : 2 + _STEAL]]
        total = sum(fields)
        return total - fields[_IDLE] - fields[_IOWAIT], total
