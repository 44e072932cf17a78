"""Implements the route of an ensemble, which asks the routes of other models.

Every step is a work of its own, offered to its model like any other, so that it shares batches with all other
requests for that model. Tensors are handed on as the arrays that they are: what one model gave is what the
next one gathers into its batch. One SLO holds for the whole: core/remaining.py says what each step leaves to
the later ones, and the gate asks at arrival for all of them.

A run ends once. A step that fails ends it with its error, and a client that leaves ends it too: then the
steps that are under way are cancelled, and the answer is given when the last of them has let go of what it
reads, which may be the client's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from time import monotonic
from typing import NamedTuple

from carpool.core.job import GONE, INFINITY, OFFERED, READY
from carpool.core.remaining import Booking
from carpool.engine.routes.stepped_route import Binding, BoundStep, SteppedRoute
from carpool.engine.run.batch import NO_INPUTS, Outcome, Work
from carpool.engine.run.model_inputs import shape_key
from carpool.engine.run.step_memory import StepMemory
from carpool.errors import Cancelled, CarpoolError, InvalidInput, ModelError, Unavailable, prefixed
from carpool.extensions.ensembles.ensemble_graph import EnsembleGraph, handed_over
from carpool.link.templates import RequestForm
from carpool.observe.logs import logger
from carpool.types import Array, Signature, StepTiming, Timing

_log = logger("engine")


class Whole(NamedTuple):
    """Describes, for a nested ensemble, the booking that it is a part of, and the place of its first model
    there."""

    booking: Booking
    first: int


class EnsembleRoute(SteppedRoute):
    """Implements `Route`. Used in the loop's thread."""

    def __init__(
        self,
        name: str,
        graph: EnsembleGraph,
        signature: Signature,
        bind: Callable[[], Binding],
        answered: Callable[[int, Timing], None],
        *,
        slo: float = INFINITY,
        most: int = 0,
        memory: StepMemory | None = None,
    ) -> None:
        super().__init__(name, bind, answered, slo=slo)
        self.graph = graph
        self.signature = signature
        self._most = most
        self.memory = memory
        self.open: dict[Work, EnsembleRun] = {}
        self._coming: set[Work] = set()

    @property
    def under_way(self) -> Collection[EnsembleRun]:
        return self.open.values()

    # ---- as `Route` -------------------------------------------------------------------------------------

    def submit(self, works: Sequence[Work]) -> None:
        for work in works:
            work.route = self
            if work.course.ready_at == -INFINITY:
                self._begin(work)
            else:
                work.state = OFFERED
                self._coming.add(work)

    def ready(self, work: Work) -> None:
        if work in self._coming:
            self._coming.discard(work)
            self._begin(work)

    def cancel(self, work: Work) -> None:
        if work in self._coming:
            self._coming.discard(work)
            work.state = GONE
            work.done(work, Outcome(error=Cancelled("the client left")))
            return
        run = self.open.get(work)
        if run is not None:
            run.end(Cancelled("the client left"))

    # ---- inside -----------------------------------------------------------------------------------------

    def _begin(self, work: Work) -> None:
        try:
            run = self._let_in(work)
        except CarpoolError as error:
            work.state = GONE
            work.done(work, Outcome(error=error))
            return
        work.state = READY
        self.open[work] = run
        run.go_on()

    def _let_in(self, work: Work) -> EnsembleRun:
        """Raises what the gate says. A part of another run was let in with that."""
        self.check_open()
        if self._most and len(self.open) >= self._most:
            raise Unavailable(
                f"{self.name} has {self._most} requests under way, which is its max_inflight_requests",
                reason="queue-full",
            )
        binding, whole = self.binding, work.payload
        if not isinstance(whole, Whole):
            whole = Whole(self.let_in(work, monotonic()), 0)
        return EnsembleRun(self, work, binding, whole)

    def left(self, work: Work, outcome: Outcome) -> None:
        """Its run is over."""
        del self.open[work]
        work.state = GONE
        try:
            work.done(work, outcome)
        except Exception:
            _log.exception("answer-failed", model=self.name)


