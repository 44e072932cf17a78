"""What `carpool plan` does once it knows its options."""

from __future__ import annotations

import json
from math import inf

from carpool.cli import checks, show
from carpool.cli.plan import PlanVerb
from carpool.errors import InvalidInput
from carpool.lab.machine import Machine
from carpool.lab.plan import Plan, Question, plan


def run(options: PlanVerb) -> bool:
    """Whether there is a plan."""
    question = _question(options)
    with show.status("planning") as tell:
        answer = plan(question, tell)
    if options.as_json:
        print(json.dumps(answer.as_json() | {"settings": _settings(options, question)}, indent=2))
    else:
        _print(answer, question)
    return answer.replicas is not None


def _question(options: PlanVerb) -> Question:
    curve = checks.batch_curve(options.curve, options.max_batch, options.buckets)
    price = options.price_per_hour
    return Question(
        curve,
        checks.slo(options.slo_ms, curve),
        checks.number("--rate", options.rate, above=0, most=1e7),
        surge=checks.number("--surge", options.surge, least=1, most=1000),
        surge_seconds=checks.number("--surge-seconds", options.surge_seconds, above=0),
        price_per_hour=None if price is None else checks.number("--price-per-hour", price),
        redundancy=checks.whole("--redundancy", options.redundancy, least=0, most=1000),
        noise=checks.number("--noise", options.noise, most=2),
        seed=options.seed,
        machine=_machine(options),
    )


def _machine(options: PlanVerb) -> Machine:
    given = options.cores
    cores = inf if given is None else checks.number("--cores", given, above=0, most=1e6)
    busy = checks.number("--infer-cores", options.infer_cores, most=1e6)
    if busy > cores:
        raise InvalidInput(
            f"--infer-cores: a batch that ran on {cores:g} cores cannot keep {busy:g} busy",
            field="--infer-cores",
        )
    decode = checks.number("--decode-ms", options.decode_ms, most=1e7)
    protocol = checks.number("--protocol-ms", options.protocol_ms, most=1e7)
    instances = checks.whole("--instances", options.instances, least=1, most=1024)
    return Machine(cores, busy, decode / 1e3, protocol / 1e3, instances)


def _settings(options: PlanVerb, question: Question) -> dict[str, object]:
    return {
        "curve": options.curve,
        "slo_ms": options.slo_ms,
        "rate": options.rate,
        "surge": options.surge,
        "surge_seconds": options.surge_seconds,
        "price_per_hour": options.price_per_hour,
        "redundancy": options.redundancy,
        "instances": options.instances,
        "cores": options.cores,
        "infer_cores": options.infer_cores,
        "decode_ms": options.decode_ms,
        "protocol_ms": options.protocol_ms,
        "max_batch": question.curve.max_batch,
        "buckets": list(question.curve.buckets),
        "noise": options.noise,
        "seed": options.seed,
    }


def _print(answer: Plan, question: Question) -> None:
    if answer.replicas is None:
        show.paragraph("No plan.")
    else:
        show.pairs(_facts(answer, question, answer.replicas))
    show.paragraph("")
    for sentence in answer.why:
        show.paragraph(sentence, "· ")


def _facts(answer: Plan, question: Question, replicas: int) -> dict[str, str]:
    fleet = replicas * answer.capacity_rps
    spare = f", {question.redundancy} of them to spare" if question.redundancy else ""
    facts = {
        "replicas": f"{replicas}{spare}",
        "max batch": f"{answer.max_batch}",
        "max delay": f"{answer.max_delay_ms:g} ms",
        "expected p50": f"{answer.p50_ms:.1f} ms",
        "expected p99": f"{answer.p99_ms:.1f} ms",
        "capacity": f"{answer.capacity_rps:,.0f} /s per replica, {fleet:,.0f} /s in all",
        "headroom": f"{100 * (answer.headroom or 0.0):.0f} %",
    }
    if answer.cost_per_1000 is not None:
        facts["cost per 1,000 images"] = f"{answer.cost_per_1000:.3g}"
    return facts
