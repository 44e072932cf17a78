"""The two servers that the table of calls is checked against."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

from conformance.flavours import Flavour, Session
from conformance.models import write_models
from conformance.table import Case, Server
from live.server import Live, start


def environment(kind: Server, folder: Path) -> dict[str, str]:
    if kind is Server.PLAIN:
        return {}
    return {
        "CARPOOL_MODEL_CONTROL_MODE": "explicit",
        "CARPOOL_LOAD_MODELS": "*",
        "CARPOOL_ALLOW_CLIENT_SHM": "true",
        "CARPOOL_TRACE_FILE": str(folder / "trace.jsonl"),
    }


@contextlib.contextmanager
def running(kind: Server, folder: Path) -> Iterator[Live]:
    """Ready when it is handed out; stopped at the end, and nothing of it may be left."""
    folder.mkdir(parents=True, exist_ok=True)
    models = write_models(folder / "models")
    frontends = 2 if kind is Server.OPEN else 1
    given = environment(kind, folder)
    server = start(models, frontends=frontends, grpc=1, folder=folder, environment=given)
    try:
        server.until_ready()
        yield server
    finally:
        left = server.end()
    assert not left, f"processes outlived the server: {left}"


def outcome(case: Case, server: Live, flavour: Flavour, runner: asyncio.Runner) -> str:
    """What the call got; raises when that is not what is documented."""
    with Session(flavour, server.url, f"127.0.0.1:{server.grpc_port}", runner) as session:
        return case.check(session)
