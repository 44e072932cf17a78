"""Traffic that does not wait for the server: so much per second, at random, by clients that come and go."""

import uvloop

from carpool.lab.load.generator import run
from carpool.lab.load.load_plan import Closed, Open, Phase, Plan
from carpool.lab.load.load_report import LoadReport
from load.visitors import LEFT, Visitors, http_message
from load.wrk import Target

PATIENCE_S = 2.0  # then a client gives up


def offer(target: Target, rate: float, seconds: float, *, warmup: float, slo: float, seed: int) -> LoadReport:
    """An open loop; the warm-up is sent and not counted."""
    phases = (Phase(rate, warmup, warmup=True), Phase(rate, seconds))
    plan = Plan(Open(phases, seed=seed), slo=slo, timeout=PATIENCE_S, drain=PATIENCE_S + 1)
    return uvloop.run(run(plan, _visitors(target, slo)))


def most(target: Target, clients: int, seconds: float, *, warmup: float) -> float:
    """Answers per second to so many clients that wait for theirs, none of which leaves."""
    plan = Plan(Closed(clients, seconds=seconds, warmup=warmup))
    return uvloop.run(run(plan, _visitors(target, 1.0, once=0.0, leavers=0.0))).total.answered_rps


def left(found: LoadReport) -> int:
    """Requests whose client did not want to wait: nobody could have answered those."""
    return found.total.failed.get(LEFT, 0)


def gave_up(found: LoadReport) -> int:
    """Requests that nothing was heard of for as long as their client waited."""
    return found.total.timed_out + found.total.unanswered


def broken(found: LoadReport) -> int:
    """Requests that ended with an error or a broken connection."""
    return sum(found.total.failed.values()) - left(found)


def _visitors(target: Target, stay: float, **shares: float) -> Visitors:
    message = http_message(target.port, target.path, target.headers, target.body)
    return Visitors(target.port, message, longest_stay=stay, name=target.path, **shares)
