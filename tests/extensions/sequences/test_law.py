"""The law of sequences, in virtual time."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.core.job import INFINITY, Job, JobOrigin
from carpool.extensions.sequences.law import Bounds, Sequences, SequenceStep, Turn, Why
from later import many


def _job(now: float = 0.0, deadline: float = INFINITY, images: int = 1) -> Job:
    return Job(now, deadline, images)


def _offer(law: Sequences, name: int | str, now: float = 0.0, flags: str = "", **more: float) -> Job:
    """`flags` is s for one that starts, e for one that ends."""
    job = _job(now, **more)
    assert law.offer(job, name, now, start="s" in flags, end="e" in flags) is None
    return job


def _law(instances: int = 1, places: int = 2, idle: float = 1.0, most: int = 100) -> Sequences:
    return Sequences(instances, places, idle, Bounds(most, most, most, INFINITY))


def test_one_at_a_time_in_order() -> None:
    law = _law()
    first, second, third = (_offer(law, 7, flags=flags) for flags in ("s", "", "e"))
    assert law.turn(0.0).passed == [first]
    assert law.turn(0.0).passed == []
    law.finished(first, 0.1, ran=True)
    assert law.turn(0.1).passed == [second]
    law.finished(second, 0.2, ran=True)
    assert law.turn(0.2).passed == [third]
    assert law.live == 1
    law.finished(third, 0.3, ran=True)
    assert (law.live, law.backlog, law.waiting) == (0, 0, 0)


@pytest.mark.parametrize(
    ("name", "images", "why"),
    [
        (0, 1, Why.NO_ID),
        ("", 1, Why.NO_ID),
        (7, 2, Why.NOT_ONE),
        (7, 1, Why.NO_START),
        ("7", 1, Why.NO_START),
    ],
)
def test_what_is_refused_is_not_known(name: int | str, images: int, why: Why) -> None:
    law = _law()
    assert law.offer(_job(images=images), name, 0.0, start=False, end=False) is why
    assert (law.live, law.backlog, law.waiting) == (0, 0, 0)


def test_a_number_and_its_text_are_two_sequences() -> None:
    law = _law()
    jobs = [_offer(law, 7, flags="s"), _offer(law, "7", flags="s")]
    assert law.turn(0.0).passed == jobs
    assert law.live == 2


def test_after_its_end_it_has_to_start_again() -> None:
    law = _law()
    _offer(law, 7, flags="se")
    assert law.offer(_job(), 7, 0.0, start=False, end=False) is Why.NO_START


def test_the_backlog_is_first_come_first_served() -> None:
    law = _law(places=1)
    held = _offer(law, 1, flags="s")
    waiting = [_offer(law, name, flags="se") for name in (3, 2, 5)]
    assert law.turn(0.0).passed == [held]
    assert law.backlog == 3
    law.finished(held, 0.0, ran=True)
    end = _offer(law, 1, flags="e")
    order = [end]
    now = 0.0
    for _ in range(4):
        (passed,) = law.turn(now).passed
        assert passed is order[-1]
        law.finished(passed, now, ran=True)
        if waiting:
            order.append(waiting.pop(0))
    assert law.live == law.backlog == 0


def test_who_starts_again_before_its_end_stays_where_it_is() -> None:
    law = _law(places=1)
    old = _offer(law, 7, flags="s")
    law.turn(0.0)
    anew = _offer(law, 7, flags="s")
    assert law.turn(0.0).passed == []
    law.finished(old, 0.0, ran=True)
    assert law.turn(0.0).passed == [anew]
    assert law.live == 1


def test_who_starts_again_behind_its_end_queues_behind_the_others() -> None:
    law = _law(places=1)
    first = _offer(law, 7, flags="se")
    law.turn(0.0)
    other = _offer(law, 8, flags="se")
    again = _offer(law, 7, flags="se")
    law.finished(first, 0.0, ran=True)
    assert law.turn(0.0).passed == [other]
    law.finished(other, 0.0, ran=True)
    assert law.turn(0.0).passed == [again]


def test_idle_sequences_lose_their_place_and_it_is_known_why() -> None:
    law = _law(places=1, idle=1.0)
    first = _offer(law, 7, flags="s")
    law.turn(0.0)
    assert law.turn(5.0).look_again is None  # it runs: that is not idle
    law.finished(first, 5.0, ran=True)
    waits = _offer(law, 8, 5.0, flags="s")
    assert law.turn(5.0).look_again == 6.0
    assert law.turn(5.9).passed == []
    assert law.turn(6.0).passed == [waits]
    assert law.why_ended(7) is Why.IDLE
    assert law.offer(_job(), 7, 6.0, start=False, end=False) is Why.NO_START
    _offer(law, 7, 6.0, flags="s")
    assert law.why_ended(7) is None


def test_a_request_puts_idling_off() -> None:
    law = _law(idle=1.0)
    for at in (0.0, 0.9, 1.8):
        job = _offer(law, 7, at, flags="" if at else "s")
        assert law.turn(at).passed == [job]
        law.finished(job, at, ran=True)
    assert law.turn(2.7).look_again == pytest.approx(2.8)
    assert law.live == 1
    law.turn(2.8)
    assert law.live == 0


def test_a_start_that_waits_too_long_takes_its_sequence_along() -> None:
    law = _law(places=1)
    _offer(law, 1, flags="s")
    late = _offer(law, 2, flags="s", deadline=3.0)
    follower = _offer(law, 2)
    turn = law.turn(1.0)
    assert turn.look_again == 3.0
    assert [dropped.job for dropped in law.turn(3.0).dropped] == [late, follower]
    assert law.offer(_job(), 2, 3.0, start=False, end=False) is Why.NO_START
    assert law.backlog == 0


def test_a_request_in_the_middle_may_be_late_alone() -> None:
    law = _law()
    first = _offer(law, 7, flags="s")
    late, last = _offer(law, 7, deadline=1.0), _offer(law, 7, flags="e")
    law.turn(0.0)
    assert [dropped.job for dropped in law.turn(1.0).dropped] == [late]
    law.finished(first, 1.0, ran=True)
    assert law.turn(1.0).passed == [last]


@pytest.mark.parametrize("in_queue", [True, False])
def test_an_end_that_does_not_run_frees_the_place(in_queue: bool) -> None:
    law = _law(places=1)
    first = _offer(law, 7, flags="s")
    law.turn(0.0)
    end = _offer(law, 7, flags="e")
    if in_queue:
        assert law.cancel(end)
        law.finished(first, 0.0, ran=True)
    else:
        law.finished(first, 0.0, ran=True)
        assert law.turn(0.0).passed == [end]
        assert not law.cancel(end)
        law.finished(end, 0.0, ran=False)
    assert law.live == law.waiting == 0


def test_a_start_that_the_scheduler_refuses_takes_its_sequence_along() -> None:
    law = _law()
    start, follower, anew = (_offer(law, 7, flags=flags) for flags in ("s", "e", "s"))
    assert law.turn(0.0).passed == [start]
    law.finished(start, 0.0, ran=False)
    turn = law.turn(0.0)
    assert [dropped.job for dropped in turn.dropped] == [follower]
    assert turn.passed == [anew]


def test_a_lost_instance_ends_its_sequences_and_no_others() -> None:
    law = _law(instances=2, places=1)
    one, two = _offer(law, 1, flags="s"), _offer(law, 2, flags="s")
    behind, anew = _offer(law, 1), _offer(law, 1, flags="s")
    assert law.turn(0.0).passed == [one, two]
    assert _instance(one) != _instance(two)
    assert law.lost(_instance(one)) == [one]
    turn = law.turn(0.0)
    assert [(dropped.job, dropped.why) for dropped in turn.dropped] == [(behind, Why.LOST)]
    assert turn.passed == []  # the other instance is full
    law.finished(one, 0.0, ran=True)  # too late
    law.placed(0)
    assert law.turn(0.0).passed == [anew]
    assert law.live == 2


def _instance(job: Job) -> int:
    step: SequenceStep = job.payload
    return step.instance


def test_new_sequences_go_where_most_places_are_free() -> None:
    law = _law(instances=3, places=2)
    jobs = [_offer(law, name, flags="s") for name in range(1, 7)]
    assert law.turn(0.0).passed == jobs
    places = [(job.payload.instance, job.payload.slot) for job in jobs]
    assert places == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1)]


def test_so_many_may_wait() -> None:
    law = _law(most=2)
    first = _offer(law, 1, flags="s")  # its turn has come: it does not wait
    _offer(law, 1)
    _offer(law, 1)
    assert law.offer(_job(), 1, 0.0, start=False, end=False) is Why.FULL
    law.turn(0.0)
    assert law.offer(_job(), 1, 0.0, start=False, end=False) is Why.FULL
    law.finished(first, 0.0, ran=True)
    law.turn(0.0)
    _offer(law, 1)


def test_all_who_wait_can_be_told() -> None:
    law = _law(places=1)
    running = _offer(law, 1, flags="s")
    law.turn(0.0)
    waiting = [_offer(law, 1), _offer(law, 2, flags="s")]
    law.drop_waiting()
    assert [dropped.job for dropped in law.turn(0.0).dropped] == waiting
    law.finished(running, 0.0, ran=True)
    assert law.live == law.backlog == law.waiting == 0


def test_starts_without_an_end_fill_no_memory() -> None:
    """Whether they run and idle, wait without a place, or are late."""
    law = _law(instances=2, places=3, idle=1.0, most=50)
    refused, now = 0, 0.0
    for name in range(1, 30_001):
        now += 0.05
        job = _job(now, now + 2.0 if name % 2 else INFINITY)
        refused += law.offer(job, name if name % 3 else f"{name}", now, start=True, end=False) is Why.FULL
        for passed in law.turn(now).passed:
            law.finished(passed, now, ran=True)
        assert len(law._known) <= 56
        backlog = law._shares[""].backlog
        assert max(map(len, (backlog, law._quiet, law._deadlines))) <= 64 + 2 * 57
    assert refused > 1000
    assert len(law._ended) == 1024
    law.turn(now + 100.0)
    assert law.live <= 6


def test_a_hundred_thousand_starts_at_once_fill_no_memory() -> None:
    """Of clients that say no deadline, end nothing and do not even wait for an answer."""
    law = Sequences(1, 8, 1.0, Bounds(65536, 100, 1 << 30, 30.0))
    found = Counter(law.offer(_job(), name, 0.0, start=True, end=False) for name in range(1, 100_001))
    assert found == {None: 108, Why.CROWDED: 99_892}
    assert len(law._known) == 108
    assert max(map(len, (law._shares[""].backlog, law._quiet, law._deadlines))) <= 108
    assert len(law.turn(0.0).passed) == 8  # and they never come back
    assert Counter(why for _, why in law.turn(30.0).dropped) == {Why.NO_PLACE: 100}
    assert (law.live, law.backlog, law.waiting, law.size) == (8, 0, 0, 0)
    law.lost(0)
    law.placed(0)
    law.turn(31.0)
    assert law._known == {}


def test_ten_thousand_sequences_at_once() -> None:
    law = _law(places=10_000, most=100_000)
    first = [_offer(law, name, flags="s") for name in range(1, 10_001)]
    second = [_offer(law, name, flags="e") for name in range(1, 10_001)]
    assert law.turn(0.0).passed == first
    for job in first:
        law.finished(job, 0.0, ran=True)
    assert law.turn(0.0).passed == second
    for job in second:
        law.finished(job, 0.0, ran=True)
    assert (law.live, law.waiting, law._known) == (0, 0, {})


def _bounded(
    requests: int = 100, sequences: int = 100, size: int = 100, seconds: float = INFINITY
) -> Sequences:
    return Sequences(1, 1, 1.0, Bounds(requests, sequences, size, seconds), lambda job: int(job.outside))


def test_so_many_sequences_may_wait_for_a_place() -> None:
    law = _bounded(sequences=2)
    first = _offer(law, 1, flags="s")
    _offer(law, 2, flags="s")
    _offer(law, "3", flags="s")
    assert law.offer(_job(), 4, 0.0, start=True, end=False) is Why.CROWDED
    assert law.until_free(0.0) is None  # nobody knows when the first ends
    assert 4 not in law._known
    _offer(law, 2)  # those that wait may go on
    law.turn(0.0)
    law.finished(first, 3.0, ran=True)
    assert law.until_free(3.25) == 0.75  # if it stays silent
    assert law.turn(4.0).passed  # it did
    _offer(law, 4, 4.0, flags="s")


def test_so_many_bytes_may_wait() -> None:
    law = _bounded(size=10)
    first = _job()
    first.outside = 1000  # it does not wait
    assert law.offer(first, 1, 0.0, start=True, end=False) is None
    jobs = [_job() for _ in range(3)]
    for job in jobs:
        job.outside = 5
    assert [law.offer(job, 1, 0.0, start=False, end=False) for job in jobs] == [None, None, Why.HEAVY]
    assert law.size == 10
    law.cancel(jobs[0])
    assert law.size == 5
    assert law.offer(jobs[2], 1, 0.0, start=False, end=True) is None
    law.turn(0.0)
    law.finished(first, 0.0, ran=True)
    assert law.turn(0.0).passed == [jobs[1]]
    assert law.size == 5
    law.drop_waiting()
    assert (law.size, law.waiting) == (0, 0)


def test_who_says_no_deadline_does_not_wait_for_a_place_for_ever() -> None:
    law = _bounded(seconds=30.0)
    first = _offer(law, 1, flags="s")
    starts, follows = _offer(law, 2, 1.0, flags="s"), _offer(law, 2, 25.0)
    _offer(law, 1, 2.0)  # waits for its own turn, not for a place
    hurried = _job(3.0, 5.0)
    assert law.offer(hurried, 3, 3.0, start=True, end=True) is None
    assert law.turn(3.0).look_again == 5.0
    assert law.turn(5.0).dropped == [(hurried, Why.DEADLINE)]
    assert law.turn(30.9) == Turn([], [], 31.0)
    turn = law.turn(31.0)
    assert turn.dropped == [(starts, Why.NO_PLACE), (follows, Why.NO_PLACE)]
    assert (law.backlog, law.waiting) == (0, 1)
    assert law.offer(_job(32.0), 2, 32.0, start=False, end=False) is Why.NO_START
    law.finished(first, 40.0, ran=True)
    assert len(law.turn(40.0).passed) == 1


def test_who_starts_again_behind_its_end_waits_no_longer_than_others() -> None:
    law = _bounded(seconds=30.0)
    first = _offer(law, 1, flags="se")
    other = _offer(law, 2, 5.0, flags="s")
    again = _offer(law, 1, 10.0, flags="s")
    law.turn(10.0)
    law.finished(first, 20.0, ran=True)
    assert law.turn(20.0).passed == [other]
    assert law.turn(39.9).dropped == []
    assert law.turn(40.0).dropped == [(again, Why.NO_PLACE)]


def test_an_instance_that_dies_before_its_request_was_passed_on() -> None:
    law = _law(instances=2, places=1)
    job = _offer(law, 1, flags="s")
    assert law.lost(0) == []
    turn = law.turn(0.0)
    assert turn.passed == []
    assert turn.dropped == [(job, Why.LOST)]
    assert law.why_ended(1) is Why.LOST
    law.placed(0)
    assert law.turn(0.0) == Turn()
    assert law._gaps == 2


_ADDRESSES = "192.0.2.1", "192.0.2.2"


def _of(
    holder: str, law: Sequences, name: int | str, now: float = 0.0, flags: str = "s", weight: float = 1.0
) -> Job:
    """With a key; or without one, from that address."""
    job = _job(now)
    job.origin = JobOrigin("", "" if "." in holder else holder, weight, holder)
    assert law.offer(job, name, now, start="s" in flags, end="e" in flags) is None
    return job


def _run(law: Sequences, now: float) -> list[Job]:
    """All that can run does, and ends at once."""
    ran: list[Job] = []
    while passed := law.turn(now).passed:
        ran += passed
        for job in passed:
            law.finished(job, now, ran=True)
    return ran


def test_two_keys_that_use_one_id_do_not_meet() -> None:
    law = _law(places=4)
    jobs = [
        _of(holder, law, name) for name in (5, "cam") for holder in ("", "a", "b")[: 2 if name == 5 else 3]
    ]
    assert (law.live, law.backlog) == (4, 1)
    told = [job.payload.name for job in jobs]
    assert (told[0], told[2]) == (5, "cam"), "the first keeps its own"
    assert len(set(told)) == len(told)
    assert 0 < told[1] < 2**31
    assert told[3] == "a/cam"
    stranger = _job()
    stranger.origin = JobOrigin(holder="c", payer="c")
    assert law.offer(stranger, 5, 0.0, start=False, end=False) is Why.NO_START


def test_the_key_with_most_places_gives_up_its_stalest_sequence() -> None:
    law = _law(places=8, idle=100.0)
    for number in range(1, 9):
        _of("a", law, number, now=float(number))
        _run(law, float(number))
    other = _of("b", law, 1, now=20.0)
    assert _run(law, 20.0) == [other]
    assert law.why_ended(1, "a") is Why.YIELDED
    assert law.why_ended(1, "b") is None
    for number in range(2, 9):
        _of("b", law, number, now=21.0)
    _run(law, 21.0)
    held = Counter(one.key[0] for one in law._known.values() if one.instance >= 0)
    assert held == {"a": 4, "b": 4}, "and then nobody takes any"
    assert [law.why_ended(number, "a") for number in range(1, 9)] == [Why.YIELDED] * 4 + [None] * 4


def test_places_and_ids_without_keys_belong_to_addresses() -> None:
    law = _law(places=4, idle=100.0)
    for number in range(1, 5):
        _of(_ADDRESSES[0], law, number, now=float(number))
        _run(law, float(number))
    other = _of(_ADDRESSES[1], law, 5, now=10.0)
    assert _run(law, 10.0) == [other]
    assert law.why_ended(1, _ADDRESSES[0]) is Why.YIELDED
    elsewhere = _job(11.0)
    elsewhere.origin = elsewhere.origin._replace(payer=_ADDRESSES[1])
    assert law.offer(elsewhere, 2, 11.0, start=False, end=False) is Why.NO_START
    assert law.offer(elsewhere, 2, 11.0, start=False, end=True) is Why.NO_START
    same = _of(_ADDRESSES[0], law, 2, now=11.0, flags="")
    assert _run(law, 11.0) == [same], "over whatever connection"
    assert {name: share.places for name, share in law._shares.items()} == {_ADDRESSES[0]: 3, _ADDRESSES[1]: 1}


def test_a_sequence_that_is_at_work_ends_with_that_before_its_place_is_anothers() -> None:
    law = _law(places=2)
    first, second = (_of("a", law, number) for number in (1, 2))
    assert law.turn(0.0).passed == [first, second]
    queued = _of("a", law, 1, flags="")
    other = _of("b", law, 1)
    turn = law.turn(0.0)
    assert (turn.passed, turn.dropped) == ([], [(queued, Why.YIELDED)])
    assert law.turn(0.0) == Turn(), "one is enough"
    late = _job()
    late.origin = JobOrigin(holder="a", payer="a")
    assert law.offer(late, 1, 0.0, start=False, end=False) is Why.NO_START
    law.finished(first, 0.1, ran=True)
    assert law.turn(0.1).passed == [other]
    law.finished(second, 0.1, ran=True)
    assert law.why_ended(1, "a") is Why.YIELDED


def test_a_heavier_key_has_more_places() -> None:
    law = _law(places=8, idle=100.0)
    for number in range(1, 9):
        _of("light", law, number)
    _run(law, 0.0)
    for number in range(1, 9):
        _of("heavy", law, number, now=1.0, weight=3.0)
    _run(law, 1.0)
    assert Counter(one.key[0] for one in law._known.values() if one.instance >= 0) == {"heavy": 6, "light": 2}


def test_one_key_cannot_fill_the_backlog_to_the_end() -> None:
    law = Sequences(1, 1, 1.0, Bounds(100, 8, 100, INFINITY))
    refused: list[Why | None] = []
    for number in range(1, 12):
        job = _job()
        job.origin = JobOrigin(holder="a", payer="a")
        refused.append(law.offer(job, number, 0.0, start=True, end=False))
    assert refused == [None] * 7 + [Why.CROWDED] * 4, "one has the place"
    for number in (1, 2):
        _of("b", law, number)


class _Adversary:
    """Random clients, and what must hold after each of their moves."""

    def __init__(self, chance: random.Random) -> None:
        self.random = chance
        self.instances, self.places = self.random.randint(1, 3), self.random.randint(1, 4)
        self.most = self.random.choice((4, 20, 1000))
        self.law = Sequences(
            self.instances,
            self.places,
            1.0,
            Bounds(
                self.most, self.random.choice((2, 1000)), 3 * self.most, self.random.choice((2.0, INFINITY))
            ),
            lambda job: 2 + int(job.arrived) % 3,
        )
        self.now = 0.0
        self.there = set(range(self.instances))
        self.waiting: dict[Job, tuple[str, int | str]] = {}
        self.passed: dict[Job, tuple[str, int | str]] = {}
        self.last: dict[tuple[str, int | str], int] = {}  # the number of the last passed on
        ids = (1, 2, 3, 2**64 - 1, 2**63, "1", "cam", "x" * 128, "ü")
        self.ids = self.random.sample(ids, self.random.randint(2, len(ids)))
        self.weights = dict.fromkeys(("", *_ADDRESSES), 1.0) | {
            key: self.random.choice((0.5, 1.0, 3.0)) for key in ("a", "b")
        }
        self.payers = list(self.weights)[: self.random.randint(1, len(self.weights))]

    def move(self) -> None:
        act = self.random.choices(
            (self.offer, self.finish, self.cancel, self.wait, self.lose, self.come_back),
            (10, 8, 2, 2, 0.2, 0.5),
        )[0]
        act()
        self.look(self.law.turn(self.now))

    def offer(self) -> None:
        name = self.random.choice(self.ids)
        deadline = self.now + self.random.choice((0.0, 0.1, 1.0, INFINITY))
        job = _job(self.now, deadline, self.random.choice((1, 1, 1, 1, 2)))
        payer = self.random.choice(self.payers)
        job.origin = JobOrigin("", "" if "." in payer else payer, self.weights[payer], payer)
        start, end = self.random.random() < 0.4, self.random.random() < 0.3
        if self.law.offer(job, name, self.now, start=start, end=end) is None:
            self.waiting[job] = payer, name
        else:
            assert job.payload is None

    def finish(self) -> None:
        if self.passed:
            job = self.random.choice(list(self.passed))
            del self.passed[job]
            self.law.finished(job, self.now, ran=self.random.random() < 0.9)

    def cancel(self) -> None:
        jobs = [*self.waiting, *self.passed]
        if jobs:
            job = self.random.choice(jobs)
            assert self.law.cancel(job) == (job in self.waiting)
            self.waiting.pop(job, None)

    def wait(self) -> None:
        self.now += self.random.choice((0.01, 0.3, 1.1))

    def lose(self) -> None:
        instance = self.random.randrange(self.instances)
        if instance in self.there:
            self.there.discard(instance)
            for job in self.law.lost(instance):
                self.passed.pop(job)
                if self.random.random() < 0.5:
                    self.law.finished(job, self.now, ran=True)

    def come_back(self) -> None:
        instance = self.random.randrange(self.instances)
        self.there.add(instance)
        self.law.placed(instance)

    def look(self, turn: Turn) -> None:
        for job in turn.passed:
            name = self.waiting.pop(job)
            step: SequenceStep = job.payload
            assert name not in self.passed.values()
            assert step.number > self.last.get(name, 0)
            assert step.instance in self.there
            self.last[name] = step.number
            self.passed[job] = name
        for job, _ in turn.dropped:
            del self.waiting[job]
        assert len(self.waiting) == self.law.waiting <= self.most
        homes = [(job.payload.instance, job.payload.slot) for job in self.passed]
        assert len(set(homes)) == len(homes)
        assert self.law.live <= len(self.there) * self.places
        if self.law.backlog:
            assert self.law.live == len(self.there) * self.places
        held = Counter(one.share.name for one in self.law._known.values() if one.instance >= 0)
        leaving = Counter(one.share.name for one in self.law._known.values() if one.is_leaving)
        assert {name: share.places for name, share in self.law._shares.items() if share.places} == +(
            held - leaving
        )
        told = [one.id for one in self.law._known.values()]
        assert len(set(told)) == len(told), "the model knows each by an id of its own"
        assert sum(leaving.values()) == self.law._leaving <= 1
        self.shared(held - leaving)
        assert all(job.deadline > self.now for job in self.waiting)

    def shared(self, held: Counter[str]) -> None:
        """Who waits for a place has its share of them, but for one that is about to be left."""
        waits = {one.share.name for one in self.law._known.values() if one.instance < 0}
        for name in waits if self.law._leaving == 0 else ():
            for other, places in held.items():
                keeps = (places - 1) / self.weights[other]
                assert keeps < (held[name] + 1) / self.weights[name]

    def end(self) -> None:
        """Everybody is served or told, and nothing is left of them."""
        for instance in range(self.instances):
            self.law.placed(instance)
        self.there = set(range(self.instances))
        for _ in range(100_000):
            self.look(self.law.turn(self.now))
            if not self.passed and not self.waiting:
                break
            self.now += 0.0 if self.passed else 1.0
            self.finish()
        self.now += 1.0
        self.law.turn(self.now + 1.0)
        law = self.law
        assert (law.live, law.backlog, law.waiting, law._known) == (0, 0, 0, {})
        assert [sorted(free or ()) for free in law._free] == [list(range(self.places))] * self.instances
        assert law._gaps == self.instances * self.places
        assert law.size == 0
        assert law.turn(self.now + 100.0).look_again is None
        assert len(law._shares) + len(law._ids) + len(law._quiet) + len(law._deadlines) == 0


@given(st.randoms(use_true_random=False), st.integers(1, 60))
@settings(max_examples=many(100), deadline=None)
def test_each_is_answered_once_and_in_order_and_no_slot_is_lost(chance: random.Random, moves: int) -> None:
    adversary = _Adversary(chance)
    for _ in range(moves):
        adversary.move()
    adversary.end()


@pytest.mark.parametrize("seed", range(25))
def test_nothing_goes_wrong_whatever_clients_do(seed: int) -> None:
    adversary = _Adversary(random.Random(seed))
    for _ in range(1_000):
        adversary.move()
    adversary.end()


@pytest.mark.conformance
@pytest.mark.parametrize("seed", range(1000, 1020))
def test_nothing_goes_wrong_for_long(seed: int) -> None:
    adversary = _Adversary(random.Random(seed))
    for _ in range(20_000):
        adversary.move()
    adversary.end()
    law = adversary.law
    assert len(law._ended) <= 1024
