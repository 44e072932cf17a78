"""Who is busy while a server is under load: its processes, their threads, the device, the machine."""

import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from chip.cores import Cores, CoreUse
from load.processes import command_line, thread_cpu, tree_cpu

_CHILD = "carpool.process.children"
_RUNNER = "carpool.extensions.torch.runner_process"
_THREADS = 6  # beside the first one, those that are busiest


@dataclass
class Seen:
    """Shares of one core, unless said; the device's are of its time, the machine's of all cores."""

    processes: dict[str, float] = field(default_factory=dict)
    engine_threads: list[float] = field(default_factory=list)  # the loop first, then the busiest
    runner_threads: list[float] = field(default_factory=list)  # likewise; none without a runner
    device: dict[str, float] = field(default_factory=dict)
    machine: dict[str, float] = field(default_factory=dict)
    in_time: float | None = None  # of the answers, by the server's own account

    def parts(self) -> dict[str, float]:
        """What a request passes through; "engine loop" is a part of "engine". Not all need be there."""
        named: dict[str, list[float]] = {}
        for name, share in self.processes.items():
            named.setdefault(name.rstrip(" 0123456789"), []).append(share)
        found: dict[str, float] = {}
        if "front end" in named:
            found["front ends"] = sum(named["front end"])
        if "engine" in named:
            found["engine"] = sum(named["engine"])
        if self.engine_threads:
            found["engine loop"] = self.engine_threads[0]
        if "runner" in named:
            found["runner"] = sum(named["runner"])
        return {name: round(share, 3) for name, share in found.items()}


def roles(commands: Mapping[int, Sequence[str]]) -> dict[int, str]:
    """What each process of a server is, by how it was started. A second of a kind has a number."""
    found: dict[int, str] = {}
    counts: dict[str, int] = {}
    for pid in sorted(commands):
        kind = _role(commands[pid])
        if kind is None:
            found[pid] = f"process {pid}"
            continue
        counts[kind] = counts.get(kind, 0) + 1
        found[pid] = kind if counts[kind] == 1 and kind != "front end" else f"{kind} {counts[kind]}"
    return found


def _role(command: Sequence[str]) -> str | None:
    if any(_RUNNER in word for word in command):
        return "runner"
    if _CHILD not in command:
        return None
    kinds = {"engine": "engine", "frontend": "front end"}
    return kinds.get(next(iter(command[command.index(_CHILD) + 1 :]), ""))


def uses_device(pid: int) -> bool:
    with suppress(OSError):
        return "libcuda.so" in Path(f"/proc/{pid}/maps").read_text()
    return False


class Watch:
    """From `start` to `stop`; the device is asked ten times a second."""

    def __init__(self, root: int, cores: Cores) -> None:
        self._root = root
        self._cores = cores
        self.started = False
        self._ending = threading.Event()
        self._samples: list[dict[str, float]] = []
        self._thread = threading.Thread(target=self._look, daemon=True)

    def start(self) -> None:
        self.started = True
        self._before = tree_cpu(self._root)
        self._names = roles({pid: command_line(pid) for pid in self._before})
        self._engine = self._busiest("engine")
        if self._engine is None:  # another server: what has the device is the like of it
            using = [pid for pid in self._before if uses_device(pid)]
            self._engine = max(using, key=self._before.__getitem__, default=None)
        self._runner = self._busiest("runner")
        self._threads = {pid: _threads(pid) for pid in (self._engine, self._runner) if pid is not None}
        self._use = CoreUse(self._cores)
        self._began = time.perf_counter()
        self._thread.start()

    def _busiest(self, kind: str) -> int | None:
        pids = [pid for pid, name in self._names.items() if name.rstrip(" 0123456789") == kind]
        return max(pids, key=self._before.__getitem__, default=None)

    def stop(self) -> Seen:
        took = time.perf_counter() - self._began
        after = tree_cpu(self._root)
        threads = {pid: _threads(pid) for pid in self._threads}
        machine = self._use.read()
        self._ending.set()
        self._thread.join()
        spent = {pid: (seconds - self._before.get(pid, 0.0)) / took for pid, seconds in after.items()}
        busy = {pid: busiest(pid, self._threads[pid], now, took) for pid, now in threads.items()}
        return Seen(
            {
                self._names.get(pid, f"process {pid}"): round(share, 3)
                for pid, share in sorted(spent.items())
                if share > 0.005
            },
            [] if self._engine is None else busy[self._engine],
            [] if self._runner is None else busy[self._runner],
            {key: round(fmean(values), 3) for key, values in _by_key(self._samples).items()},
            machine,
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


def _by_key(samples: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """A device may not answer every question every time."""
    found: dict[str, list[float]] = {}
    for sample in samples:
        for key, value in sample.items():
            found.setdefault(key, []).append(value)
    return found


def _threads(pid: int) -> dict[int, float]:
    with suppress(OSError):  # it has ended
        return thread_cpu(pid)
    return {}


def busiest(pid: int, before: Mapping[int, float], after: Mapping[int, float], seconds: float) -> list[float]:
    """Shares of a core of a process's threads: its first one, and then those that are busiest."""
    spent = {tid: (cpu - before.get(tid, 0.0)) / seconds for tid, cpu in after.items()}
    first = spent.pop(pid, 0.0)
    return [round(share, 3) for share in (first, *sorted(spent.values(), reverse=True)[:_THREADS])]


def _sample(nvml: Any, handle: Any) -> dict[str, float]:
    used = nvml.nvmlDeviceGetUtilizationRates(handle)
    sample = {"busy": used.gpu / 100, "memory": used.memory / 100}
    with suppress(Exception):
        sample["jpeg_decoder"] = nvml.nvmlDeviceGetJpgUtilization(handle)[0] / 100
    sample["watts"] = nvml.nvmlDeviceGetPowerUsage(handle) / 1e3
    return sample
