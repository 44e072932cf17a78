from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from carpool.core.job import Job, JobState, Lane, Line
from carpool.core.queue import Lanes


def waiting(lanes: Lanes, lane: Lane, rank: float, images: int = 1, shape: object = None) -> Job:
    job = Job(0.0, images=images, shape=shape)
    job.rank = rank
    lanes.offer(job, lane)
    lanes.ready_now(job)
    return job


def test_a_line_keeps_rank_order_and_skips_who_left() -> None:
    lanes = Lanes(by_shape=True)
    lane = lanes.lane(1, "", 0.0)
    late, early, middle = (waiting(lanes, lane, rank) for rank in (3.0, 1.0, 2.0))
    line = lane.lines[None]
    assert list(line) == [early, middle, late]
    lanes.remove(early, JobState.GONE)
    assert line.head() is middle
    assert line.ranked_from(2.5) == [late]
    assert (line.requests, line.images, lane.ready, lanes.requests) == (2, 2, 2, 2)


def test_places_of_those_who_left_are_given_back() -> None:
    lanes = Lanes(by_shape=True)
    lane = lanes.lane(1, "", 0.0)
    for rank in range(10_000):
        lanes.remove(waiting(lanes, lane, rank), JobState.GONE)
    assert len(lane.lines[None]._jobs) < 200


def test_what_was_taken_leaves_no_place_behind() -> None:
    line = Line()
    jobs = [Job(0.0, images=images) for images in (1, 2, 1)]
    for job in jobs:
        job.state = JobState.READY
        line.add(job)
    assert line.take(2) == jobs[:1]  # the second does not fit, and nobody is passed over
    assert (line.head(), line.requests, line.images) == (jobs[1], 2, 3)
    assert line.take(3) == jobs[1:]
    assert (line.head(), line.requests, line.images, line._jobs) == (None, 0, 0, [])


def test_one_lane_with_all_who_may_run() -> None:
    lanes = Lanes(by_shape=True)
    first, second = lanes.lane(1, "", 0.0), lanes.lane(2, "", 0.0)
    assert lanes.only_ready() is None
    job = waiting(lanes, second, 1.0)
    assert lanes.only_ready() is second
    waiting(lanes, first, 1.0)
    assert lanes.only_ready() is None
    lanes.remove(job, JobState.GONE)
    assert lanes.only_ready() is first


def test_moving_to_the_back() -> None:
    line = Line()
    jobs = [Job(0.0) for _ in range(3)]
    for rank, job in enumerate(jobs):
        job.rank, job.state = rank, JobState.READY
        line.add(job)
    line.move_to_back(jobs[0], 99.0)
    assert list(line) == [jobs[1], jobs[2], jobs[0]]


def test_counts_follow_a_job_from_offered_to_ready_to_gone() -> None:
    lanes = Lanes(by_shape=True)
    lane = lanes.lane(1, "", 0.0)
    job = Job(0.0, images=3)
    lanes.offer(job, lane)
    assert (lanes.ready, lanes.waiting, lane.ready, lane.waiting) == (0, 3, 0, 3)
    lanes.ready_now(job)
    assert (lanes.ready, lanes.waiting) == (3, 3)
    lanes.remove(job, JobState.GONE)
    assert (lanes.waiting, lanes.ready, lanes.requests, lane.requests) == (0, 0, 0, 0)


