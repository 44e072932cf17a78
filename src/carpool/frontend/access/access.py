"""Builds all that stands between the network and a front end from the settings, and keeps it up to date."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from carpool.config.server import ServerSettings
from carpool.frontend.access.guard import Guard, Names, restrictions_of
from carpool.observe.logs import logger

if TYPE_CHECKING:
    import ssl

    from carpool.frontend.access.tls import Tls

log = logger("access")

_EVERY_S = 1.0


class FileWatch:
    """Calls `changed` in its loop's thread. By time, size and inode: a link that points elsewhere counts."""

    def __init__(self, files: Sequence[str], changed: Callable[[], None]) -> None:
        self._files = files
        self._changed = changed
        self._seen = self._stamps()
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(_EVERY_S, self._look_in_time)

    def look(self) -> None:
        stamps = self._stamps()
        if stamps != self._seen:
            self._seen = stamps  # before it is read: what is written meanwhile is seen the next time
            self._changed()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look_in_time(self) -> None:
        try:
            self.look()
        except Exception:  # the next look must come
            log.exception("file-watch-failed")
        self.start()

    def _stamps(self) -> list[tuple[int, ...]]:
        return [_stamp(file) for file in self._files]


def _stamp(file: str) -> tuple[int, ...]:
    try:
        found = Path(file).stat()
    except OSError:
        return ()
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino, found.st_mode


class Access:
    """Guards one front end. `tls` is None where connections are not encrypted."""

    def __init__(self, settings: ServerSettings, *, loopback: bool, over_grpc: bool = False) -> None:
        """Raises `ConfigError` for files that will not do."""
        self._watches: list[FileWatch] = []
        keys = [file for file in (settings.api_key_file, settings.admin_key_file) if file]
        certificates = [
            file for file in (settings.tls_cert, settings.tls_key, settings.tls_client_ca) if file
        ]
        # Each watch begins before the first reading: a change in between is seen by the first look.
        if keys:
            self._watches.append(FileWatch(keys, lambda: self.guard.reload()))
        if certificates:
            self._watches.append(FileWatch(certificates, self._reload_tls))
        self.guard = Guard(
            Names(loopback=loopback, allowed=settings.allowed_hosts),
            api_key_file=settings.api_key_file,
            admin_key_file=settings.admin_key_file,
            metrics_key=settings.metrics_key,
            restricted=restrictions_of(settings, over_grpc=over_grpc),
        )
        self.tls: Tls | None = None
        if settings.tls_cert:
            from carpool.frontend.access.tls import Tls

            protocol = "h2" if over_grpc else "http/1.1"
            self.tls = Tls(settings.tls_cert, settings.tls_key, settings.tls_client_ca, protocol)

    @property
    def context(self) -> ssl.SSLContext | None:
        return None if self.tls is None else self.tls.context

    def _reload_tls(self) -> None:
        if self.tls is not None:
            self.tls.reload()

    def watch(self) -> None:
        """Look at the files from now on, in the loop that runs."""
        for watch in self._watches:
            watch.start()

    def close(self) -> None:
        for watch in self._watches:
            watch.close()


def check_files(settings: ServerSettings) -> None:
    """Before anything is started; raises `ConfigError` that names the file."""
    if settings.api_key_file or settings.admin_key_file:
        from carpool.frontend.access.key_files import read_keys

        read_keys(settings.api_key_file, settings.admin_key_file)
    for over_grpc in (False, True):
        restrictions_of(settings, over_grpc=over_grpc)
    if settings.tls_cert:
        from carpool.frontend.access.tls import read_pair

        read_pair(settings.tls_cert, settings.tls_key, settings.tls_client_ca)


def is_loopback(host: str) -> bool:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError:
        return False
    return all(ipaddress.ip_address(str(line[4][0]).partition("%")[0]).is_loopback for line in found)


def all_loopback(sockets: Iterable[socket.socket]) -> bool:
    addresses = [ipaddress.ip_address(sock.getsockname()[0].partition("%")[0]) for sock in sockets]
    return bool(addresses) and all(address.is_loopback for address in addresses)