class EnsembleRun:
    """Represents one request. `tensors` has what is known by now: None is a tensor that will never be
    there."""

    __slots__ = (
        *("_ending", "_needed", "_route", "_timings", "_under_way", "_waiting", "_whole"),
        *("_work", "binding", "tensors"),
    )

    def __init__(self, route: EnsembleRoute, work: Work, binding: Binding, whole: Whole) -> None:
        self._route = route
        self._work = work
        self.binding = binding
        self._whole = whole
        self._needed = route.graph.needed(work.form.wanted)
        self._waiting = [bound for bound in binding.steps if bound.step.number in self._needed]
        self.tensors: dict[str, Array | None] = {name: work.inputs.get(name) for name in route.graph.inputs}
        self._under_way: dict[Work, BoundStep] = {}
        self._timings: list[tuple[str, Timing]] = []
        self._ending: CarpoolError | None = None

    @property
    def under_way(self) -> Mapping[Work, BoundStep]:
        return self._under_way

    def go_on(self) -> None:
        """Begin every step whose tensors are there; the end, if nothing is under way after that."""
        try:
            self._begin_steps()
        except Exception as error:  # an internal error must not leave a client waiting
            self.end(_failed(error))

    def _begin_steps(self) -> None:
        begun = True
        while begun and self._ending is None:
            begun = False
            for bound in list(self._waiting):
                there = all(tensor in self.tensors for _, tensor in bound.step.inputs)
                if there and bound in self._waiting:  # which a step that ended at once may have changed
                    self._waiting.remove(bound)
                    begun = True
                    self._start(bound)
        if not self._under_way and (self._ending is not None or not self._waiting):
            self._finish()

    def end(self, error: CarpoolError) -> None:
        """Cancels the steps that run, since they are of no use any more. The error is reported when the last
        of them is over."""
        if self._ending is None:
            self._ending = error
            self._waiting.clear()
            for child in list(self._under_way):
                if child.route is not None:
                    child.route.cancel(child)
        if not self._under_way:
            self._finish()

    # ---- one step -----------------------------------------------------------------------------------------

    def _start(self, bound: BoundStep) -> None:
        booking, first = self._whole.booking, self._whole.first + bound.first
        try:
            inputs, images = self._inputs(bound)
        except CarpoolError as error:
            self.end(self._in_ensemble(error))
            return
        if inputs is None:  # one that it cannot do without will never be there
            booking.reaches(first, 0)
            self.tensors |= dict.fromkeys((tensor for _, tensor in bound.step.outputs), None)
            return
        child = self._child(bound, inputs, images, first)
        self._under_way[child] = bound
        if not bound.served.runs_nothing:
            booking.reaches(first, images)
        try:
            if bound.served.hosted:
                assert self._route.memory is not None  # else it was not loaded
                self._route.memory.place(bound.key, child)
            bound.route.submit([child])
        except Exception as error:
            known = error if isinstance(error, CarpoolError) else _failed(error)
            self._step_over(child, Outcome(error=known))

    def _inputs(self, bound: BoundStep) -> tuple[dict[str, Array] | None, int]:
        signature = bound.served.signature
        batched = signature.max_batch > 0
        inputs: dict[str, Array] = {}
        for name, tensor in bound.step.inputs:
            spec = signature.input_named.get(name)
            if spec is None:  # it was loaded again with other tensors
                raise ModelError(f"{bound.step.model} has no input {name} any more")
            value = self.tensors[tensor]
            if value is not None:
                where = f"input '{name}' of {bound.step.model}"
                inputs[name] = handed_over(value, spec, batched, where)
            elif not spec.optional:
                return None, 0
        sizes = {len(array) for array in inputs.values()} if batched else {1}
        if len(sizes) > 1 or not 1 <= max(sizes, default=0) <= max(1, signature.max_batch):
            raise ModelError(
                f"{bound.step.model} takes 1 to {signature.max_batch} images at once, not {sorted(sizes)}"
            )
        return inputs, max(sizes)

    def _child(self, bound: BoundStep, inputs: dict[str, Array], images: int, number: int) -> Work:
        """Returns its request to one model: with the deadline of the whole, less what is left to the later
        steps."""
        work, served, now = self._work, bound.served, monotonic()
        child = Work(
            inputs,
            self._step_over,
            now,
            work.deadline,
            images,
            shape_key(served.signature, inputs),
            RequestForm(self._needed[bound.step.number], packed=work.form.packed, may_omit=True),
        )
        child.origin, child.outside = work.origin, work.outside
        child.options = work.options._replace(
            latest=work.options.latest and not bound.step.after, again=False
        )
        if work.extras.details:
            child.own_extras().details = work.extras.details
        child.own_course().entered = now
        if bound.served.runs_nothing:
            child.arrived = work.arrived
            child.payload = self._whole._replace(first=number)
        elif served.promises:
            self._whole.booking.plan(number, child, work.arrived, work.deadline, now)
        return child

    def _step_over(self, child: Work, outcome: Outcome) -> None:
        bound = self._under_way.pop(child, None)
        if bound is None:
            return
        child.inputs = NO_INPUTS  # a queue may remember it
        bound.served.counters.asked(outcome.error, monotonic() - child.course.entered)
        if self._ending is not None:
            if not self._under_way:
                self._finish()
            return
        if outcome.outputs is None:
            error = outcome.error or CarpoolError(f"{bound.step.model} gave no response")
            self.end(self._in_ensemble(error))
            return
        self._note(bound, outcome.timing)
        for name, tensor in bound.step.outputs:
            self.tensors[tensor] = outcome.outputs.get(name)
        if not bound.served.runs_nothing:
            self._whole.booking.ends(self._whole.first + bound.first, monotonic())
        self.go_on()

    def _note(self, bound: BoundStep, timing: Timing) -> None:
        if isinstance(timing, StepTiming):
            self._timings += [(f"{bound.step.model}.{name}", each) for name, each in timing.steps]
            return
        taken = sum(name.partition(":")[0] == bound.step.model for name, _ in self._timings)
        name = bound.step.model if not taken else f"{bound.step.model}:{taken + 1}"
        self._timings.append((name, timing))

    # ---- the end ------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        route, work, booking = self._route, self._work, self._whole.booking
        if work not in route.open:
            return
        outcome = Outcome(error=self._ending) if self._ending is not None else self._outcome()
        if not isinstance(work.payload, Whole):
            if outcome.error is None:
                booking.done(monotonic())
            else:
                booking.gone()
        if outcome.error is None:
            route.answered(work.images, outcome.timing)
        self.tensors.clear()
        route.left(work, outcome)

    def _outcome(self) -> Outcome:
        timing = StepTiming.of(self._timings)
        try:
            return Outcome(self._outputs(), timing=timing)
        except CarpoolError as error:
            return Outcome(error=self._in_ensemble(error), timing=timing)

    def _outputs(self) -> dict[str, Array]:
        """Raises what is wrong with them. As in Triton, those that no step made are left out."""
        route, outputs = self._route, {}
        batched = route.signature.max_batch > 0
        for name in self._work.form.wanted or route.graph.outputs:
            value = self.tensors.get(name)
            if value is not None:
                spec = route.signature.output_named[name]
                outputs[name] = handed_over(value, spec, batched, f"output '{name}'")
        if not outputs:
            raise ModelError(
                "unexpected deadlock, at least one output is not set while no more ensemble steps can be made"
            )
        return outputs

    def _in_ensemble(self, error: CarpoolError) -> CarpoolError:
        """Returns the step's own error, with the ensemble's name before what it says."""
        prefix = f"in ensemble '{self._route.name}', "
        if error.message.startswith(prefix):
            return error
        return prefixed(error, prefix, ModelError if isinstance(error, InvalidInput) else None)


def _failed(error: Exception) -> CarpoolError:
    """What is said of a fault of ours, while it is handled."""
    _log.exception("step-failed")
    return CarpoolError(f"the engine failed: {type(error).__name__}: {error}")
