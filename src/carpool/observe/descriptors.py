"""File descriptors: as many as the system allows, and a word in the log when they run out.

Nothing else reports it: where there are none left, the loop closes new connections silently.
"""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import time

from carpool.observe.logs import logger

_ENOUGH = 65_536  # for every connection that settings allow; what has tables of them need not be larger
_OWN = 128  # of a process, besides connections
_SHORT = 0.95  # of the limit
_LOOK_S = 1.0
_AGAIN_S = 60.0
_ADVICE = "raise it: ulimit -n, LimitNOFILE= of a service, or --ulimit nofile= of a container"

_log = logger("descriptors")


def raise_limit(connections: int) -> None:
    """Raises the limit for this process and those that it starts: as far as it may without privileges."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    if soft != resource.RLIM_INFINITY and soft < connections + _OWN:
        _log.warning("few-descriptors", limit=soft, max_connections=connections, advice=_ADVICE)


class Descriptors:
    def __init__(self) -> None:
        self._told_at = -_AGAIN_S
        self._most = 0

    def connected(self, connections: int) -> None:
        """Checks at each new maximum of connections: a burst may be over before the next regular look."""
        if connections > self._most:
            self._most = connections
            self.look()

    def look(self) -> None:
        """The kernel gives the lowest number that is free, which costs less than counting them."""
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        try:
            free = os.dup(0)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._tell("out-of-descriptors", limit=limit, error=error.strerror)
            return
        os.close(free)
        if limit != resource.RLIM_INFINITY and free >= _SHORT * limit:
            self._tell("few-descriptors-left", open=free, limit=limit)

    async def watch(self) -> None:
        while True:
            self.look()
            await asyncio.sleep(_LOOK_S)

    def _tell(self, event: str, **fields: object) -> None:
        """Warns once a minute, as long as it lasts."""
        now = time.monotonic()
        if now - self._told_at >= _AGAIN_S:
            self._told_at = now
            _log.warning(event, **fields, advice=_ADVICE)
