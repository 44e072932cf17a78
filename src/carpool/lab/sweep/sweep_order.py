"""What a sweep measures, and in which order: every setting at every rate, as often as asked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from random import Random

PROMISE, KNOBS, AS_IS = "promise", "knobs", "as it is"


@dataclass(frozen=True, slots=True)
class Setting:
    """How a server batches. One that runs already is taken as it is, and then the rest may be unknown."""

    kind: str
    slo_ms: float | None = None
    max_delay_ms: float | None = None
    max_batch: int | None = None

    @property
    def name(self) -> str:
        """For people, and different for any two settings of a sweep."""
        if self.kind == PROMISE:
            return f"promise {self.slo_ms:g} ms"
        if self.kind == KNOBS:
            batch = "" if self.max_batch is None else f", batch {self.max_batch}"
            return f"knobs {self.max_delay_ms:g} ms{batch}"
        return self.kind


@dataclass(frozen=True, slots=True)
class Point:
    """One run: a setting at a rate, in requests per second. `load` is the rate over the planned capacity."""

    setting: str
    rate: float
    repeat: int
    load: float | None = None

    @property
    def key(self) -> tuple[str, float, int]:
        return self.setting, self.rate, self.repeat

    @property
    def seed(self) -> int:
        """The same arrivals for every setting, so that only the setting differs; others in every repeat."""
        return self.repeat + 1


def settings_of(
    mode: str, slo_ms: float, delays_ms: Sequence[float], max_batches: Sequence[int]
) -> list[Setting]:
    """The promise, the knobs (every delay with every largest batch), or both."""
    found = [Setting(PROMISE, slo_ms=slo_ms)] if mode in (PROMISE, "both") else []
    if mode in (KNOBS, "both"):
        batches: Sequence[int | None] = max_batches or (None,)
        found += [Setting(KNOBS, None, delay, batch) for delay, batch in product(delays_ms, batches)]
    return found


def points(
    settings: Sequence[str], rates: Sequence[tuple[float, float | None]], repeats: int, seed: int
) -> Iterator[Point]:
    """Rates in a shuffled order, and at each rate the settings right after one another, beginning with
    another one every time: a noisy minute then hits all settings alike, and no rate always comes last."""
    random = Random(seed)
    turn = 0
    for repeat in range(repeats):
        for rate, load in random.sample(list(rates), len(rates)):
            for number in range(len(settings)):
                yield Point(settings[(number + turn) % len(settings)], rate, repeat, load)
            turn += 1
