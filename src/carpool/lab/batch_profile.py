"""How long do this model's batches take here, and which does a promise allow? Measured, and doubted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import ceil, sqrt
from pathlib import Path
from statistics import median
from time import monotonic, process_time

from carpool import backends
from carpool.backends.backend import KeepsMemory
from carpool.config.asked_extensions import asked_extensions
from carpool.config.model import ModelConfig
from carpool.config.repository import ModelSource, ModelVersion, find_models
from carpool.config.server import usual_folder
from carpool.core.curve import DISTURBED, BatchCurve, Shape, shape_of, sizes
from carpool.core.numerals import numeral
from carpool.engine.loading.loading import Loading
from carpool.engine.profile.contention import contention
from carpool.engine.profile.hardware import CpuWatch, gpu_count, hardware
from carpool.engine.profile.layouts import Chosen, Layout
from carpool.engine.profile.measuring import Effort, Measuring, Point
from carpool.engine.profile.model_profile import StartTimes, last_start
from carpool.engine.profile.run_memory import batch_bytes, give_back_all
from carpool.engine.run.model_inputs import signature_of
from carpool.errors import InvalidInput
from carpool.memory.free_memory import own_bytes
from carpool.types import Signature

CAUTION = 1.1  # batches may take a tenth longer than measured
_LARGEST_UNASKED = 64
_PASSES = 4
_SPREAD = 0.2  # of the median size: above, the numbers say more about the machine than about the model
_STEAL = 0.05
_CHANGED = 1.2
_LITTLE = 1.25  # the best rate over that of single images, below which batching hardly matters

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class BatchRow:
    """Represents one batch size. `spread`: how far the middle half of the runs lies apart; `sure`: ± of `ms`;
    shares."""

    batch: int
    ms: float
    spread: float
    sure: float
    runs: int
    images_per_s: float
    off_line: float  # measured over the line, less 1
    memory_mb: float  # that such a batch takes on all instances at once; 0 where the runtime does not say


@dataclass(frozen=True, slots=True)
class Budget:
    """Describes what a promise of `slo_ms` allows; a batch of 0 is none."""

    slo_ms: float
    batch: int
    batch_ms: float
    images_per_s: float
    largest: int  # the largest batch that ends in time if it starts at once
    largest_images_per_s: float
    why: str


@dataclass(frozen=True, slots=True)
class ProfileReport:
    """The field names are the keys of `--json`."""

    model: str
    backend: str
    hardware: str
    instances: int
    threads: int
    infer_cores: float  # that a batch kept busy while it ran, as `--infer-cores` of plan takes it
    start_s: float  # until it was ready, at a server's last start here, as `--cold-start` of plan takes it
    full_speed_s: float  # until it was compiled then, behind its traffic; 0 and 0: not measured
    weights_mb: float  # that all instances took when they were loaded, without batches
    memory_mb: float  # with batches of the largest size, as `--memory-mb` of plan takes it
    rows: tuple[BatchRow, ...]
    fixed_ms: float
    per_image_ms: float
    line_from: int  # the line holds for batches from here
    line_until: int  # to here; 0 and 0 if there is none
    knee: int
    curve: str  # as `--curve` of simulate and plan takes it; marked where the machine was disturbed
    budgets: tuple[Budget, ...]
    noisy: bool
    provisional: str  # what disturbed the machine meanwhile; empty: it was calm
    steal: float
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ProfileQuestion:
    """Describes what to measure; with `sizes` none: powers of two up to the model's largest. Times in
    seconds."""

    path: Path
    name: str | None = None
    sizes: tuple[int, ...] = ()
    slos: tuple[float, ...] = (0.03, 0.05, 0.1)
    repeats: int = 10
    instances: int | None = None
    threads: int | None = None
    backend: str | None = None


def profile(
    question: ProfileQuestion, tell: Tell = lambda _: None, source: ModelSource | None = None
) -> ProfileReport:
    """Measures the model of the question, which is read here unless it is given."""
    q = question
    source = source or the_model(q)
    for extension in asked_extensions(source.config):
        if extension.no_batches:
            raise InvalidInput(f"{source.config.name} {extension.no_batches}")
    version = source.versions[-1]
    config = backends.describe(source.config, version)
    signature = signature_of(config)
    wanted = _sizes(q, signature, config.pytorch.buckets)
    with ExitStack() as stack:
        before = own_bytes()
        chosen = _open(q, config, version, signature, tell)
        for backend in chosen.backends:
            stack.callback(backend.close)
        each = max(2, ceil(q.repeats / _PASSES))  # runs of one size in one pass
        effort = Effort(each, 3 * each, seconds=1.0, warm_up=2.0, total=120.0, passes=_PASSES)
        measuring = Measuring(chosen.backends, signature, effort)
        watched, began, spent = CpuWatch(), monotonic(), process_time()
        measured = measuring.points(wanted, tell=lambda size: tell(f"measuring batches of {size}"))
        tell("measuring the first size again")
        again = measuring.point(wanted[0])
        taken = watched.read()
        busy = (process_time() - spent) / max(monotonic() - began, 1e-9)
        tell("measuring memory")
        give_back_all(chosen.backends)
        weights = max(0, own_bytes() - before) / 1e6
        keeps = any(isinstance(backend, KeepsMemory) for backend in chosen.backends)
        taken_mb = {
            point.size: batch_bytes(measuring, point.size) / 1e6 if keeps else 0.0
            for point in measured.points
        }
    curve, layout = measured.curve(max(wanted[-1], 1)), chosen.layout
    started = last_start(usual_folder("cache"), version) or StartTimes()
    shape = shape_of([(point.size, point.seconds) for point in measured.points])
    off = dict(shape.residuals)
    rows = []
    for point in measured.points:
        sure = point.spread / 2 / sqrt(point.runs)
        rate = layout.instances * point.rate
        size, ms = point.size, point.seconds * 1e3
        memory = round(taken_mb[size], 1)
        rows.append(BatchRow(size, ms, point.spread, sure, point.runs, rate, off[size], memory))
    why = signature.why_unbatched()
    notes = [f"Only single images were measured: {why}."] if why else [_line(shape)]
    notes += [] if why else [_gain(shape, curve, layout.instances)]
    if chosen.reason:
        notes.append(f"{layout}: {chosen.reason}.")
    disturbed = contention(taken, [point.spread for point in measured.points]).why
    doubted = doubts(measured.points, again, taken.steal)
    if disturbed and not doubted:
        doubted.append(f"Provisional: {disturbed}. Measure again on a quiet machine.")
    notes += doubted
    if measured.ended:
        notes.append(
            f"Batches of {measured.points[-1].size + 1} and more were not measured: {measured.ended}."
        )
    return ProfileReport(
        model=config.name,
        backend=config.backend or "",
        hardware=str(hardware()),
        instances=layout.instances,
        threads=layout.threads,
        infer_cores=round(busy, 2),
        start_s=started.ready_s,
        full_speed_s=started.full_speed_s,
        weights_mb=round(weights, 1),
        memory_mb=round(weights + max(taken_mb.values()), 1),
        rows=tuple(rows),
        fixed_ms=shape.fixed * 1e3,
        per_image_ms=shape.per_image * 1e3,
        line_from=shape.line_from,
        line_until=shape.line_until,
        knee=shape.knee,
        curve=_marked(curve, disturbed=bool(doubted)),
        budgets=tuple(_budget(slo, curve, layout.instances) for slo in q.slos),
        noisy=bool(doubted),
        provisional=disturbed,
        steal=round(taken.steal, 4),
        notes=tuple(notes),
    )


def _marked(curve: BatchCurve, *, disturbed: bool) -> str:
    """Returns the curve's text. One that other work disturbed says so wherever it is copied to."""
    points = [f"{size}:{seconds * 1e3:.4g}" for size, seconds in curve.points]
    return ",".join((*points, DISTURBED) if disturbed else points)


