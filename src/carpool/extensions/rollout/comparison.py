"""Compares the other version's answer to a request that was answered: how the two differ."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, TypeAlias, cast

import numpy as np
import orjson

from carpool import errors
from carpool.errors import CarpoolError, without_stack
from carpool.extensions.rollout.blame import fault_of
from carpool.extensions.rollout.mirror import Mirror
from carpool.extensions.rollout.routing import Split
from carpool.frontend.calls.request_facts import RequestService
from carpool.frontend.pictures.picture_service import PictureService
from carpool.frontend.pictures.recomputation import Recomputation, in_threads
from carpool.frontend.pictures.sent_pictures import RoutePicture, SentPictures
from carpool.link.catalog import ModelEntry
from carpool.link.engine_client import Answer
from carpool.memory.arena import Slot
from carpool.observe.logs import logger
from carpool.types import Array, Tensor
from carpool.vision.compare_settings import CompareSettings
from carpool.vision.likeness import Difference
from carpool.vision.plans.compare import compare_answers, compare_tensors
from carpool.vision.thumbnail import thumbnail
from carpool.wire.v2 import RequestHead

_log = logger("rollout")

_LONGEST_ANSWER = 1 << 20  # bytes of tensors that are copied to be compared

Found: TypeAlias = tuple[Difference, Array | None, Any]
"""How the two differ, the picture made small, and both answers."""


class Comparison(Recomputation[Found]):
    """Represents one request. What is compared is let go of as soon as it was."""

    def __init__(
        self,
        service: RequestService,
        service_of_pictures: PictureService,
        mirror: Mirror,
        split: Split,
        entry: ModelEntry,
        source: str,
        pictures: SentPictures | None,
    ) -> None:
        super().__init__(service_of_pictures, split.other(entry), in_threads(service.threads))
        self._mirror = mirror
        self.split = split
        self.source = source
        self._of_candidate = entry is split.candidate
        self._pictures = pictures
        self._again: SentPictures | None = None
        self._answer: bytes | dict[str, Array] | None = None

    def keep_answer(self, outputs: Sequence[Tensor]) -> None:
        """Keeps what was sent, which is gone when the request is over."""
        pictures = self._pictures
        if isinstance(pictures, RoutePicture):
            self._answer = pictures.body if pictures.drawn is None else None
        elif sum(tensor.data.nbytes for tensor in outputs) <= _LONGEST_ANSWER:
            self._answer = {tensor.name: np.array(tensor.data) for tensor in outputs}

    def begin(self, head: RequestHead, slot: Slot | None, tail: int) -> None:
        """Takes the slot."""
        pictures = self._pictures
        if self._answer is None or slot is None:
            if slot is not None:
                slot.release()
            self._skipped("slots")
        elif pictures is None:
            self.run(head, slot, tail)
        else:
            other = self._service.model(self._entry)
            self._again = again = pictures.for_model(other)
            if pictures.model.sees_as(other):
                self.run(again.head, slot)
                return
            slot.release()
            if self._service.workers.waiting or not again.files or again.is_file:
                self._skipped("busy")
            else:  # in another size
                self.prepare(again.head, again.size, again.prepare)

    def _failed(self, error: CarpoolError) -> None:
        if error.reason == "background" or fault_of(error) != "errors":
            self._skipped("late" if isinstance(error, errors.DeadlineExceeded) else "busy")
        elif self._of_candidate:
            self._skipped("failed")  # stable failed it: that says nothing of the candidate
        else:
            self._mirror.shadow_failed(self.split, without_stack(error))
            self._let_go()

    def _compare(self, answer: Answer) -> Found:
        limits = CompareSettings(**cast("dict[str, Any]", self.split.route.limits))
        again, mine = self._again, self._answer
        if isinstance(again, RoutePicture) and isinstance(mine, bytes):
            again.compose(answer.outputs)
            ours, theirs = orjson.loads(mine), orjson.loads(again.body)
            stable, candidate = (theirs, ours) if self._of_candidate else (ours, theirs)
            found = compare_answers(str(again.model.task), stable, candidate, limits)
            small = thumbnail(memoryview(again.files[0])) if self.source and again.files else None
            return found, small, (stable, candidate)
        assert isinstance(mine, dict)
        others = {tensor.name: tensor.data for tensor in answer.outputs if tensor.name in mine}
        mine = {name: mine[name] for name in others}
        return compare_tensors(*((others, mine) if self._of_candidate else (mine, others))), None, None

    def _compared(self, found: Found) -> None:
        again = self._again
        picture = again.files[0] if again is not None and again.files else b""
        self._mirror.compared(self.split, self.source, *found, bytes(picture))
        self._let_go()

    def _not_compared(self, error: BaseException) -> None:
        if not isinstance(error, asyncio.CancelledError):
            _log.warning("not-compared", model=self.split.stable.name, error=str(error)[:200])
        self._skipped("failed")

    def _skipped(self, why: str) -> None:
        self._mirror.skipped(self.split, why)
        self._let_go()

    def _let_go(self) -> None:
        self._answer = self._pictures = self._again = None
