"""What `carpool simulate` does once it knows its options."""

from __future__ import annotations

import json
from collections.abc import Mapping

from carpool.cli import checks, given, show
from carpool.cli.simulate_command import Simulate
from carpool.errors import InvalidInput
from carpool.sim.scenario import LOADS, Outcome, Scenario, contenders, measure, sweep


def run(options: Simulate) -> None:
    checks.picture(options.plot)
    scenario = given.scenario(options)
    knobs = given.knobs(options, scenario.curve)
    entries = contenders(scenario, knobs)
    chosen = options.mode.value
    if not options.compare:
        entries = {chosen: entries[chosen]}
    with show.steps("simulating", len(entries) * scenario.seeds) as step:
        results = {name: measure(entry, step) for name, entry in entries.items()}
    notes = _notes(options, scenario)
    if options.plot is not None:
        _draw(options, entries)
        notes.append(f"Goodput and latency over load are drawn in {options.plot}.")
    if options.as_json:
        print(json.dumps(_as_json(options, scenario, results, notes), indent=2))
        return
    _print_heading(options, scenario, results[chosen])
    show.outcomes(results)
    for note in notes:
        show.paragraph(note, "· ")


def _as_json(
    options: Simulate, scenario: Scenario, results: Mapping[str, Outcome], notes: list[str]
) -> dict[str, object]:
    found: dict[str, object] = {"mode": options.mode.value, **results[options.mode.value].as_json()}
    if options.compare:
        found["compare"] = {name: result.as_json() for name, result in results.items()}
    found["settings"] = _settings(options, scenario)
    found["notes"] = notes
    return found


def _settings(options: Simulate, scenario: Scenario) -> dict[str, object]:
    """Everything that the numbers depend on, with the defaults filled in."""
    used: dict[str, object] = {
        "curve": options.curve,
        "slo_ms": options.slo_ms,
        "max_batch": scenario.curve.max_batch,
        "buckets": list(scenario.curve.buckets),
        "instances": scenario.instances,
        "arrivals": scenario.traffic.name,
        "rate_rps": scenario.rate,
        "load": scenario.rate / scenario.capacity if scenario.capacity else None,
        "seconds": scenario.seconds,
        "seed": scenario.seed,
        "seeds": scenario.seeds,
        "noise": scenario.noise,
        "stall_share": scenario.stall_share,
        "stall_factor": scenario.stall_factor,
        "profile_error": scenario.profile_error,
    }
    if options.model:
        used["model"] = options.model
    kinds = {
        "bursty": ("burst_factor", "burst_seconds", "burst_period"),
        "cameras": ("cameras", "fps", "aligned", "per_source", "latest"),
    }
    knobs = ("max_delay_ms", "preferred", "max_queue", "queue_timeout_ms", "timeout_action")
    names = kinds.get(scenario.traffic.name, ())
    if options.compare or options.mode.value == "knobs":
        names += knobs
    return used | {name: getattr(options, name) for name in names}


def _notes(options: Simulate, scenario: Scenario) -> list[str]:
    notes = []
    if not scenario.traffic.even:
        notes.append(
            "The fluid bound is that of the mean rate: with traffic as uneven as this, a rough estimate."
        )
    if scenario.profile_error != 1:
        notes.append(
            f"The device takes {scenario.profile_error:g} × what --curve says. Load and capacity are the "
            "profile's; the fluid bound is the device's own."
        )
    if not (options.per_source or options.latest) and scenario.traffic.own_rate is not None:
        notes.append("All requests count as one source; --per-source gives each its fair share.")
    return notes


def _draw(options: Simulate, entries: Mapping[str, Scenario]) -> None:
    from carpool.lab.plots import operating_curve

    assert options.plot is not None
    with show.steps("drawing", len(entries) * len(LOADS)) as step:
        sweeps = {name: sweep(entry, on_step=step) for name, entry in entries.items()}
    try:
        operating_curve(options.plot, sweeps, slo_ms=options.slo_ms, title=f"Curve {options.curve} ms")
    except InvalidInput as error:
        raise InvalidInput(f"--plot: {error.message}", field="--plot") from None


def _print_heading(options: Simulate, scenario: Scenario, result: Outcome) -> None:
    devices = "1 instance" if scenario.instances == 1 else f"{scenario.instances} instances"
    load = f" ({scenario.rate / scenario.capacity:.3g}×)" if scenario.capacity else ""
    seeds = f"mean of {scenario.seeds} seeds" if scenario.seeds > 1 else f"seed {scenario.seed}"
    show.paragraph(
        f"Curve {options.curve} ms, SLO {options.slo_ms:g} ms, {devices}, "
        f"max batch {scenario.curve.max_batch}: capacity {result.capacity_rps:,.0f}/s, "
        f"fluid bound {result.fluid_bound_rps:,.0f}/s."
    )
    show.paragraph(
        f"Arrivals: {scenario.traffic.name}, {scenario.rate:,.6g}/s{load}, {scenario.seconds:.4g} s, {seeds}."
    )