def the_model(q: ProfileQuestion) -> ModelSource:
    found, _ = find_models([q.path], gpus=gpu_count(), only=None if q.name is None else [q.name])
    if len(found) > 1:
        names = ", ".join(source.config.name for source in found)
        raise InvalidInput(f"{q.path} has several models: choose one with --name: {names}")
    source = found[0]
    if q.backend is not None and q.backend != source.config.backend:
        source = replace(source, config=replace(source.config, backend=q.backend))
    return source


def _sizes(q: ProfileQuestion, signature: Signature, buckets: Sequence[int]) -> Sequence[int]:
    if not signature.max_batch:
        if q.sizes not in ((), (1,)):
            raise InvalidInput(f"--sizes: {signature.model} takes no batches: only 1 can be measured")
        return (1,)
    return q.sizes or buckets or sizes(min(signature.max_batch, _LARGEST_UNASKED))


def _open(
    q: ProfileQuestion, config: ModelConfig, version: ModelVersion, signature: Signature, tell: Tell
) -> Chosen:
    """As asked, else as the server would."""
    loading = Loading(config, version, signature=signature)
    if q.instances is None and q.threads is None:
        chosen = loading.choose(tell)
    else:
        count = q.instances or 1
        cores = hardware().cores
        chosen = Chosen(Layout(count, q.threads or backends.default_threads(count, cores)))
    tell(f"loading {config.name}")
    return replace(chosen, backends=chosen.backends or loading.open(chosen.layout))


