"""The engine's side of clients' shared memory: the one list of regions, which all front ends follow."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Mapping
from itertools import count
from typing import Any

from carpool.engine.engine_host import EngineHost
from carpool.errors import InvalidInput, Unavailable, Unsupported
from carpool.memory.client_files import EXTENSION, NOT_ALLOWED, Region, open_file
from carpool.observe.logs import logger

MAX_REGIONS = 1024
_MAX_NAME_CHARS = 256

_log = logger("memory")


class MemoryRegistry:
    """Answers "register-memory" and "unregister-memory"."""

    def __init__(self, host: EngineHost, *, allowed: bool) -> None:
        self._host = host
        self._allowed = allowed
        self._regions: dict[str, Region] = {}
        # Every front end has a descriptor of each region, and needs others for its connections.
        self._most = min(MAX_REGIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        # An engine that follows this one must not use the same numbers: front ends know regions by them.
        self._numbers = count(time.monotonic_ns())
        if allowed:
            host.extra["extensions"] = (*host.extra.get("extensions", ()), EXTENSION)
        host.teach("register-memory", self.register)
        host.teach("unregister-memory", self.unregister)

    async def register(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        if not self._allowed:
            raise Unsupported(NOT_ALLOWED)
        name = _text(arguments, "name")
        if name in self._regions:
            raise InvalidInput(
                f"shared memory region '{name}' already in manager; unregister it first", field="name"
            )
        if len(self._regions) >= self._most:
            raise Unavailable(f"{self._most} regions are registered, which is the limit")
        region = _checked(next(self._numbers), name, arguments)
        self._regions[name] = region
        self._publish()
        _log.info("region-registered", region=name, key=region.key, bytes=region.byte_size)
        return {}

    async def unregister(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """One region, or all of them without a name. One that is not there is no error, as in Triton."""
        name = str(arguments.get("name", ""))
        gone = [known for known in self._regions if name in ("", known)]
        for known in gone:
            del self._regions[known]
        if gone:
            self._publish()
            _log.info("regions-unregistered", regions=len(gone))
        return {}

    def _publish(self) -> None:
        self._host.extra["regions"] = dict(self._regions)
        self._host.publish()


def _checked(number: int, name: str, arguments: Mapping[str, Any]) -> Region:
    key, offset, byte_size = (
        _text(arguments, "key"),
        _size(arguments, "offset"),
        _size(arguments, "byte_size"),
    )
    if not byte_size:
        raise InvalidInput("byte_size must be at least 1", field="byte_size")
    fd = open_file(key)
    try:
        file = os.fstat(fd)
    finally:
        os.close(fd)
    if offset + byte_size > file.st_size:
        raise InvalidInput(
            f"failed to register shared memory region '{name}': invalid args; '{key}' has {file.st_size}"
            f" bytes, but offset {offset} and byte_size {byte_size} need {offset + byte_size}",
            field="byte_size",
        )
    return Region(number, name, key, offset, byte_size, file.st_ino)


def _text(arguments: Mapping[str, Any], field: str) -> str:
    value = arguments.get(field)
    if type(value) is not str or not 0 < len(value) <= _MAX_NAME_CHARS or not value.isprintable():
        raise InvalidInput(f"{field} must be a text of 1 to {_MAX_NAME_CHARS} characters", field=field)
    return value


def _size(arguments: Mapping[str, Any], field: str) -> int:
    value = arguments.get(field, 0)
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise InvalidInput(f"{field} must be an integer of 0 or more", field=field)
    return value