@given(st.lists(st.tuples(st.integers(1, 4), st.booleans(), st.booleans()), max_size=12), st.integers(0, 16))
def test_taking_the_first_together_counts_like_one_by_one(
    jobs: list[tuple[int, bool, bool]], room: int
) -> None:
    """Each is (images, is a live source's frame, has left meanwhile)."""

    def lined_up() -> tuple[Lanes, Lane, list[Job]]:
        lanes = Lanes(by_shape=True)
        lane = lanes.lane(1, "", 0.0)
        made = []
        for rank, (images, latest, _) in enumerate(jobs):
            job = Job(float(rank), images=images, source=f"camera-{rank}", latest=latest)
            job.rank = rank
            lanes.offer(job, lane)
            lanes.ready_now(job)
            made.append(job)
        for job, (_, _, gone) in zip(made, jobs, strict=True):
            if gone:
                lanes.remove(job, JobState.GONE)
        return lanes, lane, made

    def seen(lanes: Lanes, lane: Lane, made: list[Job]) -> object:
        line = lane.lines.get(None, Line())
        counts = [(kept.ready, kept.waiting, kept.requests) for kept in (lanes, lane)]
        rest = (lanes._served.get(1, 0.0), lane.served, len(lanes.frames), line.requests, line.images)
        return counts, rest, [job.state for job in made]

    together, one_by_one = lined_up(), lined_up()
    if jobs:
        lanes, lane, _ = together
        lanes.serve_first(lane, lane.lines[None], room)
        lanes, lane, _ = one_by_one
        used = 0
        while (head := lane.lines[None].head()) is not None and used + head.images <= room:
            used += head.images
            lanes.serve(head)
    assert seen(*together) == seen(*one_by_one)


def test_shapes_come_and_go() -> None:
    lanes = Lanes(by_shape=True)
    lane = lanes.lane(1, "", 0.0)
    first = waiting(lanes, lane, 1.0, shape=(3, 4))
    second = waiting(lanes, lane, 2.0, shape=(5, 6))
    assert lane.earliest()[0] is first
    lanes.remove(first, JobState.GONE)
    assert lane.earliest()[0] is second
    assert list(lane.lines) == [(5, 6)]


def test_the_number_of_lanes_is_bounded_and_the_overflow_shares_one() -> None:
    lanes = Lanes(by_shape=True)
    for number in range(64):
        waiting(lanes, lanes.lane(1, f"camera-{number}", 0.0), 0.0)
    assert lanes.lane(1, "one more", 0.0).source == "*"
    assert lanes.lane(1, "and another", 0.0) is lanes.lane(1, "one more", 0.0)
    assert lanes.lane(1, "camera-3", 0.0).source == "camera-3"
    assert len(lanes) == 65


def test_lanes_of_sources_that_went_away_are_given_to_others() -> None:
    lanes = Lanes(by_shape=True)
    for number in range(64):
        lanes.lane(1, f"camera-{number}", 0.0)
    assert lanes.lane(1, "newcomer", 60.0).source == "newcomer"
    assert len(lanes) == 1


def test_being_away_earns_one_batch_of_credit_and_no_more() -> None:
    lanes = Lanes(by_shape=True)
    lanes.credit = 4
    busy, idle = lanes.lane(1, "busy", 0.0), lanes.lane(1, "idle", 0.0)
    for rank in range(100):
        lanes.serve(waiting(lanes, busy, rank))
    waiting(lanes, idle, 0.0)
    assert busy.served - idle.served == 5  # its last image was counted after the others' level


@given(
    st.lists(
        st.tuples(st.integers(1, 2), st.sampled_from("ab"), st.integers(1, 4), st.sampled_from((None, 7))),
        max_size=10,
    ),
    st.sampled_from((1.0, 0.3)),
)
def test_serving_all_at_once_is_serving_each(asked: list[tuple[int, str, int, object]], part: float) -> None:
    def counts(*, at_once: bool) -> list[object]:
        lanes = Lanes(by_shape=True)
        jobs = []
        for level, source, images, shape in asked:
            lane = lanes.lane(level, source, 0.0)
            lane.part = part
            jobs.append(waiting(lanes, lane, len(jobs), images, shape))
        if at_once:
            lanes.serve_all(jobs)
        else:
            for job in jobs:
                lanes.serve(job)
        assert all(job.state is JobState.RUNNING for job in jobs)
        each = [
            (lane.served, lane.ready, lane.waiting, lane.requests, line.requests, line.images)
            for lane in lanes
            for line in lane.lines.values()
        ]
        return [lanes.ready, lanes.waiting, lanes.requests, lanes._served, each]

    assert counts(at_once=True) == counts(at_once=False)
