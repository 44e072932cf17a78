"""Every method of Triton's four Python clients, against live servers: each does what the table says.

The table is in `conformance/`; `make conformance` prints it, with what came back.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator

import pytest

from conformance.flavours import Flavour
from conformance.servers import outcome, running
from conformance.table import Case, Server, every_case, missing, unknown
from live.server import Live

_LOG_SHOWN = 12_000
CALLS = [
    pytest.param(one, flavour, id=f"{flavour.value} {one.name}")
    for one in every_case()
    for flavour in Flavour
    if flavour in one.flavours
]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Server, Live]]:
    folder = tmp_path_factory.mktemp("calls")
    with running(Server.OPEN, folder / "open") as first, running(Server.PLAIN, folder / "plain") as second:
        yield {Server.OPEN: first, Server.PLAIN: second}
        for server in (first, second):  # shown when a test fails
            sys.stdout.write(f"\n---- {server.log_file.name}\n{server.log()[-_LOG_SHOWN:]}")


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as one:
        yield one


@pytest.mark.parametrize("flavour", Flavour, ids=lambda flavour: flavour.value)
def test_the_table_has_every_method_of_the_client(flavour: Flavour) -> None:
    """A new version of tritonclient with a new method fails here: add a row that says what it does."""
    assert missing(flavour) == set()


def test_the_table_has_no_method_that_no_client_has() -> None:
    assert unknown() == set()


@pytest.mark.parametrize(("call", "flavour"), CALLS)
def test_the_call_does_what_the_table_says(
    call: Case, flavour: Flavour, servers: dict[Server, Live], runner: asyncio.Runner
) -> None:
    assert outcome(call, servers[call.server], flavour, runner)
