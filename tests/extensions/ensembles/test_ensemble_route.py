"""Whatever happens to its steps, a run is answered once, siblings are cancelled, and nothing is left."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from time import monotonic
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.config.triton import pbtxt_config
from carpool.core.curve import BatchCurve
from carpool.core.job import GONE
from carpool.core.objectives import Promise
from carpool.core.remaining import Step
from carpool.core.scheduler import Scheduler
from carpool.engine.routes.stepped_route import Binding, BoundStep
from carpool.engine.run.batch import Outcome, Work
from carpool.engine.run.model_inputs import signature_of
from carpool.engine.run.step_memory import Lent, StepMemory
from carpool.errors import Cancelled, CarpoolError, ModelError, Unavailable
from carpool.extensions.ensembles.ensemble_graph import EnsembleGraph
from carpool.extensions.ensembles.ensemble_route import EnsembleRoute
from carpool.types import Array, Datatype, Signature, TensorSpec
from engine.ensembles import step, text
from later import many


class ScriptedRoute:
    """Holds what it is given until the test says how it ends; a cancelled one ends at once, or later."""

    def __init__(self, at_once: list[CarpoolError | None]) -> None:
        self.at_once = at_once  # how the next ones end before `submit` returns; None: they wait
        self.waiting: list[Work] = []
        self.cancelled: set[Work] = set()
        self.running: set[Work] = set()  # a cancelled one of these ends when its batch does
        self.counted: list[CarpoolError | None] = []  # what its models counted of requests to them
        self.submitted = 0

    def submit(self, works: Sequence[Work]) -> None:
        self.submitted += len(works)
        for work in works:
            work.route = self
            error = self.at_once.pop(0) if self.at_once else None
            if error is not None:
                work.done(work, Outcome(error=error))
            else:
                self.waiting.append(work)

    def ready(self, work: Work) -> None:
        raise AssertionError("steps are ready when they are submitted")

    def cancel(self, work: Work) -> None:
        assert work not in self.cancelled, "cancelled twice"
        self.cancelled.add(work)
        if work not in self.running:
            self.end(work, Cancelled("it was cancelled"))

    def end(self, work: Work, error: CarpoolError | None = None) -> None:
        self.waiting.remove(work)
        outputs = {name: np.zeros((work.images, 3), np.float32) for name in work.form.wanted}
        work.done(work, Outcome(error=error) if error is not None else Outcome(outputs))


class ShortMemory(StepMemory):
    """In the place of the memory that steps in another process read from: what is lent comes back, once."""

    def __init__(self, room: int) -> None:
        super().__init__(lambda *_: None, lambda _: None, 0)
        self.room = room
        self.lent = 0

    def lend(self, _key: int, inputs: Mapping[str, Array], wanted: Sequence[str]) -> ShortLent:
        if self.lent >= self.room:
            raise Unavailable("there is no memory left for calls between models", reason="overload")
        self.lent += 1
        return ShortLent(self, len(next(iter(inputs.values()))), wanted)


class ShortLent(Lent):
    def __init__(self, memory: ShortMemory, images: int, wanted: Sequence[str]) -> None:
        self.place: Any = None
        self._memory = memory
        self._images, self._wanted = images, wanted
        self.given_back = False

    def outputs(self) -> dict[str, Array]:
        assert not self.given_back
        return {name: np.zeros((self._images, 3), np.float32) for name in self._wanted}

    def give_back(self) -> None:
        assert not self.given_back
        self.given_back = True
        self._memory.lent -= 1


@st.composite
def graphs(draw: st.DrawFn) -> list[list[int]]:
    """For each step, the numbers of the steps that it reads from; none: the input."""
    count = draw(st.integers(1, 6))
    return [sorted(draw(st.sets(st.integers(0, n - 1), max_size=3))) if n else [] for n in range(count)]


def ensemble(
    graph: list[list[int]], route: ScriptedRoute, hosted: Set[int] = frozenset(), memory: Any = None
) -> EnsembleRoute:
    """The steps of these numbers run in another process."""
    read = {number for after in graph for number in after}
    outputs = [f"t{number}" for number in range(len(graph)) if number not in read]
    names = [[f"t{b}" for b in after] or ["in"] for after in graph]
    steps = [
        step(f"m{n}", [(f"x{i}", tensor) for i, tensor in enumerate(tensors)], [("y", f"t{n}")])
        for n, tensors in enumerate(names)
    ]
    config = pbtxt_config(text(*steps, outputs=outputs), Path("/models/any/config.pbtxt"))[0]

    def spec(name: str) -> TensorSpec:
        return TensorSpec(name, Datatype.FP32, (3,))

    def bind() -> Binding:
        bound, leaves = [], []
        order = EnsembleGraph(config).steps
        place = {one.number: n for n, one in enumerate(order)}
        for n, one in enumerate(order):
            inputs = tuple(spec(name) for name, _ in one.inputs)
            served = SimpleNamespace(
                signature=Signature(one.model, inputs, (spec("y"),), 8),
                runs_nothing=False,
                hosted=one.number in hosted,
                promises=True,
                slo=1.0,
                counters=SimpleNamespace(asked=lambda error, _seconds: route.counted.append(error)),
            )
            bound.append(BoundStep(one, n, cast(Any, served), route, n))
            scheduler = Scheduler(BatchCurve.linear(0.004, 0.001), Promise(1.0, 8))
            leaves.append(Step(scheduler, tuple(place[b] for b in one.after)))
        return Binding(tuple(leaves), (), tuple(bound))

    own = EnsembleGraph(config), signature_of(config)
    return EnsembleRoute("any", *own, bind, lambda _images, _timing: None, slo=1e6, memory=memory)


ENDS = st.sampled_from(["good", "good", "good", "bad", "run", "client leaves"])


@settings(max_examples=many(300), deadline=None)
@given(
    graph=graphs(),
    at_once=st.lists(st.sampled_from([None, None, None, "no"]), max_size=6),
    script=st.lists(st.tuples(ENDS, st.integers(0, 7)), max_size=30),
    requests=st.integers(1, 3),
    hosted=st.sets(st.integers(0, 5)),
    room=st.integers(0, 6),
)
def test_every_run_ends_once_and_leaves_nothing(
    graph: list[list[int]],
    at_once: list[str | None],
    script: list[tuple[str, int]],
    requests: int,
    hosted: set[int],
    room: int,
) -> None:
    """A runner that dies is a batch that goes bad: of all its steps, in any order."""
    route = ScriptedRoute([Unavailable("no") if no else None for no in at_once])
    memory = ShortMemory(room)
    routes = ensemble(graph, route, hosted, memory)
    answers: dict[Work, list[Outcome]] = {}

    def done(work: Work, outcome: Outcome) -> None:
        answers[work].append(outcome)

    works = [request(done, images=2) for _ in range(requests)]
    for work in works:
        answers[work] = []
        routes.submit([work])
    left = play(script, routes, route, works)
    while route.waiting:
        route.end(route.waiting[0])
    for work in works:
        (outcome,) = answers[work]
        assert work.state is GONE
        check(outcome, routes, left=work in left)
    assert routes.open == {}
    assert memory.lent == 0
    assert len(route.counted) >= route.submitted  # and what found no memory
    assert routes.remaining._coming == [0] * len(graph)


def request(done: Callable[[Work, Outcome], None], images: int = 1) -> Work:
    return Work({"in": np.zeros((images, 3), np.float32)}, done, monotonic(), images=images)


def play(
    script: list[tuple[str, int]], routes: EnsembleRoute, route: ScriptedRoute, works: list[Work]
) -> set[Work]:
    """Returns whose clients have left."""
    left: set[Work] = set()
    for what, which in script:
        if what == "client leaves":
            work = works[which % len(works)]
            left.add(work)
            routes.cancel(work)
        elif route.waiting:
            child = route.waiting[which % len(route.waiting)]
            if what == "run":
                route.running.add(child)
            else:
                route.end(child, ModelError("it broke") if what == "bad" else None)
    return left


def check(outcome: Outcome, routes: EnsembleRoute, *, left: bool) -> None:
    if outcome.error is None:
        assert outcome.outputs is not None
        assert set(outcome.outputs) == set(routes.graph.outputs)
    elif isinstance(outcome.error, Cancelled):
        assert left
    else:
        assert outcome.error.message.startswith("in ensemble 'any', ")


def test_siblings_are_cancelled_and_waited_for() -> None:
    route = ScriptedRoute([])
    routes = ensemble([[], [0], [0], [1, 2]], route)
    answers: list[Outcome] = []
    work = request(lambda _, outcome: answers.append(outcome))
    routes.submit([work])
    route.end(route.waiting[0])
    left, right = route.waiting
    route.running.add(right)
    route.end(left, ModelError("it broke"))
    assert right in route.cancelled
    assert answers == []  # it may still read the client's memory
    route.end(right)
    (outcome,) = answers
    assert isinstance(outcome.error, ModelError)
    assert outcome.error.message == "in ensemble 'any', it broke"


def test_a_routesthat_raises_ends_the_run() -> None:
    route = ScriptedRoute([])
    routes = ensemble([[], [0]], route)
    answers: list[Outcome] = []
    routes.submit([request(lambda _, outcome: answers.append(outcome))])
    first = route.waiting[0]

    def raises(_works: Sequence[Work]) -> None:
        raise RuntimeError("a fault")

    route.submit = raises  # type: ignore[method-assign]
    route.end(first)
    (outcome,) = answers
    assert outcome.error is not None
    assert "a fault" in outcome.error.message
    assert routes.open == {}


def test_only_so_many_are_under_way() -> None:
    route = ScriptedRoute([])
    routes = ensemble([[]], route)
    routes._most = 1
    answers: list[Outcome] = []
    for _ in range(2):
        work = request(lambda _, outcome: answers.append(outcome))
        routes.submit([work])
    (refused,) = answers
    assert isinstance(refused.error, Unavailable)
    assert refused.error.reason == "queue-full"
    route.end(route.waiting[0])
    assert answers[1].error is None
