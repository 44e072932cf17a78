"""Reads what the GPUs of this machine are at, through NVIDIA's management library, at the scrape."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from math import nan
from pathlib import Path
from typing import Any, NamedTuple


class GpuReading(NamedTuple):
    """Holds the readings of a GPU; nan where it does not report one."""

    utilization: float  # 0 to 1
    memory_total_bytes: float
    memory_used_bytes: float
    power_usage: float  # watts
    power_limit: float
    energy: float  # joules since the first reading


class Gpus:
    """Reads the GPUs; none where there is no GPU, no driver or no nvidia-ml-py. The library is opened by the
    first reading, and for good: a scrape that opened it anew would take a hundred times as long."""

    def __init__(self, driver: Path = Path("/proc/driver/nvidia")) -> None:
        self._driver = driver
        self._library: Any = None
        self._handles: list[tuple[str, Any]] | None = None
        self._energy: dict[str, float] = {}

    def read(self) -> list[tuple[str, GpuReading]]:
        """Returns each with its UUID."""
        if self._handles is None:
            self._handles = self._open() if self._driver.exists() else []
        return [(uuid, self._read(uuid, handle)) for uuid, handle in self._handles]

    def _open(self) -> list[tuple[str, Any]]:
        try:
            import pynvml

            pynvml.nvmlInit()
            handles = [pynvml.nvmlDeviceGetHandleByIndex(n) for n in range(pynvml.nvmlDeviceGetCount())]
            self._library = pynvml
            return [(_text(pynvml.nvmlDeviceGetUUID(handle)), handle) for handle in handles]
        except Exception:  # no package, no library, no permission: none of them is the server's trouble
            return []

    def _read(self, uuid: str, handle: Any) -> GpuReading:
        library = self._library

        def told(ask: Callable[[Any], Any]) -> Any:
            with contextlib.suppress(library.NVMLError):  # of what this GPU does not have
                return ask(handle)
            return None

        used, memory = told(library.nvmlDeviceGetUtilizationRates), told(library.nvmlDeviceGetMemoryInfo)
        energy = _part(told(library.nvmlDeviceGetTotalEnergyConsumption), 1000)
        return GpuReading(
            _part(used and used.gpu, 100),
            _part(memory and memory.total),
            _part(memory and memory.used),
            _part(told(library.nvmlDeviceGetPowerUsage), 1000),
            _part(told(library.nvmlDeviceGetPowerManagementLimit), 1000),
            energy - self._energy.setdefault(uuid, energy),
        )


def _part(value: float | None, of: int = 1) -> float:
    return nan if value is None else float(value) / of


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
