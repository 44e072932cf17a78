"""Sequences over both doors of a whole server, and models of many answers, as Triton's own clients ask for
them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from queue import Queue
from typing import Any
from urllib.request import urlopen

import grpc
import numpy as np
import pytest
import tritonclient.grpc as grpc_client
import tritonclient.grpc.aio as aio_client
import tritonclient.http as http_client
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

import carpool
from extensions.sequences.test_sequences import stateful
from live.server import Live
from live.test_grpc import serving

STATE = """
    max_sequence_idle_microseconds: 30000000 oldest { max_candidate_sequences: 4 }
    state { input_name: "h" output_name: "h_next" data_type: TYPE_FP32 dims: 2 }
"""


# What its first number says, as often: one that asks for none is silent, and the others are odd.
REPEAT = """
import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            self.answer(request, request.get_response_sender())

    def answer(self, request, sender):
        x, delay = (
            pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in ("IN", "DELAY")
        )
        if x.shape != delay.shape:
            error = pb_utils.TritonError(f"IN {list(x.shape)} and DELAY {list(delay.shape)} differ")
            sender.send(pb_utils.InferenceResponse(error=error), FINAL)
            return
        if x.size and x[0] < 0:
            self.odd(int(x[0]), request, sender)
            return
        for index, value in enumerate(x):
            outputs = [
                pb_utils.Tensor("OUT", np.array([value], np.int32)),
                pb_utils.Tensor("IDX", np.array([index], np.uint32)),
            ]
            sender.send(pb_utils.InferenceResponse(outputs))
        sender.send(flags=FINAL)

    def odd(self, kind, request, sender):
        if kind == -1:
            raise ValueError("on purpose")
        if kind == -2:
            while not request.is_cancelled():
                pass
            sender.send(flags=FINAL)
            return
        wrong = {
            -3: np.zeros((2, 2), np.int32),
            -4: np.zeros(1, np.float64),
            -5: np.zeros(5 << 20, np.int32),
        }[kind]
        sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", wrong)]))
        sender.send(flags=FINAL)
"""
REPEAT_SETTINGS = """
backend: "python"
model_transaction_policy { decoupled: true }
input { name: "IN" data_type: TYPE_INT32 dims: -1 }
input { name: "DELAY" data_type: TYPE_UINT32 dims: -1 }
output { name: "OUT" data_type: TYPE_INT32 dims: -1 }
output { name: "IDX" data_type: TYPE_UINT32 dims: 1 }
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("sequences")
    stateful(folder / "models", STATE)
    repeat = folder / "models" / "repeat"
    (repeat / "1").mkdir(parents=True)
    (repeat / "1" / "model.py").write_text(REPEAT)
    (repeat / "config.pbtxt").write_text(REPEAT_SETTINGS)
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
        (98, "e", "for sequence 98 to model 'sums' must specify the START flag on the first request of the"),
        (99, "", "for sequence 99 to model 'sums' must specify the START flag on the first request of the"),
        ("x" * 129, "s", "at most 128 bytes"),
    ],
)
def test_what_is_refused(door: tuple[Any, Any], name: int | str, flags: str, words: str) -> None:
    with pytest.raises(InferenceServerException, match=words):
        ask(door, name, 1, flags)


@pytest.mark.parametrize(
    "given",
    [
        {"int64_param": -1},
        {"int64_param": -(2**63)},
        {"uint64_param": 0},
        {"bool_param": True},
        {"double_param": 1.5},
        {"string_param": ""},
        {"string_param": "x" * (1 << 16)},
        {},
    ],
)
def test_ids_that_are_none(server: Live, given: dict[str, Any]) -> None:
    request = service_pb2.ModelInferRequest(model_name="sums")
    request.inputs.add(name="x", datatype="FP32", shape=[1, 2])
    request.raw_input_contents.append(bytes(8))
    request.parameters["sequence_id"].CopyFrom(service_pb2.InferParameter(**given))
    request.parameters["sequence_start"].bool_param = True
    with grpc.insecure_channel(grpc_url(server)) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        with pytest.raises(grpc.RpcError) as refused:
            stub.ModelInfer(request, timeout=20)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_the_largest_id_through_both_doors(server: Live) -> None:
    """A sequence belongs to whoever names it, over any connection; a text of the same digits is another."""
    largest = 2**64 - 1
    request = service_pb2.ModelInferRequest(model_name="sums")
    request.inputs.add(name="x", datatype="FP32", shape=[1, 2])
    request.raw_input_contents.append(np.ones(2, np.float32).tobytes())
    request.parameters["sequence_id"].uint64_param = largest
    with carpool.Client(f"http://{server.url}") as client, grpc.insecure_channel(grpc_url(server)) as channel:

        def over_http(name: int | str, **flags: bool) -> float:
            given = {"x": np.ones((1, 2), np.float32)}
            return float(client.infer("sums", given, sequence_id=name, **flags)["y"][0, 0])

        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        assert over_http(largest, sequence_start=True) == 1
        assert over_http(str(largest), sequence_start=True) == 1
        answer = stub.ModelInfer(request, timeout=20)
        assert np.frombuffer(answer.raw_output_contents[0], np.float32)[0] == 2
        assert over_http(largest, sequence_end=True) == 3
        assert over_http(str(largest), sequence_end=True) == 2


def test_carpools_async_client_speaks_of_sequences(server: Live) -> None:
    async def story() -> None:
        async with carpool.AsyncClient(f"http://{server.url}") as client:
            for n in range(3):
                given = {"x": np.ones((1, 2), np.float32)}
                flags = {"sequence_start": n == 0, "sequence_end": n == 2}
                answer = await client.infer("sums", given, sequence_id="aio", **flags)
                assert answer["y"][0, 0] == n + 1

    asyncio.run(story())


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


