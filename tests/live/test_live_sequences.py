"""Sequences over both doors of a whole server, as Triton's own clients ask for them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from typing import Any
from urllib.request import urlopen

import numpy as np
import pytest
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client
from tritonclient.utils import InferenceServerException

from engine.test_sequences import stateful
from live.server import Live
from live.test_grpc import serving

STATE = """
    max_sequence_idle_microseconds: 30000000 oldest { max_candidate_sequences: 4 }
    state { input_name: "h" output_name: "h_next" data_type: TYPE_FP32 dims: 2 }
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("sequences")
    stateful(folder / "models", STATE)
    with serving(folder / "models", folder=folder, frontends=2) as running:
        yield running


def grpc_url(server: Live) -> str:
    return f"127.0.0.1:{server.grpc_port}"


@pytest.fixture(params=["http", "grpc"])
def door(request: pytest.FixtureRequest, server: Live) -> Iterator[tuple[Any, Any]]:
    """The client library and a client of it."""
    library: Any = http_client if request.param == "http" else grpc_client
    url = server.url if request.param == "http" else grpc_url(server)
    with library.InferenceServerClient(url) as client:
        yield library, client


def tensor(library: Any, value: float) -> list[Any]:
    one = library.InferInput("x", [1, 2], "FP32")
    one.set_data_from_numpy(np.full((1, 2), value, np.float32))
    return [one]


def ask(door: tuple[Any, Any], name: int | str, value: float, flags: str = "") -> float:
    library, client = door
    answer = client.infer(
        "sums",
        tensor(library, value),
        sequence_id=name,
        sequence_start="s" in flags,
        sequence_end="e" in flags,
    )
    return float(answer.as_numpy("y")[0, 0])


def test_sequences_of_numbers_and_of_texts(door: tuple[Any, Any]) -> None:
    for name in (7, "7", 2**63 - 1, "x" * 128):
        assert ask(door, name, 1, "s") == 1
        assert ask(door, name, 2) == 3
    for name in (7, "7", 2**63 - 1, "x" * 128):
        assert ask(door, name, 3, "e") == 6


@pytest.mark.parametrize(
    ("name", "flags", "words"),
    [
        (0, "s", "must specify a non-zero or non-empty correlation ID"),
        ("", "s", "must specify a non-zero or non-empty correlation ID"),
        (99, "", "for sequence 99 to model 'sums' must specify the START flag on the first request of the"),
        ("x" * 129, "s", "at most 128 bytes"),
    ],
)
def test_what_is_refused(door: tuple[Any, Any], name: int | str, flags: str, words: str) -> None:
    with pytest.raises(InferenceServerException, match=words):
        ask(door, name, 1, flags)


def test_more_clients_than_places_take_turns(server: Live) -> None:
    """As perf_analyzer loads such a model: each client has one sequence after the other."""

    def client(number: int) -> None:
        library: Any = http_client if number % 2 else grpc_client
        with library.InferenceServerClient(server.url if number % 2 else grpc_url(server)) as one:
            for round_ in range(5):
                name = 1000 * number + round_ + 1
                sums = [ask((library, one), name, step, {0: "s", 4: "e"}.get(step, "")) for step in range(5)]
                assert sums == [0, 1, 3, 6, 10]

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(client, range(8)))


def test_a_stream_keeps_the_order_of_each_sequence(server: Live) -> None:
    answers: Queue[Any] = Queue()
    with grpc_client.InferenceServerClient(grpc_url(server)) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        for step in range(6):
            for name in (71, "72"):
                client.async_stream_infer(
                    "sums",
                    tensor(grpc_client, step + 1),
                    request_id=f"{name}-{step}",
                    sequence_id=name,
                    sequence_start=step == 0,
                    sequence_end=step == 5,
                )
        found = [answers.get(timeout=20) for _ in range(12)]
        client.stop_stream()
    assert not any(error for _, error in found)
    sums = {result.get_response().id: float(result.as_numpy("y")[0, 0]) for result, _ in found}
    assert sums == {f"{name}-{step}": sum(range(step + 2)) for name in (71, 72) for step in range(6)}


def test_its_settings_and_metrics_tell_of_sequences(server: Live) -> None:
    with http_client.InferenceServerClient(server.url) as client:
        config = client.get_model_config("sums")["sequence_batching"]
        assert config["max_sequence_idle_microseconds"] == 30_000_000
        assert config["oldest"]["max_candidate_sequences"] == 4
        assert config["state"][0]["input_name"] == "h"
        assert "sequence" in client.get_server_metadata()["extensions"]
        assert [one["name"] for one in client.get_model_metadata("sums")["inputs"]] == ["x"]
    with urlopen(f"http://{server.url}/metrics", timeout=20) as page:
        assert 'carpool_sequences{model="sums"' in page.read().decode()
