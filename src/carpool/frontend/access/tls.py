"""Reads certificates. One is tried in a handshake with itself before any client receives it: one that is half
written, expired or mismatched therefore never replaces one that works.
"""

from __future__ import annotations

import contextlib
import os
import ssl
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from carpool.config.rules import read_bytes
from carpool.errors import ConfigError
from carpool.frontend.access.plain_http import AnswersPlainHttp
from carpool.observe.logs import logger

log = logger("access")


_MOST_BYTES = 1 << 20
_TOO_LONG = f"over {_MOST_BYTES} bytes is too large for a certificate"
_MOST_STEPS = 10  # of a handshake, there and back


@dataclass(frozen=True, slots=True, repr=False)
class Pair:
    """Holds PEM, as it was read at one moment. `client_ca` signs the clients' certificates; empty if
    clients need none."""

    cert: bytes
    key: bytes
    client_ca: bytes = b""


class Tls:
    """Holds what new connections are met with."""

    def __init__(
        self, cert_file: str, key_file: str, client_ca_file: str = "", protocol: str = "http/1.1"
    ) -> None:
        """Raises `ConfigError` for files that will not do. `protocol` is spoken over it, by its name for
        clients that ask (ALPN)."""
        self._files = cert_file, key_file, client_ca_file
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.set_alpn_protocols([protocol])
        self.context.sslobject_class = AnswersPlainHttp
        self._read()
        if Path(key_file).stat().st_mode & stat.S_IROTH:
            log.warning("private-key-readable", file=key_file, why="every user of this machine can read it")

    def reload(self) -> None:
        """The files have changed. Connections that are open keep what they began with."""
        try:
            self._read()
        except ConfigError as error:
            log.error("certificate-not-read", error=error.message, keeps="the previous one")

    def _read(self) -> None:
        pair, until = read_pair(*self._files)
        _use(self.context, pair)
        log.info("certificate-read", file=self._files[0], until=until)


def read_pair(cert_file: str, key_file: str, client_ca_file: str = "") -> tuple[Pair, str]:
    """Returns it with the time until when it is valid; raises `ConfigError`."""
    files = [file for file in (cert_file, key_file, client_ca_file) if file]
    pair = Pair(*(read_bytes(Path(file), _MOST_BYTES, _TOO_LONG) for file in files))
    client_ca = pair.client_ca
    if client_ca:
        with _in_words(client_ca_file):
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(cadata=client_ca.decode("ascii"))
    with _in_words(f"{cert_file} with {key_file}"):
        return pair, _tried(pair)


@contextlib.contextmanager
def _in_words(files: str) -> Iterator[None]:
    try:
        yield
    except ssl.SSLCertVerificationError as error:
        raise ConfigError(f"{files}: clients would reject it: {error.verify_message}") from None
    except (ssl.SSLError, ValueError) as error:
        why = (getattr(error, "reason", None) or "not PEM").replace("_", " ").lower()
        raise ConfigError(f"{files}: not a certificate and its key: {why}") from None


def _use(context: ssl.SSLContext, pair: Pair) -> None:
    """Uses this pair for the handshakes from now on. The bytes were tried before: what is in the files may be
    newer."""
    with _file_of(pair.cert) as cert, _file_of(pair.key) as key:
        context.load_cert_chain(cert, key, password=_no_password)
    if pair.client_ca:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=pair.client_ca.decode("ascii"))


def _no_password() -> str:
    """Raises, so that the library never asks for a password at a terminal: a server may have none."""
    raise ValueError("the key has a password")


@contextlib.contextmanager
def _file_of(content: bytes) -> Iterator[str]:
    """The library reads files only. This one is in memory, and no other program's."""
    descriptor = os.memfd_create("carpool-tls", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, content)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def _tried(pair: Pair) -> str:
    """Until when it is valid, found out as a client does who trusts this certificate and no other."""
    server_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _use(server_side, Pair(pair.cert, pair.key))
    client_side = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client_side.check_hostname = False
    client_side.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    client_side.load_verify_locations(cadata=pair.cert.decode("ascii"))
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = server_side.wrap_bio(to_server, to_client, server_side=True)
    client = client_side.wrap_bio(to_client, to_server)
    for _ in range(_MOST_STEPS):
        for side in (client, server):
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
    found = client.getpeercert() or {}
    return str(found.get("notAfter", ""))
