"""The table of calls: what is called, with which clients, against which server, and what should come back."""

from __future__ import annotations

import enum
import importlib
from collections.abc import Callable, Collection
from dataclasses import dataclass

from conformance.flavours import ALL, Flavour, Session

Check = Callable[[Session], str]

_PARTS = ("documents", "infer", "stream", "control", "memory")


class Server(enum.Enum):
    """How the server was started."""

    OPEN = "explicit model control, client shared memory, a trace file"
    PLAIN = "default settings"


@dataclass(frozen=True)
class Case:
    """`check` makes the call, asserts the outcome and returns what came back, in short."""

    method: str
    what: str
    outcome: str
    flavours: frozenset[Flavour]
    server: Server
    check: Check

    @property
    def name(self) -> str:
        return f"{self.method}: {self.what}" + (" (plain)" if self.server is Server.PLAIN else "")


CASES: list[Case] = []


def case(
    method: str,
    what: str,
    outcome: str,
    flavours: Collection[Flavour] = ALL,
    server: Server = Server.OPEN,
) -> Callable[[Check], Check]:
    """Puts a check into the table."""

    def add(check: Check) -> Check:
        CASES.append(Case(method, what, outcome, frozenset(flavours), server, check))
        return check

    return add


def expect(found: object, wanted: object) -> None:
    """An assertion that shows both sides wherever it is run."""
    assert found == wanted, f"expected {wanted!r}, got {found!r}"


def every_case() -> list[Case]:
    """The table, from all the files that fill it."""
    for part in _PARTS:
        importlib.import_module(f"conformance.calls_{part}")
    return CASES


def missing(flavour: Flavour) -> set[str]:
    """Methods of the installed client that the table does not call."""
    return flavour.methods() - {one.method for one in every_case() if flavour in one.flavours}


def unknown() -> set[str]:
    """Methods of the table that no installed client has; those that are no methods begin with a verb."""
    methods = set().union(*(flavour.methods() for flavour in Flavour))
    return {one.method for one in every_case() if not one.method.startswith("POST ")} - methods
