"""The history of a whole server: kept in one place, and longer than the processes that serve."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from engine import repositories
from live.server import LAYOUTS, Live, infer_path, is_alive, json_request, serving
from waiting import until

REQUEST = json_request([1, 2, 3, 4], (1, 4))


def answered(server: Live) -> int:
    points: list[dict[str, Any]] = server.get_json("/v2/history")["points"]
    return sum(point["models"].get("fake/1", {}).get("answered", 0) for point in points)


def sources(server: Live) -> set[str]:
    points: list[dict[str, Any]] = server.get_json("/v2/history")["points"]
    return {sender["source"] for point in points for sender in point["senders"]}


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("history")
    model = repositories.fake(folder / "models", head="slo_ms = 60000")
    with serving(model.parent, frontends=request.param, folder=folder) as running:
        yield running


def ask(server: Live, count: int, field: bytes = b"") -> int:
    """How many are answered in the history once these are in it, too."""
    goal = answered(server) + count
    with server.connect() as client:
        for _ in range(count):
            assert client.post(infer_path("fake"), REQUEST, field).status == 200
    until(lambda: answered(server) == goal, "all of them are in the history")
    return goal


@pytest.mark.parametrize("server", LAYOUTS, indirect=True)
def test_all_that_was_answered_is_in_it_and_who_asked(server: Live) -> None:
    ask(server, 20, b"X-Carpool-Source: gate\r\n")
    # Who asked may be in a later point than what was answered: two processes write, each once a second.
    until(lambda: "gate" in sources(server), "who asked is in the history")
    points = server.get_json("/v2/history")["points"]
    assert points[-1]["server"]["memory_bytes"] > 1e6
    last = points[-1]["number"]
    assert all(point["number"] > last for point in server.get_json(f"/v2/history?after={last}")["points"])
    assert len(server.get_json("/v2/history?seconds=1")["points"]) == 1
    for wrong in ("after=x", "seconds=901", "seconds=-1", "model=fake"):
        assert server.get(f"/v2/history?{wrong}").status == 400


@pytest.mark.parametrize("server", LAYOUTS[1:], indirect=True)
def test_front_ends_and_engines_that_die_lose_nothing_of_it(server: Live) -> None:
    before = ask(server, 20)
    for pid in (*server.frontend_pids, server.engine_pid):
        os.kill(pid, signal.SIGKILL)
        until(lambda pid=pid: not is_alive(pid), "it is dead")  # type: ignore[misc]
    server.until_ready()
    assert answered(server) == before
