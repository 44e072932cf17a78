"""From a request's offer to its tensors: let in, decoded, ready. The same over every protocol.

A picture counts behind the door from the moment that it is here. What is refused there has cost no decoding,
and what is given up while it waits for a thread costs none either.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import Generic, TypeVar

from carpool.frontend.pictures.workers import Job, Workers
from carpool.link.door import Call, Slot
from carpool.vision.heads import Buffer, read_head, sniff

T = TypeVar("T")
_SAME_FOR_ALL = 65536
_A_BYTE = 2
_USUAL = 4
"""Weights are pixels: what resizing and the rest take, whatever the size of a picture; how many of them
reading a byte takes; and how many there are for a byte of a usual picture, before its head is known."""

_LONG = 1 << 20  # to look through the head of a longer file could hold up the loop


def weight_of_size(size: int) -> float:
    """How much work there is to decode so many bytes, of which nothing else is known yet."""
    return float(_SAME_FOR_ALL + (_A_BYTE + _USUAL) * size)


def weight_of(data: Buffer) -> float:
    """How much work there is to decode a picture. Raises `InvalidInput` for one whose head is wrong."""
    if len(data) > _LONG:
        sniff(data)
        return weight_of_size(len(data))
    head = read_head(data)
    return float(_SAME_FOR_ALL + _A_BYTE * len(data) + head.width * head.height)


class Decoding(Generic[T]):
    """Of one request, into its slot. `then` gets what the work made, or what it raised; in the loop, at most
    once, and not after `stop`.

    The slot is the thread's while one writes to it, so it is nobody else's to give back: not the client's who
    leaves, not the engine's that refuses. It goes over to the call when the tensors are in it.
    """

    __slots__ = (
        *("_deadline", "_job", "_offered", "_over", "_slot", "_then", "_weight", "_work", "_workers"),
        *("call", "ready_in"),
    )

    def __init__(
        self,
        workers: Workers,
        slot: Slot,
        work: Callable[[], T],
        then: Callable[[T | None, BaseException | None], None],
        deadline: float,
        weight: float,
    ) -> None:
        self._workers = workers
        self._slot = slot
        self._work: Callable[[], T] | None = work
        self._then = then
        self._deadline = deadline
        self._weight = weight
        self._job: Job | None = None
        self._over = False
        self.call: Call | None = None  # set as soon as the door has taken it
        self._offered = monotonic()
        self.ready_in = workers.foresee(weight, self._offered)

    def admitted(self) -> None:
        """The gate has let it in."""
        work, self._work = self._work, None  # it holds the pictures, and is the thread's from here on
        if work is not None and not self._over:
            self._job = self._workers.begin(work, self._decoded, self._deadline, self._weight)

    def stop(self) -> None:
        """Refused, given up or left: what has not begun need not. The slot is given back when it is safe."""
        if self._over:
            return
        self._over = True
        job, self._job, self._work = self._job, None, None
        self._let_go()
        if job is None or self._workers.drop(job):
            self._slot.release()

    def _decoded(self, made: T | None, error: BaseException | None) -> None:
        self._job = None  # it knows us too: let go, or only the collector could free both
        if self._over:
            self._slot.release()
            return
        self._over = True
        then, call = self._then, self.call
        assert call is not None
        self._let_go()
        if error is None:
            now = monotonic()
            self._workers.came_true(self.ready_in, now - self._offered, now)
            call.ready(self._slot)
        else:
            call.cancel()
            self._slot.release()
        then(made, error)

    def _let_go(self) -> None:
        """The call knows us, too, until the engine is done with it: the picture must not wait for that."""
        self.call, self._then = None, _nothing


def _nothing(*_: object) -> None:
    """Who is told of what nobody waits for."""
