"""One client takes all places of a model behind a whole server: another's requests are answered all the same.
Clients are told apart by their keys, or else by their addresses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from frontend.access.key_files import write
from frontend.http.harness import Client, Response
from live.server import Live, infer_path, serving
from waiting import until

GREEDY, OTHER = "greedy-0123456789", "other-0123456789ab"
PLACES = 4
ELSEWHERE = "127.0.0.2"
COUNT = """
class Model:
    def predict(self, n):
        number = 0
        while number < n[0, 0]:
            yield {"y": [[number]]}
            number += 1
"""
SUM = """
sums = {}
class Model:
    def predict(self, n, id, start):
        for row, key in enumerate(id[:, 0]):
            sums[int(key)] = int(n[row, 0]) + (0 if start[row, 0] else sums[int(key)])
        return {"y": [[sums[int(key)]] for key in id[:, 0]]}
"""
TENSORS = """
[[input]]
name = "n"
datatype = "INT32"
shape = [1]
[[output]]
name = "y"
datatype = "INT32"
shape = [1]
"""
SETTINGS = {
    "count": f"decoupled = true\nmax_batch = 4\nmax_open = {PLACES}\n{TENSORS}",
    "sum": f"""backend = "python"
max_batch = {PLACES}
[sequences]
max_candidates = {PLACES}
idle_ms = 600000
[[sequences.control]]
name = "start"
kind = "start"
datatype = "INT32"
[[sequences.control]]
name = "id"
kind = "corrid"
datatype = "UINT64"
{TENSORS}""",
}


@contextmanager
def served(folder: Path, environment: dict[str, str], frontends: int) -> Iterator[Live]:
    for name, source in (("count", COUNT), ("sum", SUM)):
        (folder / "models" / name / "1").mkdir(parents=True)
        (folder / "models" / name / "model.toml").write_text(SETTINGS[name])
        (folder / "models" / name / "1" / "model.py").write_text(source)
    with serving(folder / "models", frontends=frontends, folder=folder, environment=environment) as running:
        yield running


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("shares")
    keys = write(folder / "keys", f"greedy {GREEDY}\nother {OTHER}\n")
    with served(folder, {"CARPOOL_API_KEY_FILE": keys}, frontends=1) as running:
        yield running


@pytest.fixture(scope="module")
def open_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """It asks for no keys, and is one process: the places are the engine's in either layout."""
    with served(tmp_path_factory.mktemp("open"), {}, frontends=0) as running:
        yield running


def with_key(key: str) -> bytes:
    return b"X-API-Key: %b\r\n" % key.encode() if key else b""


def test_streams_without_end_give_way_to_another_keys(server: Live) -> None:
    streams_give_way(server, GREEDY, OTHER)


@pytest.mark.conformance
def test_streams_without_end_give_way_to_another_address(open_server: Live) -> None:
    streams_give_way(open_server, "", "")


def streams_give_way(server: Live, greedy: str, key: str) -> None:
    path = "/v2/models/count/generate_stream"
    head = b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n%b\r\n%b"
    endless = b'{"n": 2000000000}'
    with ExitStack() as clients:
        for _ in range(2 * PLACES):  # half of them wait
            client = clients.enter_context(server.connect())
            client.send(head % (path.encode(), len(endless), with_key(greedy), endless))
        other = clients.enter_context(Client("127.0.0.1", server.port, source=ELSEWHERE))
        for _ in range(3):
            answer = other.post(path, b'{"n": 3}', with_key(key))
            events = [json.loads(line[6:]) for line in answer.body.split(b"\n\n") if line]
            assert [event.get("y", event) for event in events] == [0, 1, 2]


def step(client: Client, key: str, name: int, value: int, *, start: bool = False) -> Response:
    tensor = {"name": "n", "datatype": "INT32", "shape": [1, 1], "data": [value]}
    said = {"sequence_id": name, "sequence_start": start}
    return client.post(
        infer_path("sum"), json.dumps({"inputs": [tensor], "parameters": said}).encode(), with_key(key)
    )


def total(answer: Response) -> int:
    assert answer.status == 200, answer.body
    return int(json.loads(answer.body)["outputs"][0]["data"][0])


def test_sequences_give_way_and_an_id_is_its_keys_own(server: Live) -> None:
    with server.connect() as client:
        for name in range(1, PLACES + 1):
            assert total(step(client, GREEDY, name, 100 * name, start=True)) == 100 * name
        assert total(step(client, OTHER, PLACES, 1, start=True)) == 1
        assert total(step(client, OTHER, PLACES, 2)) == 3
        assert total(step(client, GREEDY, PLACES, 1)) == 100 * PLACES + 1, "the model tells them apart"
        gone = step(client, GREEDY, 1, 1)
        assert gone.status == 400
        assert b"had more than its share" in gone.body
        until(lambda: step(client, OTHER, PLACES, 0).status == 200, "it goes on")


@pytest.mark.conformance
def test_sequences_give_way_to_another_address(open_server: Live) -> None:
    with open_server.connect() as client, Client("127.0.0.1", open_server.port, source=ELSEWHERE) as other:
        for name in range(1, PLACES + 1):
            assert total(step(client, "", name, name, start=True)) == name
        assert total(step(other, "", PLACES + 1, 7, start=True)) == 7
        assert step(client, "", 1, 1).status == 400
        assert total(step(client, "", 2, 1)) == 3
