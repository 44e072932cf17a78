"""How long does a model that writes take here, to encode and to step, and what can be promised with it?"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from math import ceil, log10
from statistics import median

from carpool.config.repository import ModelSource
from carpool.core.curve import BatchCurve
from carpool.engine.profile.hardware import CpuWatch, hardware
from carpool.engine.profile.measuring import Point
from carpool.extensions.text.settings import text_settings
from carpool.extensions.text.text_loading import TextLoading, promise_of
from carpool.lab.batch_profile import CAUTION, Tell, doubts

_RUNS = 5  # of a size in one pass, at least; two passes show whether the machine changes meanwhile


@dataclass(frozen=True, slots=True)
class PartRow:
    """Describes so many pictures encoded together, or so many slots stepped. `spread`: how far the middle
    half of the runs lies apart, as a share."""

    size: int
    ms: float
    spread: float
    runs: int
    per_s: float  # pictures, or tokens


@dataclass(frozen=True, slots=True)
class TextBudget:
    """Describes what can be promised to so many answers at once."""

    slots: int
    encoded: int  # pictures together
    per_token_ms: float
    ttft_ms: float
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class TextProfileReport:
    """The field names are the keys of `--json`."""

    model: str
    backend: str
    hardware: str
    encoders: int  # apart from the decoders; 0: one instance does both
    decoders: int
    slots: int  # of a decoder
    max_tokens: int
    encoder: tuple[PartRow, ...]
    step: tuple[PartRow, ...]
    encoder_curve: str  # as `--encoder` of simulate takes it
    step_curve: str  # as `--step-curve`
    budgets: tuple[TextBudget, ...]
    noisy: bool
    steal: float
    notes: tuple[str, ...]


def profile_text(
    source: ModelSource, repeats: int = 2 * _RUNS, tell: Tell = lambda _: None
) -> TextProfileReport:
    loading = TextLoading(source.config, source.versions[-1])
    loading.check()
    config, watched = loading.config, CpuWatch()
    tell(f"loading {config.name}")
    with closing(loading.backend(0, 1, tell)) as instance:
        passes = [loading.measured(instance, tell) for _ in range(max(2, ceil(repeats / _RUNS)))]
        slots, widths, said = instance.slots, instance.widths, instance.notes
    stolen = watched.read().steal
    encoder, step = (
        [_over_all(points) for points in zip(*(one[part].points for one in passes), strict=True)]
        for part in (0, 1)
    )
    encodes = BatchCurve.measured([(p.size, p.seconds) for p in encoder], encoder[-1].size)
    steps = BatchCurve.measured([(p.size, p.seconds) for p in step], slots, widths)
    promise, settings = promise_of(config, slots), text_settings(config)
    budgets = tuple(_budget(width, encodes, steps, promise.apart) for width in widths)
    found = doubts([*encoder, *step], passes[-1][0].points[0], stolen) if config.fake is None else []
    return TextProfileReport(
        model=config.name,
        backend=config.backend or "",
        hardware=str(hardware()),
        encoders=promise.encoders,
        decoders=promise.decoders,
        slots=slots,
        max_tokens=promise.max_tokens,
        encoder=tuple(map(_row, encoder)),
        step=tuple(map(_row, step)),
        encoder_curve=_points(encodes),
        step_curve=_points(steps),
        budgets=budgets,
        noisy=bool(found),
        steal=round(stolen, 4),
        notes=(*said, *_verdict(budgets, settings.ttft, settings.per_token), *found),
    )


def _over_all(passes: Sequence[Point]) -> Point:
    """Passes that do not agree are a spread, too."""
    times = [point.seconds for point in passes]
    middle = median(times)
    spread = max((max(times) - min(times)) / middle, *(point.spread for point in passes))
    return Point(passes[0].size, middle, spread, sum(point.runs for point in passes))


def _row(point: Point) -> PartRow:
    return PartRow(point.size, point.seconds * 1e3, point.spread, point.runs, point.rate)


def _points(curve: BatchCurve) -> str:
    return ",".join(f"{size}:{seconds * 1e3:.4g}" for size, seconds in curve.points)


def _budget(slots: int, encoder: BatchCurve, step: BatchCurve, apart: bool) -> TextBudget:
    """Returns the budget. Between two tokens there is a step, and an encoding where it is not done elsewhere.
    A request that arrives just after an encoding began waits for it and for a step, is encoded, and gets its
    own step. A tenth is added as reserve."""
    batch = encoder.efficient[min(slots, encoder.max_batch)]
    encodes, steps = CAUTION * encoder.times[batch], CAUTION * step.times[slots]
    per_token = steps if apart else encodes + steps
    return TextBudget(slots, batch, per_token * 1e3, 2e3 * (encodes + steps), slots / step.times[slots])


def _verdict(budgets: tuple[TextBudget, ...], ttft: float | None, per_token: float | None) -> list[str]:
    if ttft is None and per_token is None:
        full = budgets[-1]
        return [
            f"With all {full.slots} slots of a decoder: ttft_ms = {_up(full.ttft_ms)}, "
            f"per_token_ms = {_up(full.per_token_ms)}."
        ]
    wanted = {"ttft_ms": ttft, "per_token_ms": per_token}
    promised = ", ".join(f"{key} = {value * 1e3:g}" for key, value in wanted.items() if value is not None)
    kept = [
        budget.slots
        for budget in budgets
        if (ttft is None or budget.ttft_ms <= ttft * 1e3)
        and (per_token is None or budget.per_token_ms <= per_token * 1e3)
    ]
    if kept:
        return [f"{promised} can be met with up to {max(kept)} concurrent responses."]
    least = budgets[0]
    return [
        f"{promised} cannot be met here: even a single response needs ttft_ms = {_up(least.ttft_ms)}, "
        f"per_token_ms = {_up(least.per_token_ms)}."
    ]


def _up(ms: float) -> str:
    """Rounds to two figures, never less."""
    unit = 10.0 ** (int(log10(ms)) - (2 if ms < 1 else 1))
    return f"{ceil(round(ms / unit, 6)) * unit:g}"
