"""Which requests of sequences share batches: the cases of Triton's published tests, retold in virtual time.

All requests of a story are there before the first batch, as those tests have it; the numbers are theirs. A
batch of the direct strategy counts as many rows as there are up to the last slot that is in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from carpool.core.curve import BatchCurve
from carpool.core.instance import Batch
from carpool.core.job import INFINITY, Job
from carpool.core.objectives import FixedBatching
from carpool.core.scheduler import Scheduler
from carpool.extensions.sequences.law import Bounds, Dropped, Sequences, SequenceStep, Why
from carpool.extensions.sequences.pinned import pin
from carpool.extensions.sequences.settings import DIRECT, OLDEST, SequenceSettings

IDLE = 5.0
CURVE = BatchCurve.parse("4+1", 4)


class Story:
    """One model, whose instances have four rows together."""

    def __init__(
        self,
        strategy: str = DIRECT,
        instances: int = 1,
        *,
        min_utilization: float = 0.0,
        max_delay: float = 0.0,
        preserve_ordering: bool = False,
    ) -> None:
        rows = 4 // instances
        settings = SequenceSettings(strategy, 0, IDLE, min_utilization=min_utilization, max_delay=max_delay)
        fixed = settings.fixed(FixedBatching(max_batch=rows, preserve_ordering=preserve_ordering))
        self.direct = strategy == DIRECT
        self.core = Scheduler(CURVE, fixed, instances)
        pin(self.core, fixed)
        self.law = Sequences(instances, settings.places(rows), IDLE, Bounds(1000, 1000, 1000, INFINITY))
        self.now = 0.0
        self.names: dict[Job, str] = {}
        self.batches: list[list[str]] = []
        self.rows: Counter[int] = Counter()
        self.began: list[float] = []
        self.answered: list[str] = []
        self.dropped: list[Dropped] = []
        self._running: list[tuple[float, Batch]] = []
        self._look_again: list[float] = []

    def ask(self, name: int | str, flags: str = "", shape: str = "") -> Why | None:
        """`flags` is s for one that starts, e for one that ends."""
        job = Job(self.now, images=1, shape=shape)
        self.names[job] = f"{name}"
        return self.law.offer(job, name, self.now, start="s" in flags, end="e" in flags)

    def ask_all(self, **lengths: int) -> None:
        """Whole sequences, a request of each in turn."""
        for step in range(max(lengths.values())):
            for name, length in lengths.items():
                if step < length:
                    flags = ("s" if step == 0 else "") + ("e" if step == length - 1 else "")
                    assert self.ask(name, flags) is None

    def go_on(self, until: float = 100.0) -> None:
        """Up to that time, or until nothing is left to do before it."""
        while True:
            self._decide()
            times = [when for when, _ in self._running] + self._look_again
            if not times or min(times) > until:
                break
            self.now = min(times)
            for when, batch in [one for one in self._running if one[0] <= self.now]:
                self._running.remove((when, batch))
                self.answered += [self.names[job] for job in self.core.finished(batch, self.now)]
                for job in batch.jobs:
                    self.law.finished(job, self.now, ran=True)
        self.now = until if until < 100.0 else self.now

    def _decide(self) -> None:
        turn = self.law.turn(self.now)
        self.dropped += turn.dropped
        for job in turn.passed:
            assert self.core.offer(job, self.now) is None
        self._look_again = [] if turn.look_again is None else [turn.look_again]
        while (decision := self.core.decide(self.now)).batch is not None:
            batch = decision.batch
            steps: list[SequenceStep] = [job.payload for job in batch.jobs]
            assert {step.instance for step in steps} == {batch.instance.index}
            assert len({step.sequence.id for step in steps}) == len(steps)
            self.batches.append([self.names[job] for job in batch.jobs])
            self.rows[max(step.slot for step in steps) + 1 if self.direct else len(steps)] += 1
            self.began.append(self.now)
            self._running.append((self.now + CURVE.times[batch.images], batch))
        if decision.look_again is not None:
            self._look_again.append(decision.look_again)
        self._look_again = [when for when in self._look_again if when > self.now]


BOTH = pytest.mark.parametrize("strategy", [OLDEST, DIRECT])


@BOTH
@pytest.mark.parametrize("length", [1, 9])
def test_a_sequence_alone(strategy: str, length: int) -> None:
    story = Story(strategy)
    story.ask_all(a=length)
    story.go_on()
    assert story.rows == {1: length}
    assert story.law.live == 0


@BOTH
def test_one_that_starts_again_before_its_end(strategy: str) -> None:
    story = Story(strategy)
    for flags in ("s", "", "s", "e"):
        story.ask(1, flags)
    story.go_on()
    assert story.rows == {1: 4}
    assert story.law.live == 0


@pytest.mark.parametrize(
    ("instances", "lengths", "rows"),
    [
        (1, {"a": 4, "b": 4}, {2: 4}),
        (2, {"a": 4, "b": 4}, {1: 8}),
        (1, {"b": 4, "d": 4, "a": 2, "c": 2}, {4: 2, 2: 2}),
        (2, {"b": 4, "d": 4, "a": 2, "c": 2}, {2: 4, 1: 4}),
        (4, {"b": 4, "d": 4, "a": 2, "c": 2}, {1: 12}),
        (1, {"a": 3, "b": 3, "c": 3, "d": 3}, {4: 3}),
        (2, {"a": 3, "b": 3, "c": 3, "d": 3}, {2: 6}),
        (4, {"a": 3, "b": 3, "c": 3, "d": 3}, {1: 12}),
        (1, {"a": 3, "b": 3, "c": 3, "d": 3, "e": 3}, {4: 3, 1: 3}),
        (2, {"a": 3, "b": 3, "c": 3, "d": 3, "e": 3}, {2: 6, 1: 3}),
        (4, {"a": 3, "b": 3, "c": 3, "d": 3, "e": 3}, {1: 15}),
        (1, {"a": 3, "b": 2, "c": 2, "d": 3, "e": 1, "f": 1}, {4: 3}),
    ],
)
@BOTH
def test_batches_of_sequences_that_are_all_there(
    strategy: str, instances: int, lengths: dict[str, int], rows: dict[int, int]
) -> None:
    """The fifth and the sixth wait in the backlog, and take the place of those that are shorter."""
    story = Story(strategy, instances)
    story.ask_all(**lengths)
    story.go_on()
    assert story.rows == rows
    assert Counter(name for batch in story.batches for name in batch) == lengths


@pytest.mark.parametrize(("strategy", "rows"), [(DIRECT, {4: 3, 3: 2}), (OLDEST, {4: 3, 1: 2})])
def test_one_from_the_backlog_keeps_its_place_until_its_end_comes(
    strategy: str, rows: dict[int, int]
) -> None:
    story = Story(strategy)
    story.ask_all(a=3, b=2, c=2, d=3, e=1)
    story.ask("f", "s")
    story.ask("f")
    story.go_on(2.0)
    assert story.law.live == 1
    story.ask("f", "e")
    story.go_on()
    assert story.rows == rows
    assert story.law.live == 0


@pytest.mark.parametrize(("instances", "rows"), [(1, {4: 3, 1: 2}), (2, {2: 6, 1: 2}), (4, {1: 14})])
@BOTH
def test_an_id_that_comes_again_after_its_end(strategy: str, instances: int, rows: dict[int, int]) -> None:
    story = Story(strategy, instances)
    story.ask_all(a=3, b=3, c=3, d=3)
    for flags in ("s", "e"):
        story.ask("b", flags)
    story.go_on()
    assert story.rows == rows


@BOTH
def test_an_id_that_comes_again_without_its_end(strategy: str) -> None:
    story = Story(strategy)
    for flags in ("s", ""):
        story.ask("a", flags)
    story.ask_all(b=4, c=4, d=4)
    for flags in ("s", "e"):
        story.ask("a", flags)
    story.go_on()
    assert story.rows == {4: 4}


@BOTH
def test_one_that_idles_makes_room_and_has_to_start_again(strategy: str) -> None:
    story = Story(strategy)
    for name in ("a", "b", "c", "d"):
        story.ask(name, "s")
    story.ask_all(e=2)
    for _ in range(2):
        story.go_on(story.now + IDLE / 2)
        for name in ("b", "c", "d"):
            story.ask(name)
    story.go_on(story.now + IDLE / 2)
    assert story.answered.count("e") == 2
    assert story.ask("a") is Why.NO_START
    assert story.law.why_ended("a") is Why.IDLE
    for name in ("b", "c", "d"):
        assert story.ask(name, "e") is None
    story.go_on()
    assert story.law.live == 0


@BOTH
def test_shapes_that_differ_do_not_share_a_batch(strategy: str) -> None:
    """Neither do those of one sequence with those of another, however long they wait."""
    story = Story(strategy)
    shapes = {"a": "2", "b": "2", "c": "1", "d": "3"}
    for step in range(3):
        for name, shape in shapes.items():
            story.ask(name, {0: "s", 2: "e"}.get(step, ""), shape)
    story.go_on()
    assert Counter("".join(sorted(batch)) for batch in story.batches) == {"ab": 3, "c": 3, "d": 3}


@pytest.mark.parametrize(
    ("min_utilization", "later", "began"),
    [(0.0, 0.0, [0.0, CURVE.times[2]]), (0.5, 0.0, [0.0, 3.0]), (1.0, 2.0, [3.0, 5.0])],
)
def test_a_batch_waits_for_enough_of_its_slots(
    min_utilization: float, later: float, began: Sequence[float]
) -> None:
    """The first has one request, the second has two. Half of the slots are two, for which the second of them
    waits in vain, as long as it may from when it came; all of them never come."""
    story = Story(min_utilization=min_utilization, max_delay=3.0)
    story.ask("a", "s")
    story.ask("b", "s")
    if later:
        story.go_on(later)
    story.ask("b")
    story.go_on()
    assert story.rows == {2: 2}
    assert story.batches == [["a", "b"], ["b"]]
    assert story.began == pytest.approx(list(began))


@BOTH
@pytest.mark.parametrize("preserve_ordering", [False, True])
def test_answers_of_a_sequence_are_in_order(strategy: str, preserve_ordering: bool) -> None:
    """With `preserve_ordering`, so are those of all: in which they were run."""
    story = Story(strategy, 2, preserve_ordering=preserve_ordering)
    for step in range(3):
        for name in range(10):
            story.ask(f"{name}", {0: "s", 2: "e"}.get(step, ""))
            story.now += 0.001
    story.go_on()
    assert len(story.answered) == 30
    assert len(story.batches) < 30
    assert set(Counter(story.answered).values()) == {3}
    if preserve_ordering:
        assert story.answered == [name for batch in story.batches for name in batch]
