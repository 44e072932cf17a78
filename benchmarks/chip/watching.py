"""Who is busy while a server is under load: its processes, the engine's threads, the device."""

import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from load.processes import thread_cpu, tree_cpu


@dataclass
class Seen:
    """Shares of one core, unless said; the device's are of its time."""

    engine: int | None = None
    processes: dict[str, float] = field(default_factory=dict)
    engine_threads: list[float] = field(default_factory=list)  # the loop first, then the busiest
    device: dict[str, float] = field(default_factory=dict)


def uses_device(pid: int) -> bool:
    with suppress(OSError):
        return "libcuda.so" in Path(f"/proc/{pid}/maps").read_text()
    return False


class Watch:
    """From `start` to `stop`; the device is asked ten times a second."""

    def __init__(self, root: int) -> None:
        self._root = root
        self.started = False
        self._ending = threading.Event()
        self._samples: list[dict[str, float]] = []
        self._thread = threading.Thread(target=self._look, daemon=True)

    def start(self) -> None:
        self.started = True
        self._before = tree_cpu(self._root)
        engines = [pid for pid in self._before if uses_device(pid)]
        self._engine = max(engines, key=lambda pid: self._before[pid], default=None)
        self._threads = thread_cpu(self._engine) if self._engine else {}
        self._began = time.perf_counter()
        self._thread.start()

    def stop(self) -> Seen:
        took = time.perf_counter() - self._began
        after = tree_cpu(self._root)
        threads = thread_cpu(self._engine) if self._engine else {}
        self._ending.set()
        self._thread.join()
        spent = {pid: (seconds - self._before.get(pid, 0.0)) / took for pid, seconds in after.items()}
        busy = {tid: (seconds - self._threads.get(tid, 0.0)) / took for tid, seconds in threads.items()}
        loop = busy.pop(self._engine, 0.0) if self._engine else 0.0
        names = {pid: "engine" if pid == self._engine else f"process {pid}" for pid in spent}
        return Seen(
            self._engine,
            {names[pid]: round(share, 3) for pid, share in spent.items() if share > 0.005},
            [round(loop, 3), *(round(b, 3) for b in sorted(busy.values(), reverse=True)[:6])],
            {
                key: round(fmean(sample[key] for sample in self._samples), 3)
                for key in (self._samples[0] if self._samples else {})
            },
        )

    def _look(self) -> None:
        try:
            import pynvml

            pynvml.nvmlInit()
            handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        except Exception:
            return
        while not self._ending.wait(0.1):
            with suppress(Exception):
                self._samples.append(_sample(pynvml, handle))


def _sample(nvml: Any, handle: Any) -> dict[str, float]:
    used = nvml.nvmlDeviceGetUtilizationRates(handle)
    sample = {"busy": used.gpu / 100, "memory": used.memory / 100}
    with suppress(Exception):
        sample["jpeg_decoder"] = nvml.nvmlDeviceGetJpgUtilization(handle)[0] / 100
    sample["watts"] = nvml.nvmlDeviceGetPowerUsage(handle) / 1e3
    return sample
