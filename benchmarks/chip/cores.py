"""Cores for the server and cores for the generator, so that neither waits for the other; who used them."""

import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from load.processes import MachineCpu, each_core

_LEAST = 8  # cores that are worth dividing
_TOPOLOGY = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


@dataclass(frozen=True)
class Cores:
    """Where processes that are started here may run. Undivided: both may run everywhere."""

    server: frozenset[int]
    generator: frozenset[int]

    @property
    def everything(self) -> frozenset[int]:
        return self.server | self.generator

    @property
    def divided(self) -> bool:
        return self.server.isdisjoint(self.generator)

    def generator_apart(self) -> tuple[frozenset[int], frozenset[int]]:
        """The last two of the generator's, which are one core of two threads, and the rest of them."""
        if not self.divided or len(self.generator) < 4:
            return self.generator, self.generator
        apart = frozenset(sorted(self.generator)[-2:])
        return apart, self.generator - apart

    def said(self) -> str:
        if not self.divided:
            return f"server and generator share {len(self.everything)} cores, as the kernel puts them"
        return f"server on cores {written(self.server)}, generator on cores {written(self.generator)}"


def divide(cores: Collection[int], asked: str, siblings: Mapping[int, int] | None = None) -> Cores:
    """`asked` is a number of cores for the server, 0 for none of its own, or "auto". Threads of one core stay
    on one side: `siblings` maps each to the first of its core."""
    first_of = siblings or {}
    listed = sorted(cores, key=lambda core: (first_of.get(core, core), core))
    count = _automatic(len(listed)) if asked == "auto" else int(asked)
    if not 0 <= count < len(listed):
        raise ValueError(f"of {len(listed)} cores the server can have 0 to {len(listed) - 1}, not {count}")
    everything = frozenset(listed)
    if not count:
        return Cores(everything, everything)
    return Cores(frozenset(listed[:count]), frozenset(listed[count:]))


def _automatic(cores: int) -> int:
    """Five of eight, in whole cores of two threads: a request costs the server about twice what it costs the
    generator."""
    return cores * 5 // 16 * 2 if cores >= _LEAST else 0


def first_siblings(cores: Collection[int]) -> dict[int, int]:
    """By core, as Linux numbers them: the first one that shares its hardware."""
    found: dict[int, int] = {}
    for core in cores:
        with suppress(OSError, ValueError):
            text = Path(_TOPOLOGY.format(core)).read_text()
            found[core] = int(text.replace("-", ",").split(",")[0])
    return found


@contextmanager
def placed(cores: Collection[int]) -> Iterator[None]:
    """What this thread starts in here runs there, with all that it starts itself."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def written(cores: Collection[int]) -> str:
    """Like 0-7,12."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][1] + 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


class CoreUse:
    """From when it is made: shares of all cores' time that were busy, and that the host kept for others."""

    def __init__(self, cores: Cores) -> None:
        self._cores = cores
        self._before = each_core()
        self._began = time.perf_counter()

    def read(self) -> dict[str, float]:
        return shares(self._before, each_core(), time.perf_counter() - self._began, self._cores)


def shares(
    before: Mapping[int, MachineCpu], after: Mapping[int, MachineCpu], seconds: float, cores: Cores
) -> dict[str, float]:
    """Of the time of all cores that both readings know; by side as well, if they are divided."""
    both = before.keys() & after.keys()
    if not both or seconds <= 0:
        return {}

    def share(field: str, chosen: Sequence[int]) -> float:
        spent = sum(getattr(after[core], field) - getattr(before[core], field) for core in chosen)
        return round(spent / (seconds * len(chosen)), 3)

    found = {field: share(field, sorted(both)) for field in ("busy", "steal")}
    if cores.divided:
        for side, mine in (("server", cores.server), ("generator", cores.generator)):
            if chosen := sorted(both & mine):
                found |= {f"{side}_{field}": share(field, chosen) for field in ("busy", "steal")}
    return found
