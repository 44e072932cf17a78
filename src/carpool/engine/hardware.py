"""What a measurement depends on besides the model: the processor, the cores we may use, the GPUs; and how
much of the processor others took meanwhile."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

from carpool.config.usable_cores import usable_cores

_STEAL = 7  # field of the first line of /proc/stat: those after it are counted twice
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


class Steal:
    """The share of processor time that the machine below gave to others, since this object was made."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._file = proc / "stat"
        self._before = self._ticks()

    def share(self) -> float:
        stolen, total = (now - before for now, before in zip(self._ticks(), self._before, strict=True))
        return stolen / total if total > 0 else 0.0

    def _ticks(self) -> tuple[int, int]:
        try:
            fields = [int(field) for field in self._file.read_text("ascii").split()[1 : 2 + _STEAL]]
        except (OSError, ValueError):
            return 0, 0
        return fields[_STEAL], sum(fields)
