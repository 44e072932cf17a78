"""Looks up the names of hosts in threads of their own: a resolver that does not answer holds a thread for
minutes, and cannot be interrupted. So each name has one lookup at a time, for all who wait for it, and one
that failed or is silent is not repeated for a moment."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic
from typing import TypeAlias

Resolve: TypeAlias = Callable[[str, int], Sequence[str]]
"""Returns all addresses of a name; may take long."""

_MOST_AT_ONCE = 64  # threads: of as many names
_SILENT_S = 3.0  # a lookup that takes longer is not waited for by newcomers
_FAILED_S = 1.0  # so long a failure is remembered


class NotFoundNow(OSError):
    """The name cannot be looked up now."""


class _Lookup:
    __slots__ = ("done", "since")

    def __init__(self, since: float) -> None:
        self.since = since
        self.done: asyncio.Future[Sequence[str]] = asyncio.get_running_loop().create_future()
        self.done.add_done_callback(lambda done: None if done.cancelled() else done.exception())


class NameLookups:
    """Looks up names for one front end, in its loop's thread; `resolve` runs in others."""

    def __init__(self, resolve: Resolve, clock: Callable[[], float] = monotonic) -> None:
        self._resolve = resolve
        self._clock = clock
        self._under_way: dict[tuple[str, int], _Lookup] = {}
        self._failed: dict[tuple[str, int], float] = {}  # until when it is not repeated

    async def addresses(self, host: str, port: int) -> Sequence[str]:
        """Returns all addresses of a name. Raises `OSError`, and `UnicodeError` for what is no name."""
        now = self._clock()
        lookup = self._under_way.get((host, port))
        if lookup is None:
            lookup = self._begin((host, port), now)
        elif now - lookup.since > _SILENT_S:
            raise NotFoundNow(f"the lookup of {host} is not answered")
        return await asyncio.shield(lookup.done)  # others may wait for it, too

    def _begin(self, place: tuple[str, int], now: float) -> _Lookup:
        self._failed = {known: until for known, until in self._failed.items() if now < until}
        if place in self._failed:
            raise NotFoundNow(f"the lookup of {place[0]} failed a moment ago")
        if len(self._under_way) >= _MOST_AT_ONCE:
            raise NotFoundNow("too many names are being looked up")
        lookup = _Lookup(now)
        work = partial(self._look_up, place, asyncio.get_running_loop())
        try:
            threading.Thread(target=work, name="name-lookup", daemon=True).start()
        except RuntimeError as error:
            raise NotFoundNow(f"the lookup of {place[0]} cannot begin: {error}") from None
        self._under_way[place] = lookup
        return lookup

    def _ended(self, place: tuple[str, int], found: Sequence[str] | Exception) -> None:
        lookup = self._under_way.pop(place)
        if isinstance(found, Exception):
            self._failed[place] = self._clock() + _FAILED_S
        if lookup.done.done():
            return
        if isinstance(found, Exception):
            lookup.done.set_exception(found)
        else:
            lookup.done.set_result(found)

    # ── in a thread ──

    def _look_up(self, place: tuple[str, int], loop: asyncio.AbstractEventLoop) -> None:
        found: Sequence[str] | Exception
        try:
            found = self._resolve(*place)
        except Exception as error:
            found = error
        try:
            loop.call_soon_threadsafe(self._ended, place, found)
        except RuntimeError:
            return  # the loop is closed: nothing waits any more


def addresses_of(host: str, port: int) -> list[str]:
    """Returns all addresses of a name, as this machine's resolver knows them."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))
