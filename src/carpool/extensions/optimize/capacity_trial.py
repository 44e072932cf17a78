"""Measures forms of a model beside each other: in turns, so that what else the machine does disturbs all of
them alike, and what counts is the ratio within a turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import median

from carpool import backends
from carpool.backends.backend import Backend, Placement
from carpool.config.model import ModelConfig
from carpool.config.repository import ModelVersion
from carpool.core.curve import BatchCurve, sizes, slo_capacity
from carpool.engine.loading.batch_proof import prove
from carpool.engine.profile.contention import contention
from carpool.engine.profile.hardware import CpuWatch
from carpool.engine.profile.layout_trials import even_layouts
from carpool.engine.profile.layouts import Layout
from carpool.engine.profile.measuring import Effort, Measuring
from carpool.engine.run.model_inputs import signature_of
from carpool.lab.machine_share import Machine
from carpool.types import Signature

_EFFORT = Effort(least_runs=2, most_runs=5, seconds=0.12, warm_up=0.06, total=3.0)
_HARDLY = 1e-6
_BEYOND = 2.0  # times the SLO: sizes up to this are measured, for the machine may be slower for a while


@dataclass(frozen=True, slots=True)
class Form:
    """Describes one form of a model, as it can be loaded."""

    name: str
    config: ModelConfig  # complete: what the file says is filled in
    version: ModelVersion

    @property
    def signature(self) -> Signature:
        return signature_of(self.config)

    def load(self, threads: int) -> Backend:
        return backends.load(self.config, self.version, Placement(threads=threads))


@dataclass(frozen=True, slots=True)
class LayoutCurve:
    """Describes one layout of a form: its batch times while all instances run, and what it sustains within
    the SLO. The field names are keys of optimize.json."""

    instances: int
    threads: int
    curve: tuple[tuple[int, float], ...]  # images, ms
    capacity: float


@dataclass(frozen=True, slots=True)
class Speed:
    """Holds what was measured of one form. `gain` is its capacity over that of the model as it is, in the
    median of the turns, `gains` those of the turns. `images` counts the decoding of images on the same cores
    as well. The field names are keys of optimize.json."""

    layouts: tuple[LayoutCurve, ...]
    best: int  # of the layouts
    capacity: float
    images: float
    gain: float
    gains: tuple[float, ...]
    disturbed: str = ""  # what disturbed the machine meanwhile; empty: it was calm


@dataclass(slots=True)
class _Measured:
    """Holds the turns of one form, by layout: seconds by batch size."""

    turns: dict[Layout, list[Mapping[int, float]]] = field(default_factory=dict)

    def calmed(self, base: _Measured) -> _Measured:
        """Returns the same times as they would be at the speed of the machine in its calmest turn. How much
        slower it was in another one is what the model as it is took more in that turn, in the median of the
        sizes: else a form would seem to miss the SLO because of what else ran."""
        found = _Measured()
        for layout, turns in self.turns.items():
            before = base.turns[layout]
            every = {size for turn in before for size in turn}
            least = {size: min(turn[size] for turn in before if size in turn) for size in every}
            slower = [median(turn[size] / least[size] for size in turn) for turn in before]
            found.turns[layout] = [
                {size: seconds / factor for size, seconds in turn.items()}
                for turn, factor in zip(turns, slower, strict=True)
            ]
        return found

    def capacities(self, layout: Layout, slo: float, largest: int) -> list[float]:
        """Returns that of each turn; of a form that sustains nothing within the SLO, next to nothing, so that
        such forms are compared with their like."""
        curves = (BatchCurve.measured(list(turn.items()), largest) for turn in self.turns[layout])
        return [
            slo_capacity(curve, slo, layout.instances) or _HARDLY * layout.instances * curve.throughput(1)
            for curve in curves
        ]


def layouts_of(config: ModelConfig, cores: int) -> list[Layout]:
    """Returns the layouts to try: that of the settings, else those with every core busy."""
    if any(group.given for group in config.instances):
        count = max(1, sum(group.count for group in config.instances))
        return [Layout(count, max(1, cores // count))]
    return even_layouts(cores)


def not_batched(form: Form) -> str:
    """Returns why batches of this form are not what single requests are, or nothing."""
    if form.signature.max_batch <= 1:
        return ""
    backend = form.load(1)
    try:
        return prove(backend, form.signature).differs
    finally:
        backend.close()


def measured_beside(
    base: Form,
    other: Form,
    *,
    slo: float,
    cores: int,
    turns: int,
    prepare_s: float,
    tell: Callable[[str], None] = lambda _: None,
) -> tuple[Speed, Speed]:
    """Returns the speed of the model as it is and of the other form, measured in turns."""
    layouts = layouts_of(base.config, cores)
    both: Mapping[str, _Measured] = {form.name: _Measured() for form in (base, other)}
    with ExitStack() as stack:
        opened: dict[tuple[str, Layout], Measuring] = {}
        for form in (base, other):
            for layout in layouts:
                instances = [form.load(layout.threads) for _ in range(layout.instances)]
                for backend in instances:
                    stack.callback(backend.close)
                measuring = Measuring(instances, form.signature, _EFFORT)
                opened[form.name, layout] = measuring
                both[form.name].turns[layout] = []
        watched = CpuWatch()
        for turn in range(turns):
            for layout in layouts:
                for form in (base, other) if turn % 2 else (other, base):
                    tell(f"{other.name}: measuring, turn {turn + 1} of {turns}")
                    wanted = sizes(form.signature.max_batch) if form.signature.max_batch else [1]
                    found = opened[form.name, layout].points(wanted, _BEYOND * slo)
                    times = {point.size: point.seconds for point in found.points}
                    both[form.name].turns[layout].append(times)
        disturbed = contention(watched.read()).why
    return _speeds(base, other, both, layouts, slo, Machine(cores, decode=prepare_s), disturbed)


def _speeds(
    base: Form,
    other: Form,
    both: Mapping[str, _Measured],
    layouts: Sequence[Layout],
    slo: float,
    machine: Machine,
    disturbed: str,
) -> tuple[Speed, Speed]:
    largest = {form.name: max(1, form.signature.max_batch) for form in (base, other)}
    both = {name: found.calmed(both[base.name]) for name, found in both.items()}
    each = {
        form.name: {layout: both[form.name].capacities(layout, slo, largest[form.name]) for layout in layouts}
        for form in (base, other)
    }
    best = {name: max(found, key=lambda layout: median(found[layout])) for name, found in each.items()}
    first, second = (each[form.name][best[form.name]] for form in (base, other))
    gains = tuple(round(two / one, 4) for one, two in zip(first, second, strict=True))
    return (
        _speed(base, both, layouts, best, slo, machine, (1.0,) * len(first), disturbed),
        _speed(other, both, layouts, best, slo, machine, gains, disturbed),
    )


def _speed(
    form: Form,
    both: Mapping[str, _Measured],
    layouts: Sequence[Layout],
    best: Mapping[str, Layout],
    slo: float,
    machine: Machine,
    gains: tuple[float, ...],
    disturbed: str,
) -> Speed:
    largest = max(1, form.signature.max_batch)
    turns = both[form.name].turns
    curves = {layout: _usual(turns[layout], largest) for layout in layouts}
    rows = tuple(
        LayoutCurve(
            layout.instances,
            layout.threads,
            tuple((size, round(seconds * 1e3, 4)) for size, seconds in curves[layout].points),
            round(slo_capacity(curves[layout], slo, layout.instances), 3),
        )
        for layout in layouts
    )
    chosen = best[form.name]
    busy = float(chosen.instances * chosen.threads)
    shared = Machine(machine.cores, min(busy, machine.cores), machine.decode, instances=chosen.instances)
    return Speed(
        rows,
        layouts.index(chosen),
        rows[layouts.index(chosen)].capacity,
        round(shared.capacity(curves[chosen], slo), 3),
        round(median(gains), 4),
        gains,
        disturbed,
    )


def _usual(turns: Sequence[Mapping[int, float]], largest: int) -> BatchCurve:
    """Returns the curve of the median of the turns, of the sizes that all of them measured."""
    found: dict[int, list[float]] = {}
    for turn in turns:
        for size, seconds in turn.items():
            found.setdefault(size, []).append(seconds)
    complete = {size: times for size, times in found.items() if len(times) > len(turns) // 2}
    return BatchCurve.measured([(size, median(times)) for size, times in complete.items()], largest)
