"""Every way to be refused has a sentence with its numbers, and a time to come back that is honest."""

from __future__ import annotations

import pytest

from carpool.core.curve import BatchCurve
from carpool.core.job import Job, JobState, Reason, Refusal
from carpool.core.objectives import Promise
from carpool.core.refusal_words import given_up, refused
from carpool.core.scheduler import Scheduler
from carpool.errors import DeadlineExceeded, InvalidInput, Refused, Replaced, Unavailable

AT_ARRIVAL = {
    Reason.CANNOT_FINISH: "m would finish 93 ms after it arrived, its deadline is 50 ms; 7 images wait",
    Reason.OVERLOAD: "m is offered 1500 images/s and can answer at most 840 in time; a new request would",
    Reason.OVER_SHARE: "m is saturated; this source asks 1500 images/s, and its fair share is 840",
    Reason.QUEUE_FULL: "m has a full queue: 7 images wait, and at most 8 may",
    Reason.TOO_LARGE: "m takes no request of 3 images: at most 8 at once",
    Reason.REPLACED: "m: a newer frame of source 'gate' took this one's place",
    Reason.RESTARTING: "m is down and is being restarted",
}
LATER = {
    Reason.GIVEN_UP: (Refused, "m is saturated; after 20 of its 50 ms this request was given up"),
    Reason.DEADLINE: (DeadlineExceeded, "m: after 20 of its 50 ms in the queue no answer could reach"),
    Reason.TIMEOUT: (Unavailable, "Request timeout expired"),
    Reason.REPLACED: (Replaced, "m: a newer frame of source 'gate' took this one's place after 20 ms"),
}


def job() -> Job:
    return Job(10.0, 10.05, images=3, source="gate")


def test_there_is_no_other_reason() -> None:
    assert set(AT_ARRIVAL) | set(LATER) == set(Reason)


@pytest.mark.parametrize("reason", AT_ARRIVAL)
def test_a_no_at_the_gate(reason: Reason) -> None:
    refusal = Refusal(reason, 10.093, 0.25, waiting=7, most=8, asked=1500.0, answerable=840.0)
    error = refused("m", job(), refusal, knobs=False)
    assert error.message.startswith(AT_ARRIVAL[reason])
    assert "?" not in error.message
    if isinstance(error, Refused):
        assert (error.reason, error.predicted_ms, error.retry_after_s) == (reason.value, 93.0, 0.25)
        assert error.numbers["deadline_ms"] == 50.0
        assert error.numbers["waiting"] == 7
    else:
        assert isinstance(error, InvalidInput | Replaced | Unavailable)
        assert ("retry_after_s" in error.numbers) is (reason is Reason.RESTARTING)


def test_a_fast_model_is_told_of_without_an_exponent() -> None:
    refusal = Refusal(Reason.OVERLOAD, 10.093, 0.25, waiting=25_000, asked=123_456.78, answerable=12_345.6)
    message = refused("m", job(), refusal, knobs=False).message
    assert "is offered 123,457 images/s and can answer at most 12,346 in time" in message
    assert "(25,000 images wait)" in message


def test_triton_clients_read_triton_words() -> None:
    error = refused("m", job(), Refusal(Reason.QUEUE_FULL, waiting=7, most=8), knobs=True)
    assert isinstance(error, Unavailable)
    assert error.message == "Exceeds maximum queue size"
    assert error.numbers["max_waiting"] == 8


@pytest.mark.parametrize("reason", LATER)
def test_accepted_and_not_run(reason: Reason) -> None:
    error = given_up("m", job(), reason, 10.02, 0.0)
    assert isinstance(error, LATER[reason][0])
    assert error.message.startswith(LATER[reason][1])
    assert error.numbers == {"waited_ms": 20.0, "deadline_ms": 50.0}


def test_a_deadline_that_passed_is_said_to_have() -> None:
    error = given_up("m", job(), Reason.DEADLINE, 10.06, 0.0)
    assert error.message == "m: the deadline of 50 ms passed in the queue"


def test_a_deadline_that_has_not_passed_is_not_said_to_have() -> None:
    waiting = job()
    waiting.due = 10.04
    error = given_up("m", waiting, Reason.DEADLINE, 10.041, 0.0)
    assert isinstance(error, DeadlineExceeded)
    assert error.message == "m: after 41 of its 50 ms in the queue no answer could reach the client in time"
    assert error.numbers == {"waited_ms": 41.0, "deadline_ms": 50.0}


def test_the_sentence_counts_what_the_client_sees() -> None:
    core = Scheduler(BatchCurve.parse("4+1"), Promise(0.050, 64))
    asked = Job(10.0, 10.007, outside=0.0016)
    refusal = core.offer(asked, 10.0)
    assert refusal is not None
    message = refused("m", asked, refusal, knobs=False).message
    assert message == "m would finish 7.1 ms after it arrived, its deadline is 7 ms; 0 images wait"


# ---- when to come back, in virtual time


def quiet_until(core: Scheduler, now: float, end: float) -> None:
    """Nobody else comes: batches take what the curve says."""
    while True:
        decision = core.decide(now)
        if decision.batch is not None:
            continue
        running = [i for i in core.instances if i.batch is not None]
        ends = [(i.batch.started + core.curve.times[i.batch.images], i.batch) for i in running if i.batch]
        if not ends or min(ends, key=lambda e: e[0])[0] > end:
            return
        now, batch = min(ends, key=lambda e: e[0])
        core.finished(batch, now, core.curve.times[batch.images])


@pytest.mark.parametrize("instances", [1, 3])
@pytest.mark.parametrize("sources", [1, 3])
@pytest.mark.parametrize("max_queue", [40, 100_000])
def test_who_comes_back_when_told_is_let_in_if_nobody_else_comes(
    instances: int, sources: int, max_queue: int
) -> None:
    for flood in range(20, 400, 60):
        core = Scheduler(BatchCurve.parse("4+1"), Promise(0.050, 64, max_queue=max_queue), instances)
        told: tuple[str, Refusal] | None = None
        now = 0.0
        for number in range(flood):
            now += 1e-4
            source = f"s{number % sources}" if sources > 1 else ""
            refusal = core.offer(Job(now, source=source), now)
            told = told if refusal is None else (source, refusal)
            core.decide(now)
        if told is None:
            continue
        source, refusal = told
        assert refusal.retry_after > 0
        again = now + refusal.retry_after
        quiet_until(core, now, again)
        retry = Job(again, source=source)
        assert core.offer(retry, again) is None, (flood, refusal)
        assert retry.state is JobState.READY


def test_who_could_not_make_it_on_an_idle_server_is_not_told_to_come_back() -> None:
    core = Scheduler(BatchCurve.parse("4+1"), Promise(0.050, 64))
    core.offer(Job(0.0, images=30), 0.0)
    core.decide(0.0)
    refusal = core.offer(Job(0.001, deadline=0.004), 0.001)
    assert refusal is not None
    assert refusal.retry_after == 0.0
