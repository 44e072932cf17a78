"""Finds where replicas share what was measured, so that a fleet measures a model once: a folder on a volume
that all of them see, a Redis server, or an address like s3://bucket/profiles.

Files are small, and are read and written whole, by name. A place that does not answer within a few seconds
is not waited for: a replica that reads nothing measures.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from carpool.engine.profile.profile_folder import MOST_BYTES, ProfileFolder, SharedFiles

T = TypeVar("T")

FILE = "file:"
_WAIT_S = 5.0
_LOOK_S = 0.01


def shared_files(setting: str, secret: str) -> SharedFiles:
    """Returns the files of the setting `shared_profiles`, which was checked."""
    if setting.startswith(FILE):
        return PatientFiles(ProfileFolder(Path(setting.removeprefix(FILE)) / "profiles"))
    if setting.startswith(("redis", "unix")):
        return PatientFiles(ProfileRedis(setting, secret))
    return PatientFiles(ProfileBucket(setting))


class PatientFiles:
    """A place that may hang, such as a network's file system: each question has a thread of its own, which is
    left alone when its time is over."""

    def __init__(self, place: SharedFiles, patience: float = _WAIT_S) -> None:
        self._place, self._patience = place, patience
        self.where = place.where

    def read(self, name: str) -> bytes | None:
        return self._within(lambda: self._place.read(name))

    def write(self, name: str, data: bytes) -> None:
        self._within(lambda: self._place.write(name, data))

    def _within(self, work: Callable[[], T]) -> T:
        answers: list[T] = []
        errors: list[Exception] = []

        def run() -> None:
            try:
                answers.append(work())
            except Exception as error:  # every store has errors of its own
                errors.append(error)

        thread = threading.Thread(target=run, daemon=True, name="shared-profiles")
        thread.start()
        thread.join(self._patience)
        if answers:
            return answers[0]
        raise OSError(f"{self.where}: {errors[0] if errors else 'no response within the timeout'}")


class ProfileBucket:
    """Stores files over fsspec, with the keys that each store's own tools would find."""

    def __init__(self, address: str, most: int = MOST_BYTES) -> None:
        from carpool.config.remote_address import shown_address

        self._address, self._most = address, most
        self.where = shown_address(address)

    def read(self, name: str) -> bytes | None:
        fs, root = self._open()
        try:
            data: bytes = fs.cat_file(f"{root}/{name}", 0, self._most + 1)
        except FileNotFoundError:
            return None
        return data

    def write(self, name: str, data: bytes) -> None:
        fs, root = self._open()
        fs.pipe_file(f"{root}/{name}", data)

    def _open(self) -> tuple[Any, str]:
        import fsspec

        fs, root = fsspec.core.url_to_fs(self._address, use_listings_cache=False)
        return fs, root.rstrip("/")


class ProfileRedis:
    """What was not written with the secret of these servers is not there."""

    def __init__(self, url: str, secret: str) -> None:
        from carpool.config.redis_url import read_redis_url

        self._url, self._secret = url, secret
        self.where = read_redis_url(url, "shared_profiles").where

    def read(self, name: str) -> bytes | None:
        async def written(store: Any) -> bytes | None:
            found: bytes | None = (await _document(store, name))[1]
            return found

        return asyncio.run(self._connected(written))

    def write(self, name: str, data: bytes) -> None:
        async def swapped(store: Any) -> None:
            lies = (await _document(store, name))[0]
            await _asked(store, lambda then: store.swap_document(_key(name), lies, data, then))

        asyncio.run(self._connected(swapped))

    async def _connected(self, work: Callable[[Any], Awaitable[T]]) -> T:
        from carpool.link.redis_client import shared_store

        store = shared_store(self._url, self._secret, _WAIT_S, setting="shared_profiles")
        try:
            for _ in range(round(_WAIT_S / _LOOK_S)):
                if store.up:
                    return await work(store)
                await asyncio.sleep(_LOOK_S)
            raise OSError(store.said or "the Redis server did not answer")
        finally:
            store.close()


def _key(name: str) -> str:
    return f"profile {name}"


async def _document(store: Any, name: str) -> tuple[bytes | None, bytes | None]:
    found: tuple[bytes | None, bytes | None] = await _asked(
        store, lambda then: store.document(_key(name), then)
    )
    return found


async def _asked(store: Any, question: Callable[[Callable[[Any], None]], None]) -> Any:
    told = asyncio.get_running_loop().create_future()
    question(lambda value: None if told.done() else told.set_result(value))
    found = await told
    if found is None:
        raise OSError(store.said or "the Redis server did not answer, or answered with an error")
    return found
