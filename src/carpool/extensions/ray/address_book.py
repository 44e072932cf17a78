"""Which replicas a fleet has, and where: who does not say again that he is there is taken out. Pure: the time
is an argument.
"""

from __future__ import annotations

from typing import NamedTuple

from carpool.extensions.deploy.balancer_config import Address

BEAT_S, LEASE_S = 1.0, 5.0


class Place(NamedTuple):
    """This says where a replica listens."""

    host: str
    port: int
    grpc_port: int = 0  # none

    @property
    def http(self) -> Address:
        return Address(self.host, self.port)

    @property
    def grpc(self) -> Address:
        return Address(self.host, self.grpc_port)


class Page(NamedTuple):
    """This is what a reader gets."""

    version: int
    replicas: dict[str, Place]
    whole: bool  # the book is old enough to know every replica that runs


class AddressBook:
    def __init__(self, now: float) -> None:
        self._began = now
        self._replicas: dict[str, tuple[Place, float]] = {}  # with the end of the lease
        self._version = 1

    def beat(self, name: str, place: Place, now: float) -> None:
        self._expire(now)
        known = self._replicas.get(name)
        self._replicas[name] = (place, now + LEASE_S)
        if known is None or known[0] != place:
            self._version += 1

    def leave(self, name: str, now: float) -> None:
        self._expire(now)
        if self._replicas.pop(name, None) is not None:
            self._version += 1

    def page(self, now: float) -> Page:
        """Returns the replicas that are known now. A book that was restarted is empty at first: until each
        replica has had time to report, a reader may add the listed replicas, and must remove none."""
        self._expire(now)
        whole = now >= self._began + LEASE_S
        return Page(
            2 * self._version + whole, {name: place for name, (place, _) in self._replicas.items()}, whole
        )

    def _expire(self, now: float) -> None:
        gone = [name for name, (_, until) in self._replicas.items() if until < now]
        for name in gone:
            del self._replicas[name]
        self._version += bool(gone)


def merged(before: dict[str, Place], page: Page) -> dict[str, Place]:
    """What a balancer should have, after what it had."""
    return page.replicas if page.whole else before | page.replicas
