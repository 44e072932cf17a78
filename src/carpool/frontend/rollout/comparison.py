"""The other version's answer to a request that was answered, and how the two differ.

It is run out of what the device has to spare, and compared in a thread: whoever waits for an answer does not
wait for this. What cannot be had without hurting somebody is skipped, and counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import orjson

from carpool import errors
from carpool.config.rollout_settings import CompareSettings
from carpool.core.job import INFINITY
from carpool.errors import CarpoolError, without_stack
from carpool.frontend.calls.routing import Split
from carpool.frontend.pictures.sent_pictures import RoutePicture, SentPictures
from carpool.link.door import Answer, Ask, Call, ModelEntry, OneAnswer
from carpool.memory.arena import Slot
from carpool.observe.logs import logger
from carpool.types import Array, Tensor
from carpool.vision.likeness import Difference
from carpool.vision.plans.compare import compare_answers, compare_tensors
from carpool.vision.thumbnail import thumbnail
from carpool.wire.v2 import RequestHead

if TYPE_CHECKING:
    from carpool.frontend.rollout.mirror import Mirror

_log = logger("rollout")

_LONGEST_ANSWER = 1 << 20  # bytes of tensors that are copied to be compared
_PATIENCE = 10.0  # promises after which a comparison is not worth it any more
_PATIENCE_S = 10.0  # without a promise

_WRONG_REQUESTS = (
    errors.InvalidInput,
    errors.TooLarge,
    errors.Replaced,
    errors.Cancelled,
    errors.Unauthenticated,
    errors.Forbidden,
    errors.Unsupported,
)
_NOBODYS = ("engine-restarted", "engine-stalled", "not-serving", "stopping", "overload", "no-slots")
_LATE = (errors.Refused, errors.DeadlineExceeded)


def may_run_again(error: CarpoolError) -> bool:
    """What is wrong with a request is wrong with it everywhere; the rest may be the version's fault."""
    return not isinstance(error, _WRONG_REQUESTS)


def fault_of(error: CarpoolError) -> str:
    """What an error says about the version that it came from: errors, late, or nothing."""
    if isinstance(error, _LATE):
        return "late"
    if isinstance(error, (*_WRONG_REQUESTS, errors.NotFound)) or error.reason in _NOBODYS:
        return ""
    return "errors"


class Comparison(OneAnswer):
    """The other version's answer to a request that was answered: run out of spare capacity, then compared."""

    def __init__(
        self, mirror: Mirror, split: Split, entry: ModelEntry, source: str, pictures: SentPictures | None
    ) -> None:
        self._mirror = mirror
        self.split = split
        self.source = source
        self._of_candidate = entry is split.candidate
        self._other = split.other(entry)
        self._pictures = pictures
        self._again: SentPictures | None = None
        self._answer: bytes | dict[str, Array] | None = None
        self._call: Call | None = None

    def keep_answer(self, outputs: Sequence[Tensor]) -> None:
        """What was sent, which is gone when the request is over."""
        pictures = self._pictures
        if isinstance(pictures, RoutePicture):
            self._answer = pictures.body if pictures.drawn is None else None
        elif sum(tensor.data.nbytes for tensor in outputs) <= _LONGEST_ANSWER:
            self._answer = {tensor.name: np.array(tensor.data) for tensor in outputs}

    def begin(self, head: RequestHead, slot: Slot | None, tail: int) -> None:
        """Takes the slot."""
        mirror, pictures = self._mirror, self._pictures
        if self._answer is None or slot is None:
            self._skip("slots", slot)
        elif pictures is None:
            self._offer(head, slot, tail)
        else:
            other = mirror.pictures.model(self._other)
            self._again = pictures.for_model(other)
            if pictures.model.sees_as(other):
                self._offer(self._again.head, slot, 0)
                return
            slot.release()
            self._decode_again(self._again)

    def _decode_again(self, pictures: SentPictures) -> None:
        """In another size: only when no thread has anything else to begin."""
        mirror = self._mirror
        workers = mirror.pictures.workers
        if workers.waiting or not pictures.files or pictures.is_file:
            self._skip("busy")
            return
        try:
            slot = mirror.door.slot(pictures.size)
        except CarpoolError:
            self._skip("slots")
            return
        workers.begin(
            partial(pictures.prepare, slot.view), partial(self._decoded, slot), INFINITY, pictures.weight
        )

    def _decoded(self, slot: Slot, seconds: float | None, error: BaseException | None) -> None:
        if seconds is None or error is not None or self._again is None:
            self._skip("failed", slot)
        else:
            self._offer(self._again.head, slot, 0)

    def _offer(self, head: RequestHead, slot: Slot, tail: int) -> None:
        now, slo = monotonic(), self._other.slo
        patience = _PATIENCE_S if slo is None else _PATIENCE * slo
        try:
            ask = Ask(self._other, head, slot, tail, now, now + patience, spare=True)
            self._call = self._mirror.door.infer(ask, self)
        except CarpoolError:
            self._skip("slots", slot)

    def done(self, answer: Answer) -> None:
        error = answer.error
        if error is None:
            self._mirror.aside(partial(self._compare, answer.outputs), self._compared)
            return
        self._release()
        if error.reason == "spare" or fault_of(error) != "errors":
            self._skip("late" if isinstance(error, errors.DeadlineExceeded) else "busy")
        elif self._of_candidate:
            self._skip("failed")  # stable failed it: that says nothing of the candidate
        else:
            self._mirror.shadow_failed(self.split, without_stack(error))
        self._let_go()

    # ── in a thread ──

    def _compare(self, outputs: Sequence[Tensor]) -> tuple[Difference, Array | None, Any]:
        """How the two differ, the picture made small, and both answers."""
        limits = CompareSettings(**cast("dict[str, Any]", self.split.route.limits))
        again, mine = self._again, self._answer
        if isinstance(again, RoutePicture) and isinstance(mine, bytes):
            again.compose(outputs)
            ours, theirs = orjson.loads(mine), orjson.loads(again.body)
            stable, candidate = (theirs, ours) if self._of_candidate else (ours, theirs)
            found = compare_answers(str(again.model.task), stable, candidate, limits)
            small = thumbnail(memoryview(again.files[0])) if self.source and again.files else None
            return found, small, (stable, candidate)
        assert isinstance(mine, dict)
        others = {tensor.name: tensor.data for tensor in outputs if tensor.name in mine}
        mine = {name: mine[name] for name in others}
        return compare_tensors(*((others, mine) if self._of_candidate else (mine, others))), None, None

    # ── in the loop ──

    def _compared(
        self, found: tuple[Difference, Array | None, Any] | None, error: BaseException | None
    ) -> None:
        self._release()
        if found is None:
            if error is not None and not isinstance(error, asyncio.CancelledError):
                _log.warning("not-compared", model=self.split.stable.name, error=str(error)[:200])
            self._skip("failed")
        else:
            difference, small, answers = found
            again = self._again
            picture = again.files[0] if again is not None and again.files else b""
            self._mirror.compared(self.split, self.source, difference, small, answers, bytes(picture))
        self._let_go()

    def _release(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            call.release()

    def _let_go(self) -> None:
        self._answer = self._pictures = self._again = None

    def _skip(self, why: str, slot: Slot | None = None) -> None:
        if slot is not None:
            slot.release()
        self._mirror.skipped(self.split, why)
        self._let_go()
