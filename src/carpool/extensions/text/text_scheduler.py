"""Implements the second kind of scheduler: for models that write an answer token by token.

An encoder turns pictures into rows, and a decoder gives each answer that is being written one token per step.
An answer has a slot of a decoder's caches from its encoding to its last token; when it ends, the next waiting
request gets the slot at the next boundary between two steps, and none waits for the slowest of a batch.

One device does both, and then each encoding interrupts the steps: when it pays is the question here. Or there
are pools, encoders and decoders apart: encoders take waiting requests as soon as there are slots, and a slot
of any decoder will do.

No answer is preempted, and caches are not paged. A slot holds the longest answer that is allowed, so memory
cannot run out midway and there is nothing to take back; what paging would save is small where an answer is a
line or a page of text: the caches of a small reader are about a megabyte a slot. Preemption would make two
answers late instead of one: the gate rejects a request before anything is encoded.

As in scheduler.py, the caller passes events and the time, and results are values.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from carpool.core.constants import CONSTANTS, Constants
from carpool.core.curve import BatchCurve
from carpool.core.job import DONE, GONE, INFINITY, READY, RUNNING, SOON, JobState, Reason, Refusal, Terms
from carpool.core.learning import Belief, Rate
from carpool.core.scheduler_state import Ledger
from carpool.extensions.text.lengths import Departures, Lengths
from carpool.extensions.text.text_job import (
    Boundary,
    DecodeStep,
    Encode,
    StepDecision,
    TextGivenUp,
    TextJob,
    TextPromise,
    TextQueue,
)

FIRST_SHARE: Final = 0.8
"""Who waits to be encoded is, however small the batch, once encoding and two steps would take this share
of what is left until the first token is due: noise takes some of the rest."""

STEP_BUSY: Final = 0.9
"""Encoding waits for the smallest batch with which the device carries what is asked in this share of its
time. With 1.0 the queue would grow at every surge, with 0.7 first tokens come later for nothing."""


class TextScheduler:
    """Represents one model's scheduler. A job is offered, encoded, stepped until it ends, and then its slot
    is free."""

    def __init__(
        self, encoder: BatchCurve, step: BatchCurve, settings: TextPromise, constants: Constants = CONSTANTS
    ) -> None:
        self.settings = settings
        self.constants = constants
        self.encoder = Belief(encoder, max(1, settings.encoders), 0.0, constants)
        self._encoders = len(self.encoder.speeds)
        self.step = Belief(step, settings.decoders, 0.0, constants)
        self.lengths = Lengths(settings.max_tokens)
        self._departures = Departures(self.lengths)
        self.ledger = Ledger()
        self.each = min(settings.slots, step.max_batch)  # slots of a decoder
        self.slots: list[TextJob | None] = [None] * (self.each * settings.decoders)  # decoder by decoder
        self.encoding: dict[int, Encode] = {}  # by encoder
        self.stepping: dict[int, DecodeStep] = {}  # by decoder
        self._taken = [0] * settings.decoders  # slots
        # How many slots of each may be used, and what that was computed from.
        self._rooms: list[tuple[float, BatchCurve, int]] = [(0.0, step, 0)] * settings.decoders
        memory = max(constants.rate_memory_s, constants.rate_memory_promises * min(settings.ttft, 1.0))
        self._rate = Rate(memory)
        self._queue = TextQueue()
        self._fresh: list[TextJob] = []  # encoded, without a token yet
        self._last_step = -INFINITY  # when the last one ended
        self._noted: DecodeStep | None = None  # the last one
        self._was_late = False  # it came later after the one before than was promised
        self._has_encoded = False  # since then
        self._last_ran = -INFINITY  # when anything last ended
        self._probe: TextJob | None = None
        self._steps = 0
        self._planned: tuple[object, ...] = ()  # what `_costs` was computed from
        self._costs: list[float] = []
        self._best = 1

    # ---- what happened ----------------------------------------------------------------------------------

    def offer(self, job: TextJob, now: float) -> Refusal | None:
        """Count it in the queue, or say why not."""
        settings = self.settings
        job.limit = min(job.limit or settings.max_tokens, settings.max_tokens)
        job.deadline = min(job.deadline, job.arrived + settings.slo)
        job.first_due = min(job.deadline, job.arrived + settings.ttft)
        self.ledger.offered += 1
        self._rate.add(1, now)
        if self._is_idle:
            for belief in (self.encoder, self.step):
                belief.taken_up(now)
        refusal = self.refuses(job, now)
        if refusal is not None and self._is_probe(job, now):
            self._probe, refusal = job, None
        if refusal is not None:
            job.state = GONE
            self.ledger.refused[refusal.reason] += 1
            return refusal
        job.state = READY
        self._queue.add(job)
        return None

    def cancel(self, job: TextJob, now: float) -> bool:
        """The client has gone. True if that spared the work; else the slot is free at the next boundary."""
        if job.state is READY:
            self._queue.remove(job)
        elif job.state is RUNNING:
            self.ledger.running -= 1
        else:
            return False
        spared = job.state is READY
        job.state = GONE
        self.ledger.cancelled += 1
        if not spared and not self._is_used(job):
            self._free(job)
        return spared

    def encoded(self, work: Encode, now: float, seconds: float | None = None) -> None:
        """They are in their slots. `seconds` is what it took, if that is worth learning from."""
        self.encoding.pop(work.encoder, None)
        self._has_encoded = True
        for job in work.jobs:
            if job.state is RUNNING:
                self._fresh.append(job)
            else:
                self._free(job)
        self._last_ran = now
        if seconds is not None:
            self.encoder.ended(work.encoder, len(work.jobs), seconds, now)

    def stepped(
        self, work: DecodeStep, now: float, ended: Collection[TextJob] = (), seconds: float | None = None
    ) -> Boundary:
        """Each got a token, which for those who `ended` was the end of the text."""
        if self.stepping.get(work.decoder) is work:
            del self.stepping[work.decoder]
        self._note(work, now)
        done: list[TextJob] = []
        given_up: list[TextGivenUp] = []
        for job in work.jobs:
            if job.state is not RUNNING:
                self._free(job)
                continue
            self.lengths.seen(job.tokens, job in ended)
            job.tokens += 1
            if job.first_at is None:
                job.first_at = now
            if job in ended or job.tokens >= job.limit:
                self._leave(job, DONE)
                self.ledger.answered += 1
                done.append(job)
            elif now >= job.deadline:
                self._leave(job, GONE)
                self.ledger.given_up[Reason.DEADLINE] += 1
                given_up.append(TextGivenUp(job, Reason.DEADLINE))
        self._fresh = [job for job in self._fresh if job.first_at is None and job.state is RUNNING]
        if seconds is not None:
            self.step.ended(work.decoder, work.width, seconds, now)
        return Boundary(done, given_up)

    def follow(self, work: DecodeStep, now: float) -> StepDecision:
        """Returns what may be launched behind a step before its tokens are known: a device that waited for
        them would be idle meanwhile. An answer that ended with it keeps its slot for one step more. After an
        encoding, which counts as done (`encoded`) when it was launched, this may be called again."""
        ends = max(now, work.started + self.step_takes(work.width))
        self._note(work, ends)
        decision = StepDecision()
        self._expire(now, decision.given_up)
        if not self.settings.apart:
            size = self._to_encode(ends)
            if size:
                decision.work = self.encoding[0] = self._take(size, now, 0)
                return decision
        certain = {job for job in work.jobs if job.tokens + 1 >= job.limit}
        jobs = tuple(job for job in self._steppable(work.decoder) if job not in certain)
        if jobs:
            decision.work = self.stepping[work.decoder] = self._step_of(jobs, ends, work.decoder)
        return decision

    def took(self, work: Encode, seconds: float, now: float) -> None:
        """Notes the seconds that an encoding took, if they were not known when it was reported."""
        self.encoder.ended(work.encoder, len(work.jobs), seconds, now)

    def step_takes(self, width: int) -> float:
        return self.step.slowest(cautious=False) * self.step.curve.times[width]

    def lost(self, decoder: int = 0) -> list[TextJob]:
        """Its caches are gone. Returns whose answers will not be finished; who waits goes on waiting."""
        held = [job for job in self._of(decoder) if job is not None]
        lost = [job for job in held if job.state is RUNNING]
        for job in lost:
            self._leave(job, GONE)
            self.ledger.given_up[Reason.RESTARTING] += 1
        for job in held:
            self._free(job)
        self.stepping.pop(decoder, None)
        self._fresh = [job for job in self._fresh if job.state is RUNNING]
        self._departures.forget()  # none of them leaves a slot any more
        return lost

    # ---- what to do ---------------------------------------------------------------------------------------

    def decide(self, now: float) -> StepDecision:
        """Returns the next thing to do. Ask again after work was returned: others may be free, too."""
        decision = StepDecision()
        self._expire(now, decision.given_up)
        apart = self.settings.apart
        if self.encoding and not apart:
            return decision
        encoder = next((one for one in range(self._encoders) if one not in self.encoding), None)
        if encoder is not None and (apart or not self.stepping):
            size = self._to_encode(now)
            if size:
                decision.work = self.encoding[encoder] = self._take(size, now, encoder)
                return decision
        for decoder in range(self.settings.decoders):
            jobs = () if decoder in self.stepping else self._steppable(decoder)
            if jobs:
                decision.work = self.stepping[decoder] = self._step_of(jobs, now, decoder)
                return decision
        if self._queue.first_due < INFINITY:
            decision.look_again = self._queue.first_due
        return decision

    def refuses(self, job: TextJob, now: float) -> Refusal | None:
        """Returns what the gate says. Its slot comes when enough have left for a whole batch: one that would
        make it only in a smaller batch would slow down all others. That is the second question."""
        if self.waiting >= self.settings.max_queue:
            return Refusal(Reason.QUEUE_FULL, waiting=self.waiting, most=self.settings.max_queue)
        if job.first_due == INFINITY:  # nothing was promised
            return None
        batch = self._batch(now)
        takes = self._until_first(min(batch, self.waiting + 1))
        ahead = self.waiting // batch
        queue = self._until_left((ahead + 1) * batch)
        queue += ahead * self._encodes(batch) / self._encoders
        running = self._under_way(now)
        wait = queue + running
        first = now + wait + takes
        rest = (min(self.lengths.mean, job.limit) - 1) * self._pace()
        whole = first + rest
        if first <= job.first_due and whole <= job.deadline:
            return None
        soonest = now + self._until_left(self.waiting + 1) + takes
        hopeless = soonest > job.first_due or whole > job.deadline
        terms = Terms(job.first_due - job.arrived, now - job.arrived, queue, running, batch=takes)
        if first <= job.first_due:  # the first token would be in time, and the last one not
            terms = terms._replace(deadline=job.deadline - job.arrived, later=rest)
        return Refusal(
            Reason.CANNOT_FINISH if hopeless else Reason.OVERLOAD,
            retry_after=(wait or SOON) if self._would_do(job, rest) else 0.0,
            waiting=self.waiting,
            asked=self._rate.at(now),
            answerable=1.0 / self._costs[self._best - 1],
            terms=terms,
        )

    def _would_do(self, job: TextJob, rest: float) -> bool:
        """An idle model would keep its promise to one that brings as much time as this one brought, and loses
        none of it on the way; `rest` is from the first token to the last."""
        first = self._until_first(1, slots=1)
        return first <= job.first_due - job.arrived and first + rest <= job.deadline - job.arrived

    def most_slots(self) -> int:
        """So many may be written at once that each token keeps its promise."""
        return sum([self._room(decoder) for decoder in range(self.settings.decoders)])

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def used(self) -> int:
        """Returns the number of used slots."""
        return sum(self._taken)

    # ---- inside -----------------------------------------------------------------------------------------

    def _of(self, decoder: int) -> list[TextJob | None]:
        return self.slots[decoder * self.each : (decoder + 1) * self.each]

    def _room(self, decoder: int) -> int:
        """Returns how many of its slots each token's promise allows."""
        cautious, curve = self.step.speeds[decoder].cautious, self.step.curve
        for_speed, for_curve, room = self._rooms[decoder]
        if for_speed != cautious or for_curve is not curve:
            room = max(1, min(self.each, curve.fits(self.settings.per_token / cautious)))
            self._rooms[decoder] = cautious, curve, room
        return room

    @property
    def _is_idle(self) -> bool:
        return not (self.used or self.waiting)

    def _is_probe(self, job: TextJob, now: float) -> bool:
        """Returns whether this request is accepted as a probe. A model that has not run for a whole SLO
        accepts one, whatever its forecast: else it could reject all requests for ever, and never learn that
        it is fast again. The probe has the whole SLO ahead: a client's own short deadline proves nothing."""
        whole = job.first_due - job.arrived >= 0.99 * self.settings.ttft and job.first_due > now
        return self._is_idle and whole and now - self._last_ran >= self.settings.ttft

    def _expire(self, now: float, given_up: list[TextGivenUp]) -> None:
        """Gives up those whose first token would be late even if the batch that may leave now took them
        along."""
        queue = self._queue
        due = queue.first_due
        if due == INFINITY or due > now + self._until_first(
            self.encoder.curve.max_batch, slots=len(self.slots)
        ):
            return  # mostly: this is asked at every step
        size = min(self._free_slots(), self.waiting, self._batch(now))
        takes = self._until_first(max(1, size))
        while queue.first_due < now + takes:
            job = queue.first
            if job is self._probe and job.first_due > now:
                break
            queue.remove(job)
            job.state = GONE
            reason = Reason.DEADLINE if now >= job.first_due else Reason.GIVEN_UP
            self.ledger.given_up[reason] += 1
            given_up.append(TextGivenUp(job, reason, takes))

    def _to_encode(self, now: float) -> int:
        """Returns how many to encode now; 0: a step first, or nothing."""
        size = min(self._free_slots(), self.waiting, self.encoder.curve.max_batch)
        if not size or self.settings.apart:
            return size
        if not self.used:
            return size
        if size < self._batch(now) and not (self._is_due(size, now) and self._keeps_up(size, now)):
            return 0
        return min(size, self._encode_fits(now))

    def _is_due(self, size: int, now: float) -> bool:
        """The first token of the next in line would be late if a step came first."""
        takes = self._encodes(size, cautious=True) + 2 * self._steps_for(cautious=True)
        return takes > FIRST_SHARE * (self._queue.first_due - now)

    def _keeps_up(self, size: int, now: float) -> bool:
        """Returns whether batches of this size sustain what is asked. Where they do not, who is due is given
        up instead: for him all others would be encoded in ones and twos."""
        cost = self._costs[min(size, len(self._costs)) - 1]
        return self.waiting == size or self._rate.at(now) * cost <= 1.0

    def _encode_fits(self, now: float) -> int:
        """The largest batch that lets those who are being written have their next token in time. Where none
        does, a token may be late once, but not twice in a row."""
        speed = self.encoder.speeds[0].cautious
        step = self._steps_for(cautious=True)
        since = self._last_step if self._has_begun() else INFINITY
        next_due = since + self.settings.per_token
        for job in self._fresh:
            next_due = min(next_due, job.first_due)
        fits = self.encoder.curve.fits((next_due - now - step) / speed)
        if fits or self._was_late or self._has_encoded:
            return fits
        return max(1, self.encoder.curve.fits((next_due + self.settings.per_token - now - step) / speed))

    def _has_begun(self) -> bool:
        return any(job is not None and job.tokens for job in self.slots)

    def _batch(self, now: float) -> int:
        """Returns the batch to wait for. While slots stand empty for it, steps carry less; encoded alone,
        each costs more. The smallest that keeps up with what is asked, or else the one that carries most."""
        slots = self.most_slots()
        plan = (slots, self._encoders, self.encoder.curve, self.step.curve, self.lengths.lasts)
        if plan != self._planned:
            self._planned = plan
            self._plan(slots)
        if self.waiting >= self._best:
            return self._best
        most = STEP_BUSY / max(self._rate.at(now), 1e-9)
        return next((n for n in range(1, self._best) if self._costs[n - 1] <= most), self._best)

    def _plan(self, slots: int) -> None:
        """Computes the seconds of the device for one answer, by the size of the batches in which they are
        encoded."""
        step = self._steps_for(slots, cautious=True)
        fits = self.encoder.curve.fits((self.settings.per_token - step) / self.encoder.speeds[0].cautious)
        most = self.encoder.curve.max_batch if self.settings.apart else fits
        sizes = range(1, max(1, min(slots, most)) + 1)
        written = self.lengths.mean * self._steps_for(slots)
        if self.settings.apart:
            self._costs = [max(self._encodes(n) / n / self._encoders, written / slots) for n in sizes]
        else:
            self._costs = [self._encodes(size) / size + written / (slots - (size - 1) / 2) for size in sizes]
        self._best = min(sizes, key=lambda size: self._costs[size - 1])

    def _take(self, size: int, now: float, encoder: int) -> Encode:
        """The first in line, each into the lowest free slot of the decoder that has least to do: so few slots
        have to be stepped."""
        jobs: list[TextJob] = []
        for _ in range(size):
            job = self._queue.pop()
            job.state, job.decoder = RUNNING, self._next_decoder()
            job.slot = self._of(job.decoder).index(None)
            self.slots[self._place(job)] = job
            self._taken[job.decoder] += 1
            jobs.append(job)
        self.ledger.running += size
        return Encode(tuple(jobs), now, encoder)

    def _next_decoder(self) -> int:
        taken = self._taken
        free = (one for one in range(len(taken)) if taken[one] < self._room(one))
        return min(free, key=taken.__getitem__)

    def _place(self, job: TextJob) -> int:
        return job.decoder * self.each + job.slot

    def _steppable(self, decoder: int) -> tuple[TextJob, ...]:
        held = {job for work in self.encoding.values() for job in work.jobs}
        return tuple(
            job for job in self._of(decoder) if job is not None and job.state is RUNNING and job not in held
        )

    def _free_slots(self) -> int:
        return sum([max(0, self._room(decoder) - taken) for decoder, taken in enumerate(self._taken)])

    def _is_used(self, job: TextJob) -> bool:
        """Work that is under way may still write to its slot."""
        stepped = self.stepping.get(job.decoder)
        return (stepped is not None and job in stepped.jobs) or any(
            job in work.jobs for work in self.encoding.values()
        )

    def _step_of(self, jobs: tuple[TextJob, ...], now: float, decoder: int) -> DecodeStep:
        return DecodeStep(jobs, self.step.curve.padded(max([job.slot for job in jobs]) + 1), now, decoder)

    def _note(self, work: DecodeStep, now: float) -> None:
        """It has ended."""
        if self._noted is work:
            return
        self._noted = work
        self._steps += 1
        began = any(job.tokens for job in work.jobs)
        self._was_late = began and now - self._last_step > self.settings.per_token
        self._last_step = self._last_ran = now
        self._has_encoded = False

    def _leave(self, job: TextJob, state: JobState) -> None:
        job.state = state
        self.ledger.running -= 1
        if not self._is_used(job):
            self._free(job)

    def _free(self, job: TextJob) -> None:
        if self.slots[self._place(job)] is job:
            self.slots[self._place(job)] = None
            self._taken[job.decoder] -= 1

    def _encodes(self, size: int, *, cautious: bool = False) -> float:
        return self.encoder.slowest(cautious=cautious) * self.encoder.curve.times[size]

    def _steps_for(self, slots: int = 0, *, cautious: bool = False) -> float:
        """Returns seconds of a step with so many slots over all decoders, or with those that are used, and
        one more."""
        decoders = self.settings.decoders
        width = min(self.each, -(-(slots or 1 + self.used) // decoders))
        return self.step.slowest(cautious=cautious) * self.step.curve.times[width]

    def _until_first(self, size: int, *, slots: int = 0) -> float:
        """Returns the seconds from the beginning of an encoding to the first token, at the worst. A decoder
        that does not encode may be at a step then. `slots` as in `_steps_for`."""
        steps = 2 if self.settings.apart else 1
        return self._encodes(size, cautious=True) + steps * self._steps_for(slots, cautious=True)

    def _pace(self) -> float:
        """Returns seconds from token to token of one that is being written while slots are full."""
        slots = self.most_slots()
        return slots * self._costs[self._best - 1] / self.lengths.mean

    def _under_way(self, now: float) -> float:
        """Returns the seconds until there is a device that encodes."""
        encodes = [work.started + self._encodes(len(work.jobs)) for work in self.encoding.values()]
        ends = min(encodes) if len(encodes) >= self._encoders else 0.0
        if not self.settings.apart:
            for work in self.stepping.values():
                ends = max(ends, work.started + self._steps_for(work.width))
        return max(0.0, ends - now)

    def _until_left(self, places: int) -> float:
        """Returns the seconds of steps until so many slots are free, if none is taken meanwhile."""
        places -= self._free_slots()
        if places <= 0:
            return 0.0
        slots = self.most_slots()
        steps = self._departures.steps_until(places, self._steps, self.slots, slots)
        return steps * self._steps_for(slots)
