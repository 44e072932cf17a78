"""Instances × threads, on a machine whose cores are a script."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from carpool.engine.profile.hardware import CpuTaken
from carpool.engine.profile.instance_layout import choose_threads
from carpool.engine.profile.layout_trials import choose_by_capacity, even_layouts
from carpool.engine.profile.layouts import Layout, Trying, other_work
from carpool.errors import ModelError
from engine.timed import SIGNATURE, Clock, Timed
from later import first, later

Takes = Callable[[Layout, int], float]


class Machine:
    """`takes(layout, images)` is the time of a batch while all instances of the layout are busy."""

    def __init__(self, takes: Takes) -> None:
        self.clock = Clock()
        self.opened: list[tuple[Layout, list[Timed]]] = []
        self._takes = takes
        self.fails = False
        self.loading = 0.0  # seconds for each instance
        self.busy = 0  # cores, with other work

    def open(self, layout: Layout) -> list[Timed]:
        backends = [
            Timed(self.clock, lambda images, _: self._takes(layout, images), fails=self.fails)
            for _ in range(layout.instances)
        ]
        self.opened.append((layout, backends))
        self.clock.seconds += self.loading * layout.instances
        return backends

    @contextmanager
    def beside(self, cores: int) -> Iterator[None]:
        self.busy = cores
        yield
        self.busy = 0

    @property
    def trying(self) -> Trying:
        return self.trying_with(self.open)

    def trying_with(self, opened: Callable[[Layout], list[Timed]]) -> Trying:
        return Trying(SIGNATURE, opened, self.clock, beside=self.beside)

    @property
    def still_open(self) -> list[Layout]:
        return [layout for layout, backends in self.opened if not backends[0].closed]


@pytest.mark.parametrize(
    ("cores", "found"),
    [
        (2, [Layout(1, 2), Layout(2, 1)]),
        (3, [Layout(1, 3), Layout(3, 1)]),
        (8, [Layout(1, 8), Layout(4, 2), Layout(8, 1)]),
    ],
)
def test_what_is_tried_uses_every_core_once(cores: int, found: list[Layout]) -> None:
    assert even_layouts(cores) == found


def capacity(takes: Takes, slo: float = 0.1) -> tuple[Machine, Layout, str]:
    machine = Machine(takes)
    chosen = choose_by_capacity(2, slo, machine.trying)
    assert machine.still_open == [chosen.layout]  # the others are closed, and it need not be loaded again
    assert chosen.backends is machine.opened[[layout for layout, _ in machine.opened].index(chosen.layout)][1]
    return machine, chosen.layout, chosen.reason


def test_two_instances_where_threads_hardly_help() -> None:
    _, layout, reason = capacity(
        lambda layout, images: images * (0.009 if layout.threads == 2 else 0.010), slo=0.06
    )
    assert layout == Layout(2, 1)
    assert "within the SLO beside other work, against 111 images/s with 1 instance × 2 threads" in reason


def test_two_threads_where_they_halve_the_time() -> None:
    _, layout, reason = capacity(lambda layout, images: images * 0.020 / layout.threads)
    assert layout == Layout(1, 2)
    assert "about as many, and one image takes only 10 ms" in reason


def test_one_thread_each_where_a_single_image_is_quick_either_way() -> None:
    machine, layout, reason = capacity(lambda layout, images: images * 0.020 / layout.threads, slo=0.25)
    assert layout == Layout(2, 1)
    assert reason.startswith("one image takes 20 ms with one thread, a small part of the SLO")
    assert [layout for layout, _ in machine.opened] == [Layout(1, 1), Layout(2, 1)], "nothing else was tried"


def test_many_cores_are_tried_also_where_a_single_image_is_quick() -> None:
    """They share caches and memory, which eight instances may fill."""
    machine = Machine(lambda layout, images: images * (0.020 if layout.instances == 8 else 0.002))
    chosen = choose_by_capacity(8, 0.25, machine.trying)
    assert chosen.layout != Layout(8, 1)


def test_a_slow_model_runs_twice_in_each_layout_and_beside_nothing() -> None:
    machine, layout, reason = capacity(lambda layout, images: images * 0.5 / layout.threads**0.9, slo=2.0)
    assert layout == Layout(1, 2)
    assert [backends[0].sizes for _, backends in machine.opened] == [[1], [1, 1], [1, 1]]
    assert "beside" not in reason


def test_threads_that_wait_for_each_other_are_tried_beside_other_work() -> None:
    """Alone two threads halve the time. Beside other work, the one that shares its core holds up both."""
    machine = Machine(lambda layout, images: images * 0.020 / layout.threads)
    alone = machine._takes
    machine._takes = lambda layout, images: (
        alone(layout, images) * (2.0 if machine.busy and layout.threads == 2 else 1.0)
    )
    chosen = choose_by_capacity(2, 0.1, machine.trying)
    assert chosen.layout == Layout(2, 1)
    assert machine.busy == 0


def test_other_work_is_over_after_the_trial() -> None:
    before = threading.active_count()
    with other_work(2):
        assert threading.active_count() == before + 2
    assert threading.active_count() == before


def test_one_thread_for_what_is_over_at_once() -> None:
    machine, layout, reason = capacity(lambda layout, images: images * 0.0002)
    assert layout == Layout(1, 1)
    assert "too short" in reason
    assert len(machine.opened) == 1


def test_a_promise_that_only_two_threads_can_keep_decides() -> None:
    """One image takes 60 ms on one thread: no batch meets an SLO of 100 ms."""
    _, layout, reason = capacity(lambda layout, images: 0.06 * images / layout.threads**0.5)
    assert layout == Layout(1, 2)
    assert "against one image in 60 ms with 2 instances × 1 thread" in reason


def test_nothing_stays_open_when_the_model_cannot_be_tried() -> None:
    machine = Machine(lambda *_: 0.01)
    machine.fails = True
    with pytest.raises(ModelError):
        choose_by_capacity(2, 0.1, machine.trying)
    with pytest.raises(ModelError):
        choose_threads(1, 2, machine.trying)
    assert machine.still_open == []


def test_a_large_model_is_not_loaded_many_times_only_to_try() -> None:
    machine = Machine(lambda layout, images: images * 0.020 / layout.threads)
    machine.loading = 0.6
    chosen = choose_by_capacity(8, 0.1, machine.trying)
    assert [layout for layout, _ in machine.opened] == [Layout(1, 1), Layout(1, 8), Layout(8, 1)]
    assert machine.still_open == [chosen.layout]


def test_what_was_open_is_closed_when_a_later_trial_fails() -> None:
    machine = Machine(lambda *_: 0.02)

    def open_first_only(layout: Layout) -> list[Timed]:
        machine.fails = layout.threads > 1
        return machine.open(layout)

    with pytest.raises(ModelError):
        choose_by_capacity(2, 0.1, machine.trying_with(open_first_only))
    assert machine.still_open == []


@pytest.mark.parametrize(("with_two", "threads"), [(0.006, 2), (0.009, 1)])
def test_threads_alone_must_clearly_shorten_a_run(with_two: float, threads: int) -> None:
    machine = Machine(lambda layout, _: with_two if layout.threads == 2 else 0.010)
    chosen = choose_threads(1, 2, machine.trying)
    assert chosen.layout == Layout(1, threads)
    assert chosen.reason == f"one image takes {with_two * 1e3:.3g} ms with 2 threads, 10 ms with one"
    assert machine.still_open == []


def test_a_short_run_is_not_tried_with_more() -> None:
    machine = Machine(lambda *_: 0.0005)
    assert choose_threads(3, 4, machine.trying).layout == Layout(3, 1)
    assert len(machine.opened) == 1


class HalfTaken:
    def read(self) -> CpuTaken:
        return CpuTaken(0.0, 0.6, 0.5)


def test_a_quick_model_is_quick_beside_others_too() -> None:
    """12 ms of a promise of 100 are quick; every run takes twice that, since others have half of its core."""
    machine = Machine(lambda layout, images: 2 * images * 0.012 / layout.threads**0.9)
    chosen = choose_by_capacity(2, 0.1, replace(machine.trying, watch=HalfTaken))
    assert chosen.layout == Layout(2, 1)
    assert chosen.reason.startswith("one image takes 12 ms with one thread, a small part of the SLO")


class BusyMachine(Machine):
    """For some runs in a row everything takes longer, and now and then one run does."""

    def __init__(self, takes: Takes, seed: int) -> None:
        super().__init__(self._disturbed)
        self._alone = takes
        self._random = random.Random(seed)
        self._left, self._factor = 0, 1.0
        self._lock = threading.Lock()

    def _disturbed(self, layout: Layout, images: int) -> float:
        draw = self._random
        with self._lock:
            if not self._left:
                self._left, self._factor = (
                    draw.randint(3, 25),
                    draw.choice([1.0, 1.0, draw.uniform(1.2, 2.5)]),
                )
            self._left -= 1
            factor = self._factor * draw.lognormvariate(0, 0.06)
            if draw.random() < 0.15:
                factor *= draw.uniform(1.2, 3)
        return self._alone(layout, images) * max(1.0, factor)


MODELS: dict[str, tuple[Takes, float]] = {
    "near quick": (lambda layout, images: images * 0.018 / layout.threads**0.9, 0.1),
    "nearly quick": (lambda layout, images: images * 0.012 / layout.threads**0.9, 0.1),
    "threads help half": (lambda layout, images: images * 0.020 / layout.threads**0.6, 0.1),
    "batches help": (lambda layout, images: (0.012 + images * 0.006) / layout.threads**0.8, 0.1),
    "threads help": (lambda layout, images: images * 0.045 / layout.threads**0.95, 0.25),
    "slow": (lambda layout, images: images * 0.3 / layout.threads**0.9, 1.0),
}


@pytest.mark.parametrize("seeds", [20, later(60)])
@pytest.mark.parametrize(("takes", "slo"), MODELS.values(), ids=MODELS)
def test_a_busy_machine_comes_to_the_same_layout(takes: Takes, slo: float, seeds: int) -> None:
    calm = choose_by_capacity(2, slo, Machine(takes).trying).layout
    tries = (choose_by_capacity(2, slo, BusyMachine(takes, seed).trying) for seed in range(seeds))
    chosen = Counter(choice.layout for choice in tries)
    assert chosen[calm] >= 0.9 * seeds, chosen


ON_THE_EDGE: dict[str, tuple[Takes, float]] = {
    "of what is quick": (lambda layout, images: images * 0.015 / layout.threads**0.9, 0.1),
    "of what is short": (lambda layout, images: images * 0.001 / layout.threads**0.9, 0.1),
    "of what is clearly better": (lambda layout, images: images * 0.03 / layout.threads**0.848, 0.1),
    "of what is clearly better, slow": (lambda layout, images: images * 0.3 / layout.threads**0.848, 1.0),
}


@pytest.mark.parametrize("seed", first(1, range(3)))
@pytest.mark.parametrize(("takes", "slo"), ON_THE_EDGE.values(), ids=ON_THE_EDGE)
def test_an_earlier_choice_stays_where_noise_would_decide(takes: Takes, slo: float, seed: int) -> None:
    earlier = choose_by_capacity(2, slo, BusyMachine(takes, seed).trying).layout
    chosen = Counter(
        choose_by_capacity(2, slo, replace(BusyMachine(takes, again).trying, earlier=earlier)).layout
        for again in range(100, 130)
    )
    assert chosen[earlier] >= 26, (earlier, chosen)


def test_an_earlier_choice_goes_when_another_is_clearly_better() -> None:
    def takes(layout: Layout, images: int) -> float:
        return images * 0.03 / layout.threads**0.4

    chosen = choose_by_capacity(2, 0.1, replace(Machine(takes).trying, earlier=Layout(1, 2)))
    assert chosen.layout == Layout(2, 1)


def test_what_others_took_counts_as_doubt() -> None:
    """Two instances did 1.3 times as much, while others had more than half of the cores."""

    def takes(layout: Layout, images: int) -> float:
        return images * 0.03 / layout.threads**0.6

    trying = Machine(takes).trying
    assert choose_by_capacity(2, 0.1, trying).layout == Layout(2, 1)
    among_others = choose_by_capacity(2, 0.1, replace(Machine(takes).trying, watch=HalfTaken))
    assert among_others.layout == Layout(1, 2)
    assert "not clearly fewer on a machine that was busy" in among_others.reason
