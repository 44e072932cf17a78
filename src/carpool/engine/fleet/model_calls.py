"""Requests that models make of other models of the same engine, in place of a client.

They are offered like a client's, and wait, run or are refused like those. Two things differ. They must be
answered by the latest deadline of the requests that the caller is busy with, since the answer is of no use
after that. And a caller holds an instance while it waits: where that leaves no instance that could answer,
because a model calls itself or two wait for each other, the call is refused at once, with that reason.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from carpool.core.job import INFINITY, RUNNING
from carpool.engine.run.batch import Outcome, Work
from carpool.errors import CarpoolError, Unavailable, without_stack
from carpool.types import Array

if TYPE_CHECKING:
    from carpool.engine.models.served import Served

T = TypeVar("T")

MOST_CALLS = 64
"""Of one instance at the same time."""

AnswerCall = Callable[[Mapping[str, Array] | CarpoolError], None]


class CallOfModel(NamedTuple):
    model: str
    version: str
    inputs: Mapping[str, Array]
    wanted: Sequence[str]
    timeout: float
    details: bytes
    answer: AnswerCall


class AskedEngine(Protocol):
    """The engine, as calls of its models need it."""

    @property
    def served(self) -> Mapping[int, Served]: ...

    def prepare(
        self,
        model: str,
        inputs: Mapping[str, Array],
        version: str,
        outputs: Sequence[str],
        done: Callable[[Work, Outcome], None],
    ) -> tuple[int, Work, bool]: ...

    def submit_own(self, key: int, work: Work) -> None: ...

    def cancel(self, work: Work) -> None: ...

    def bring_for(self, name: str, caller: Served) -> Coroutine[Any, Any, None] | None:
        """Returns what is to be waited for before this model is asked by that one; mostly nothing."""


class ModelCalls:
    """Holds all calls that are open. Everything but `caller` happens on the loop's thread."""

    def __init__(self, engine: AskedEngine) -> None:
        self.engine = engine
        self.busy: set[InstanceCalls] = set()  # those with open calls

    def caller(self, served: Served, index: int) -> InstanceCalls:
        """Returns the calls of the instance of this number, from the thread that loads it."""
        return InstanceCalls(self, served, index)

    def all_wait(self, caller: InstanceCalls) -> bool:
        """Returns whether what this one waits for can never come.

        Takes all calling instances for stuck, and then, until nothing changes, removes those whose every
        call runs on an instance that is not stuck, or waits for a model that has such an instance.
        """
        stuck = set(self.busy)
        while True:
            free = {one for one in stuck if not any(_is_held(*call, stuck) for call in one.open.items())}
            if not free:
                return caller in stuck
            stuck -= free


