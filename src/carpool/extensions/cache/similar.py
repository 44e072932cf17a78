"""Finds pictures of one source that show the same scene as one that was computed a moment ago.

A picture is compared with those that were computed, never with one that was answered from here: a scene that
changes slowly cannot creep away from its answer. What is looked at is a small grey picture, and where that
changed most; or, for those who want it, the perceptual hash of the textbooks, which sees less.

A camera that moves is not looked at each time: after eight looks in vain only two frames of every 4, 8 … 32
are, two in a row, since a frame is only compared with one that is no older than the time to live.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from random import random
from typing import Any, NamedTuple

import cv2
import numpy as np

from carpool.core.evidence import interval
from carpool.extensions.cache.answer_store import Room
from carpool.extensions.cache.settings import CacheSettings
from carpool.frontend.calls.reused_answer import EncodedAnswer
from carpool.types import Array
from carpool.vision.thumbnail import block_change, thumbnail
from carpool.wire.head import Buffer

MOST_SOURCES = 1024
MOST_FRAMES = 8
IN_VAIN = 8
MOST_LEFT_OUT = 32
OFF_S = 600.0
AUDIT_EVERY_S = 5.0  # of one source: frames that follow each other are no independent trials
_OVERHEAD = 512
_HASHED, _LOW = 32, 8  # sides: of the picture that is transformed, and of what is used of it


def perceptual_hash(picture: Array) -> int:
    """Returns 64 bits: which of the lowest frequencies are stronger than the median of them."""
    small = cv2.resize(picture, (_HASHED, _HASHED), interpolation=cv2.INTER_AREA)
    low = cv2.dct(small.astype(np.float32))[:_LOW, :_LOW]
    bits = np.packbits(low > np.median(low))
    return int.from_bytes(bits.tobytes(), "big")


class PictureLook(NamedTuple):
    """Describes what is looked at of a picture."""

    thumbnail: Array
    hash: int = 0


@dataclass(slots=True)
class Frame:
    """Describes a frame that was computed."""

    seen: PictureLook
    kept: EncodedAnswer
    at: float

    @property
    def size(self) -> int:
        return self.seen.thumbnail.nbytes + len(self.kept.body) + _OVERHEAD


class Likeness(NamedTuple):
    frame: Frame
    change: float


@dataclass(slots=True)
class SourceAnswers:
    """Holds what was computed for one source lately, for one way of asking; and what is, by whose work it
    is."""

    frames: deque[Frame] = field(default_factory=deque)
    computing: dict[Any, PictureLook] = field(default_factory=dict)
    in_vain: int = 0
    every: int = 1  # 1: each frame is looked at
    left_out: int = 0
    once_more: bool = False
    off_until: float = 0.0
    audited_at: float = -AUDIT_EVERY_S
    trials: int = 0
    wrong: int = 0
    gone: bool = False  # it is found no more

    def wants_a_look(self, now: float) -> bool:
        if now < self.off_until:
            return False
        if self.every == 1:
            return True
        if self.once_more:
            self.once_more = False
            return True
        self.left_out += 1
        if self.left_out < self.every:
            return False
        self.left_out = 0
        self.once_more = True
        return True

    def looked(self, *, found: bool) -> None:
        """There was something to compare with."""
        if found:
            self.in_vain, self.every = 0, 1
            return
        self.in_vain += 1
        if self.in_vain >= IN_VAIN:
            self.every = min(2 * self.every, MOST_LEFT_OUT)


class SimilarFrames:
    """Holds the frames of one front end: sources by what identifies them, the longest silent first."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._used = 0
        self._sources: OrderedDict[bytes, SourceAnswers] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sources)

    def source(self, key: bytes) -> SourceAnswers:
        found = self._sources.get(key)
        if found is None:
            found = self._sources[key] = SourceAnswers()
            while len(self._sources) > MOST_SOURCES:
                self._drop_oldest()
        else:
            self._sources.move_to_end(key)
        return found

    def look(
        self, source: SourceAnswers, seen: PictureLook, settings: CacheSettings, now: float, max_age: float
    ) -> Likeness | None:
        """Returns the newest frame that shows the same."""
        self._expire(source, now - settings.similar_ttl_s)
        oldest = now - max_age
        best: Likeness | None = None
        compared = False
        for frame in reversed(source.frames):
            if frame.at < oldest:
                break
            compared = True
            change = _change(frame.seen, seen, settings)
            if change <= _allowed(settings):
                best = Likeness(frame, change)
                break
        if compared:
            source.looked(found=best is not None)
        return best

    def look_at_computing(
        self, source: SourceAnswers, seen: PictureLook, settings: CacheSettings
    ) -> Any | None:
        """Returns what shows the same and will be there soon: to compute it twice would be for nothing."""
        for work, other in reversed(source.computing.items()):
            if _change(other, seen, settings) <= _allowed(settings):
                return work
        return None

    def keep(self, source: SourceAnswers, frame: Frame) -> None:
        """Keeps a frame, of which a picture was computed."""
        if frame.size > self._most or source.gone:
            return
        while len(source.frames) >= MOST_FRAMES:
            self._forget(source)
        source.frames.append(frame)
        self._used += frame.size
        self._room.used += frame.size
        while self._used > self._most and len(self._sources) > 1:
            self._drop_oldest()

    def clear(self, prefix: bytes) -> None:
        for key in [key for key in self._sources if key.startswith(prefix)]:
            self._end(self._sources.pop(key))

    @property
    def _most(self) -> int:
        return self._room.most // 2

    def _expire(self, source: SourceAnswers, oldest: float) -> None:
        while source.frames and source.frames[0].at <= oldest:
            self._forget(source)

    def _forget(self, source: SourceAnswers) -> None:
        size = source.frames.popleft().size
        self._used -= size
        self._room.used -= size

    def _drop_oldest(self) -> None:
        self._end(self._sources.popitem(last=False)[1])

    def _end(self, source: SourceAnswers) -> None:
        source.gone = True
        while source.frames:
            self._forget(source)


def seen_of(small: Array, settings: CacheSettings) -> PictureLook:
    return PictureLook(small, perceptual_hash(small) if settings.similar_hash == "phash" else 0)


def see(picture: Buffer, settings: CacheSettings) -> PictureLook | None:
    """Looks at a picture, in a thread if it takes long."""
    small = thumbnail(picture if isinstance(picture, bytes) else memoryview(picture))
    return None if small is None else seen_of(small, settings)


def _change(before: PictureLook, now: PictureLook, settings: CacheSettings) -> float:
    if settings.similar_hash == "phash":
        return float((before.hash ^ now.hash).bit_count())
    return block_change(before.thumbnail, now.thumbnail)


def _allowed(settings: CacheSettings) -> float:
    return settings.similar_threshold if settings.similar_hash == "phash" else settings.similar_grey


# ---- the audit: a share of what is answered from here is computed all the same ----------------------------


def is_audited(source: SourceAnswers, settings: CacheSettings, now: float) -> bool:
    """Returns whether this hit is computed too, where the device has time for it."""
    if not settings.audit or now - source.audited_at < AUDIT_EVERY_S or random() >= settings.audit:
        return False
    source.audited_at = now
    return True


def judged(source: SourceAnswers, settings: CacheSettings, now: float, *, wrong: bool) -> bool:
    """One was compared. True: it is proven wrong too often, and is off for a while; then it begins anew."""
    source.trials += 1
    source.wrong += wrong
    if not source.wrong or interval(source.wrong, source.trials).low <= settings.audit_most:
        return False
    source.off_until = now + OFF_S
    source.trials = source.wrong = 0
    return True
