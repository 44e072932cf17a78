"""Knobs mode against batches recorded from a real tritonserver, story by story, in virtual time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from carpool.core.curve import BatchCurve
from carpool.core.instance import Batch
from carpool.core.job import Job, Reason
from carpool.core.objectives import FixedBatching, QueueLimits, TimeoutAction
from carpool.core.scheduler import Scheduler

RECORDED = json.loads((Path(__file__).parents[1] / "conformance" / "triton_batching.json").read_text())


def fixed(config: dict[str, Any]) -> FixedBatching:
    return FixedBatching(
        max_batch=config["max_batch"],
        preferred=tuple(config.get("preferred", ())),
        max_delay=config.get("max_delay_ms", 0) / 1e3,
        priority_levels=config.get("priority_levels", 0),
        default_priority=config.get("default_priority", 0),
        limits=limits(config),
        level_limits={
            int(level): limits(policy) for level, policy in config.get("priority_policies", {}).items()
        },
        preserve_ordering=config.get("preserve_ordering", False),
    )


def limits(config: dict[str, Any]) -> QueueLimits:
    return QueueLimits(
        max_size=config.get("max_queue_size", 0),
        timeout=config.get("default_timeout_ms", 0) / 1e3,
        allow_override=config.get("allow_timeout_override", False),
        action=TimeoutAction[config.get("timeout_action", "REJECT")],
    )


# Where we mean to be better: whoever cancels or hangs up leaves at once, and frees its place.
BETTER = {
    "cancel/set aside already: runs anyway": [["r1", "r3", "r4"]],
    "cancel/queue size 2: counts until it is looked at": [["r2", "late"]],
    "cancel/HTTP client hangs up, policy": [["r1", "r3"]],
}


class Story:
    """Plays the events; the plugs hold the instances until they are released."""

    def __init__(self, story: dict[str, Any]) -> None:
        self.config = story["config"]
        self.scheduler = Scheduler(
            BatchCurve.linear(0.1, 0.0, self.config["max_batch"]),
            fixed(self.config),
            self.config.get("instances", 1),
        )
        self.jobs: dict[str, Job] = {}
        self.plugs: dict[str, Batch] = {}
        self.running: list[tuple[float, Batch]] = []
        self.executions: list[list[str]] = []
        self.rejected: dict[str, Reason] = {}
        self.look_again: float | None = None
        for number in range(story["plugs"]):
            name = "plug" if story["plugs"] == 1 else f"plug{number + 1}"
            self.scheduler.offer(Job(-1e6, payload=name, shape=("plug", number)), -1e6)
            batch = self.scheduler.decide(-1e6 + self.config.get("max_delay_ms", 0) / 1e3).batch
            assert batch is not None
            self.plugs[name] = batch
        for event in story["events"]:
            self.until(event["at_ms"] / 1e3)
            self.happen(event)
        self.until(1e9)

    def happen(self, event: dict[str, Any]) -> None:
        now = event["at_ms"] / 1e3
        if "send" in event:
            job = Job(
                now,
                images=event.get("images", 1),
                shape=tuple(event["shape"]) if "shape" in event else (4,),
                priority=event.get("priority", 0),
                timeout=event.get("timeout_us", 0) / 1e6,
                payload=(event["send"], event.get("exec_ms", self.config["exec_ms"])),
            )
            self.jobs[event["send"]] = job
            refusal = self.scheduler.offer(job, now)
            if refusal is not None:
                self.rejected[event["send"]] = refusal.reason
        elif "release" in event:
            self.scheduler.finished(self.plugs.pop(event["release"]), now)
        else:
            gone = event.get("cancel") or event["hang_up"]
            self.scheduler.cancel(self.jobs[gone], now)
        self.act(now)

    def act(self, now: float) -> None:
        while True:
            decision = self.scheduler.decide(now)
            for gone in decision.given_up:
                self.rejected[gone.job.payload[0]] = gone.reason
            if decision.batch is None:
                self.look_again = decision.look_again
                return
            self.executions.append([job.payload[0] for job in decision.batch.jobs])
            seconds = max(job.payload[1] for job in decision.batch.jobs) / 1e3
            self.running.append((now + seconds, decision.batch))

    def until(self, end: float) -> None:
        while True:
            at, batch = min(self.running, key=lambda entry: entry[0], default=(1e9, None))
            if self.look_again is not None and self.look_again < at:
                at, batch = self.look_again, None
            if at >= end:
                return
            if batch is not None:
                self.running.remove((at, batch))
                self.scheduler.finished(batch, at)
            self.act(at)


def test_forms_the_batches_that_triton_formed() -> None:
    stories = {story["name"]: story for story in RECORDED["stories"]}
    assert len(stories) == len(RECORDED["stories"])
    formed = {name: Story(story).executions for name, story in stories.items()}
    recorded = {name: BETTER.get(name, story["executions"]) for name, story in stories.items()}
    assert {name: found for name, found in formed.items() if found != recorded[name]} == {}
