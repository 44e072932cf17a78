"""Models that write text, as the targets know them: what they write, and what is promised."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from carpool.core.curve import BatchCurve
from carpool.extensions.text.generation_simulation import TextScenario, TokenLengths, measure_text, saturated
from carpool.extensions.text.text_job import TextPromise


@dataclass(frozen=True)
class TextCase:
    """`gain` is how many times static batches' throughput, `first` the share of their p99 to the first token
    at 0.9 of their capacity."""

    tokens: str
    max_tokens: int
    ttft: float
    gain: float
    first: float

    def scenario(self, slots: int, seed: int, **more: float) -> TextScenario:
        return TextScenario(
            BatchCurve.parse("0.6+0.05", 64),
            BatchCurve.parse("0.3+0.0015", slots),
            TokenLengths.parse(self.tokens),
            TextPromise(slots, self.max_tokens, self.ttft, 0.005),
            seed=seed,
            **more,  # type: ignore[arg-type]
        )

    @cache  # noqa: B019 - there are three of them, and several tests ask each for the same
    def carried(self, slots: int, seed: int, *, static: bool = False) -> float:
        return saturated(self.scenario(slots, seed), static=static)

    def gained(self, slots: int, seed: int) -> float:
        return self.carried(slots, seed) / self.carried(slots, seed, static=True)

    def first_token(self, slots: int, seed: int, requests: int) -> float:
        """Of static batches' p99, at nine tenths of what those carry."""
        scenario = self.scenario(slots, seed)
        rate = 0.9 * self.carried(slots, seed, static=True)
        scenario = replace(scenario, rate=rate, seconds=requests / rate)
        return measure_text(scenario).first_p99_ms / measure_text(scenario, static=True).first_p99_ms

    def apart(self, slots: int, seed: int, requests: int) -> float:
        """First token's p99 with an encoder apart, of that with one device for both, at 0.9 of what this
        carries."""
        scenario = self.scenario(slots, seed)
        rate = 0.9 * self.carried(slots, seed)
        scenario = replace(scenario, rate=rate, seconds=requests / rate)
        apart = replace(scenario, promise=replace(scenario.promise, encoders=1))
        return measure_text(apart).first_p99_ms / measure_text(scenario).first_p99_ms

    def overloaded(self, slots: int, seed: int, requests: int) -> float:
        """Within the promise at 1.5 times the load, of what can be carried when nothing is promised."""
        scenario = self.scenario(slots, seed)
        most = self.carried(slots, seed)
        scenario = replace(scenario, rate=1.5 * most, seconds=requests / (1.5 * most))
        return measure_text(scenario).goodput_rps / most


TEXTS = {
    "captions": TextCase("lognormal:16,0.2", 64, 0.02, 1.05, 0.4),
    "lines": TextCase("lognormal:22,0.5", 128, 0.02, 1.8, 1 / 3),
    "pages": TextCase("lognormal:180,0.6", 1024, 0.1, 2.8, 1 / 3),
}
SLOTS = 64
