"""Defines the few numbers of the promise rule, each with its reason. Everything else is measured or
learned."""

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
    """Batches keep up with the traffic when they carry this share of the offered rate, which is an estimate:
    nobody is lost for less than is certain. 1.0 costs two percent at capacity on two instances; with 0.9, one
    instance runs small batches too long and loses one."""

    handover: float = 1.25
    """If a batch and handing it over took longer than they do as a rule, a quarter of that counts as its own
    time: whoever is late to hear of its end must not think that the instance is slow."""

    handover_weight: float = 0.05
    handover_most: float = 4.0
    handover_least_s: float = 0.00005
    handover_most_s: float = 0.001
    """What a batch occupies its instance for beside its run is learned from each by a twentieth. One counts
    as four times what was thought (or 0.05 ms) at most: a stall is no handing over. It is at most 1 ms: only
    a machine that has no time for it takes longer, and then the batch counts, not who is late."""

    handover_look_s: float = 0.25
    handover_far: float = 0.1
    """Four times a second the curve may follow, if a batch of one would take a tenth more or less by it."""

    most_lag: float = 0.2
    """Requests may spend a fifth of a promise on their way to the scheduler. What is more says that it cannot
    take them as fast as they come, whatever the device could do: the front ends must say no instead."""

    spared_lag: float = 0.05
    """Beside other models, which wait in the same line, a flooded one is held to a twentieth: it has more to
    refuse than its device could answer, and loses nothing if that is done before."""

    lag_memory_s: float = 0.005
    """When nobody has come for so long, nobody is on the way any more."""

    lag_weight: float = 0.05
    """One request moves what is thought of their age when offered by a twentieth: a few say little."""

    most_outside: float = 0.25
    """A promise is planned shorter by what its client waits outside the scheduler's account, up to a quarter.
    Beyond that no plan helps: the machine is too busy to carry answers away, and refusing more is no cure."""

    outside_rise: float = 0.2
    outside_fall: float = 0.5
    """One answer that took longer on its way moves the estimate by a fifth of the difference, one that took
    less by half of it per second since the last: a stall is reckoned with at once, and for two seconds."""

    decode_weight: float = 0.15
    decode_most: float = 4.0
    decode_surprise: float = 0.2
    decode_memory_s: float = 0.5
    """One picture moves what decoding is thought to take by so much of the difference, and counts at most as
    four times what was thought: a neighbour who comes or goes is reckoned with after some ten pictures, and
    one picture that takes a hundred times as long as the others shuts the gate on nobody. One that came later
    than foreseen moves the next forecast by a fifth of that, and half a second later most of it is forgotten:
    a gate that was shut for it would never learn that it is over."""

    doubt_start: float = 0.05
    doubt_rise: float = 0.06
    doubt_fall: float = 0.002
    doubt_most: float = 0.4
    doubt_memory_s: float = 1.0
    """Requests whose inputs are still to come are let in with so much of the promise to spare for whatever
    goes wrong, at most two fifths. Each that is later than that moves it up by 0.06 of the most, each that is
    not down by 0.002: about one in thirty is later. After a second without any it is forgotten."""

    most_unread: float = 0.2
    """Requests may lie in their sockets for a fifth of a promise. If that lasts, their front end gets more
    than it can read and serve: it turns newcomers away unread. With a quarter, the way back would take what
    is left of the plan's share for what is outside; with 0.15, a twentieth of its time is lost."""

    backlog_promises: float = 2.0
    """It lasts when the wait has stood for so many promises: what gathered in a stall is gone by then."""

    backlog_memory_s: float = 0.25
    """For so long after it turned somebody away, the wait need not stand again before it turns away the next:
    an overload that lasts is held at the limit. After a second's memory, every stall would cost requests."""

    backlog_share: float = 0.9
    backlog_step: float = 0.7
    """A front end that is behind can go on with nine tenths of what it did: who asks for more than a fair
    part of that is turned away. If the wait stands for two promises all the same, the rest give way, too."""

    backlog_beside: float = 0.5
    """Beside somebody who asks for little, a flood is turned away at half of the wait that is too long. At
    all of it, one in twenty of those others would find the wait too long."""

    paced_share: float = 0.05
    paced_together: float = 0.15
    paced_burst_s: float = 0.02
    """One lane's refusals, mistakes and documents get a twentieth of a front end's time, those of all three
    twentieths; so much of it may be used at once. What is beyond is answered later."""

    paced_wait: float = 0.13
    paced_longest_s: float = 2.0
    """A refusal is told late by this part of the promise at most, or by two seconds if its lane is what makes
    a front end fall behind: who asks again at once asks less often, and is still told in time. With its way
    on a busy machine that is a fifth of the promise, hardly with 0.15."""

    lane_memory_s: float = 1.0
    """Memory of one source's rate: a share must not be lost to the luck of a few arrivals."""

    mean_weight: float = 0.05
    """One batch moves the learned speed by a twentieth of its surprise: one stall is forgotten in 20."""

    cautious_start: float = 1.1
    """Before anything is learned, assume batches may take a tenth longer: 1.0 wastes 3–4 % at first."""

    cautious_up: float = 0.0045
    cautious_down: float = 0.0005
    """Up by nine for one down settles where one batch in ten takes longer: the 0.9 quantile."""

    cautious_max: float = 1.5
    """However noisy a device is, plan with no more than half its time lost to noise."""

    surprise: float = 0.25
    surprises: int = 3
    """Three batches in a row off by a quarter on the same side mean that the device changed: believe them."""

    forget_s: float = 10.0
    """An idle instance drifts back to its profile with this time constant."""

    trend: float = 0.2
    trend_over: float = 0.1
    trend_s: float = 1.0
    trend_weight: float = 0.1
    """Slower or faster than the profile by a fifth, for a second, is worth telling, once; within a tenth it
    is over. The gap between the two keeps a device at the edge from being told of all day. Each batch moves
    the figure by a tenth of its surprise, and what is told is where it settled."""

    relearn: float = 0.1
    relearn_s: float = 5.0
    """Batches that differ from the curve by a tenth on average, over so long, give it new points. Shorter
    spells are left to the learned speed, which forgets them."""

    relearn_batches: int = 20
    relearn_least: int = 10
    """So many batches before a look says anything, and so many near one point before it is moved: one
    stall among ten is no tenth."""

    relearn_back: float = 0.1
    relearn_patience: int = 16
    """At each such look, a size that once proved slow and was not run since comes a tenth of its way back to
    the profile's shape: what made it slow may be over, and nobody would know unless it is tried. It is, after
    about a minute of traffic, and judged by its first batches. Each time it fails, the next chance takes
    twice as long, up to sixteen times: where the profile is wrong for good, that costs a few batches."""

    max_kinds: int = 8
    kind_memory_s: float = 60.0
    """Kinds of work (shapes) of one model of which something is learned apart; the rest share one belief, so
    that shapes cost nobody memory. One that was not run for a minute leaves its place to another."""

    kind_tries: float = 0.05
    """A kind that fits no promise, as far as is known, is tried with this share of an instance's time."""

    guard_margin: float = 1.1
    """Extra room in the guard batch, so that a source below its share is not lost to noise."""

    protected_wait: float = 0.75
    """A protected request survives a stall (twice the time) of its own batch, unless it waited longer than
    this share of the one before: 0.999 of them make it where 2 batches in 1,000 stall."""

    lately_s: float = 10.0
    """How long the guard stays up after the last protected request: the next must find it up."""

    later_quantile: float = 0.9
    later_window: int = 200
    later_memory_s: float = 1.0
    """A step of a pipeline leaves to the later ones what nine in ten of the last 200 requests needed there.
    With 0.7, 7 % is lost at three times the load. After a second without an answer it is forgotten."""

    fan_out_weight: float = 0.02
    """One request moves what is thought of how many images later steps get of each by a fiftieth."""

    cheap_first: float = 0.25
    """Where the cheap model of a cascade answers for the big one under load, it goes first on their device
    when what waits for it would take this part of its promise. Until then the big one does: with equal turns
    it would get 0.58 of the hard requests at 1.3 times the load, and not 0.68."""

    first_share: float = 0.8
    """Who waits to be encoded is, however small the batch, once encoding and two steps would take this share
    of what is left until the first token is due: noise takes some of the rest."""

    step_busy: float = 0.9
    """Encoding waits for the smallest batch with which the device carries what is asked in this share of its
    time. With 1.0 the queue would grow at every surge, with 0.7 first tokens come later for nothing."""

    length_prior: float = 4.0
    length_memory: float = 1024.0
    """What is guessed of the lengths of answers weighs as much as four answers. When so many were seen that
    were so long, half of them are forgotten."""

    background_load: float = 0.7
    background_delay: float = 0.1
    background_quiet_s: float = 1.0
    """Work that nobody waits for runs while less than this share is asked of what the models on its device
    can answer in time, and for a second nobody was told no; it takes what is left of the share, and no batch
    of it takes more than a tenth of a promise. 0.9 would gain next to nothing."""

    background_rare: float = 0.005
    background_long_s: float = 20.0
    background_unseen: float = 0.01
    """Longer batches of it may run, within half of what the most urgent has to spare, as long as all such
    work takes this share of twenty seconds: fewer requests meet one than the slowest hundredth. Where less
    than a hundredth of a request comes within a promise, it is all of what one has to spare."""

    background_promises: float = 10.0
    background_promise_s: float = 0.5
    """It is skipped when it has waited for ten promises. A model without one is treated as if it promised
    half a second, and is left alone while anybody waits for it."""

    max_lanes: int = 64
    """Sources with a lane of their own; the rest share one, so that names cost nobody memory or share."""


CONSTANTS = Constants()
