"""What a browser says about who sends a request, and whether this server goes by the name it is called.

A browser sends requests to this machine on behalf of any page that it shows. It says so: `Sec-Fetch-Site` and
`Origin` name the page's site, and programs such as curl and tritonclient send neither. A page whose own name
was made to point to this machine (DNS rebinding) counts as the same site, but calls the server by that name.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from ipaddress import IPv6Address, ip_address

from carpool.errors import Forbidden

_HOST = re.compile(r"(\[[^\[\]]*\]|[^:\[\]]*)(?::([0-9]*))?")
_PORTS = {"http": "80", "https": "443"}
_OWN = (b"same-origin", b"none")
_LONGEST_SHOWN = 80


class Names:
    """By which a server may be called. `loopback`: it listens on this machine's own addresses only."""

    def __init__(self, *, loopback: bool = False, allowed: Collection[str] = ()) -> None:
        self._loopback = loopback
        self._allowed = frozenset(_plain(name) for name in allowed)

    def check_host(self, headers: Mapping[bytes, bytes]) -> None:
        """Raise `Forbidden` for a name that is not this server's. Without a field, it is no browser."""
        host = headers.get(b"host")
        if host is None or not (self._loopback or self._allowed):
            return
        name = _split(host.decode("ascii", "replace"))[0]
        if name in self._allowed or name == "localhost" or self._is_address(name):
            return
        raise Forbidden(
            f"this server is not called '{name[:_LONGEST_SHOWN]}': it answers to localhost,"
            " and to other names after --allowed-host NAME"
        )

    def check_site(self, headers: Mapping[bytes, bytes]) -> None:
        """Raise `Forbidden` when a browser says that another site's page sends this."""
        site = headers.get(b"sec-fetch-site")
        if site is not None and site not in _OWN:
            raise _another_site()
        origin = headers.get(b"origin")
        if origin is not None and not self._is_own(origin, headers.get(b"host", b"")):
            raise _another_site()

    def _is_own(self, origin: bytes, host: bytes) -> bool:
        scheme, _, authority = origin.decode("ascii", "replace").partition("://")
        if scheme not in _PORTS:
            return False
        name, port = _split(authority)
        own_name, own_port = _split(host.decode("ascii", "replace"))
        default = _PORTS[scheme]
        return name in self._allowed or (name, port or default) == (own_name, own_port or default)

    def _is_address(self, name: str) -> bool:
        """A page has to have a name before that can be made to point elsewhere; and what only listens here is
        only called by addresses of this machine."""
        try:
            address = ip_address(name)
        except ValueError:
            return False
        if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        return address.is_loopback or not self._loopback


def _split(authority: str) -> tuple[str, str]:
    """Name and port; ("", "") for what is neither, which is nobody's name."""
    found = _HOST.fullmatch(authority)
    return (_plain(found[1]), found[2] or "") if found else ("", "")


def _plain(name: str) -> str:
    return name.lower().removesuffix(".").removeprefix("[").removesuffix("]")


def _another_site() -> Forbidden:
    return Forbidden("a browser sends this for a page of another site, which may change nothing here")
