"""Where replicas keep what they share: a folder that is gone, full or slow, and a real Redis server."""

from __future__ import annotations

import asyncio
import fcntl
import os
import threading
from pathlib import Path

import pytest

from carpool.config.server import ServerSettings
from carpool.errors import ConfigError
from carpool.extensions.rollout import shared_places
from carpool.extensions.rollout.shared_places import (
    FolderPlace,
    OutOfReach,
    SharedPlace,
    StoredState,
    begin,
    place_of,
)
from engine.scripted import run
from link.redis_server import redis_server

SECRET = "sixteen characters"


async def patient(place: SharedPlace, model: str) -> StoredState:
    """A connection takes a moment."""
    while True:
        try:
            return await place.read(model)
        except OutOfReach:
            await asyncio.sleep(0.005)


async def check_swaps(place: SharedPlace) -> None:
    assert await patient(place, "m") == (None, None)
    assert await place.swap("m", None, b"one")
    assert not await place.swap("m", None, b"two"), "somebody was faster"
    found = await place.read("m")
    assert found.written == b"one"
    assert await place.swap("m", found.lies, b"three")
    assert not await place.swap("m", found.lies, b"four")
    assert (await place.read("m")).written == b"three"
    assert await place.read("M") == await place.read("m/../n") == (None, None)


def test_a_folder(tmp_path: Path) -> None:
    async def story() -> None:
        place = place_of(f"file:{tmp_path}", "")
        await check_swaps(place)
        for name in ("a/b", "a_b", "../x", "\N{SNOWMAN}" * 200):
            assert await place.swap(name, None, name.encode())
        assert (await place.read("a/b")).written == b"a/b"
        assert all(each.parent == tmp_path for each in tmp_path.rglob("*"))
        place.close()
        with pytest.raises(OutOfReach, match="stopping"):
            await place.read("m")

    run(story())


def test_many_that_add_at_once_lose_nothing(tmp_path: Path) -> None:
    async def add(place: SharedPlace) -> None:
        for _ in range(10):
            while True:
                found = await place.read("m")
                if await place.swap("m", found.lies, (found.written or b"") + b"x"):
                    break

    async def story() -> None:
        places = [FolderPlace(tmp_path) for _ in range(3)]
        await asyncio.gather(*map(add, places))
        assert (await places[0].read("m")).written == b"x" * 30

    run(story())


def test_a_volume_that_is_gone_read_only_full_or_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()

    async def story() -> None:
        gone = FolderPlace(tmp_path / "not mounted")
        with pytest.raises(OutOfReach, match="no such folder"):
            await gone.read("m")
        with pytest.raises(OutOfReach, match="no such folder"):
            await gone.swap("m", None, b"x")
        assert not (tmp_path / "not mounted").exists(), "or a volume that is mounted later would hide it"
        place = FolderPlace(tmp_path)
        assert await place.swap("m", None, b"old")

        def refuse(_path: Path, _document: bytes) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(shared_places, "write_document", refuse)
            with pytest.raises(OutOfReach, match="No space left"):
                await place.swap("m", b"old", b"new")
        assert (await place.read("m")).written == b"old"
        with monkeypatch.context() as patch:
            patch.setattr(shared_places, "_WAIT_S", 0.02)
            patch.setattr(FolderPlace, "_read", lambda *_: go_on.wait(30) and None)
            for _ in range(30):
                with pytest.raises(OutOfReach, match="does not answer"):
                    await place.read("m")
            assert place._disk._work_queue.qsize() == 0, "nothing piles up behind what hangs"
        go_on.set()
        assert (await patient(place, "m")).written == b"old"

    run(story())


def test_a_lock_that_somebody_holds_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_places, "_LOCK_PAUSE_S", 0.0)

    async def story() -> None:
        place = FolderPlace(tmp_path)
        assert await place.swap("m", None, b"x")
        (file,) = tmp_path.glob("*.lock")
        held = os.open(file, os.O_RDWR)
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(OutOfReach, match="holds the lock"):
            await place.swap("m", b"x", b"y")
        os.close(held)
        assert await place.swap("m", b"x", b"y")

    run(story())


def test_redis(tmp_path: Path) -> None:
    async def story() -> None:
        with redis_server(tmp_path, password="secret") as redis:
            place = place_of(redis.url, SECRET)
            stranger = place_of(redis.url, "another secret!!")
            await check_swaps(place)
            assert await patient(stranger, "m") == (None, None), "who lacks the secret finds nothing"
            (key,) = (key for key in redis.ask("KEYS", "*"))
            redis.ask("SET", key, b"forged")
            assert await place.read("m") == (b"forged", None)
            assert await place.swap("m", b"forged", b"again")
            redis.ask("CONFIG", "SET", "maxmemory", "1")
            found = await place.read("m")
            with pytest.raises(OutOfReach):
                await place.swap("m", found.lies, b"more")
            redis.end()
            with pytest.raises(OutOfReach):
                await place.read("m")
            redis.start()
            assert await patient(place, "m") == (None, None), "it keeps nothing over a restart"
            place.close()
            stranger.close()

    run(story())


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("/mnt/rollouts", "rollout_state must be an address like file:/mnt/rollouts"),
        ("file:rollouts", "from the root, like file:/mnt/rollouts"),
        ("file:", "from the root"),
        ("http://host", "rollout_state must be an address like file:/mnt/rollouts"),
        ("redis://host:x", "rollout_state must be an address like file:/mnt/rollouts"),
        ("redis://host?unknown=1", "rollout_state has an unknown option"),
    ],
)
def test_settings_that_name_no_place(setting: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        begin(ServerSettings(rollout_state=setting, cache_secret=SECRET))
    assert caught.value.field == "rollout_state"


def test_redis_needs_the_secret_and_nothing_shows_a_password() -> None:
    with pytest.raises(ConfigError, match="rollout_state needs a cache_secret of 16"):
        begin(ServerSettings(rollout_state="redis://:password@host"))
    settings = ServerSettings(rollout_state="redis://:password@host", cache_secret=SECRET)
    assert begin(settings) == (settings, "")
    assert "password" not in repr(settings)
