"""Lets in many requests of one client for one version as one: the parts of an image that it waits for.

The gate is asked once, whether the last of them would be answered in time. What is promised to the whole is
what is promised to one image, times their number, as if its client sent one after the other. From then on
they are requests like others, which share batches, and the gate rejects none of them; one that waits until
the end of that time is given up as any other.
"""

from __future__ import annotations

from collections import Counter

from carpool.core.job import INFINITY, Job
from carpool.core.refusal_words import turned_away
from carpool.core.scheduler import Scheduler
from carpool.engine.run.batch import Work
from carpool.errors import CarpoolError
from carpool.link.records import ProtocolError

MOST_IMAGES = 4096
"""Of one group."""


class ImageGroups:
    """Implements `OpensGroups` for a version that runs batches. What requests name as their step is how many
    images the whole has."""

    def __init__(self, name: str, scheduler: Scheduler) -> None:
        self.name = name
        self.scheduler = scheduler
        self.coming: Counter[str] = Counter()  # images that were let in and are not here yet, by source

    def opened(self, step: int, work: Work, now: float) -> ImageGroup | None:
        if not work.images <= step <= MOST_IMAGES:
            raise ProtocolError(f"a group of {step} images that begins with {work.images}")
        scheduler, promise = self.scheduler, 0.0
        origin, options = work.origin, work.options
        source = origin.source or origin.payer
        if scheduler.slo < INFINITY:
            promise = scheduler.slo * step
            last = Job(work.arrived, work.deadline, 1, None, options.priority, outside=work.outside)
            last.origin = origin
            last.own_course().promise = promise
            refusal = scheduler.refuses(last, now, ahead=step - 1 + self.coming[source])
            if refusal is not None:
                scheduler.refused_elsewhere(work.images, 1, refusal.reason, now, source)
                raise turned_away(self.name, last, refusal, fixed=False)
        return ImageGroup(self, source, step, promise)


class ImageGroup:
    """Implements `Group`: one image of a client, in parts."""

    failed: CarpoolError | None = None

    def __init__(self, groups: ImageGroups, source: str, images: int, promise: float) -> None:
        self._coming = groups.coming
        self._source = source
        self._images = images
        self._left = images  # that are not here yet
        self._promise = promise
        self._coming[source] += images

    def asks(self, step: int, work: Work, now: float) -> None:
        if step != self._images or work.images > self._left:
            raise ProtocolError(f"{work.images} images of {step}, where {self._left} are left")
        if self._left < self._images:  # it begins to wait now, and its age says nothing of new requests
            work.own_course().entered = now
            work.sent = None
        self._arrived(work.images)
        if self._promise:
            course = work.own_course()
            course.promise, course.probe = self._promise, True

    def reaches(self, step: int, images: int) -> None:
        raise ProtocolError(f"step {step} of a group of images, with {images}")

    def over(self, now: float, *, answered: bool) -> None:
        self._arrived(self._left)

    def _arrived(self, images: int) -> None:
        self._left -= images
        self._coming[self._source] -= images
        if not self._coming[self._source]:
            del self._coming[self._source]
