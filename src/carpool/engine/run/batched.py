"""`@carpool.batched`: a function over a list gathers its own batches, from asyncio or from plain threads."""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from time import monotonic
from time import monotonic as now
from typing import Any, Generic, TypeVar

import numpy as np

from carpool.config.model import ModelSignature
from carpool.core.curve import BatchCurve, sizes
from carpool.core.objectives import FixedBatching, Promise
from carpool.core.scheduler import Scheduler
from carpool.engine.run.batch import Outcome, Watcher, Work
from carpool.engine.run.driver import Driver
from carpool.engine.run.executor import Executor
from carpool.errors import CarpoolError, ModelError
from carpool.types import Array, Datatype, Signature, TensorSpec

Item = TypeVar("Item")
Result = TypeVar("Result")

_ITEMS, _RESULTS = "items", "results"
_MEASURE_S = 2.0


class Pending(Generic[Result]):
    """Represents an answer on its way: `await` it in asyncio, or call `result()` in a thread."""

    def __init__(self, future: Future[Result]) -> None:
        self._future = future

    def __await__(self) -> Generator[Any, None, Result]:
        return asyncio.wrap_future(self._future).__await__()

    def result(self, timeout: float | None = None) -> Result:
        return self._future.result(timeout)


def batched(
    *,
    slo_ms: float | None = None,
    max_batch: int = 32,
    max_delay_ms: float = 0.0,
    curve: str | None = None,
) -> Callable[[Callable[[list[Item]], Sequence[Result]]], Callable[[Item], Pending[Result]]]:
    """Turn `def predict(items: list) -> list` into `await predict(item)`.

    With `slo_ms` it promises: what cannot be answered in time is refused at once (`carpool.errors.Refused`).
    The function is measured at its first call, with copies of that item, unless `curve` says how long batches
    take ("4+1" is ms per batch + ms per image). Without `slo_ms` it gathers for at most `max_delay_ms`.
    """
    if slo_ms is not None and max_delay_ms:
        raise ValueError("slo_ms and max_delay_ms exclude each other: give one of them")
    policy: Promise | FixedBatching = (
        FixedBatching(max_batch, max_delay=max_delay_ms / 1e3)
        if slo_ms is None
        else Promise(slo_ms / 1e3, max_batch)
    )

    def decorate(function: Callable[[list[Item]], Sequence[Result]]) -> Callable[[Item], Pending[Result]]:
        if inspect.iscoroutinefunction(function):
            raise TypeError(f"{function.__name__} is async: give batched a plain function over a list")
        gatherer = _Gatherer(function, policy, curve)

        @functools.wraps(function)
        def call(item: Item) -> Pending[Result]:
            future: Future[Result] = Future()
            gatherer.submit(item, future)
            return Pending(future)

        return call

    return decorate


class _Function:
    """Wraps the user's function as a backend: lists in and out, carried as arrays of objects."""

    alive = True

    def __init__(self, function: Callable[[list[Any]], Sequence[Any]]) -> None:
        self._function = function
        self.signature = ModelSignature()

    def run(self, inputs: Mapping[str, Array], wanted: Sequence[str]) -> Mapping[str, Array]:
        items = list(inputs[_ITEMS])
        try:
            results = self._function(items)
        except Exception as error:
            failed = ModelError(f"{type(error).__name__}: {error}")
            failed.__cause__ = error  # compiled code leaves out what `raise` is `from`
            raise failed from error
        if len(results) != len(items):
            raise ModelError(f"the function got {len(items)} items and returned {len(results)}")
        return {_RESULTS: as_objects(results)}

    def abort(self) -> None:
        """A function in this process cannot be stopped."""

    def close(self) -> None:
        """Has nothing to free."""


def as_objects(items: Sequence[Any]) -> Array:
    array = np.empty(len(items), dtype=object)
    for index, item in enumerate(items):
        array[index] = item  # one by one: numpy would look into nested sequences
    return array


