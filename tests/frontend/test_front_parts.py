"""Front parts of extensions: loaded when a catalogue or an option names them, asked for each catalogue."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from carpool.frontend import front_parts
from carpool.frontend.calls.front_part import FrontPart, StartedWith
from carpool.frontend.front_parts import FrontParts
from carpool.link.catalog import Catalog


class Sample:
    """Two extensions: one that observes what a catalogue says, one that an option starts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[str] = []
        self.followed: list[Catalog] = []
        self.on = False
        self.closed = False
        extensions = {
            "seeing": SimpleNamespace(name="seeing", front="front:front", part=lambda _: self.seeing),
            "started": SimpleNamespace(name="started", front="front:front", part=lambda _: self.started),
            "silent": SimpleNamespace(name="silent", front=""),
        }
        monkeypatch.setattr(front_parts, "installed", lambda: extensions)
        monkeypatch.setattr(front_parts, "started", lambda _settings: (extensions["started"],))
        service: Any = SimpleNamespace()
        row: Any = SimpleNamespace()
        self.parts = FrontParts(service, row, StartedWith(began=7.0))

    def seeing(self, _server: Any) -> FrontPart:
        self.made.append("seeing")
        observer: Any = self
        return FrontPart(
            follow=self.followed.append,
            observe=lambda: observer if self.on else None,
            picture=lambda *_: None,
            refused=lambda *_: None,
            close=self.close,
        )

    def started(self, server: Any) -> FrontPart:
        self.made.append(f"started at {server.began}")
        wrapped: Any = lambda door: ("wrapped", door)  # noqa: E731
        return FrontPart(engine=wrapped)

    def follow(self, catalog: Catalog) -> None:
        self.parts.load(catalog)
        self.parts.follow(catalog)

    def close(self) -> None:
        self.closed = True


def test_options_start_parts_that_may_wrap_the_door(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = Sample(monkeypatch)
    door: Any = "door"
    assert sample.parts.start(door) == ("wrapped", "door")
    assert sample.made == ["started at 7.0"]
    sample.follow(Catalog(extra={"started": {}, "silent": {}, "unknown": {}}))
    assert len(sample.made) == 1


def test_a_catalogue_loads_a_part_once_and_asks_it_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = Sample(monkeypatch)
    entry: Any = SimpleNamespace(extra={"seeing": {"sample": 0.5}})
    sample.follow(Catalog())
    assert (sample.made, sample.parts.observers) == ([], ())
    with_one = Catalog(number=2, entries={("m", "1"): entry})
    sample.follow(with_one)
    assert (sample.made, sample.followed) == (["seeing"], [with_one])
    assert sample.parts.observers == sample.parts.see_pictures == sample.parts.see_refused == ()
    sample.on = True
    sample.follow(Catalog(number=3))
    assert len(sample.made) == 1
    assert len(sample.parts.observers) == len(sample.parts.see_pictures) == 1
    assert len(sample.parts.see_refused) == 1
    sample.parts.close()
    assert sample.closed


def test_parts_wrap_in_the_order_of_the_list_whenever_they_were_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sample = Sample(monkeypatch)
    inner = FrontPart()
    sample.parts.add("silent", inner)
    entry: Any = SimpleNamespace(extra={"seeing": {}})
    sample.parts.start(sample)  # type: ignore[arg-type]
    sample.follow(Catalog(entries={("m", "1"): entry}))
    outer, between, last = sample.parts.in_order()
    assert (outer.picture is not None, between.engine is not None, last) == (True, True, inner)


def test_a_field_of_a_head_loads_the_part_that_chooses_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    extension: Any = SimpleNamespace(name="seeing", front="front:front")
    monkeypatch.setattr(front_parts, "choice_fields", lambda: {b"x-carpool-side": extension})
    sample = Sample(monkeypatch)
    extension.part = lambda _: sample.seeing
    catalog = Catalog(number=3)
    assert not sample.parts.loads_for({b"accept": b"*/*"}, catalog)
    assert sample.parts.loads_for({b"x-carpool-side": b"left"}, catalog)
    assert (sample.made, sample.followed) == (["seeing"], [catalog])
    assert not sample.parts.loads_for({b"x-carpool-side": b"left"}, catalog), "it is loaded once"
