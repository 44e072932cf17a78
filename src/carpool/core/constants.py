"""Defines the numbers of the promise rule that several modules use, each with its reason. A number that one
module uses stands there, in capitals. Everything else is measured or learned."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Constants:
    """Found by simulation on curves of very different shapes; see docs/scheduling.md for what each buys."""

    oversell: float = 0.8
    """The gate counts only this share of the queue: some of it will be given up. 1.0 refuses more at arrival
    and loses 1 % of goodput; 0.6 leaves a fifth of the refusals to be found out later."""

    rate_memory_s: float = 0.2
    rate_memory_promises: float = 2.0
    """Memory of the offered rate: long enough to average tens of requests, short enough to see a surge. Where
    two promises are longer, they are the memory: with slow batches few requests come in a fifth of a second,
    and refusing for their luck cost two percent at capacity. Three promises hold small batches too long."""

    keeps_up: float = 0.95
    """Batches keep up with the traffic when they sustain this share of the offered rate, which is an
    estimate: no request is given up on a doubtful figure. 1.0 costs two percent at capacity on two instances;
    with 0.9, one instance runs small batches too long and loses one."""

    handover_weight: float = 0.05
    handover_most: float = 4.0
    handover_least_s: float = 0.00005
    handover_most_s: float = 0.001
    """What a batch occupies its instance for beside its run is learned from each by a twentieth. One counts
    as four times what was thought (or 0.05 ms) at most: a stall is no handing over. It is at most 1 ms: only
    a machine that has no time for it takes longer, and then the batch counts, not who is late."""

    most_outside: float = 0.25
    """A promise is planned shorter by what its client waits outside the scheduler's account, up to a quarter.
    Beyond that no plan helps: the machine is too busy to carry answers away, and refusing more is no cure."""

    most_unread: float = 0.2
    """Requests may lie in their sockets for a fifth of a promise. If that lasts, their front end gets more
    than it can read and serve: it turns newcomers away unread. With a quarter, the way back would take what
    is left of the plan's share for what is outside; with 0.15, a twentieth of its time is lost."""

    backlog_share: float = 0.9
    backlog_step: float = 0.7
    """A front end that is behind can go on with nine tenths of what it did: clients that ask for more than a
    fair part of that are rejected. If the wait still stands after two promises, the rest give way, too."""

    paced_wait: float = 0.13
    paced_longest_s: float = 2.0
    """A front end delays a refusal by at most this part of the promise, or by two seconds if the refusal's
    lane is what makes it fall behind: a client that retries at once retries less often, and is still answered
    in time. Including the way on a busy machine that is a fifth of the promise, hardly with 0.15."""

    lane_memory_s: float = 1.0
    """Memory of one source's rate: a share must not be lost to the luck of a few arrivals."""

    guard_margin: float = 1.1
    """Extra room in the guard batch, so that a source below its share is not lost to noise."""

    lately_s: float = 10.0
    """How long the guard stays up after the last protected request: the next must find it up."""

    later_quantile: float = 0.9
    later_window: int = 200
    later_memory_s: float = 1.0
    """A step of a pipeline leaves to the later ones what nine in ten of the last 200 requests needed there.
    With 0.7, 7 % is lost at three times the load. After a second without an answer it is forgotten."""

    max_lanes: int = 64
    """Sources with a lane of their own; the rest share one, so that names cost neither memory nor share."""


CONSTANTS = Constants()
