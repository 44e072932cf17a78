"""Who asks most of the models: sources by their names, and all addresses as one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from carpool.core.curve import BatchCurve
from carpool.core.job import ADDRESS, Job
from carpool.core.objectives import Promise
from carpool.core.scheduler import Scheduler
from carpool.engine.load_gauges import senders


def test_addresses_are_one_line_and_never_named() -> None:
    core = Scheduler(BatchCurve.parse("4+1"), Promise(0.05, 64))
    for number in range(60):
        job = Job(number / 100, source="gate" if number % 3 == 0 else "")
        job.origin = job.origin._replace(payer=f"{ADDRESS}10.0.0.{number % 7}")
        core.offer(job, job.arrived)
    served: Any = SimpleNamespace(name="m", scheduler=core)
    unnamed, gate = senders([served], 0.6)
    assert (unnamed["source"], gate["source"]) == ("", "gate")
    assert unnamed["offered_rps"] > gate["offered_rps"] > 0.0
    assert unnamed["queued"] + gate["queued"] == core.lanes.waiting
    assert "10.0.0" not in str((unnamed, gate))