class _Gatherer:
    """Holds one scheduler for one function, on a loop in a thread of its own, made at the first call."""

    def __init__(
        self,
        function: Callable[[list[Any]], Sequence[Any]],
        policy: Promise | FixedBatching,
        curve: str | None,
    ) -> None:
        self._backend = _Function(function)
        self._name = getattr(function, "__name__", "function")
        self._policy = policy
        self._curve = curve
        self._lock = threading.Lock()  # over the next three
        self._driver: Driver | None = None
        self._starting = False
        self._early: list[Work] = []  # came while the function was being measured
        self._loop: asyncio.AbstractEventLoop | None = None

    def submit(self, item: Any, future: Future[Any]) -> None:
        arrived = now()
        work = Work({_ITEMS: as_objects([item])}, lambda _work, outcome: _settle(future, outcome))
        work.arrived = arrived
        with self._lock:
            if self._driver is None:
                self._early.append(work)
                if not self._starting:
                    # Measuring takes a while: never on the caller's loop, and once for all who wait for it.
                    self._starting = True
                    threading.Thread(target=self._begin, args=(item,), daemon=True).start()
                return
        self._hand_over([work])

    def _begin(self, item: Any) -> None:
        """Measures, then serves all calls that have come; if that fails, all of them raise the reason, and
        the next call tries again."""
        try:
            driver, failure = self._start(item), None
        except BaseException as error:  # a function may raise anything, and callers wait
            driver, failure = None, _as_error(error)
        with self._lock:
            early, self._early = self._early, []
            self._driver = driver
            self._starting = False
        if failure is not None:
            for work in early:
                work.done(work, Outcome(error=failure))
            return
        for work in early:
            work.arrived = now()  # the promise runs from when the function was known
        self._hand_over(early)

    def _hand_over(self, works: list[Work]) -> None:
        assert self._loop is not None
        assert self._driver is not None
        self._loop.call_soon_threadsafe(self._driver.submit, works)

    def _start(self, item: Any) -> Driver:
        curve = self._measure(item)
        signature = Signature(
            self._name,
            (TensorSpec(_ITEMS, Datatype.BYTES, ()),),
            (TensorSpec(_RESULTS, Datatype.BYTES, ()),),
            self._policy.max_batch,
        )
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name=f"{self._name}-batcher", daemon=True).start()
        fixed = isinstance(self._policy, FixedBatching)
        driver = Driver(self._name, Scheduler(curve, self._policy), fixed, Watcher(), self._loop)
        largest = self._policy.max_batch
        executor = Executor(self._backend, signature, largest, largest, driver.report)
        self._loop.call_soon_threadsafe(driver.place, driver.scheduler.instances[0], executor)
        return driver

    def _measure(self, item: Any) -> BatchCurve:
        largest = self._policy.max_batch
        if self._curve is not None:
            return BatchCurve.parse(self._curve, largest)
        if isinstance(self._policy, FixedBatching):
            return BatchCurve.linear(0.001, 0.001, largest)
        points = []
        began = monotonic()
        for size in sizes(largest):
            items = {_ITEMS: as_objects([item] * size)}
            self._backend.run(items, ())
            start = monotonic()
            self._backend.run(items, ())
            points.append((size, max(monotonic() - start, 1e-6)))
            if points[-1][1] > self._policy.slo or monotonic() - began > _MEASURE_S:
                break
        return BatchCurve.measured(points, largest)


def _settle(future: Future[Any], outcome: Outcome) -> None:
    # From here on it cannot be cancelled: a caller may do that from any thread, at any time.
    if not future.set_running_or_notify_cancel():
        return
    if outcome.outputs is not None:
        future.set_result(outcome.outputs[_RESULTS][0])
    else:
        error = outcome.error or CarpoolError("no answer")
        future.set_exception(error.__cause__ or error)  # the function's own exception, where it raised one


def _as_error(error: BaseException) -> CarpoolError:
    return error if isinstance(error, CarpoolError) else ModelError(f"{type(error).__name__}: {error}")
