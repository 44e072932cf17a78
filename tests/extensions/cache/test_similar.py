"""The same scene of the same source: what is compared, for how long, and who is looked at less often."""

from __future__ import annotations

from math import inf

import cv2
import numpy as np
import pytest

from carpool.extensions.cache.answer_store import Room
from carpool.extensions.cache.settings import CacheSettings
from carpool.extensions.cache.similar import (
    AUDIT_EVERY_S,
    MOST_FRAMES,
    MOST_SOURCES,
    OFF_S,
    Frame,
    PictureLook,
    SimilarFrames,
    SourceAnswers,
    is_audited,
    judged,
    perceptual_hash,
    seen_of,
)
from carpool.frontend.calls.reused_answer import EncodedAnswer
from carpool.types import Array

SETTINGS = CacheSettings(similar=True)
KEPT = EncodedAnswer(b"answer")


def scene(seed: int = 1) -> Array:
    """A smooth picture, as thumbnails are."""
    noise = np.random.default_rng(seed).integers(0, 256, (8, 10), np.uint8)
    return cv2.resize(noise, (80, 60), interpolation=cv2.INTER_CUBIC)


def with_figure(picture: Array, size: int = 3) -> Array:
    changed = picture.copy()
    changed[20 : 20 + size, 30 : 30 + size] = 255 - changed[20 : 20 + size, 30 : 30 + size]
    return changed


def look(frames: SimilarFrames, source: SourceAnswers, picture: Array, now: float, **more: float) -> bool:
    settings = SETTINGS
    return (
        frames.look(source, seen_of(picture, settings), settings, now, more.get("max_age", inf)) is not None
    )


def keep(frames: SimilarFrames, source: SourceAnswers, picture: Array, at: float) -> None:
    frames.keep(source, Frame(seen_of(picture, SETTINGS), KEPT, at))


def test_the_same_scene_is_found_while_it_is_fresh() -> None:
    frames = SimilarFrames(Room(1 << 20))
    source = frames.source(b"camera")
    assert not look(frames, source, scene(), 0.0)
    keep(frames, source, scene(), 0.0)
    assert look(frames, source, scene(), 1.9)
    assert not look(frames, source, scene(), 1.9, max_age=1.0)
    assert not look(frames, source, with_figure(scene()), 1.9)
    assert not look(frames, source, scene(), 2.0)
    assert not look(frames, frames.source(b"other"), scene(), 0.1)


def test_a_hit_is_never_what_others_are_compared_with() -> None:
    """A scene that changes a little each time must not creep away from its answer."""
    frames = SimilarFrames(Room(1 << 20))
    source = frames.source(b"camera")
    first = np.full((60, 80), 100, np.uint8)
    keep(frames, source, first, 0.0)
    hits = []
    for step in range(8):
        changed = first.copy()
        changed[20:30, 30:40] += np.uint8(2 * step)
        hits.append(look(frames, source, changed, 0.1 * step))
    assert hits == [True, True, True, True, False, False, False, False]


def test_frames_and_sources_are_bounded() -> None:
    room = Room(256 << 20)
    frames = SimilarFrames(room)
    for number in range(2 * MOST_SOURCES):
        keep(frames, frames.source(b"%d" % number), scene(), 0.0)
    assert len(frames) == MOST_SOURCES
    source = frames.source(b"%d" % (2 * MOST_SOURCES - 1))
    for number in range(2 * MOST_FRAMES):
        keep(frames, source, scene(number), 0.001 * number)
    assert len(source.frames) == MOST_FRAMES
    frames.clear(b"")
    assert (len(frames), room.used) == (0, 0)
    keep(frames, source, scene(), 1.0)  # one that was under way meanwhile
    assert room.used == 0


def test_bytes_are_bounded_by_half_of_the_room() -> None:
    room = Room(100_000)
    frames = SimilarFrames(room)
    for number in range(100):
        keep(frames, frames.source(b"%d" % number), scene(), 0.0)
    assert 0 < room.used <= 50_000


def test_a_camera_that_moves_is_looked_at_less_and_less() -> None:
    frames = SimilarFrames(Room(1 << 24))
    source = frames.source(b"camera")
    looks = 0
    for number in range(1000):
        now = number / 10
        if source.wants_a_look(now):
            looks += 1
            look(frames, source, scene(number), now)
            keep(frames, source, scene(number), now)
    assert looks < 110


def test_and_every_time_again_when_it_stands_still() -> None:
    frames = SimilarFrames(Room(1 << 24))
    source = frames.source(b"camera")
    for number in range(300):
        if source.wants_a_look(number / 10):
            look(frames, source, scene(number), number / 10)
            keep(frames, source, scene(number), number / 10)
    assert source.every > 1
    hits = 0
    for number in range(300, 400):
        if source.wants_a_look(number / 10):
            if look(frames, source, scene(7), number / 10):
                hits += 1
            else:
                keep(frames, source, scene(7), number / 10)
    assert source.every == 1
    assert hits > 55


def test_the_textbooks_hash() -> None:
    settings = CacheSettings(similar=True, similar_hash="phash", similar_threshold=4)
    frames = SimilarFrames(Room(1 << 20))
    source = frames.source(b"camera")
    frames.keep(source, Frame(seen_of(scene(), settings), KEPT, 0.0))
    assert frames.look(source, seen_of(scene(), settings), settings, 0.1, inf)
    assert not frames.look(source, seen_of(scene(5), settings), settings, 0.1, inf)
    assert 0 <= perceptual_hash(scene()) < 1 << 64
    assert PictureLook(scene()).hash == 0


def test_thumbnails_of_other_sizes_are_other_scenes() -> None:
    frames = SimilarFrames(Room(1 << 20))
    source = frames.source(b"camera")
    keep(frames, source, scene(), 0.0)
    assert not look(frames, source, scene()[:, :40], 0.1)


def test_the_audit_takes_its_share_and_not_twice_at_once() -> None:
    source = SourceAnswers()
    always = CacheSettings(similar=True, audit=1.0)
    assert is_audited(source, always, 100.0)
    assert not is_audited(source, always, 100.0 + AUDIT_EVERY_S / 2)
    assert is_audited(source, always, 100.0 + AUDIT_EVERY_S)
    assert not is_audited(SourceAnswers(), CacheSettings(similar=True, audit=0.0), 0.0)


def test_a_source_that_is_proven_wrong_is_off_for_a_while() -> None:
    source = SourceAnswers()
    breaches = [judged(source, SETTINGS, 10.0, wrong=True) for _ in range(2)]
    assert breaches == [False, True]
    assert not source.wants_a_look(10.0 + OFF_S - 1)
    assert source.wants_a_look(10.0 + OFF_S)
    assert (source.trials, source.wrong) == (0, 0)


@pytest.mark.parametrize("share", [0.0, 0.001])
def test_one_that_is_rarely_wrong_stays_on(share: float) -> None:
    source = SourceAnswers()
    rng = np.random.default_rng(1)
    assert not any(judged(source, SETTINGS, 1.0, wrong=bool(rng.random() < share)) for _ in range(3000))
