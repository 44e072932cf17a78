"""All that stands between the network and a front end: built from the settings, kept up to date."""

from __future__ import annotations

import ipaddress
import socket
import ssl
from collections.abc import Iterable

from carpool.config.server import ServerSettings
from carpool.frontend.access.file_watch import FileWatch
from carpool.frontend.access.guard import Guard, guard_of, restrictions_of
from carpool.frontend.access.keys import read_keys
from carpool.frontend.access.tls import Tls, read_pair


class Access:
    """One per front end. `tls` is None where connections are not encrypted."""

    def __init__(self, settings: ServerSettings, *, loopback: bool, over_grpc: bool = False) -> None:
        """Raises `ConfigError` for files that will not do."""
        self._watches: list[FileWatch] = []
        keys = [file for file in (settings.api_key_file, settings.admin_key_file) if file]
        certificates = [
            file for file in (settings.tls_cert, settings.tls_key, settings.tls_client_ca) if file
        ]
        # Each watch begins before the first reading: a change in between is seen by the first look.
        if keys:
            self._watches.append(FileWatch(keys, self._reload_keys))
        if certificates:
            self._watches.append(FileWatch(certificates, self._reload_certificates))
        self.guard: Guard = guard_of(settings, loopback=loopback, over_grpc=over_grpc)
        self.tls: Tls | None = None
        if settings.tls_cert:
            self.tls = Tls(settings.tls_cert, settings.tls_key, settings.tls_client_ca)

    @property
    def context(self) -> ssl.SSLContext | None:
        return None if self.tls is None else self.tls.context

    def watch(self) -> None:
        """Look at the files from now on, in the loop that runs."""
        for watch in self._watches:
            watch.start()

    def close(self) -> None:
        for watch in self._watches:
            watch.close()

    def _reload_keys(self) -> None:
        self.guard.reload()

    def _reload_certificates(self) -> None:
        if self.tls is not None:
            self.tls.reload()


def check_files(settings: ServerSettings) -> None:
    """Before anything is started; raises `ConfigError` that names the file."""
    read_keys(settings.api_key_file, settings.admin_key_file)
    for over_grpc in (False, True):
        restrictions_of(settings, over_grpc=over_grpc)
    if settings.tls_cert:
        read_pair(settings.tls_cert, settings.tls_key, settings.tls_client_ca)


def is_loopback(host: str) -> bool:
    """Whether an address to listen on is of this machine alone."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError:
        return False
    return all(ipaddress.ip_address(str(line[4][0]).partition("%")[0]).is_loopback for line in found)


def all_loopback(sockets: Iterable[socket.socket]) -> bool:
    """Whether they can only be reached from this machine."""
    addresses = [ipaddress.ip_address(sock.getsockname()[0].partition("%")[0]) for sock in sockets]
    return bool(addresses) and all(address.is_loopback for address in addresses)
