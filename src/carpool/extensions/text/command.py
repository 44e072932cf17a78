"""Adds models that write token by token to `carpool simulate` and `carpool profile`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from math import inf
from typing import TYPE_CHECKING, Any

from carpool.cli import show
from carpool.cli import verb_options as o
from carpool.cli.profile_command import ProfileVerb, shown_ms
from carpool.cli.simulate_command import Mode, Simulate, traffic_of
from carpool.core.curve import BatchCurve, CurveError
from carpool.core.numerals import numeral
from carpool.errors import InvalidInput
from carpool.extensions.text.settings import MAX_POOL

if TYPE_CHECKING:
    from carpool.config.repository import ModelSource
    from carpool.extensions.text.generation_simulation import TextReport, TextScenario
    from carpool.extensions.text.text_job import TextPromise
    from carpool.extensions.text.text_profile import PartRow, TextProfileReport
    from carpool.lab.batch_profile import ProfileQuestion
    from carpool.sim.arrivals import Traffic

_PANEL = "Models that write text"  # of the help
_MOST_TOKENS = 100_000
_MOST_IN_ALL = 50_000_000  # tokens in one run: some minutes
_GOES_WITH_TEXT = ("model", "name", "repeats", "as_json")  # options of profile


@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """Defines the options of a model that writes text: an encoder, and a decoder that is stepped."""

    encoder: str = o.option("", "Times to encode a batch of images: 0.6+0.05, as --curve.", _PANEL)
    step_curve: str = o.option(
        "", "Times of a step that adds one token to each of n responses: 0.3+0.0015, as --curve.", _PANEL
    )
    tokens: str = o.option(
        "",
        "Tokens per response: lognormal:22,0.5 (mean, sigma), geometric:22 or fixed:22.",
        _PANEL,
    )
    slots: int = o.option(64, "Slots: responses that are written at the same time.", _PANEL)
    max_tokens: int | None = o.option(
        None, "Most tokens of a response. Default: eight times the mean.", _PANEL
    )
    ttft_ms: float | None = o.option(None, "SLO of the first token, in ms.", _PANEL)
    per_token_ms: float | None = o.option(None, "SLO from token to token, in ms.", _PANEL)
    encoder_instances: int | None = o.option(
        None, "Number of encoders on devices of their own. Default: one device does both.", _PANEL
    )
    decoder_instances: int | None = o.option(
        None, "Number of decoders apart from the encoders, each with all slots.", _PANEL
    )

    @property
    def writes(self) -> bool:
        given = {"--encoder": self.encoder, "--step-curve": self.step_curve, "--tokens": self.tokens}
        if not any(given.values()):
            for one in fields(GenerationOptions):
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
        from carpool.extensions.text.generation_simulation import TextScenario, TokenLengths
        from carpool.extensions.text.text_job import TextPromise

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


@dataclass(frozen=True, kw_only=True)
class SimulateText(GenerationOptions, Simulate):
    """A reader that writes token by token, compared with static batches:

    carpool simulate --encoder 0.6+0.05 --step-curve 0.3+0.0015 --tokens lognormal:22,0.5 --ttft-ms 20
    """

    def run(self) -> None:
        if not self.writes:
            super().run()
            return
        others = ("curve", "step", "one_device", "buckets", "max_batch", "replicas", "latest", "per_source")
        given = {name: getattr(self, name) for name in (*others, "under_load", "compare", "plot", "model")}
        self.check_generation(**given, mode=self.mode is Mode.knobs, instances=self.instances != 1)
        if self.rate is not None and self.load is not None:
            raise InvalidInput("--load and --rate both set the traffic: give one of them")
        scenario = self.text_scenario(
            self.slo_ms,
            traffic_of(self),
            seconds=o.number("--seconds", 10.0 if self.seconds is None else self.seconds, above=0, most=1e6),
            seed=self.seed,
            seeds=o.whole("--seeds", self.seeds, least=1, most=100),
            noise=o.number("--noise", self.noise, most=2),
            stall_share=o.number("--stall-share", self.stall_share, most=1),
            stall_factor=o.number("--stall-factor", self.stall_factor, least=1, most=1000),
        )
        rate = scenario.traffic.own_rate
        if rate is None and self.rate is not None:
            rate = o.number("--rate", self.rate, above=0)
        simulate_generation(self, scenario, rate, self.load, as_json=self.as_json)


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
    options: GenerationOptions,
    scenario: TextScenario,
    rate: float | None,
    load: float | None,
    *,
    as_json: bool,
) -> None:
    """Compares slots with static batches of as many, both at this rate, or at this load of what slots can
    carry."""
    from carpool.extensions.text.generation_simulation import measure_text, saturated

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
        settings = {field.name: getattr(options, field.name) for field in fields(GenerationOptions)}
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


@dataclass(frozen=True, kw_only=True)
class ProfileText(ProfileVerb):
    """Times of the first token and between tokens, for a model that writes text:

    carpool profile models/reader
    """

    def measure(self, source: ModelSource, question: ProfileQuestion) -> None:
        if not source.config.asks("text"):
            super().measure(source, question)
            return
        from carpool.extensions.text.text_profile import profile_text

        name = source.config.name
        self.check_given(
            _GOES_WITH_TEXT, f"is for models that answer with one response, but {name} writes text"
        )
        with show.status("reading the model") as tell:
            report = profile_text(source, question.repeats, tell)
        self.show_report(report, _print_text)

    def print_document(self, document: dict[str, Any]) -> None:
        if "step" in document:
            _print_text_document(document)
        else:
            super().print_document(document)


_PARTS = (("pictures", "encoder", "pictures/s"), ("slots", "step", "tokens/s"))


def _print_text(report: TextProfileReport) -> None:
    apart = f"encoders apart: {report.encoders}, decoders: {report.decoders}, " if report.encoders else ""
    show.paragraph(
        f"{report.model} on {report.backend}, {apart}{report.slots} slots; {report.hardware}. Writes up to "
        f"{report.max_tokens} tokens."
    )

    def rows(found: tuple[PartRow, ...]) -> list[tuple[str, ...]]:
        return [
            (f"{row.size}", shown_ms(row.ms), show.percent(row.spread), f"{row.runs}", numeral(row.per_s))
            for row in found
        ]

    for (what, name, rate), found in zip(_PARTS, (report.encoder, report.step), strict=True):
        show.table((what, name, "spread", "runs", rate), rows(found))
        show.paragraph("")
    show.table(
        ("answers at once", "encoded together", "per_token_ms", "ttft_ms", "tokens/s"),
        [
            (
                f"{budget.slots}",
                f"{budget.encoded}",
                numeral(budget.per_token_ms),
                numeral(budget.ttft_ms),
                numeral(budget.tokens_per_s),
            )
            for budget in report.budgets
        ],
    )
    show.paragraph("")
    for note in report.notes:
        show.paragraph(note, "· ")
    print(f"· For simulate: --encoder {report.encoder_curve} --step-curve {report.step_curve}")


def _print_text_document(document: dict[str, Any]) -> None:
    promised = [f"{key} = {document[key]:g}" for key in ("ttft_ms", "per_token_ms") if document[key]]
    show.paragraph(
        f"{document['name']} version {document['version']}: {', '.join(promised) or 'no SLO'}, "
        f"{document['slots']} slots, up to {document['max_tokens']} tokens."
    )
    for (what, name, rate), curve in zip(_PARTS, (document["encoder"], document["step"]), strict=True):
        rows = [(f"{size}", shown_ms(ms), numeral(1e3 * size / ms)) for size, ms in curve]
        show.table((what, name, rate), rows)
        show.paragraph("")
    for note in map(str, document["choices"]):
        show.paragraph(note, "· ")
    curves = (",".join(f"{size}:{ms:.4g}" for size, ms in document[part]) for part in ("encoder", "step"))
    print(f"· For simulate: --encoder {next(curves)} --step-curve {next(curves)}")
