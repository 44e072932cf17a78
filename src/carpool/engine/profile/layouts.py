"""Describes instances and threads of a model, and with what layouts of them are tried."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from threading import Event, Thread
from time import monotonic

from carpool.backends.backend import Backend
from carpool.engine.profile.measuring import Effort, Measuring, NotWatched, Watches
from carpool.types import Signature

SHORT_S = 0.001  # next to what a request costs anyway: a second core is better used for the next one
_TRIAL = Effort(least_runs=2, most_runs=6, seconds=0.04, warm_up=0.05)
_STAYS = 1.25  # times a limit: so far beyond it the layout of an earlier start stays
_HASHED = bytes(1 << 20)  # long enough that other Python threads run meanwhile
MOST_STREAMS = 6  # instances on one GPU that are tried


@dataclass(frozen=True, slots=True)
class Layout:
    instances: int
    threads: int

    def __str__(self) -> str:
        instances = "1 instance" if self.instances == 1 else f"{self.instances} instances"
        return f"{instances} × {self.threads} {'thread' if self.threads == 1 else 'threads'}"


@dataclass(slots=True)
class Chosen:
    """`backends` were loaded for the trial; they are all there are, or none."""

    layout: Layout
    reason: str = ""
    backends: Sequence[Backend] = ()


def close_all(opened: Iterable[Backend]) -> None:
    for backend in opened:
        backend.close()


@contextmanager
def closed_if_it_fails(opened: Iterable[Backend]) -> Iterator[None]:
    try:
        yield
    except BaseException:
        close_all(opened)
        raise


@contextmanager
def other_work(cores: int) -> Iterator[None]:
    """Meanwhile so many threads are busy with something that needs no memory to speak of."""
    over = Event()

    def work() -> None:
        while not over.is_set():
            hashlib.sha256(_HASHED)

    threads = [Thread(target=work, daemon=True) for _ in range(cores)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


@dataclass(frozen=True, slots=True)
class Trying:
    """Holds what layouts are tried with. `turn` is held while times are taken, not while the model is
    opened."""

    signature: Signature
    open: Callable[[Layout], Sequence[Backend]]
    now: Callable[[], float] = monotonic
    turn: AbstractContextManager[object] = field(default_factory=nullcontext)
    beside: Callable[[int], AbstractContextManager[None]] = other_work
    watch: Callable[[], Watches] = NotWatched
    earlier: Layout | None = None  # what an earlier start of the same model chose

    def limit(self, value: float, layout: Layout) -> float:
        """Returns the limit below which this layout is taken, and later on as long as that is not clearly
        wrong."""
        if self.earlier is None:
            return value
        return value * _STAYS if layout == self.earlier else value / _STAYS

    def measuring(self, opened: Sequence[Backend]) -> Measuring:
        return Measuring(opened, self.signature, _TRIAL, now=self.now)


def too_short(seconds: float) -> str:
    return f"one image takes {seconds * 1e3:.2g} ms, too short to be worth a second thread"
