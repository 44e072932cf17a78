"""Implements `carpool plan`: how many replicas, and why."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import partial
from math import inf
from typing import TYPE_CHECKING

from carpool.cli import shared_options as shared
from carpool.cli import show
from carpool.cli import verb_options as o
from carpool.errors import InvalidInput

if TYPE_CHECKING:
    from carpool.core.scaling import ScalingRule
    from carpool.lab.fleet_plan import FleetPlan, FleetQuestion
    from carpool.sim.arrivals import Traffic


@dataclass(frozen=True, kw_only=True)
class PlanVerb(shared.HasCurve, shared.HasTraffic, shared.SharesCores):
    """Plan how many replicas meet an SLO, with which settings, at what cost, and why.

    500 requests a second, which triple for ten seconds now and then:

        carpool plan --curve 4+1 --slo-ms 50 --rate 500 --surge 3 --surge-seconds 10

    Measured batch times, one redundant GPU, at 2.50 per hour:

        carpool plan --curve 1:6.2,16:21,64:74 --slo-ms 100 --rate 2400 --redundancy 1 --price-per-hour 2.5

    A detector and a classifier for its boxes, on two devices, with one SLO:

        carpool plan --step 4+1 --step 3+0.22@4.2 --slo-ms 100 --rate 1500

    JPEGs for a CPU model, where decoding and the protocol share its cores:

        carpool plan --curve 1:13,8:85 --slo-ms 250 --rate 60 --cores 2 --infer-cores 2 --decode-ms 2.5
    """

    rate: float | None = o.option(None, "Images per second, on average. A trace has its own rate.", o.TRAFFIC)
    arrivals: str = o.option(
        "poisson", "poisson, bursty, cameras, or trace:FILE as carpool serve --record writes it.", o.TRAFFIC
    )
    model: str = o.option(
        "", "trace: the model whose arrivals are used, if the trace has several.", o.TRAFFIC
    )
    surge: float = o.option(1.0, "Rate of a surge, as a multiple of the average.", o.TRAFFIC)
    surge_seconds: float = o.option(60.0, "Length of a surge, in seconds.", o.TRAFFIC)
    price_per_hour: float | None = o.option(None, "Cost of a replica per hour, in any currency.", o.FLEET)
    cold_start: float | None = o.option(
        None,
        "Scale the replicas with the load. A new one is ready after these seconds, as printed by profile.",
        o.FLEET,
    )
    target_load: float = o.option(
        0.75, "With --cold-start: target load, as a share of the capacity.", o.FLEET
    )
    hpa_period: float = o.option(15.0, "With --cold-start: seconds between two decisions.", o.FLEET)
    redundancy: int = o.option(0, "Replicas that may fail without missing the SLO.", o.FLEET)
    instances: int = o.option(
        1, "Instances per replica. The curve is that of one while all are busy.", o.MODEL
    )
    cores: float | None = o.option(None, "Cores of each replica, for everything. Default: enough.", o.CORES)
    memory_mb: float = o.option(
        0.0, "Memory of the model, weights and batches, in MB, as printed by profile.", o.FLEET
    )
    noise: o.Noise = 0.05
    seed: o.Seed = 1
    as_json: o.Json = False

    def run(self) -> int:
        from carpool.lab.fleet_plan import plan

        question = self._question()
        with show.status("planning") as tell:
            answer = plan(question, tell)
        if self.as_json:
            unused = ("curve", "max_batch", "buckets") if self.step else ("step", "one_device")
            used = {name: value for name, value in vars(self).items() if name not in (*unused, "as_json")}
            if not self.step:
                used |= {"max_batch": question.curve.max_batch, "buckets": list(question.curve.buckets)}
            print(json.dumps(asdict(answer) | {"settings": used}, indent=2))
        else:
            _print(answer, question)
        return 1 if answer.replicas is None else 0

    def _question(self) -> FleetQuestion:
        from carpool.lab.fleet_plan import FleetQuestion

        curve, steps = self.curve_and_steps()
        if steps and (self.cores is not None or self.infer_cores or self.decode_ms or self.protocol_ms):
            raise InvalidInput(
                "--cores and the options that divide them are for one model: leave them out with --step"
            )
        price = self.price_per_hour
        traffic = self._traffic()
        cores = inf if self.cores is None else o.number("--cores", self.cores, above=0, most=1e6)
        instances = o.whole("--instances", self.instances, least=1, most=1024)
        return FleetQuestion(
            curve,
            shared.slo(self.slo_ms, curve, steps),
            self._rate(traffic),
            surge=o.number("--surge", self.surge, least=1, most=1000),
            surge_seconds=o.number("--surge-seconds", self.surge_seconds, above=0),
            price_per_hour=None if price is None else o.number("--price-per-hour", price),
            redundancy=o.whole("--redundancy", self.redundancy, least=0, most=1000),
            noise=o.number("--noise", self.noise, most=2),
            seed=self.seed,
            machine=self.machine(cores, instances),
            steps=steps,
            shared=self.one_device,
            traffic=traffic,
            scaling=self._scaling(),
            model_mb=o.number("--memory-mb", self.memory_mb, most=1e7),
            hpa_period=o.number("--hpa-period", self.hpa_period, least=1, most=3600),
        )

    def _traffic(self) -> Traffic:
        from carpool.sim.arrivals import Poisson, Recording

        if self.model and not self.arrivals.startswith("trace:"):
            raise InvalidInput("--model chooses among the models of a trace: give --arrivals trace:FILE")
        if self.surge > 1 and self.arrivals != "poisson":
            raise InvalidInput("--surge is for poisson arrivals: other arrivals have their own surges")
        read = partial(Recording.read, model=self.model)
        return self.traffic({"poisson": Poisson()}, read, per_source=False)

    def _rate(self, traffic: Traffic) -> float:
        own = traffic.own_rate
        if own is None and self.rate is None:
            raise InvalidInput("Missing option '--rate': images per second, on average")
        if own is not None and self.rate is not None:
            raise InvalidInput(f"--rate cannot be given with {self.arrivals}, which sets its own rate")
        return o.number("--rate", self.rate if own is None else own, above=0, most=1e7)  # type: ignore[arg-type]

    def _scaling(self) -> ScalingRule | None:
        from carpool.core.scaling import ScalingRule

        if self.cold_start is None:
            return None
        target = o.number("--target-load", self.target_load, above=0, most=1)
        cold = o.number("--cold-start", self.cold_start, most=1e5)
        return ScalingRule(least=1, target=target, cold_start=cold)


def _print(answer: FleetPlan, question: FleetQuestion) -> None:
    if answer.replicas is None:
        show.paragraph("No plan.")
    else:
        fleet = answer.replicas * answer.capacity_rps
        redundant = f", {question.redundancy} of them redundant" if question.redundancy else ""
        facts = {
            "replicas": f"{answer.replicas}{redundant}",
            **({} if answer.max_batch is None else {"max batch": f"{answer.max_batch}"}),
            "max delay": f"{answer.max_delay_ms:g} ms",
            "expected p50": f"{answer.p50_ms:.1f} ms",
            "expected p99": f"{answer.p99_ms:.1f} ms",
            "capacity": f"{answer.capacity_rps:,.0f} /s per replica, {fleet:,.0f} /s in all",
            "headroom": f"{100 * (answer.headroom or 0.0):.0f} %",
        }
        if answer.peak_replicas is not None and answer.replica_hours is not None:
            facts["replicas at peak"] = f"{answer.peak_replicas}, autoscaled"
            facts["replica-hours"] = f"{answer.replica_hours:,.2f}"
            facts["requests before new replicas were ready"] = f"{answer.lost_to_cold_start:,.0f} images"
        if answer.largest_step is not None:
            facts["largest step"] = f"{answer.largest_step:.1f} ×"
        if answer.memory_mb is not None:
            facts["memory per replica"] = f"{answer.memory_mb:,.0f} MB"
        if answer.cost_per_1000 is not None:
            facts["cost per 1,000 images"] = f"{answer.cost_per_1000:.3g}"
        show.table(("", ""), facts.items(), left=("",))
    show.paragraph("")
    for sentence in answer.why:
        show.paragraph(sentence, "· ")
