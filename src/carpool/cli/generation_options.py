"""Reads what `simulate` asks about a model that writes its answer token by token, and shows what it found."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from math import inf
from typing import TYPE_CHECKING

from carpool.cli import show
from carpool.cli import verb_options as o
from carpool.core.curve import BatchCurve, CurveError
from carpool.errors import InvalidInput
from carpool.extensions.text.settings import MAX_POOL

if TYPE_CHECKING:
    from carpool.extensions.text.text_job import TextPromise
    from carpool.sim.arrivals import Traffic
    from carpool.sim.generation_simulation import TextReport, TextScenario

_MOST_TOKENS = 100_000
_MOST_IN_ALL = 50_000_000  # tokens in one run: some minutes


@dataclass(frozen=True, kw_only=True)
class HasGeneration:
    """Defines a verb that may be about a model that writes text: an encoder, and a decoder that is
    stepped."""

    encoder: str = o.option("", "Times to encode a batch of images: 0.6+0.05, as --curve.", o.TEXT)
    step_curve: str = o.option(
        "", "Times of a step that adds one token to each of n responses: 0.3+0.0015, as --curve.", o.TEXT
    )
    tokens: str = o.option(
        "",
        "Tokens per response: lognormal:22,0.5 (mean, sigma), geometric:22 or fixed:22.",
        o.TEXT,
    )
    slots: int = o.option(64, "Slots: responses that are written at the same time.", o.TEXT)
    max_tokens: int | None = o.option(
        None, "Most tokens of a response. Default: eight times the mean.", o.TEXT
    )
    ttft_ms: float | None = o.option(None, "SLO of the first token, in ms.", o.TEXT)
    per_token_ms: float | None = o.option(None, "SLO from token to token, in ms.", o.TEXT)
    encoder_instances: int | None = o.option(
        None, "Number of encoders on devices of their own. Default: one device does both.", o.TEXT
    )
    decoder_instances: int | None = o.option(
        None, "Number of decoders apart from the encoders, each with all slots.", o.TEXT
    )

    @property
    def writes(self) -> bool:
        given = {"--encoder": self.encoder, "--step-curve": self.step_curve, "--tokens": self.tokens}
        if not any(given.values()):
            for one in fields(HasGeneration):
                if getattr(self, one.name) != one.default:
                    name = one.name.replace("_", "-")
                    raise InvalidInput(f"--{name} is for models that write text: give {', '.join(given)}")
            return False
        for option, value in given.items():
            if not value:
                raise InvalidInput(f"Missing option '{option}': {', '.join(given)} belong together")
        return True

    def check_generation(self, **others: object) -> None:
        for name, given in others.items():
            if given:
                raise InvalidInput(
                    f"--{name.replace('_', '-')} is for models with one response: leave out --encoder"
                )

    def text_scenario(self, slo_ms: float, traffic: Traffic, **run: float) -> TextScenario:
        """Returns the scenario at a rate of 1; in seconds."""
        from carpool.extensions.text.text_job import TextPromise
        from carpool.sim.generation_simulation import TextScenario, TokenLengths

        slots = o.whole("--slots", self.slots, least=1, most=o.MOST_IN_A_BATCH)
        encoder = self._curve("--encoder", self.encoder, None)
        step = self._curve("--step-curve", self.step_curve, slots)
        with o.blamed_on("--tokens"):
            lengths = TokenLengths.parse(self.tokens)
        longest = min(_MOST_TOKENS, round(8 * lengths.mean)) if self.max_tokens is None else self.max_tokens
        promise = TextPromise(
            slots,
            o.whole("--max-tokens", longest, least=1, most=_MOST_TOKENS),
            ttft=_seconds("--ttft-ms", self.ttft_ms),
            per_token=_seconds("--per-token-ms", self.per_token_ms),
            slo=_seconds("--slo-ms", None if slo_ms == inf else slo_ms),
            encoders=self._instances("--encoder-instances", self.encoder_instances) if self._apart else 0,
            decoders=self._instances("--decoder-instances", self.decoder_instances),
        )
        alone = encoder.times[1] + step.times[1]
        if promise.ttft < alone:
            raise InvalidInput(
                f"--ttft-ms {self.ttft_ms:g} is below the {alone * 1e3:g} ms that one image and one step "
                f"take: give at least {2e3 * alone:g}"
            )
        if promise.per_token < step.times[1]:
            raise InvalidInput(
                f"--per-token-ms {self.per_token_ms:g} is below the {step.times[1] * 1e3:g} ms of one step"
            )
        return TextScenario(encoder, step, lengths, promise, traffic=traffic, **run)  # type: ignore[arg-type]

    @property
    def _apart(self) -> bool:
        return not (self.encoder_instances is None and self.decoder_instances is None)

    def _instances(self, option: str, given: int | None) -> int:
        return o.whole(option, 1 if given is None else given, least=1, most=MAX_POOL)

    def _curve(self, option: str, text: str, largest: int | None) -> BatchCurve:
        try:
            return BatchCurve.parse(text, largest)
        except CurveError as error:
            raise InvalidInput(f"{option}: {error}") from None


def _slots(promise: TextPromise) -> str:
    if not promise.apart:
        return f"{promise.slots} slots"
    decoders = f"{promise.decoders} of {promise.slots} slots"
    return f"encoders apart: {promise.encoders}, decoders: {decoders}"


def _seconds(option: str, ms: float | None) -> float:
    return inf if ms is None else o.number(option, ms, above=0, most=1e7) / 1e3


_ROWS: tuple[tuple[str, Callable[[TextReport], str]], ...] = (
    ("offered", lambda r: f"{r.offered_rps:,.1f} /s"),
    ("answered", lambda r: f"{r.answered_rps:,.1f} /s"),
    ("… within the SLO (goodput)", lambda r: f"{r.goodput_rps:,.1f} /s"),
    ("… of offered (attainment)", lambda r: show.percent(r.attainment)),
    ("first token, p50", lambda r: f"{r.first_p50_ms:,.1f} ms"),
    ("first token, p99", lambda r: f"{r.first_p99_ms:,.1f} ms"),
    ("token to token, p50", lambda r: f"{r.interval_p50_ms:,.2f} ms"),
    ("token to token, p99", lambda r: f"{r.interval_p99_ms:,.2f} ms"),
    ("longest gap of a response, p99", lambda r: f"{r.gap_p99_ms:,.2f} ms"),
    ("whole answer, p50", lambda r: f"{r.done_p50_ms:,.1f} ms"),
    ("whole answer, p99", lambda r: f"{r.done_p99_ms:,.1f} ms"),
    ("tokens", lambda r: f"{r.tokens_per_s:,.0f} /s"),
    ("images encoded together", lambda r: f"{r.encode_batch:.1f}"),
    ("slots of a step", lambda r: f"{r.step_width:.1f}"),
    ("… of which in use", lambda r: show.percent(r.width_used)),
)


def simulate_generation(
    options: HasGeneration, scenario: TextScenario, rate: float | None, load: float | None, *, as_json: bool
) -> None:
    """Compares slots with static batches of as many, both at this rate, or at this load of what slots can
    carry."""
    from carpool.sim.generation_simulation import measure_text, saturated

    with show.steps("simulating", 4) as step:
        static = saturated(scenario, static=True)
        step()
        capacity = saturated(scenario)
        step()
        if rate is None:
            rate = capacity * o.number("--load", 1.0 if load is None else load, above=0, most=1000)
        if rate * scenario.seconds * scenario.lengths.mean > _MOST_IN_ALL:
            most = _MOST_IN_ALL / rate / scenario.lengths.mean
            raise InvalidInput(
                f"--seconds: that is more than {_MOST_IN_ALL:,} tokens: give at most {most:.3g}"
            )
        scenario = replace(scenario, rate=rate)
        results = {"slots": measure_text(scenario)}
        step()
        results["static batches"] = measure_text(scenario, static=True)
        step()
    capacities = {"capacity_rps": capacity, "static_capacity_rps": static, "gain": capacity / static}
    if as_json:
        settings = {field.name: getattr(options, field.name) for field in fields(HasGeneration)}
        settings |= {"rate_rps": rate, "load": rate / capacity, "seconds": scenario.seconds}
        settings |= {name: getattr(scenario, name) for name in ("seed", "seeds", "noise")}
        found = {name: round(value, 6) for name, value in capacities.items()}
        print(
            json.dumps(
                {
                    "mode": "generation",
                    **found,
                    "slots": results["slots"].as_json(),
                    "static": results["static batches"].as_json(),
                    "settings": settings,
                },
                indent=2,
            )
        )
        return
    show.paragraph(
        f"Encoder {options.encoder} ms, step {options.step_curve} ms, {options.tokens} tokens, "
        f"{_slots(scenario.promise)}: {capacity:,.0f} responses/s, in static batches {static:,.0f}/s "
        f"({capacity / static:.2f}×)."
    )
    show.paragraph(
        f"Arrivals: {scenario.traffic.name}, {rate:,.6g}/s ({rate / capacity:.3g}×), "
        f"{scenario.seconds:.4g} s. Static batches reject no request, and wait for their "
        f"slowest{', all on one device' if scenario.promise.apart else ''}."
    )
    rows = [(label, *map(of, results.values())) for label, of in _ROWS]
    show.table(("", *results), rows, left=("",))
