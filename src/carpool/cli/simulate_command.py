"""Implements `carpool simulate`: the real scheduler in virtual time."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from carpool.cli import shared_options as shared
from carpool.cli import show
from carpool.cli import verb_options as o
from carpool.cli.day_options import HasDay
from carpool.cli.fleet_options import simulate_fleet
from carpool.errors import InvalidInput

if TYPE_CHECKING:
    from carpool.core.curve import BatchCurve
    from carpool.core.objectives import FixedBatching
    from carpool.sim.arrivals import Traffic
    from carpool.sim.simulation import Outcome, Scenario
    from carpool.sim.step_simulation import StepPlan, UnderLoad

_SECONDS = 60.0
_MOST_REQUESTS = 5_000_000  # in one run: a minute or two, and some GB
_FIXED = "Fixed batching settings"
_SETTINGS = ("seconds", "seed", "seeds", "noise", "stall_share", "stall_factor", "profile_error")
_TRAFFIC_SETTINGS: dict[str, tuple[str, ...]] = {
    "bursty": ("burst_factor", "burst_seconds", "burst_period"),
    "cameras": ("cameras", "fps", "aligned", "per_source", "latest"),
}
_FIXED_SETTINGS = ("max_delay_ms", "preferred", "max_queue", "queue_timeout_ms", "timeout_action")
Mode = StrEnum("Mode", ["promise", "knobs"])
Timeout = StrEnum("Timeout", ["reject", "delay"])
Overload = StrEnum("Overload", ["quick", "refuse"])


@dataclass(frozen=True, kw_only=True)
class Simulate(shared.HasCurve, shared.HasTraffic, HasDay):
    """Simulate traffic in virtual time, with the server's own scheduler.

    Three times the capacity within the SLO, compared with other ways of batching:

        carpool simulate --curve 4+1 --slo-ms 50 --load 3 --compare

    A hundred cameras, with measured batch times:

        carpool simulate --curve 1:8,8:12,32:22,64:35,128:60 --slo-ms 100 --arrivals cameras --cameras 100

    A detector, then a classifier for each of the 4.2 objects found on average, within one SLO:

        carpool simulate --step 4+1 --step 3+0.22@4.2 --slo-ms 100 --load 3 --compare

    A cascade: a large model gets the 30 % that a cheap one is not sure of, if there is time:

        carpool simulate --step 2+0.3 --step 6+2@0.3 --one-device --under-load quick --slo-ms 100 --load 3

    Arrivals recorded by carpool serve --record FILE, on two instances:

        carpool simulate --curve 16+4 --slo-ms 200 --arrivals trace:FILE --instances 2

    Four servers behind a balancer that retries rejections elsewhere; one runs at half speed:

        carpool simulate --curve 4+1 --slo-ms 50 --load 0.7 --replicas 4 --retries 1 --slow 1:2.0

    A day of a million cameras, with a surge, a lost region and a broken rollout at once:

        carpool simulate --curve 4+1 --slo-ms 50 --rate 1000000 --replicas 400 --autoscale load:0.75 \
            --max-replicas 2400 --day surge:1.3@12:00+20 --day lose:0.33@12:05+30 --day rollout:0.1@12:10+10
    """

    slo_ms: float = o.option(
        inf, "The SLO: largest latency of a response, in ms.", o.MODEL, show_default=False
    )
    instances: int = o.option(1, "Number of devices that share one queue.", o.MODEL)
    under_load: Overload | None = o.option(
        None,
        "Make the two steps a cascade: the second gets a share of the requests. If it has no time, `quick` "
        "answers with the first, `refuse` rejects.",
        o.MODEL,
    )
    load: float | None = o.option(
        None,
        "Traffic as a multiple of the SLO capacity: max B/t(B) with 2·t(B) ≤ SLO. Default: 1.",
        o.TRAFFIC,
    )
    rate: float | None = o.option(None, "Traffic in images per second, instead of --load.", o.TRAFFIC)
    arrivals: str = o.option(
        "poisson",
        "poisson, bursty, cameras, or trace:FILE (JSON lines: time, if known model, images, source).",
        o.TRAFFIC,
    )
    model: str = o.option(
        "", "trace: the model whose arrivals are used, if the trace has several.", o.TRAFFIC
    )
    per_source: bool = o.option(
        False,
        "Give each camera, or each source of a trace, a fair share. Default: they are one source.",
        o.TRAFFIC,
    )
    latest: bool = o.option(
        False,
        "A newer frame replaces a waiting one of the same source. Each camera is a source.",
        o.TRAFFIC,
    )
    mode: Mode = o.option(
        Mode.promise, "How batches are formed: by the SLO, or by Triton's fixed settings.", _FIXED
    )
    max_delay_ms: float = o.option(5.0, "Longest wait for a larger batch, in ms; 0 runs at once.", _FIXED)
    preferred: str | None = o.option(None, "Preferred batch sizes, like 4,8.", _FIXED)
    max_queue: int = o.option(0, "Most requests that may wait; 0 is no limit.", _FIXED)
    queue_timeout_ms: float = o.option(0.0, "Longest wait of a request, in ms; 0 is no limit.", _FIXED)
    timeout_action: Timeout = o.option(
        Timeout.reject, "What happens after the queue timeout: reject, or delay behind the others.", _FIXED
    )
    noise: o.Noise = 0.05
    stall_share: float = o.option(0.002, "Share of batches that stall.", o.DEVICE)
    stall_factor: float = o.option(
        2.0, "Duration of a stalled batch, as a multiple of its usual time.", o.DEVICE
    )
    profile_error: float = o.option(
        1.0, "Duration of batches as a multiple of --curve; 1.3 means 30 % slower.", o.DEVICE
    )
    seconds: float | None = o.option(
        None, "Simulated time, in seconds. Default: 60, or the whole trace.", o.RUN
    )
    seed: o.Seed = 1
    seeds: int = o.option(1, "Number of seeds to average over.", o.RUN)
    compare: bool = o.option(
        False, "Compare the SLO with these fixed settings, eager batching and batch 1.", o.RUN
    )
    plot: Path | None = o.option(
        None,
        "Plot goodput and latency over 0.1–3× load; with --compare, for all four.",
        o.RUN,
        metavar="FILE.png",
    )
    as_json: o.Json = False

    def run(self) -> None:
        from carpool.sim.simulation import LOADS, contenders, measure, sweep

        if self.slo_ms == inf:
            raise InvalidInput("Missing option '--slo-ms': the SLO, in ms")
        shared.drawing(self.plot)
        fixed = self.mode is Mode.knobs
        self.check_fleet(step=self.step, latest=self.latest, compare=self.compare, plot=self.plot, mode=fixed)
        if self.day:
            self._day()
            return
        scenario = _scenario(self)
        if self.replicas is not None:
            simulate_fleet(self, scenario, _settings(self, scenario), as_json=self.as_json)
            return
        entries = contenders(scenario, _fixed(self, scenario.curve))
        if not self.compare:
            entries = {self.mode.value: entries[self.mode.value]}
        with show.steps("simulating", len(entries) * scenario.seeds) as step:
            results = {name: measure(entry, step) for name, entry in entries.items()}
        notes = _notes(self, scenario)
        if self.plot is not None:
            from carpool.lab.plots import operating_curve

            with show.steps("drawing", len(entries) * len(LOADS)) as step:
                sweeps = {name: sweep(entry, on_step=step) for name, entry in entries.items()}
            with o.blamed_on("--plot"):
                operating_curve(self.plot, sweeps, slo_ms=self.slo_ms, title=f"{_what(self)} ms")
            notes.append(f"Goodput and latency over load are plotted in {self.plot}.")
        if self.as_json:
            found: dict[str, object] = {"mode": self.mode.value, **results[self.mode.value].as_json()}
            if self.compare:
                found["compare"] = {name: result.as_json() for name, result in results.items()}
            found |= {"settings": _settings(self, scenario), "notes": notes}
            print(json.dumps(found, indent=2))
            return
        _print(self, scenario, results)
        for note in notes:
            show.paragraph(note, "· ")

    def _day(self) -> None:
        """Nothing of it is played request by request, so that it may be as long and as much as it is."""
        others = ("slow", "lose", "retries", "seconds", "model", "per_source", "load")
        for name in (*others, *(("arrivals",) if self.arrivals != "poisson" else ())):
            if getattr(self, name):
                raise InvalidInput(f"--{name.replace('_', '-')} is not known of a day, which is in rates")
        if self.replicas is None or self.rate is None:
            raise InvalidInput("--day needs --replicas, the smallest number, and --rate, that of noon")
        one = _scenario(replace(self, rate=1.0, day=None, replicas=None))
        rate = o.number("--rate", self.rate, above=0, most=1e12)
        self.simulate_day(replace(one, rate=rate), as_json=self.as_json)


# ---- from the options to a scenario


def _scenario(options: Simulate) -> Scenario:
    """Returns the scenario with batching by SLO; `contenders` have the fixed settings."""
    from carpool.core.objectives import Promise
    from carpool.sim.arrivals import Recording
    from carpool.sim.simulation import Scenario

    curve, steps = options.curve_and_steps()
    slo = shared.slo(options.slo_ms, curve, steps)
    if steps and options.latest:
        raise InvalidInput("--latest is for one model: it cannot be given with --step")
    traffic = traffic_of(options)
    if options.seconds is not None:
        seconds = o.number("--seconds", options.seconds, above=0, most=1e6)
    else:  # a hair more than its span, so that the last arrival of a trace is played too
        seconds = traffic.span * (1 + 1e-9) if isinstance(traffic, Recording) else _SECONDS
    scenario = Scenario(
        curve,
        slo,
        Promise(slo, curve.max_batch),
        rate=1.0,
        traffic=traffic,
        instances=o.whole("--instances", options.instances, least=1, most=256),
        seconds=seconds,
        seed=options.seed,
        seeds=o.whole("--seeds", options.seeds, least=1, most=100),
        noise=o.number("--noise", options.noise, most=2),
        stall_share=o.number("--stall-share", options.stall_share, most=1),
        stall_factor=o.number("--stall-factor", options.stall_factor, least=1, most=1000),
        profile_error=o.number("--profile-error", options.profile_error, least=0.1, most=10),
        latest=options.latest,
        steps=steps,
        shared=options.one_device,
        under_load=_under_load(options, steps),
    )
    scenario = replace(scenario, rate=_mean_rate(options, scenario))
    if not scenario.rate * seconds <= _MOST_REQUESTS:
        raise InvalidInput(
            f"--seconds {seconds:g} at {scenario.rate:,.9g} images/s is more than the {_MOST_REQUESTS:,} "
            f"requests that one run may have: give at most {_MOST_REQUESTS / scenario.rate:.3g}"
        )
    return scenario


def _under_load(options: Simulate, steps: tuple[StepPlan, ...]) -> UnderLoad | None:
    from carpool.sim.step_simulation import is_cascade

    if options.under_load is None:
        return None
    if not is_cascade(steps):
        raise InvalidInput(
            "--under-load is for a cascade: two --step, of which the second gets a share of the requests, "
            "like --step 2+0.3 --step 6+2@0.3"
        )
    return "quick" if options.under_load is Overload.quick else "refuse"


def _fixed(options: Simulate, curve: BatchCurve) -> FixedBatching:
    from carpool.core.objectives import FixedBatching, QueueLimits, TimeoutAction

    limits = QueueLimits(
        max_size=o.whole("--max-queue", options.max_queue, least=0, most=10**6),
        timeout=o.number("--queue-timeout-ms", options.queue_timeout_ms, most=1e7) / 1e3,
        action=TimeoutAction(options.timeout_action.value),
    )
    preferred = shared.sizes("--preferred", options.preferred, most=curve.max_batch)
    delay = o.number("--max-delay-ms", options.max_delay_ms, most=1e7) / 1e3
    return FixedBatching(curve.max_batch, preferred=preferred, max_delay=delay, limits=limits)


def _mean_rate(options: Simulate, scenario: Scenario) -> float:
    asked = {"--load": options.load, "--rate": options.rate}
    given = [option for option, value in asked.items() if value is not None]
    own = scenario.traffic.own_rate
    if own is not None:
        if given:
            raise InvalidInput(f"{given[0]} cannot be given with {options.arrivals}, which sets its own rate")
        return own
    if len(given) == 2:
        raise InvalidInput("--load and --rate both set the traffic: give one of them")
    if options.rate is not None:
        return o.number("--rate", options.rate, above=0)
    if not scenario.capacity:
        more = "more" if scenario.steps else f"{2e3 * scenario.curve.times[1]:g} or more"
        raise InvalidInput(
            f"--load needs a capacity to multiply, and no batch meets an SLO of {options.slo_ms:g} ms: "
            f"give --slo-ms {more}, or give --rate instead"
        )
    load = o.number("--load", 1.0 if options.load is None else options.load, above=0, most=1000)
    return load * scenario.capacity * (options.replicas or 1)


def traffic_of(options: Simulate) -> Traffic:
    from carpool.sim.arrivals import Poisson, Recording

    if options.latest and options.arrivals in ("poisson", "bursty"):
        raise InvalidInput("--latest needs sources: give --arrivals cameras or a trace that names them")
    if options.model and not options.arrivals.startswith("trace:"):
        raise InvalidInput("--model chooses among the models of a trace: give --arrivals trace:FILE")
    per_source = options.per_source or options.latest
    read = partial(Recording.read, per_source=per_source, model=options.model)
    return options.traffic({"poisson": Poisson()}, read, per_source=per_source)


# ---- what programs and people see


def _settings(options: Simulate, scenario: Scenario) -> dict[str, object]:
    """Returns everything that the numbers depend on, with the defaults filled in."""
    used: dict[str, object] = {
        "curve": options.curve,
        "slo_ms": options.slo_ms,
        "max_batch": scenario.curve.max_batch,
        "buckets": list(scenario.curve.buckets),
        "instances": scenario.instances,
        "arrivals": scenario.traffic.name,
        "rate_rps": scenario.rate,
        "load": scenario.rate / scenario.capacity if scenario.capacity else None,
        **{name: getattr(scenario, name) for name in _SETTINGS},
    }
    if options.model:
        used["model"] = options.model
    if scenario.steps:
        del used["curve"], used["max_batch"], used["buckets"]
        used |= {"steps": options.step, "one_device": options.one_device}
        used |= {} if options.under_load is None else {"under_load": options.under_load.value}
    names = _TRAFFIC_SETTINGS.get(scenario.traffic.name, ())
    if options.compare or options.mode.value == "knobs":
        names += _FIXED_SETTINGS
    return used | {name: getattr(options, name) for name in names}


def _notes(options: Simulate, scenario: Scenario) -> list[str]:
    notes = []
    if not scenario.traffic.even:
        notes.append(
            "The fluid bound is computed from the mean rate. It is a rough estimate for traffic as uneven "
            "as this."
        )
    if scenario.profile_error != 1:
        notes.append(
            f"The device takes {scenario.profile_error:g} × what --curve says. Load and capacity are the "
            "profile's; the fluid bound is the device's own."
        )
    if not (options.per_source or options.latest) and scenario.traffic.own_rate is not None:
        notes.append("All requests count as one source; --per-source gives each its fair share.")
    return notes


_ROWS: tuple[tuple[str, Callable[[Outcome], str]], ...] = (
    ("offered", lambda o: f"{o.offered_rps:,.1f} /s"),
    ("within the SLO (goodput)", lambda o: f"{o.goodput_rps:,.1f} /s"),
    ("… of offered (attainment)", lambda o: show.percent(o.attainment)),
    ("… of the fluid bound", lambda o: show.percent(o.fraction_of_bound)),
    ("p50 of answered", lambda o: f"{o.p50_ms:,.1f} ms"),
    ("p95 of answered", lambda o: f"{o.p95_ms:,.1f} ms"),
    ("p99 of answered", lambda o: f"{o.p99_ms:,.1f} ms"),
    ("mean batch", lambda o: f"{o.mean_batch:.1f}"),
    ("device time wasted", lambda o: show.percent(o.wasted_fraction)),
    (
        "share of rejections made on arrival",
        lambda o: show.percent(o.shed_at_arrival_fraction) if o.shed_any else "–",
    ),
    ("device busy", lambda o: show.percent(o.busy_fraction)),
)
_LIVE_ROWS: tuple[tuple[str, Callable[[Outcome], str]], ...] = (
    ("replaced by a newer frame", lambda o: show.percent(o.replaced_fraction)),
    ("age of a source's newest response", lambda o: f"{o.staleness_ms:,.1f} ms"),
)
_CASCADE_ROWS = (
    ("answered by the cheap model for lack of time", "degraded_fraction"),
    ("hard requests that the large model answered", "hard_by_big_fraction"),
)


def _print(options: Simulate, scenario: Scenario, columns: Mapping[str, Outcome]) -> None:
    """Prints one column for each contender."""
    result = columns[options.mode.value]
    devices = "1 instance" if scenario.instances == 1 else f"{scenario.instances} instances"
    load = f" ({scenario.rate / scenario.capacity:.3g}×)" if scenario.capacity else ""
    seeds = f"mean of {scenario.seeds} seeds" if scenario.seeds > 1 else f"seed {scenario.seed}"
    largest = "" if scenario.steps else f", max batch {scenario.curve.max_batch}"
    show.paragraph(
        f"{_what(options)} ms, SLO {options.slo_ms:g} ms, {devices}"
        f"{largest}: capacity {result.capacity_rps:,.0f}/s, "
        f"fluid bound {result.fluid_bound_rps:,.0f}/s."
    )
    show.paragraph(
        f"Arrivals: {scenario.traffic.name}, {scenario.rate:,.6g}/s{load}, {scenario.seconds:.4g} s, {seeds}."
    )
    live = any(outcome.staleness_ms for outcome in columns.values())
    rows = [(label, *map(of, columns.values())) for label, of in (*_ROWS, *(_LIVE_ROWS if live else ()))]
    for label, name in _CASCADE_ROWS if options.under_load is not None else ():
        rows.append((label, *(show.percent((outcome.cascade or {})[name]) for outcome in columns.values())))
    for number, text in enumerate(options.step or ()):
        for label, name in (("mean batch", "mean_batch"), ("wasted", "wasted_fraction")):
            values = [outcome.steps[number][name] for outcome in columns.values()]
            shown = [f"{value:.1f}" if name == "mean_batch" else show.percent(value) for value in values]
            rows.append((f"step {number + 1} ({text}): {label}", *shown))
    show.table(("", *columns), rows, left=("",))


def _what(options: Simulate) -> str:
    if not options.step:
        return f"Curve {options.curve}"
    return f"Steps {', '.join(options.step)}{' on one device' if options.one_device else ''}"
