"""The engine's list of regions: what may be registered, and what every front end then has."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from carpool.engine.control import engine_questions
from carpool.engine.control.engine_questions import ClientRegions
from carpool.errors import CarpoolError, InvalidInput, Unavailable, Unsupported
from carpool.memory.client_files import EXTENSION
from frontend.client_files import client_file
from frontend.fake_door import FakeDoor
from frontend.fake_host import FakeHost


def engine(allowed: bool = True) -> FakeDoor:
    door = FakeDoor()
    host: Any = FakeHost(door)
    ClientRegions(host, allowed=allowed)
    host.publish()
    return door


def register(door: FakeDoor, name: str, key: str, byte_size: Any, offset: Any = 0) -> Any:
    fields = {"name": name, "key": key, "byte_size": byte_size, "offset": offset}
    return asyncio.run(door.ask("register-memory", fields))


def unregister(door: FakeDoor, name: str = "") -> Any:
    return asyncio.run(door.ask("unregister-memory", {"name": name}))


def test_registered_regions_are_in_the_catalogue() -> None:
    door = engine()
    assert door.catalog.server.extensions == (EXTENSION,)
    with client_file(bytes(64)) as file:
        assert register(door, "a", file.key, 32, 32) == {}
        assert register(door, "b", file.key[1:], 64) == {}
        a, b = (door.catalog.regions[name] for name in "ab")
        assert (a.key, a.offset, a.byte_size, a.inode) == (file.key, 32, 32, file.path.stat().st_ino)
        assert a.number < b.number
        assert unregister(door, "a") == {}
        assert list(door.catalog.regions) == ["b"]
        assert unregister(door) == {}
        assert not door.catalog.regions


def test_a_number_is_never_used_again() -> None:
    with client_file(bytes(8)) as file:
        seen = []
        for door in (engine(), engine()):  # as after a restart of the engine
            for _ in range(3):
                register(door, "a", file.key, 8)
                seen.append(door.catalog.regions["a"].number)
                unregister(door, "a")
    assert len(set(seen)) == 6


def test_what_is_not_there_can_be_unregistered() -> None:
    door = engine()
    number = door.catalog.number
    assert (unregister(door), unregister(door, "none")) == ({}, {})
    assert door.catalog.number == number


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"name": ""}, "name must be a text"),
        ({"name": "x" * 257}, "name must be a text"),
        ({"name": "a\nb"}, "name must be a text"),
        ({"key": 7}, "key must be a text"),
        ({"key": "../passwd"}, "key must be the name"),
        ({"key": "/carpool-test-none"}, "No such file"),
        ({"byte_size": 0}, "at least 1"),
        ({"byte_size": 9}, "has 8 bytes, but offset 0 and byte_size 9 need 9"),
        ({"byte_size": 8, "offset": 1}, "need 9"),
        ({"byte_size": 2**63}, "byte_size must be an integer"),
        ({"byte_size": 2**62, "offset": 2**62}, "has 8 bytes"),
        ({"byte_size": "8"}, "byte_size must be an integer"),
        ({"byte_size": True}, "byte_size must be an integer"),
        ({"offset": -1}, "offset must be an integer"),
        ({"byte_size": None}, "byte_size must be an integer"),
    ],
)
def test_what_cannot_be_right_is_refused(fields: dict[str, Any], words: str) -> None:
    door = engine()
    with client_file(bytes(8)) as file:
        asked = {"name": "r", "key": file.key, "byte_size": 8, "offset": 0, **fields}
        with pytest.raises(InvalidInput) as raised:
            asyncio.run(door.ask("register-memory", asked))
    assert words in raised.value.message
    assert not door.catalog.regions


def test_a_name_is_registered_once() -> None:
    door = engine()
    with client_file(bytes(8)) as file:
        register(door, "r", file.key, 8)
        with pytest.raises(InvalidInput, match="already in manager; unregister it first"):
            register(door, "r", file.key, 4)
        assert door.catalog.regions["r"].byte_size == 8


def test_the_number_of_regions_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_questions, "MAX_REGIONS", 3)
    door = engine()
    with client_file(bytes(8)) as file:
        for name in "abc":
            register(door, name, file.key, 8)
        with pytest.raises(Unavailable, match="3 regions"):
            register(door, "d", file.key, 8)
        unregister(door, "a")
        register(door, "d", file.key, 8)


def test_it_is_off_unless_allowed() -> None:
    door = engine(allowed=False)
    assert not door.catalog.server.extensions
    with client_file(bytes(8)) as file, pytest.raises(Unsupported, match="--allow-client-shm"):
        register(door, "r", file.key, 8)
    assert unregister(door) == {}


def test_only_what_is_registered_is_open_here() -> None:
    door = engine()
    with client_file(bytes(8)) as file:
        register(door, "r", file.key, 8)
        for size in (9, 0):
            with pytest.raises(CarpoolError):
                register(door, "s", file.key, size)
        assert file.descriptors() == 1
        unregister(door, "r")
        assert file.descriptors() == 0


def test_a_region_belongs_to_the_key_that_registered_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_questions, "MAX_REGIONS", 8)
    door = engine()

    def ask(what: str, by: str, **fields: Any) -> None:
        asyncio.run(door.ask(what, fields | ({"by": by} if by else {})))

    with client_file(bytes(8)) as file:
        for by in ("alice", "bob", ""):
            ask("register-memory", by, name="x", key=file.key, byte_size=8)
        regions = door.catalog.regions
        assert [(one.name, one.owner) for one in regions.values()] == [
            ("x", "alice"),
            ("x", "bob"),
            ("x", ""),
        ]
        ask("unregister-memory", "alice", name="alice\0x")
        ask("unregister-memory", "mallory", name="x")
        ask("unregister-memory", "mallory")
        ask("unregister-memory", "", name="alice\0x")
        assert len(door.catalog.regions) == 3
        ask("unregister-memory", "alice", name="x")
        ask("unregister-memory", "")
        assert [one.owner for one in door.catalog.regions.values()] == ["bob"]
        for number in range(6):
            ask("register-memory", "greedy", name=str(number), key=file.key, byte_size=8)
        with pytest.raises(Unavailable, match="its share of the 8"):
            ask("register-memory", "greedy", name="6", key=file.key, byte_size=8)
        ask("register-memory", "bob", name="y", key=file.key, byte_size=8)
        for by in ("bob", "greedy"):
            ask("unregister-memory", by)
