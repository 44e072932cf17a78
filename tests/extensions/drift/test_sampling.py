"""Which pictures a front end measures: a part of them, few a second, within a hundredth of a core."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from carpool.extensions.drift import front as sampling
from carpool.extensions.drift.front import Sampler
from carpool.extensions.drift.samples import Sampled
from carpool.link.catalog import Catalog
from carpool.link.engine_client import Answer
from carpool.link.senders import NOBODY
from carpool.vision.decode import Decoded
from waiting import until_in_loop as until


class Place:
    """A front end of its own clock, whose threads are idle at once."""

    takes_idle = True

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **drift: Any) -> None:
        self.now = 100.0
        self.asked: list[tuple[str, Any]] = []
        self.room = 0
        monkeypatch.setattr(sampling, "monotonic", lambda: self.now)
        self.threads = self
        self.sampler = Sampler(self)  # type: ignore[arg-type]
        extra = {"drift": {"sample": 1.0, "uncertain": None, **drift}}
        self.entry = SimpleNamespace(key=7, name="m", extra=extra)
        self.sampler.follow(Catalog(entries={("m", "1"): self.entry}))  # type: ignore[dict-item]
        assert self.sampler.observe() is self.sampler

    def pick(self, *files: bytes, is_file: bool = False) -> Sampled | None:
        pictures = SimpleNamespace(files=files, is_file=is_file)
        self.sampler.pick(self.entry, pictures, None)  # type: ignore[arg-type]
        assert pictures.noted is None or isinstance(pictures.noted, Sampled)
        return pictures.noted

    def answered(self, sampled: Sampled | None, document: bytes = b"{}") -> None:
        pictures = SimpleNamespace(noted=sampled, first_document=lambda _: document)
        call = SimpleNamespace(pictures=pictures, entry=self.entry, sender=NOBODY._replace(source="door"))
        self.sampler.answered(call, Answer(), (0.0, 0.0, 0.0))

    def idle(self, work: Callable[[], Any], then: Callable[[Any, BaseException | None], None]) -> bool:
        try:
            then(work(), None)
        except Exception as error:
            then(None, error)
        return True

    async def ask(self, what: str, arguments: Mapping[str, Any]) -> Any:
        self.asked.append((what, arguments))
        return {"room": {"7": self.room}}


def seen(value: int = 0) -> list[Decoded]:
    return [Decoded(np.full((16, 16, 3), value, np.uint8), 16, 16)]


def test_a_part_of_them_and_few_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(monkeypatch, sample=0.1)
    picked = 0
    for _ in range(20_000):
        place.now += 1.0
        picked += place.pick(b"x") is not None
    assert 1_800 < picked < 2_200
    picked = 0
    for _ in range(20_000):  # 2,000 a second, a tenth of them, for 10 s
        place.now += 0.0005
        picked += place.pick(b"x") is not None
    assert 80 < picked <= 101


def test_cameras_that_take_turns_are_all_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(monkeypatch, sample=0.05)
    cameras = set()
    for number in range(20_000):
        place.now += 1.0
        if place.pick(b"x") is not None:
            cameras.add(number % 20)
    assert len(cameras) == 20


def test_large_pictures_are_measured_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        place = Place(monkeypatch)
        for seconds in (0.05, 0.0001):
            taken = iter((0.0, seconds))
            monkeypatch.setattr(
                "carpool.extensions.drift.samples.thread_time", lambda taken=taken: next(taken)
            )
            sampled = place.pick(b"x")
            assert sampled is not None
            sampled.decoded.extend(seen())
            place.answered(sampled)
            place.now += 100 * seconds - 0.005
            place.now += 0.11 if seconds < 0.01 else 0.0
            first = place.pick(b"x")
            assert (first is None) == (seconds > 0.01)
            place.now += 0.2
        place.sampler.close()

    asyncio.run(main())


def test_they_are_told_in_bulk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "_REPORT_S", 0.0)

    async def main() -> None:
        place = Place(monkeypatch)
        for _ in range(3):
            place.now += 10.0
            sampled = place.pick(b"x" * 64)
            assert sampled is not None
            sampled.decoded.extend(seen())
            place.answered(sampled)
        place.answered(None)
        await until(lambda: place.asked)
        ((what, arguments),) = place.asked
        assert what == "drift/samples"
        assert [one["source"] for one in arguments["samples"]] == ["door"] * 3
        assert arguments["samples"][0]["values"]["bytes"] == 0.25
        assert arguments["samples"][0]["black"] is True
        place.sampler.close()

    asyncio.run(main())


def test_doubtful_pictures_go_along_while_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    document = b'{"image": {}, "detections": [{"label": "cat", "score": 0.4, "box": [0, 0, 1, 1]}]}'
    file = b"\xff\xd8\xff\xe0 no more of it"
    monkeypatch.setattr(
        "carpool.extensions.drift.samples.read_head", lambda _: SimpleNamespace(format="JPEG")
    )

    async def main() -> None:
        place = Place(monkeypatch, uncertain={"score": [0.3, 0.5], "margin": 0.1})
        for _ in range(3):
            place.now += 10.0
            sampled = place.pick(file)
            assert sampled is not None
            sampled.decoded.extend(seen())
            place.answered(sampled, document)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        kept = [arguments for what, arguments in place.asked if what == "drift/keep"]
        assert len(kept) == 1  # the engine said that there is no room for more
        assert kept[0]["line"]["says"] == "cat at 0.40"
        place.sampler.close()

    asyncio.run(main())


def test_what_cannot_be_measured_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(monkeypatch)
    place.answered(Sampled([], 3, b"abc"))  # no picture
    assert place.sampler._untold == []
    place.now += 1.0
    assert place.pick(is_file=True) is None  # its file is nowhere
    place.takes_idle = False
    place.now += 1.0
    assert place.pick(b"x") is None


def test_nothing_is_watched() -> None:
    sampler = Sampler(SimpleNamespace(threads=None))  # type: ignore[arg-type]
    entry, pictures = SimpleNamespace(key=7, extra={}), SimpleNamespace()
    sampler.follow(Catalog(entries={("m", "1"): entry}))  # type: ignore[dict-item]
    assert sampler.observe() is None
    sampler.pick(entry, pictures, None)  # type: ignore[arg-type]
    assert pictures.noted is None
