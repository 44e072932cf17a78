"""Chooses which threshold for a cascade, by which measure of certainty, and whether it is worth having at
all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import floor

from carpool.errors import InvalidInput
from carpool.extensions.cascades.cascade_curve import Curve, Judged, Point, at_least, curve_of
from carpool.vision.certainty import MEASURES

LEAST_SAMPLES = 300
_FINEST = 1e6


@dataclass(frozen=True, slots=True)
class Sampled:
    """Describes one picture, answered by both models. `certainty` is the cheap model's, by measure."""

    certainty: Mapping[str, float]
    cheap: bool  # it was right; without labels: it says what the big one says
    big: bool


@dataclass(frozen=True, slots=True)
class Costs:
    """Holds the seconds of device for one picture, in the batches in use."""

    cheap: float
    big: float

    @property
    def ratio(self) -> float:
        return self.big / self.cheap

    @property
    def break_even(self) -> float:
        """Returns the share that has to be kept: below it the cascade costs more than the big model alone."""
        return min(1.0, 1.0 / self.ratio)

    def of(self, kept: float) -> float:
        """Seconds for a picture: all go to the cheap model, and what is not kept to the big one as well."""
        return self.cheap + (1.0 - kept) * self.big

    def saving(self, kept: float) -> float:
        """Returns how many times less it costs than the big model alone."""
        return self.big / self.of(kept)


@dataclass(frozen=True, slots=True)
class Tuned:
    """`why_not` is empty where it is worth it; `warnings` hold all the same."""

    by: str
    point: Point
    curve: Curve
    costs: Costs
    labelled: bool
    loss: float  # that was allowed
    why_not: str
    warnings: tuple[str, ...]
    others: Mapping[str, Point]  # by measure: what each would keep

    @property
    def saving(self) -> float:
        return self.costs.saving(self.point.share)


def tune(
    sample: Sequence[Sampled], costs: Costs, *, labelled: bool, loss: float, sure: bool = False, by: str = ""
) -> Tuned:
    """Tunes by one measure, or by the simplest that keeps as much as the best, as far as the sample shows.
    With `sure`, not only the sample but all pictures of its kind lose no more, with 95 % confidence."""
    if len(sample) < LEAST_SAMPLES:
        raise InvalidInput(
            f"{len(sample)} images are too few: at least {LEAST_SAMPLES} are needed, and some thousands "
            "are better",
            field="pictures",
        )
    measures = [name for name in MEASURES if all(name in one.certainty for one in sample)]
    if by:
        if by not in measures:
            raise InvalidInput(f"--by: these models give {', '.join(measures)}, not {by}", field="by")
        measures = [by]
    if not measures:
        raise InvalidInput("these responses have no measure of certainty: they cannot form a cascade")
    curves = {name: _curve(sample, name) for name in measures}
    chosen = {name: _chosen(curve, loss, sure=sure) for name, curve in curves.items()}
    name = _simplest(chosen)
    point, curve = chosen[name], curves[name]
    why_not = _why_not(point, curve, costs, labelled=labelled, loss=loss)
    warnings = _warnings(point, curve, labelled=labelled, loss=loss)
    return Tuned(name, point, curve, costs, labelled, loss, why_not, warnings, chosen)


def _curve(sample: Sequence[Sampled], by: str) -> Curve:
    return curve_of([Judged(one.certainty[by], one.cheap, one.big) for one in sample])


def _chosen(curve: Curve, loss: float, *, sure: bool) -> Point:
    """Returns what keeps most within the loss. Where that is everything, the big model is not the better one,
    and may still know what the cheap one does not: then what keeps most and is as good as the best threshold,
    if that is surely better than the cheap model alone."""

    def within(point: Point) -> bool:
        return (point.loss_at_most if sure and point.kept else point.loss) <= loss + 1e-12

    most = max((point for point in curve.points if within(point)), key=_kept)
    if most.kept < most.pictures:
        return most
    best = max(point.accuracy for point in curve.points)
    as_good = max((point for point in curve.points if point.accuracy >= best - loss), key=_kept)
    return as_good if curve.gain_at_least(as_good) > 0.0 else most


def _kept(point: Point) -> int:
    return point.kept


def _simplest(chosen: Mapping[str, Point]) -> str:
    best = max(chosen.values(), key=lambda point: point.kept)
    enough = at_least(best.kept, best.pictures)
    return next(name for name in MEASURES if name in chosen and chosen[name].share >= enough)


def _why_not(point: Point, curve: Curve, costs: Costs, *, labelled: bool, loss: float) -> str:
    if not labelled and not curve.rises:
        return (
            "the two models do not agree more often where the cheap one is surer, so agreement means "
            "nothing: labels are needed"
        )
    if point.share <= costs.break_even:
        return (
            f"{_percent(point.share)} of the images are answered by the cheap model, but at least "
            f"{_percent(costs.break_even)} are needed, because the large model costs {costs.ratio:.2f} "
            "times as much: the cascade would cost more than the large model alone"
        )
    if point.kept == point.pictures:
        return f"the cheap model alone is as good as the large one, within {_percent(loss)}: serve that"
    return ""


def _warnings(point: Point, curve: Curve, *, labelled: bool, loss: float) -> tuple[str, ...]:
    found = []
    if labelled and not curve.rises:
        found.append("The cheap model is not right more often when it is surer: a threshold helps little.")
    if labelled and point.kept < point.pictures and curve.cheap >= curve.big - loss:
        found.append(
            f"The cheap model alone is as good as the large one ({curve.cheap:.4f} and {curve.big:.4f}): the "
            "cascade can only gain what the large one adds."
        )
    if point.kept and point.loss_at_most > max(loss, 0.0):
        found.append(
            f"On other images of this kind it may lose up to {_percent(point.loss_at_most)}: use more "
            "images for a tighter bound."
        )
    if not labelled:
        found.append("Without labels the large model counts as right: its own errors are not measured.")
    return tuple(found)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if share < 0.0995 or share > 0.9 else f"{100 * share:.0f} %"


def rounded_down(threshold: float) -> float:
    """Returns a threshold for a settings file, so that what was kept in the sample is kept."""
    return floor(threshold * _FINEST) / _FINEST
