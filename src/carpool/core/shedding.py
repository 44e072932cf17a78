"""Whom to give up, and when: only when saturated, and always the one who costs the others most.

The usual mistake is to shrink the batch until the oldest request still makes it. Under overload the oldest is
always nearly late, so batches shrink to one and nobody is served. Here a request that would shrink the batch
below what the traffic needs is given up instead, so that those behind it ride in a full batch.
"""

from __future__ import annotations

from carpool.core.job import Job, Reason


def batch_size(head: Job, room: int, want: int, smaller: int, *, keeps_up: bool) -> int:
    """How many images to run with `head` as the most urgent; 0 means that the head is given up.

    `room` is the largest batch that meets the head's deadline, `want` the batch we would like, `smaller` the
    most efficient one within `room`, and `keeps_up` whether batches of `room` carry the offered rate.
    """
    if room >= want:
        return want
    if room >= head.images and keeps_up:
        return max(smaller, head.images)
    return 0


def reason_to_give_up(job: Job, now: float) -> Reason:
    """Too late is the clock's doing; anything else is ours, and says so."""
    return Reason.DEADLINE if now >= job.due else Reason.GIVEN_UP
