"""What was measured of a model and chosen from it, and the words that explain the choices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import ceil, floor, log10
from typing import Any

from carpool.config.model import ModelConfig
from carpool.core.curve import BatchCurve, promised_batch, shape_of, slo_capacity
from carpool.core.numerals import numeral
from carpool.core.policy import Promise
from carpool.engine.profile.instance_layout import Layout
from carpool.engine.profile.measuring import Measured, Point
from carpool.errors import ConfigError

LEAST = 2.2
"""Times a single image: who arrives just after another began waits for that one, and a little is lost."""


def keepable(config: ModelConfig, curve: BatchCurve) -> tuple[ModelConfig, str]:
    """The settings to serve with, and in words what became of the promise. Raises where it cannot be kept."""
    policy = config.policy
    if not isinstance(policy, Promise):
        return config, ""
    alone, slo = curve.times[1], policy.slo
    if config.slo_may_grow and slo < LEAST * alone:
        grown = _rounded_up(LEAST * alone)
        takes = f"one image takes {numeral(alone * 1e3)} ms here"
        said = f"Promised: {numeral(grown * 1e3)} ms instead of {numeral(slo * 1e3)}, since {takes}."
        return replace(config, policy=replace(policy, slo=grown)), said
    if alone > slo:
        raise ConfigError(
            f"{config.name}: one image takes {numeral(alone * 1e3)} ms here, so slo_ms = {slo * 1e3:g} "
            f"cannot be kept; promise at least {numeral(LEAST * alone * 1e3)} ms"
        )
    return config, ""


def _rounded_up(seconds: float) -> float:
    """To two digits: a promise is a number that people say."""
    step = 10.0 ** (floor(log10(seconds)) - 1)
    return ceil(seconds / step) * step


_WORTH_IT = 0.85  # a piece must be this much cheaper per image before large batches are run in pieces


@dataclass(frozen=True, slots=True)
class Profile:
    """`points` are empty for a model that could not be run on zeros, and for a fake one."""

    layout: Layout
    layout_reason: str = ""
    measured: Measured = field(default_factory=Measured)
    measured_at: str = ""  # UTC, ISO 8601
    reused: str = ""  # what the check of an older profile found

    @property
    def points(self) -> tuple[Point, ...]:
        return self.measured.points

    def as_json(self) -> dict[str, Any]:
        return {
            "instances": self.layout.instances,
            "threads": self.layout.threads,
            "layout_reason": self.layout_reason,
            "points": [[point.size, point.seconds, point.spread, point.runs] for point in self.points],
            "ended": self.measured.ended,
            "measured_at": self.measured_at,
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Profile:
        """Raises ValueError, KeyError or TypeError for what cannot be right."""
        points = tuple(_point(*entry) for entry in document["points"])
        BatchCurve.measured([(point.size, point.seconds) for point in points])
        layout = Layout(_whole(document["instances"]), _whole(document["threads"]))
        texts = [document[name] for name in ("layout_reason", "ended", "measured_at")]
        if any(not isinstance(text, str) or len(text) > 1000 for text in texts):
            raise ValueError("texts must be short")
        return cls(layout, texts[0], Measured(points, texts[1]), texts[2])

    def after_check(self, found: str) -> Profile:
        return replace(self, reused=found)


def _point(size: object, seconds: object, spread: object, runs: object) -> Point:
    if not isinstance(seconds, int | float) or not isinstance(spread, int | float):
        raise TypeError("times are numbers")
    if not 0 < seconds < 1e6 or not 0 <= spread < 1e6:
        raise ValueError("times are above 0")
    return Point(_whole(size), float(seconds), float(spread), _whole(runs))


def _whole(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 1 << 20:
        raise ValueError("counts are whole numbers above 0")
    return value


def best_piece(curve: BatchCurve) -> int:
    """The size in which a large batch is run: the whole, unless pieces are clearly cheaper per image."""
    whole = curve.max_batch
    piece = min((size for size, _ in curve.points), key=lambda size: curve.times[size] / size)
    cheaper = curve.times[piece] / piece < _WORTH_IT * curve.times[whole] / whole
    return piece if cheaper else whole


def choices(
    profile: Profile, curve: BatchCurve, piece: int, slo: float | None, measured_with: str = ""
) -> tuple[str, ...]:
    """What was chosen and why, a sentence each."""
    said = []
    if profile.layout_reason:
        said.append(f"{profile.layout}: {profile.layout_reason}.")
    if profile.points:
        sizes = ", ".join(str(point.size) for point in profile.points)
        why = f"; no larger ones, since {profile.measured.ended}" if profile.measured.ended else ""
        how = f", {measured_with}" if measured_with else ""
        said.append(f"Measured and warm: batches of {sizes}{how}{why}.")
    if slo is not None:
        said += _promised(curve, slo, profile.layout.instances)
    elif profile.points:
        knee = shape_of(curve.points).knee
        said.append(f"A batch of {knee} has nine tenths of the best rate; nothing is promised.")
    if piece < curve.max_batch:
        saved = 1 - curve.times[piece] / piece / (curve.times[curve.max_batch] / curve.max_batch)
        said.append(f"Large batches run in pieces of {piece}: {saved:.0%} less time for each image.")
    if profile.reused:
        said.append(profile.reused)
    return tuple(said)


def _promised(curve: BatchCurve, slo: float, instances: int) -> list[str]:
    promise = f"{slo * 1e3:g} ms"
    largest = max(1, curve.fits(slo))
    if largest < curve.max_batch:
        first = f"a batch of {largest + 1} would take {numeral(curve.times[largest + 1] * 1e3)} ms"
        said = [
            f"Largest batch {largest} of {curve.max_batch}: {first}, longer than the promise of {promise}."
        ]
    else:
        said = [
            f"Largest batch {largest}: it takes {numeral(curve.times[largest] * 1e3)} ms, within {promise}."
        ]
    batch = promised_batch(curve, slo)
    if not batch:
        said.append(
            f"Nothing is sure: one image takes {numeral(curve.times[1] * 1e3)} ms, and who arrives just "
            "after another began would need twice that; "
            f"{numeral(LEAST * curve.times[1] * 1e3)} ms could be promised."
        )
        return said
    rate = slo_capacity(curve, slo, instances)
    said.append(
        f"Under load batches near {batch}: two of {numeral(curve.times[batch] * 1e3)} ms fit into {promise}, "
        f"the one that runs and one's own; that carries {numeral(rate)} images/s."
    )
    return said