def _budget(slo: float, curve: BatchCurve, instances: int) -> Budget:
    """Returns the budget: a request that just missed a batch waits for two in a row; and a margin."""
    batch = curve.efficient[curve.fits(slo / (2 * CAUTION))]
    largest = curve.fits(slo)
    if not largest:
        why = f"one image alone takes {numeral(curve.times[1] * 1e3)} ms"
    elif not batch:
        enough = numeral(2 * CAUTION * curve.times[1] * 1e3)
        why = f"only requests that find the model idle meet it; use an SLO of {enough} ms"
    else:
        ms = curve.times[batch] * 1e3
        why = f"2 × {numeral(ms)} ms, the running batch and the request's own, with a tenth as reserve"
    takes, rate = (curve.times[batch] * 1e3, instances * curve.throughput(batch)) if batch else (0.0, 0.0)
    at_most = instances * curve.throughput(largest) if largest else 0.0
    return Budget(slo * 1e3, batch, takes, rate, largest, at_most, why)


def _line(shape: Shape) -> str:
    said = f"t(B) = {numeral(shape.fixed * 1e3)} ms + B × {numeral(shape.per_image * 1e3)} ms"
    if not shape.line_until:
        return f"These points are not on a line; the nearest is {said}."
    if shape.bends:
        return f"{said} from {shape.line_from} to {shape.line_until}; the other sizes are not on this line."
    worst = max((abs(off) for _, off in shape.residuals), default=0.0)
    return f"{said}, and every point within {worst:.0%} of it."


def _gain(shape: Shape, curve: BatchCurve, instances: int) -> str:
    alone = curve.throughput(1)
    best = max(curve.points, key=lambda point: point[0] / point[1])[0]
    gain = curve.throughput(best) / alone
    if gain < _LITTLE:
        return (
            f"Batching gains little here: {numeral(instances * alone)} images/s one by one, {gain:.2f} × "
            "that at best. The time is spent per image, not per call."
        )
    return (
        f"Batches of {best} process {gain:.2f} × the images of single ones; {shape.knee} are enough for 90 "
        "% of that."
    )


def doubts(points: Sequence[Point], again: Point, stolen: float) -> list[str]:
    said = []
    usual = median(point.spread for point in points)
    if usual > _SPREAD:
        said.append(
            f"Too noisy: the interquartile range of the runs is {usual:.0%}. Other work is probably "
            "running; measure again on a quiet machine, or with more --repeats."
        )
    if stolen > _STEAL:
        said.append(f"The hypervisor gave {stolen:.0%} of the processor to others while this was measured.")
    then, now = points[0].seconds * 1e3, again.seconds * 1e3
    if max(now / then, then / now) > _CHANGED:
        said.append(
            f"The machine changed while this was measured: a batch of {again.size} took {numeral(then)} ms "
            f"at first, {numeral(now)} ms at the end."
        )
    return said