def test_tritonclients_aio_stream_of_sequences(server: Live) -> None:
    async def main() -> dict[str, list[float]]:
        async def requests() -> Any:
            for step in range(5):
                for name in (81, "82"):
                    yield {
                        "model_name": "sums",
                        "inputs": tensor(grpc_client, step),
                        "request_id": f"{name}",
                        "sequence_id": name,
                        "sequence_start": step == 0,
                        "sequence_end": step == 4,
                    }

        found: dict[str, list[float]] = {}
        async with aio_client.InferenceServerClient(grpc_url(server)) as client:
            async for result, error in client.stream_infer(requests()):
                assert error is None
                found.setdefault(result.get_response().id, []).append(float(result.as_numpy("y")[0, 0]))
        return found

    found = asyncio.run(asyncio.wait_for(main(), 60))
    assert found == {"81": [0, 1, 3, 6, 10], "82": [0, 1, 3, 6, 10]}


# ── many answers ──


def numbers(*values: int, delays: int | None = None) -> list[Any]:
    count = len(values) if delays is None else delays
    given = [("IN", "INT32", np.array(values, np.int32)), ("DELAY", "UINT32", np.zeros(count, np.uint32))]
    tensors = []
    for name, datatype, array in given:
        tensors.append(grpc_client.InferInput(name, [len(array)], datatype))
        tensors[-1].set_data_from_numpy(array)
    return tensors


@contextmanager
def stream(server: Live) -> Iterator[tuple[Any, Queue[Any]]]:
    answers: Queue[Any] = Queue()
    with grpc_client.InferenceServerClient(grpc_url(server)) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        try:
            yield client, answers
        finally:
            client.stop_stream(cancel_requests=True)


@pytest.mark.parametrize("asked", [1, 5])
@pytest.mark.parametrize("count", [0, 1, 5])
def test_each_request_has_its_answers_and_its_end(server: Live, asked: int, count: int) -> None:
    with stream(server) as (client, answers):
        for number in range(asked):
            client.async_stream_infer(
                "repeat",
                numbers(*range(100, 100 + count)),
                request_id=f"{number}",
                enable_empty_final_response=True,
            )
        found: dict[str, list[tuple[int, int]]] = {}
        ended = 0
        while ended < asked:
            result, error = answers.get(timeout=20)
            assert error is None, error
            response = result.get_response()
            ended += response.parameters["triton_final_response"].bool_param
            told = found.setdefault(response.id, [])
            if response.outputs:
                told.append((int(result.as_numpy("OUT")[0]), int(result.as_numpy("IDX")[0])))
        assert found == {f"{n}": [(100 + i, i) for i in range(count)] for n in range(asked)}
        assert answers.empty()


@pytest.mark.parametrize("count", [1, 5])
def test_answers_without_a_word_about_the_end(server: Live, count: int) -> None:
    with stream(server) as (client, answers):
        for number in range(5):
            client.async_stream_infer("repeat", numbers(*range(count)), request_id=f"{number}")
        found = [answers.get(timeout=20) for _ in range(5 * count)]
        assert not any(error for _, error in found)
        by_id: dict[str, list[int]] = {}
        for result, _ in found:
            by_id.setdefault(result.get_response().id, []).append(int(result.as_numpy("IDX")[0]))
        assert by_id == {f"{number}": list(range(count)) for number in range(5)}


def test_what_the_model_itself_finds_wrong(server: Live) -> None:
    with stream(server) as (client, answers):
        client.async_stream_infer("repeat", numbers(1, delays=2))
        assert "IN [1] and DELAY [2] differ" in answers.get(timeout=20)[1].message()
        for _ in range(10):
            client.async_stream_infer("repeat", numbers(-1))
        for _ in range(10):
            assert "on purpose" in answers.get(timeout=20)[1].message()
        assert client.is_model_ready("repeat")


@pytest.mark.parametrize("kind", [-3, -4, -5])
def test_answers_of_a_wrong_shape_type_or_size_are_errors(server: Live, kind: int) -> None:
    with stream(server) as (client, answers):
        client.async_stream_infer("repeat", numbers(kind))
        result, error = answers.get(timeout=20)
        assert result is None
        assert "OUT" in error.message() or "bytes" in error.message()
        client.async_stream_infer("repeat", numbers(7))
        assert answers.get(timeout=20)[0].as_numpy("OUT")[0] == 7


def test_a_stream_that_is_cancelled_ends_what_its_model_does(server: Live) -> None:
    """The model has one instance, which waits for that."""

    async def main() -> None:
        async def requests() -> Any:
            yield {"model_name": "repeat", "inputs": numbers(1)}
            yield {"model_name": "repeat", "inputs": numbers(-2)}

        async with aio_client.InferenceServerClient(grpc_url(server)) as client:
            responses = client.stream_infer(requests())
            result, _ = await anext(responses)
            assert result.as_numpy("OUT")[0] == 1
            assert responses.cancel()
            with pytest.raises(asyncio.CancelledError):
                await anext(responses)
            asked = asyncio.ensure_future(anext(client.stream_infer(requests())))
            assert (await asked)[0].as_numpy("OUT")[0] == 1

    asyncio.run(asyncio.wait_for(main(), 60))


def test_one_answer_is_not_what_such_models_give(server: Live) -> None:
    words = "doesn't support models with decoupled transaction policy"
    with (
        grpc_client.InferenceServerClient(grpc_url(server)) as client,
        pytest.raises(InferenceServerException, match=words),
    ):
        client.infer("repeat", numbers(1))
