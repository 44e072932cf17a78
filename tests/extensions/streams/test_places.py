"""Places of decoupled models, shared by client: who runs, who waits, and who gives way."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from carpool.core.job import Job, JobOrigin
from carpool.extensions.streams.places import StreamPlaces
from later import many


def asked(law: StreamPlaces, payer: str, weight: float = 1.0) -> Job:
    job = Job(0.0)
    job.origin = JobOrigin(weight=weight, payer=payer)
    assert law.offer(job)
    return job


def test_the_key_with_most_gives_way_with_what_has_run_longest() -> None:
    law = StreamPlaces(4, 100)
    greedy = [asked(law, "a") for _ in range(6)]
    assert law.turn() == (greedy[:4], None)
    other = asked(law, "b")
    assert law.turn() == ([], greedy[0])
    assert law.turn() == ([], None), "one at a time"
    law.left(greedy[0])
    assert law.turn() == ([other], None)
    more = [asked(law, "b") for _ in range(3)]
    assert law.turn() == ([], greedy[1])
    law.left(greedy[1])
    assert law.turn() == ([more[0]], None), "two each: nobody takes any more"
    law.left(greedy[2])
    assert law.turn() == ([greedy[4]], None), "who has least is next"


def test_one_key_alone_has_all_and_gives_way_to_nobody() -> None:
    law = StreamPlaces(2, 100)
    jobs = [asked(law, "a") for _ in range(5)]
    assert law.turn() == (jobs[:2], None)
    assert law.turn() == ([], None)
    law.left(jobs[3])
    law.left(jobs[0])
    assert law.turn() == ([jobs[2]], None)


def test_one_key_cannot_fill_the_queue_to_the_end() -> None:
    law = StreamPlaces(1, 8)
    jobs = [Job(0.0) for _ in range(20)]
    for job in jobs:
        job.origin = JobOrigin(payer="a")
    assert sum(law.offer(job) for job in jobs) == 6
    asked(law, "b")


def test_what_waits_of_a_live_source_is_found() -> None:
    law = StreamPlaces(1, 100)
    running = asked(law, "a")
    assert law.turn() == ([running], None)
    frames = [
        Job(0.0, source=source, latest=latest) for source, latest in (("x", True), ("y", True), ("x", False))
    ]
    for job in frames:
        job.origin = job.origin._replace(payer="a")
        assert law.offer(job)
    assert law.older_frame(Job(1.0, source="x", latest=True)) is frames[0]
    assert law.older_frame(Job(1.0, source="x")) is None
    assert law.older_frame(Job(1.0, source="z", latest=True)) is None


class Adversary:
    """Random clients, and what must hold after each of their moves."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.places = random.randint(1, 8)
        self.law = StreamPlaces(self.places, random.choice((4, 1000)))
        self.weights = {name: random.choice((0.5, 1.0, 3.0)) for name in "abc"}
        self.held: dict[Job, None] = {}
        self.running: dict[Job, None] = {}
        self.leaving: Job | None = None

    def come(self) -> None:
        job = Job(0.0)
        payer = self.random.choice("abc")
        job.origin = JobOrigin(weight=self.weights[payer], payer=payer)
        if self.law.offer(job):
            self.held[job] = None

    def leave(self) -> None:
        job = self.random.choice([*self.held, *self.running])
        self.law.left(job)
        self.held.pop(job, None)
        self.running.pop(job, None)
        self.leaving = None if job is self.leaving else self.leaving

    def look(self) -> None:
        passed, ends = self.law.turn()
        for job in passed:
            del self.held[job]
            self.running[job] = None
        if ends is not None:
            assert self.leaving is None
            assert ends in self.running
            self.leaving = ends
        assert self.law.held == len(self.held)
        assert len(self.running) <= self.places
        assert not self.held or len(self.running) == self.places
        if self.leaving is None:
            self.shared(Counter(job.origin.payer for job in self.running))

    def shared(self, have: Counter[str]) -> None:
        """Nobody waits who has less than its share."""
        for taker in {job.origin.payer for job in self.held}:
            for giver, count in have.items():
                assert (count - 1) / self.weights[giver] < (have[taker] + 1) / self.weights[taker]


@pytest.mark.parametrize("seed", range(many(20)))
def test_nothing_is_lost_and_shares_are_kept_whatever_comes(seed: int) -> None:
    adversary = Adversary(Random(seed))
    for _ in range(500):
        if adversary.random.random() < 0.55 or not (adversary.held or adversary.running):
            adversary.come()
        else:
            adversary.leave()
        adversary.look()
    while adversary.held or adversary.running:
        adversary.leave()
        adversary.look()
    assert adversary.law.held == adversary.law._running == len(adversary.law._shares) == 0
