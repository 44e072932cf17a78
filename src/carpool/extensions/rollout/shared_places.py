"""Defines where replicas keep what they know together: a folder on a volume that all of them see, or a Redis
server.

A document is read whole, and is changed only by a replica that has read what lies there: in a folder under a
lock and by a rename, in Redis by a script. What cannot be reached within a second is not waited for. The
rules of `shared_state` do not depend on any of that: a replica that knows what was lost writes it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from carpool.config.redis_url import read_redis_url
from carpool.config.regular_file import read_regular
from carpool.config.server import ServerSettings
from carpool.errors import ConfigError
from carpool.extensions.rollout.rollout_file import write_document

if TYPE_CHECKING:
    from carpool.link.redis_client import SharedStore

T = TypeVar("T")

_FILE = "file:"
_WAIT_S = 1.0
_REDIS_WAIT_S, _REDIS_PAUSE_S = 0.5, 1.0
_LOCK_TRIES, _LOCK_PAUSE_S = 40, 0.02
_MOST_BYTES = 8 << 20
_PLAIN = re.compile(r"[^0-9A-Za-z._-]+")


class OutOfReach(Exception):
    """Says why the place cannot be read, or written, now."""


class StoredState(NamedTuple):
    lies: bytes | None = None  # as `swap` wants to know it; none: there is nothing
    written: bytes | None = None  # none: not by a replica


class SharedPlace(Protocol):
    where: str

    async def read(self, model: str) -> StoredState: ...

    async def swap(self, model: str, old: bytes | None, new: bytes) -> bool:
        """Put it there if `old` still lies there, and say whether it did."""

    def close(self) -> None: ...


def begin(settings: ServerSettings) -> tuple[ServerSettings, str]:
    """Checks where replicas share rollouts."""
    where: str = settings.option("rollout_state")
    kind, _, folder = where.partition(":")
    if where and kind != "file":
        read_redis_url(where, "rollout_state")
        for field, sentence in settings.redis_mistakes("rollout_state"):
            raise ConfigError(sentence, field=field)
    elif where and (not folder.startswith("/") or "\0" in folder):
        raise ConfigError(
            "rollout_state names a folder from the root, like file:/mnt/rollouts", field="rollout_state"
        )
    return settings, ""


def place_of(setting: str, secret: str) -> SharedPlace:
    """Returns the place of the setting `rollout_state`, which was checked."""
    if setting.startswith(_FILE):
        return FolderPlace(Path(setting.removeprefix(_FILE)))
    from carpool.link.redis_client import shared_store

    store = shared_store(setting, secret, _REDIS_WAIT_S, setting="rollout_state", pause_s=_REDIS_PAUSE_S)
    return RedisPlace(store)


class FolderPlace:
    """All that touches the volume is done in one thread: one that hangs holds up nothing else. While it does,
    nothing more is asked of it: what is not waited for any more would pile up behind it."""

    def __init__(self, folder: Path) -> None:
        self.where = str(folder)
        self._folder = folder
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="rollout-state")
        self._hangs: Future[Any] | None = None  # what was not over in time

    async def read(self, model: str) -> StoredState:
        data = await self._do(partial(self._read, self._file(model)))
        return StoredState(data, data)

    async def swap(self, model: str, old: bytes | None, new: bytes) -> bool:
        return await self._do(partial(self._swap, self._file(model), old, new))

    def close(self) -> None:
        self._disk.shutdown(wait=False, cancel_futures=True)

    async def _do(self, work: Callable[[], T]) -> T:
        if self._hangs is not None and not self._hangs.done():
            raise OutOfReach("the folder does not answer")
        try:
            future = self._disk.submit(work)
            return await asyncio.wait_for(asyncio.wrap_future(future), _WAIT_S)
        except TimeoutError:
            if not future.cancelled():  # it was begun
                self._hangs = future
            raise OutOfReach("the folder does not answer") from None
        except OSError as error:
            raise OutOfReach(error.strerror or str(error)) from None
        except RuntimeError:
            raise OutOfReach("the server is stopping") from None

    def _file(self, model: str) -> Path:
        """Names may hold what no file's may, and two may differ in that alone."""
        digest = blake2b(model.encode(), digest_size=6).hexdigest()
        return self._folder / f"{_PLAIN.sub('_', model)[:80]}-{digest}.json"

    def _read(self, path: Path) -> bytes | None:
        """The folder itself is never made: where it is missing, the volume is not there. Opening asks a
        network's file system anew, where the time of the last change may come from memory."""
        try:
            return read_regular(path, _MOST_BYTES)
        except FileNotFoundError:
            if not self._folder.is_dir():
                raise FileNotFoundError(2, "there is no such folder") from None
            return None

    def _swap(self, path: Path, old: bytes | None, new: bytes) -> bool:
        self._read(path)  # and the folder is there
        with _locked(path.with_suffix(".lock")):
            if self._read(path) != old:
                return False
            write_document(path, new)
            return True


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Among all that see the folder; the kernel releases it for a process that dies."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        for _ in range(_LOCK_TRIES):
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(_LOCK_PAUSE_S)
        else:
            raise BlockingIOError(11, "another process holds the lock")
        yield
    finally:
        os.close(lock)


class RedisPlace:
    def __init__(self, store: SharedStore) -> None:
        self._store = store
        self.where = store.where

    async def read(self, model: str) -> StoredState:
        return StoredState(*await self._ask(partial(self._store.document, _name(model))))

    async def swap(self, model: str, old: bytes | None, new: bytes) -> bool:
        return bool(await self._ask(partial(self._store.swap_document, _name(model), old, new)))

    async def _ask(self, question: Callable[[Callable[[Any], None]], None]) -> Any:
        told = asyncio.get_running_loop().create_future()
        question(lambda value: None if told.done() else told.set_result(value))
        found = await told
        if found is None:
            raise OutOfReach(self._store.said or "the Redis server did not answer, or answered with an error")
        return found

    def close(self) -> None:
        self._store.close()


def _name(model: str) -> str:
    return f"rollout {model}"
