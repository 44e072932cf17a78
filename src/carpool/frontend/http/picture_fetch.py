"""Fetches pictures that a client names by their address, from hosts that the operator allows and no others.

A server that fetches any given address would reach what its clients cannot: other machines behind the same
firewall, a cloud's metadata, itself. So every address that a name leads to must be public, the connection
goes to the address that was checked and not to the name, and each redirect is checked like the first address.
A host that is not public has its address beside its name in the settings: the name is never looked up then.
Time and bytes are bounded, and every failure to fetch is reported in the same words, whatever its cause.

Fetches are divided among clients and among hosts: each may have as many as are left for the others, so that
one slow host or one client never takes all. A host that sends too slowly is given up.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import NamedTuple
from urllib.parse import urljoin, urlsplit

from carpool.config.rules import shown
from carpool.errors import CarpoolError, Forbidden, InvalidInput, Refused, TooLarge
from carpool.frontend.clients.accounts import Shares
from carpool.frontend.http.name_lookups import NameLookups, addresses_of
from carpool.wire.http_reply import FEW_CHUNKS, ByteReader, NotHttp, ReplyBody, TooLong, begin_reply

_MOST_BYTES = 32 << 20
_MOST_FETCHES = 64  # of one front end
_MOST_HELD_BYTES = 256 << 20  # by all of them
_READ_AT_ONCE = 64 << 10  # then others have their turn
_SECONDS = 10.0
_FIRST_BYTES_S = 5.0  # for the connection and the beginning of the reply
_LEAST_RATE = 4096.0  # bytes per second from then on
_MOST_REDIRECTS = 3
_REDIRECTS = (301, 302, 303, 307, 308)
_LONGEST_URL = 2048
_PORTS = {"http": 80, "https": 443}
# Of IPv6 only 2000::/3 is assigned to global unicast, so everything else is refused. The other networks are
# those of IANA's special-purpose registries that are not globally reachable; they are refused as a whole,
# because no pictures are served from the few single addresses inside that are.
_GLOBAL_IPV6 = IPv6Network("2000::/3")
_SPECIAL_IPV6 = tuple(map(IPv6Network, ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20")))
_SPECIAL_IPV4 = tuple(
    map(
        IPv4Network,
        (
            "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12",
            "192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15",
            "198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4",
        ),
    )
)  # fmt: skip


resolve = addresses_of  # in threads


class PictureAddress(NamedTuple):
    scheme: str
    host: str
    port: int
    target: str
    given: Sequence[str] = ()  # its addresses in the settings; without any, the name is looked up


def is_public(address: str) -> bool:
    """Returns whether the address is public. IPv6 that leads on to an IPv4 address never is."""
    found = ip_address(address)
    if isinstance(found, IPv6Address):
        return found in _GLOBAL_IPV6 and not any(found in network for network in _SPECIAL_IPV6)
    return not any(found in network for network in _SPECIAL_IPV4)


class _InTurns:
    """Reads a reply a little at a time, with a turn for others in between, and no slower than the least
    rate."""

    def __init__(self, stream: asyncio.StreamReader, begun: float) -> None:
        self._stream = stream
        self._begun = begun
        self._received = 0

    async def read(self, n: int, /) -> bytes:
        await asyncio.sleep(0)
        async with asyncio.timeout_at(self._begun + longest_s(self._received)):
            data = await self._stream.read(min(n, _READ_AT_ONCE))
        self._received += len(data)
        return data


def longest_s(received: int) -> float:
    """Returns the seconds after which a host must have sent more than so many bytes."""
    return _FIRST_BYTES_S + received / _LEAST_RATE


class PictureFetcher:
    """`hosts` are names, with a port where it is not the usual one, and with `=ADDRESS` for a host that need
    not be public. In the loop's thread."""

    def __init__(self, hosts: Collection[str], max_body_bytes: int) -> None:
        self._hosts: dict[str, list[str]] = {}  # the given addresses of each
        for host in hosts:
            name, _, address = host.lower().partition("=")
            self._hosts.setdefault(name, []).extend([address] if address else [])
        self._most_bytes = min(max_body_bytes, _MOST_BYTES)
        self._under_way: set[asyncio.Task[bytearray]] = set()
        self._by_client, self._by_host = Shares(_MOST_FETCHES), Shares(_MOST_FETCHES)
        self._held = Shares(_MOST_HELD_BYTES)  # bytes, by client
        self._lookups = NameLookups(resolve)
        self._tls: ssl.SSLContext | None = None

    def start(
        self, url: str, seconds: float, client: str = "", authorization: str = ""
    ) -> asyncio.Task[bytearray]:
        """Fetch it within this time and that of any fetch; raises `Refused` for a client or a host that has
        its share of the fetches. The host of the address is sent the `authorization`, and no other is."""
        if not self._hosts:
            raise Forbidden(
                "this server fetches no images: send the image itself", reason="url-off", field="url"
            )
        host = self._check(url).host
        if not self._by_client.take(client, 1):
            raise _too_many("this client has too many fetches under way")
        if not self._by_host.take(host, 1):
            self._by_client.give(client, 1)
            raise _too_many(f"too many fetches from {shown(host)} are under way")
        fetch = self._fetch_in_time(url, min(seconds, _SECONDS), client, authorization)
        task = asyncio.get_running_loop().create_task(fetch)
        self._under_way.add(task)  # the loop itself holds tasks only weakly
        task.add_done_callback(lambda task: self._ended(task, client, host))
        return task

    def _ended(self, task: asyncio.Task[bytearray], client: str, host: str) -> None:
        self._under_way.discard(task)
        self._by_client.give(client, 1)
        self._by_host.give(host, 1)

    def close(self) -> None:
        for task in self._under_way:
            task.cancel()

    async def _fetch_in_time(self, url: str, seconds: float, client: str, authorization: str) -> bytearray:
        held = 0

        def hold(size: int) -> None:
            nonlocal held
            if not self._held.take(client, size):
                raise _too_many("this client's fetches take too many bytes")
            held += size

        try:
            async with asyncio.timeout(seconds):
                return await self._fetch(url, hold, authorization)
        except (OSError, NotHttp, UnicodeError):  # a time that is over is an OSError, too
            raise _not_fetched("its server does not respond, or not with valid HTTP") from None
        except TooLong:
            raise TooLarge(f"the image is larger than {self._most_bytes} bytes", field="url") from None
        finally:
            self._held.give(client, held)

    async def _fetch(self, url: str, hold: Callable[[int], None], authorization: str) -> bytearray:
        first = self._check(url)
        for _ in range(_MOST_REDIRECTS + 1):
            place = self._check(url)
            reader, writer = await self._connect(place)
            try:
                known = authorization if place[:3] == first[:3] else ""
                turns = _InTurns(reader, asyncio.get_running_loop().time())
                reply = await self._ask(place, turns, writer, known)
                if reply.status not in _REDIRECTS:
                    return await _picture_of(reply, hold)
            finally:
                writer.transport.abort()
            url = urljoin(url, reply.fields.get("location", ""))
        raise _not_fetched("its server does not answer with an image")

    async def _ask(
        self, place: PictureAddress, stream: ByteReader, writer: asyncio.StreamWriter, authorization: str
    ) -> ReplyBody:
        port = "" if place.port == _PORTS[place.scheme] else f":{place.port}"
        host = f"[{place.host}]" if ":" in place.host else place.host
        lines = [f"GET {place.target} HTTP/1.1", f"Host: {host}{port}", "User-Agent: carpool"]
        lines += [f"Authorization: {authorization}"] if authorization else []
        lines += ["Accept: image/*", "Accept-Encoding: identity", "Connection: close", "", ""]
        writer.write("\r\n".join(lines).encode("ascii"))
        return await begin_reply(stream, self._most_bytes, FEW_CHUNKS)

    async def _connect(self, place: PictureAddress) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connects in time, to an address that was checked."""
        async with asyncio.timeout(_FIRST_BYTES_S):
            addresses = place.given or await self._lookups.addresses(place.host, place.port)
            if not place.given and not (addresses and all(map(is_public, addresses))):
                raise Forbidden(
                    f"{place.host} resolves to an address that is not public",
                    reason="address-not-public",
                    field="url",
                )
            if place.scheme == "https" and self._tls is None:
                self._tls = await asyncio.to_thread(ssl.create_default_context)
            return await self._open(place, addresses)

    async def _open(
        self, place: PictureAddress, addresses: Sequence[str]
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """To the first that answers, of those that were checked: the name is not looked up again."""
        safe = place.scheme == "https"
        tls, name = (self._tls, place.host) if safe else (None, None)
        for address in addresses[:-1]:
            with suppress(OSError):
                return await asyncio.open_connection(address, place.port, ssl=tls, server_hostname=name)
        return await asyncio.open_connection(addresses[-1], place.port, ssl=tls, server_hostname=name)

    def _check(self, url: str) -> PictureAddress:
        """Where the address leads, if the operator allows it; each redirect goes through here, too."""
        plain = url.isascii() and url.isprintable() and " " not in url and len(url) <= _LONGEST_URL
        try:
            parts = urlsplit(url if plain else "")
            port = parts.port
        except ValueError:
            raise _wrong(url) from None
        host = (parts.hostname or "").lower()
        if parts.scheme not in _PORTS or not host or "@" in parts.netloc:
            raise _wrong(url)
        port = port or _PORTS[parts.scheme]
        names = (f"{host}:{port}", host) if port == _PORTS[parts.scheme] else (f"{host}:{port}",)
        known = [self._hosts[name] for name in names if name in self._hosts]
        if not known:
            raise Forbidden(
                f"this server fetches no images from {shown(host)}", reason="host-not-allowed", field="url"
            )
        target = f"{parts.path or '/'}?{parts.query}" if parts.query else parts.path or "/"
        return PictureAddress(parts.scheme, host, port, target, [one for given in known for one in given])


async def _picture_of(reply: ReplyBody, hold: Callable[[int], None]) -> bytearray:
    if reply.status != 200:
        raise _not_fetched("its server does not answer with an image")
    if reply.fields.get("content-encoding", "identity").lower() != "identity":
        raise _not_fetched("its server compressed it, which was not requested")
    body = bytearray()
    while part := await reply.next():
        hold(len(part))
        body += part
    return body


def _too_many(what: str) -> Refused:
    return Refused(f"{what}; retry", reason="queue-full", retry_after_s=1.0)


def _wrong(url: str) -> InvalidInput:
    return InvalidInput(f"url must be like https://host/image.jpg, not {shown(url)}", field="url")


def _not_fetched(why: str) -> CarpoolError:
    return InvalidInput(f"the image cannot be fetched: {why}", reason="picture-not-fetched", field="url")