class InstanceCalls:
    """Holds the calls of one instance: `AsksModels` for its backend."""

    def __init__(self, calls: ModelCalls, served: Served, index: int) -> None:
        self._calls = calls
        self._loop = served.runtime.loop
        self.served = served
        self.index = index
        self.open: dict[Work, Served] = {}  # with the version that each is for
        self._elsewhere: set[asyncio.Task[Any]] = set()
        self._left = False

    def ask(
        self,
        model: str,
        version: str,
        inputs: Mapping[str, Array],
        wanted: Sequence[str],
        timeout: float,
        answer: AnswerCall,
        details: bytes = b"",
    ) -> None:
        call = CallOfModel(model, version, inputs, wanted, timeout, details, answer)
        try:
            assert self._loop is not None  # it is loaded on one
            self._loop.call_soon_threadsafe(self._ask, call)
        except RuntimeError:
            answer(Unavailable("the engine has stopped", reason="stopping"))

    def leave(self) -> None:
        with suppress(RuntimeError):  # there is no loop any more, nor anything that waits
            assert self._loop is not None
            self._loop.call_soon_threadsafe(self._leave)

    def _ask(self, call: CallOfModel) -> None:
        try:
            if self._left or len(self.open) + len(self._elsewhere) >= MOST_CALLS:
                why = (
                    "the instance is gone" if self._left else f"{MOST_CALLS} calls of this instance are open"
                )
                raise Unavailable(why, reason="overload")
            first = self._calls.engine.bring_for(call.model, self.served)
            if first is not None:
                self._begin(first, lambda _: self._ask(call), call.answer)
            else:
                self._ask_here(call)
        except CarpoolError as error:
            call.answer(without_stack(error))

    def _ask_here(self, call: CallOfModel) -> None:
        single = False

        def done(work: Work, outcome: Outcome) -> None:
            target = self.open.pop(work, None)
            if target is not None:
                target.counters.asked(outcome.error, monotonic() - work.arrived)
                if not self.open:
                    self._calls.busy.discard(self)
            if outcome.outputs is None:
                call.answer(outcome.error or CarpoolError(f"{call.model} gave no response"))
            else:
                call.answer({name: one[0] if single else one for name, one in outcome.outputs.items()})

        engine = self._calls.engine
        key, work, single = engine.prepare(call.model, call.inputs, call.version, call.wanted, done)
        if call.details:
            work.own_extras().details = call.details
        work.deadline = work.due = self._until(work.arrived, call.timeout)
        self._note(work, engine.served[key])
        try:
            engine.submit_own(key, work)
        except CarpoolError as error:
            done(work, Outcome(error=without_stack(error)))

    def _begin(
        self,
        work: Coroutine[Any, Any, T],
        then: Callable[[T], None],
        fail: Callable[[CarpoolError], None],
    ) -> None:
        """Starts the load of the called model. That model does not wait for any that wait for it."""
        assert self._loop is not None
        task = self._loop.create_task(work)
        self._elsewhere.add(task)

        def over(done: asyncio.Task[T]) -> None:
            self._elsewhere.discard(done)
            error = Unavailable("the instance is gone") if done.cancelled() else done.exception()
            if error is None:
                then(done.result())
            elif isinstance(error, CarpoolError):
                fail(without_stack(error))
            else:
                fail(CarpoolError(f"the call failed: {error}"))

        task.add_done_callback(over)

    def _note(self, work: Work, target: Served) -> None:
        self.open[work] = target
        self._calls.busy.add(self)
        if self._calls.all_wait(self):
            del self.open[work]
            if not self.open:
                self._calls.busy.discard(self)
            raise Unavailable(
                f"{self.served.name} cannot call {target.name} now: every instance of {target.name} waits "
                "for its own calls, so this one would never be answered. Give it more instances, or let "
                "no model call itself",
                reason="deadlock",
            )

    def _until(self, now: float, timeout: float) -> float:
        return min(self._deadline(), now + timeout if timeout > 0 else INFINITY)

    def _deadline(self) -> float:
        """Returns the latest deadline in the batch that it runs; infinity for a trial, without requests."""
        return max((job.deadline for job in self.served.runtime.riding(self.index)), default=INFINITY)

    def _leave(self) -> None:
        self._left = True
        for work in list(self.open):
            self._calls.engine.cancel(work)
        for task in self._elsewhere:
            task.cancel()


def _is_held(work: Work, target: Served, stuck: set[InstanceCalls]) -> bool:
    """Returns whether this call runs on an instance that is stuck, or waits while all of them are.

    One without a batch is not, whatever threads of its model may be waiting for. A call of an ensemble is
    held where one of its steps is that is under way.
    """
    steps = target.runtime.asked_for(work)
    if steps is not None:
        return any(_is_held(step, served, stuck) for step, served in steps)
    if target.scheduler is None:
        return False
    calling = {caller.index for caller in stuck if caller.served is target}
    instances = [one for one in target.scheduler.instances if one.available]
    held = [one.batch for one in instances if one.index in calling and one.batch is not None]
    if work.state is RUNNING:
        return any(work in batch.jobs for batch in held)
    return bool(instances) and len(held) == len(instances)
