"""Every way to be refused has a sentence with its numbers, and a time to come back that is honest."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from carpool.core.curve import BatchCurve
from carpool.core.instance import Batch
from carpool.core.job import GivenUp, Job, JobOptions, JobOrigin, JobState, Reason, Refusal, Terms
from carpool.core.objectives import Promise
from carpool.core.refusal_words import given_up, refused
from carpool.core.scheduler import Scheduler
from carpool.errors import DeadlineExceeded, InvalidInput, Refused, Replaced, Unavailable
from later import many

LATE = Terms(0.050, waited=0.002, queue=0.030, running=0.008, batch=0.009, outside=0.001, spread=0.004)
AT_ARRIVAL = {
    Reason.CANNOT_FINISH: (
        "m rejected the request: the response would be ready in 50 ms (2 ms since it arrived + 30 ms queued "
        "batches + 8 ms running batch + 9 ms its own batch + 1 ms reading and sending), plus a safety margin "
        "of 4 ms that covers how much batch times vary here; that is later than the deadline of 50 ms. "
        "7 images are queued. Retry after 250 ms, or raise the deadline (slo_ms, or the request's own)."
    ),
    Reason.OVERLOAD: (
        "m rejected the request: its deadline of 50 ms leaves room for a batch of 3, and batches of 3 "
        "sustain 840 images/s, but 1500 images/s are offered. 7 images are queued. Retry after 250 ms."
    ),
    Reason.OVER_SHARE: (
        "m rejected the request: its deadline of 50 ms leaves room for a batch of 3, and batches of 3 "
        "sustain 840 images/s of this source's share, but the source offers 1500 images/s. 7 images "
        "are queued. Retry after 250 ms."
    ),
    Reason.QUEUE_FULL: (
        "m rejected the request: it has 3 images, 7 images are queued, and the queue holds at most 8. "
        "Retry after 250 ms."
    ),
    Reason.TOO_LARGE: "m takes at most 8 images in a request, not 3",
    Reason.REPLACED: "m: a newer frame of source 'gate' took this one's place",
    Reason.RESTARTING: "m is down and is being restarted",
}
LATER = {
    Reason.GIVEN_UP: (
        Refused,
        "m rejected the request after 20 ms in the queue: 30 of its 50 ms are left, enough for a batch of 2, "
        "and the queue needs batches of 8.",
    ),
    Reason.DEADLINE: (
        DeadlineExceeded,
        "m: after 20 ms in the queue the response could be ready in 55 ms (20 ms since it arrived + 35 ms "
        "its own batch); that is later than the deadline of 50 ms. Retry when there is less load, or raise "
        "the deadline (slo_ms, or the request's own)",
    ),
    Reason.TIMEOUT: (Unavailable, "Request timeout expired"),
    Reason.REPLACED: (Replaced, "m: a newer frame of source 'gate' took this one's place after 20 ms"),
}


def job() -> Job:
    return Job(10.0, 10.05, images=3, source="gate")


def test_there_is_no_other_reason() -> None:
    assert set(AT_ARRIVAL) | set(LATER) == set(Reason)


@pytest.mark.parametrize("reason", AT_ARRIVAL)
def test_a_no_at_the_gate(reason: Reason) -> None:
    refusal = Refusal(
        reason, 0.25, 7, 8, asked=1500.0, answerable=1400.0, room=3, sustained=840.0, images=3, terms=LATE
    )
    error = refused("m", job(), refusal, fixed=False)
    assert error.message == AT_ARRIVAL[reason]
    if isinstance(error, Refused):
        predicted = None if reason is Reason.QUEUE_FULL else 50.0
        assert (error.reason, error.predicted_ms, error.retry_after_s) == (reason.value, predicted, 0.25)
        assert error.numbers["deadline_ms"] == 50.0
        assert error.numbers["waiting"] == 7
    else:
        assert isinstance(error, InvalidInput | Replaced | Unavailable)
        assert ("retry_after_s" in error.numbers) is (reason is Reason.RESTARTING)


def test_large_numbers_have_no_exponent() -> None:
    refusal = Refusal(Reason.OVERLOAD, 0.25, 25_000, asked=123_456.78, room=9, sustained=12_345.6, terms=LATE)
    message = refused("m", job(), refusal, fixed=False).message
    assert "sustain 12,346 images/s, but 123,457 images/s are offered. 25,000 images are queued." in message


def test_a_margin_that_decides_is_in_the_sentence_even_if_rounding_would_hide_it() -> None:
    terms = Terms(0.250, batch=0.18512341, spread=0.0648766)
    assert terms.late
    message = refused("m", job(), Refusal(Reason.CANNOT_FINISH, terms=terms), fixed=False).message
    assert "in 185.1234 ms" not in message
    check(message, Reason.CANNOT_FINISH)


def test_triton_clients_read_triton_words() -> None:
    error = refused("m", job(), Refusal(Reason.QUEUE_FULL, waiting=7, most=8), fixed=True)
    assert isinstance(error, Unavailable)
    assert error.message == "Exceeds maximum queue size"
    assert error.numbers["max_waiting"] == 8


@pytest.mark.parametrize("reason", LATER)
def test_accepted_and_not_run(reason: Reason) -> None:
    batch = 0.035 if reason is Reason.DEADLINE else 0.0
    error = given_up("m", GivenUp(job(), reason, 2, 8, batch), 10.02, 0.0)
    assert isinstance(error, LATER[reason][0])
    assert error.message.startswith(LATER[reason][1])
    assert error.numbers == {"waited_ms": 20.0, "deadline_ms": 50.0}


def test_a_deadline_that_passed_is_said_to_have() -> None:
    error = given_up("m", GivenUp(job(), Reason.DEADLINE), 10.06, 0.0)
    assert error.message == "m: the deadline of 50 ms passed in the queue"


def test_a_deadline_that_has_not_passed_is_not_said_to_have() -> None:
    waiting = job()
    waiting.outside = 0.01
    error = given_up("m", GivenUp(waiting, Reason.DEADLINE), 10.041, 0.0)
    assert isinstance(error, DeadlineExceeded)
    assert error.message == (
        "m: after 41 ms in the queue the response could be ready in 51 ms (41 ms since it arrived + 10 ms "
        "reading and sending); that is later than the deadline of 50 ms. Retry when there is less load, or "
        "raise the deadline (slo_ms, or the request's own)"
    )
    assert error.numbers == {"waited_ms": 41.0, "deadline_ms": 50.0}


def test_the_sentence_counts_what_the_client_sees() -> None:
    core = Scheduler(BatchCurve.parse("4+1"), Promise(0.050, 64))
    asked = Job(10.0, 10.007, outside=0.0016)
    refusal = core.offer(asked, 10.0)
    assert refusal is not None
    message = refused("m", asked, refusal, fixed=False).message
    assert message == (
        "m rejected the request: the response would be ready in 6.6 ms (5 ms its own batch + 1.6 ms reading "
        "and sending), plus a safety margin of 0.5 ms that covers how much batch times vary here; that is "
        "later than the deadline of 7 ms. 0 images are queued. Retry after 1.6 ms, or raise the deadline "
        "(slo_ms, or the request's own)."
    )


# ---- every sentence is read back: its numbers must justify what was decided

_N = r"([\d.,]*\d)"
_SENTENCES = {
    "late": re.compile(
        rf"ready in {_N} ms(?: \(([^)]*)\))?(?:, plus a safety margin of {_N} ms that covers [a-z ]+)?; "
        rf"that is later than the deadline of {_N} ms"
    ),
    "room": re.compile(
        rf"leaves room for a batch of {_N}, and batches of {_N} sustain {_N} images/s[a-z' ]*, "
        rf"but [a-z ]*{_N} images/s"
    ),
    "lag": re.compile(rf"requests wait {_N} ms before they .* at most {_N} ms are accepted"),
    "full": re.compile(rf"it has {_N} images?, {_N} images? (?:is|are) queued, and .* at most {_N}\."),
    "left": re.compile(
        rf"after {_N} ms in the queue: {_N} of its {_N} ms are left, "
        rf"enough for a batch of {_N}, and the queue needs batches of {_N}"
    ),
    "passed": re.compile(rf"the deadline of {_N} ms passed in the queue"),
}


def numbers_in(found: re.Match[str]) -> list[float]:
    return [
        float(word.replace(",", ""))
        for word in found.groups()
        if word and word[0].isdigit() and " " not in word
    ]


def check(message: str, reason: Reason) -> str:
    """Which kind of sentence it is; fails unless its own numbers say what it claims."""
    kind, found = next((k, m) for k, p in _SENTENCES.items() if (m := p.search(message)))
    said = numbers_in(found)
    if kind == "late":
        ready, deadline = said[0], said[-1]
        assert ready + sum(said[1:-1]) > deadline - 1e-9, message
        parts = [float(ms) for ms in re.findall(r"([\d.]+) ms [a-z]", found[2] or "")]
        assert not parts or sum(parts) == pytest.approx(ready, rel=0.005), message
    elif kind == "room":
        room, again, sustained, offered = said
        assert room == again, message
        assert sustained < offered, message
    elif kind == "lag":
        assert said[0] > said[1], message
    elif kind == "full":
        assert said[0] + said[1] > said[2], message
    elif kind == "left":
        waited, left, deadline, room, needed = said
        assert waited + left <= deadline * 1.001, message
        assert room < needed, message
    assert reason in READS[kind], message
    return kind


READS = {
    "late": {Reason.CANNOT_FINISH, Reason.OVERLOAD, Reason.GIVEN_UP, Reason.DEADLINE},
    "room": {Reason.OVERLOAD, Reason.OVER_SHARE},
    "lag": {Reason.OVERLOAD},
    "full": {Reason.QUEUE_FULL},
    "left": {Reason.GIVEN_UP},
    "passed": {Reason.DEADLINE},
}


@settings(max_examples=many(200), deadline=None)
@given(
    seed=st.integers(0, 2**32),
    curve=st.sampled_from(["4+1", "16+4", "0.2+0.05", "1:10,2:11,4:30,8:100"]),
    slo=st.sampled_from([0.01, 0.05, 0.25]),
    instances=st.integers(1, 3),
    load=st.floats(0.3, 6.0),
)
def test_every_sentence_justifies_its_verdict(
    seed: int, curve: str, slo: float, instances: int, load: float
) -> None:
    kinds = Counter[str]()
    for message, reason in rejections(Random(seed), BatchCurve.parse(curve), slo, instances, load):
        kinds[check(message, reason)] += 1
    event(" ".join(sorted(kinds)))


def test_every_kind_of_sentence_was_read() -> None:
    wanted, kinds = {"late", "room", "full", "left"}, set[str]()
    for seed in range(60):
        if kinds >= wanted:
            return
        chance = Random(seed)
        curve = BatchCurve.parse(chance.choice(["4+1", "16+4"]))
        for message, reason in rejections(chance, curve, 0.05, 1 + seed % 2, 3.0):
            kinds.add(check(message, reason))
    assert kinds >= wanted


def rejections(
    chance: Random, curve: BatchCurve, slo: float, instances: int, load: float
) -> Iterator[tuple[str, Reason]]:
    """What a scheduler says to 300 requests of all kinds, whose batches take what they like."""
    core = Scheduler(curve, Promise(slo, 16, max_queue=chance.choice([6, 30, 1000])), instances)
    rate = load * instances * curve.throughput(min(16, curve.max_batch))
    now = 0.0
    running: list[tuple[float, Batch]] = []
    for _ in range(300):
        now += chance.expovariate(rate)
        while running and min(running, key=lambda r: r[0])[0] <= now:
            ends, batch = min(running, key=lambda r: r[0])
            running.remove((ends, batch))
            core.finished(batch, ends, ends - batch.started)
            yield from decide(core, ends, running, chance)
        offered = request(chance, now, slo)
        coming = chance.random() < 0.3
        if coming:
            offered.own_course().ready_at = now + chance.uniform(0.0, slo / 2)
        refusal = core.offer(offered, now, ready=not coming)
        if coming and refusal is None and chance.random() < 0.8:
            core.ready(offered, now)
        if refusal is not None and refusal.reason is not Reason.TOO_LARGE:
            yield refused("m", offered, refusal, fixed=False).message, refusal.reason
        yield from decide(core, now, running, chance)


def request(chance: Random, now: float, slo: float) -> Job:
    late = chance.uniform(0.0, slo / 4)
    own = chance.choice([math.inf, slo * chance.random()])
    offered = Job(now - late, now - late + own, images=chance.choice([1, 1, 1, 2, 5]))
    offered.origin = JobOrigin(chance.choice(["", "", "a", "b"]))
    offered.options = JobOptions(chance.choice([0, 0, 0, 1]))
    offered.outside = chance.choice([0.0, slo / 50])
    offered.own_course().later = chance.choice([0.0, 0.0, slo / 4])
    return offered


def decide(
    core: Scheduler, now: float, running: list[tuple[float, Batch]], chance: Random
) -> Iterator[tuple[str, Reason]]:
    while True:
        decision = core.decide(now)
        for gone in decision.given_up:
            message = given_up("m", gone, now, 0.0).message
            if "before the whole request" not in message:
                yield message, gone.reason
        if decision.batch is None:
            return
        takes = core.curve.times[decision.batch.images] * chance.uniform(0.8, 1.8)
        running.append((now + takes, decision.batch))


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
