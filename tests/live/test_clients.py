"""Triton's own Python clients for HTTP against a server of real processes, in detail.

That every method of every client does what is documented is checked by `make conformance`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tritonclient.http.aio as aio
from tritonclient.http import InferenceServerClient, InferInput, InferRequestedOutput, InferResult
from tritonclient.utils import InferenceServerException

from backends import onnx_models
from carpool import __version__
from carpool.frontend.documents import EXTENSIONS
from carpool.types import DATATYPES, Datatype
from frontend.http.harness import Response
from live.server import LAYOUTS, Live, serving
from waiting import until

VALUES: dict[str, Any] = {
    "BYTES": [[b"ab", b"\0"], [b"", "ü".encode()]],
    "BOOL": [[True, False], [False, True]],
    "UINT64": [[0, 2**64 - 1], [1, 2]],
    "INT64": [[-(2**63), 2**63 - 1], [0, -1]],
    "UINT8": [[0, 255], [1, 2]],
    "INT8": [[-128, 127], [1, 2]],
    "FP16": [[0.5, -65504.0], [float("inf"), 2.0]],
    "BF16": [[0.5, -3.0], [float("inf"), 2.0]],
    "FP64": [[0.1, -1e300], [1.0, 2.0]],
}
FIELDS = ("success", "queue", "compute_input", "compute_infer", "compute_output")


def write_models(folder: Path) -> Path:
    for datatype in Datatype:
        onnx_models.identity(folder / f"same-{datatype.value}" / "1" / "model.onnx", datatype.value, ("n", 2))
    onnx_models.arithmetic(folder / "numbers" / "1" / "model.onnx")
    onnx_models.identity(folder / "wide" / "1" / "model.onnx", "FP32", ("n", 5000))
    onnx_models.identity(folder / "whole" / "1" / "model.onnx", "INT32", (2, 2))
    for version in (1, 3):
        onnx_models.identity(folder / "versions" / str(version) / "model.onnx")
    (folder / "versions" / "model.toml").write_text('versions = "all"\n')
    onnx_models.classifier(folder / "classes" / "1" / "model.onnx", features=4, classes=3)
    (folder / "classes" / "labels.txt").write_text("cat\ndog\nowl\n")
    (folder / "classes" / "model.toml").write_text('labels = "labels.txt"\n')
    onnx_models.identity(folder / "levels" / "1" / "model.onnx")
    (folder / "levels" / "config.pbtxt").write_text(
        """
        max_batch_size: 8
        dynamic_batching {
          preferred_batch_size: [4]
          priority_levels: 3
          default_priority_level: 2
          default_queue_policy { allow_timeout_override: true default_timeout_microseconds: 9000000 }
        }
        """
    )
    return folder


@pytest.fixture(scope="module", params=LAYOUTS)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("clients")
    with serving(write_models(folder / "models"), frontends=request.param, folder=folder) as running:
        yield running


@pytest.fixture
def client(server: Live) -> Iterator[InferenceServerClient]:
    with InferenceServerClient(server.url, concurrency=4, network_timeout=20, connection_timeout=20) as one:
        yield one


def tensor(values: Any, datatype: str = "FP32", name: str = "x", *, binary: bool = True) -> InferInput:
    dtype = ml_dtypes.bfloat16 if datatype == "BF16" else DATATYPES[datatype].dtype
    array = np.array(values, dtype)
    return InferInput(name, list(array.shape), datatype).set_data_from_numpy(array, binary_data=binary)


# ---- documents


def test_health(client: InferenceServerClient) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("numbers")
    assert client.is_model_ready("versions", "1")
    assert not client.is_model_ready("versions", "2")
    assert not client.is_model_ready("nothing")


def test_server_metadata(client: InferenceServerClient) -> None:
    expected = {"name": "carpool", "version": __version__, "extensions": list(EXTENSIONS)}
    assert client.get_server_metadata() == expected


def test_model_metadata(client: InferenceServerClient) -> None:
    assert client.get_model_metadata("numbers") == {
        "name": "numbers",
        "versions": ["1"],
        "platform": "onnxruntime_onnx",
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 3]}],
        "outputs": [
            {"name": "double", "datatype": "FP32", "shape": [-1, 3]},
            {"name": "total", "datatype": "FP32", "shape": [-1, 1]},
        ],
    }
    assert client.get_model_metadata("versions", "1")["versions"] == ["1", "3"]
    assert client.get_model_metadata("whole")["inputs"][0]["shape"] == [2, 2]


def test_model_config(client: InferenceServerClient) -> None:
    document = client.get_model_config("levels")
    assert document["max_batch_size"] == 8
    assert document["input"][0]["data_type"] == "TYPE_FP32"
    assert document["dynamic_batching"]["priority_levels"] == 3
    assert document["dynamic_batching"]["preferred_batch_size"] == [4]


def test_repository_index(client: InferenceServerClient) -> None:
    index = client.get_model_repository_index()
    names = {(line["name"], line["version"]) for line in index}
    assert {("versions", "1"), ("versions", "3"), ("same-BYTES", "1")} < names
    assert {line["state"] for line in index} == {"READY"}


def test_statistics(client: InferenceServerClient) -> None:
    def stats() -> dict[str, Any]:
        (found,) = client.get_inference_statistics("whole", "1")["model_stats"]
        return dict(found)

    before = stats()["inference_stats"]
    for _ in range(3):
        client.infer("whole", [tensor([[1, 2], [3, 4]], "INT32")])
    # The answer is on its way before it is counted.
    until(lambda: stats()["inference_stats"]["success"]["count"] == before["success"]["count"] + 3, "3")
    after = stats()
    for field in FIELDS:
        assert after["inference_stats"][field]["count"] == before[field]["count"] + 3, field
    every = client.get_inference_statistics()["model_stats"]
    assert {"numbers", "versions", "whole"} < {model["name"] for model in every}
    with pytest.raises(InferenceServerException, match="unknown model"):
        client.get_inference_statistics("nothing")


# ---- inference


@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False])
def test_infer(client: InferenceServerClient, binary_in: bool, binary_out: bool) -> None:
    outputs = [InferRequestedOutput("double", binary_data=binary_out)]
    result = client.infer(
        "numbers", [tensor([[1, 2, 3]], binary=binary_in)], outputs=outputs, request_id="a-1"
    )
    assert result.as_numpy("double").tolist() == [[2, 4, 6]]
    response = result.get_response()
    assert (response["model_name"], response["model_version"], response["id"]) == ("numbers", "1", "a-1")
    assert result.get_output("total") is None


def test_mixed_outputs_in_the_order_asked_for(client: InferenceServerClient) -> None:
    wanted = [InferRequestedOutput("total", binary_data=False), InferRequestedOutput("double")]
    result = client.infer("numbers", [tensor([[1, 2, 3]])], outputs=wanted)
    assert [output["name"] for output in result.get_response()["outputs"]] == ["total", "double"]
    assert (result.as_numpy("total").tolist(), result.as_numpy("double").tolist()) == ([[6]], [[2, 4, 6]])


def test_no_outputs_listed_are_all(client: InferenceServerClient) -> None:
    result = client.infer("numbers", [tensor([[1, 2, 3]])])
    assert (result.as_numpy("double").tolist(), result.as_numpy("total").tolist()) == ([[2, 4, 6]], [[6]])


def test_a_batch_of_images(client: InferenceServerClient) -> None:
    values = np.arange(21, dtype=np.float32).reshape(7, 3)
    assert np.array_equal(client.infer("numbers", [tensor(values)]).as_numpy("double"), 2 * values)


def test_a_model_without_a_batch_dimension(client: InferenceServerClient) -> None:
    assert client.infer("whole", [tensor([[1, 2], [3, 4]], "INT32")]).as_numpy("y").tolist() == [
        [1, 2],
        [3, 4],
    ]


@pytest.mark.parametrize("binary", [True, False])
def test_classification_with_labels(client: InferenceServerClient, binary: bool) -> None:
    outputs = [InferRequestedOutput("scores", binary_data=binary, class_count=2)]
    images = tensor([[2, 2, 2, 2], [4, 4, 4, 4]], "UINT8", "image")
    found = client.infer("classes", [images], outputs=outputs).as_numpy("scores")
    texts = [[bytes(text) if binary else str(text).encode() for text in row] for row in found]
    assert texts == [[b"4.000000:2:owl", b"2.000000:1:dog"], [b"8.000000:2:owl", b"4.000000:1:dog"]]


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
@pytest.mark.parametrize("binary", [True, False])
def test_compression_both_ways(client: InferenceServerClient, algorithm: str, binary: bool) -> None:
    values = np.arange(5000, dtype=np.float32).reshape(1, 5000) % 7
    result = client.infer(
        "wide",
        [tensor(values, binary=binary)],
        outputs=[InferRequestedOutput("y", binary_data=binary)],
        request_compression_algorithm=algorithm,
        response_compression_algorithm=algorithm,
    )
    assert np.array_equal(result.as_numpy("y"), values)


@pytest.mark.parametrize("datatype", Datatype, ids=lambda datatype: datatype.value)
def test_every_datatype_comes_back_as_it_went(client: InferenceServerClient, datatype: Datatype) -> None:
    name = datatype.value
    values = VALUES.get(name, [[1, 0], [3, 2]])
    result = client.infer(f"same-{name}", [tensor(values, name)])
    assert result.get_output("y")["datatype"] == name
    assert result.as_numpy("y").tolist() == values


@pytest.mark.parametrize("datatype", [d for d in Datatype if not d.binary_only], ids=lambda d: d.value)
def test_every_datatype_that_json_has(client: InferenceServerClient, datatype: Datatype) -> None:
    name = datatype.value
    values = [[b"ab", b""], [b"x", b"y"]] if name == "BYTES" else VALUES.get(name, [[1, 0], [3, 2]])
    sent = tensor(values, name, binary=False)
    result = client.infer(f"same-{name}", [sent], outputs=[InferRequestedOutput("y", binary_data=False)])
    shown = [value.decode() if isinstance(value, bytes) else value for row in values for value in row]
    assert result.get_output("y")["data"] == shown


def test_versions(client: InferenceServerClient) -> None:
    one = tensor([[1, 2, 3]])
    assert client.infer("versions", [one]).get_response()["model_version"] == "3"
    assert client.infer("versions", [one], model_version="1").get_response()["model_version"] == "1"
    with pytest.raises(InferenceServerException, match="it serves 1, 3") as raised:
        client.infer("versions", [one], model_version="2")
    assert raised.value.status() == "404"


def test_priority_timeout_headers_and_parameters(client: InferenceServerClient) -> None:
    for model in ("levels", "numbers"):
        result = client.infer(
            model,
            [tensor([[1, 2, 3]])],
            priority=1,
            timeout=5_000_000,
            parameters={"tag": "a"},
            headers={"X-Carpool-Source": "camera 7", "X-Carpool-Deadline-Ms": "5000"},
            query_params={"a": "1"},
        )
        assert result.get_response()["model_name"] == model


def test_async_infer(client: InferenceServerClient) -> None:
    pending = [client.async_infer("numbers", [tensor([[n, 0, 0]])], request_id=str(n)) for n in range(16)]
    answers = [request.get_result(timeout=20) for request in pending]
    assert [answer.get_response()["id"] for answer in answers] == [str(n) for n in range(16)]
    assert [answer.as_numpy("total").item() for answer in answers] == list(range(16))


def test_a_body_that_the_client_made_and_something_else_sends(server: Live) -> None:
    body, length = InferenceServerClient.generate_request_body([tensor([[1, 2, 3]])])
    with server.connect() as plain:
        field = b"Inference-Header-Content-Length: %d\r\n" % length
        response: Response = plain.post("/v2/models/numbers/infer", body, field)
    size = int(response.fields["inference-header-content-length"])
    result: InferResult = InferenceServerClient.parse_response_body(response.body, header_length=size)
    assert result.as_numpy("double").tolist() == [[2, 4, 6]]


def test_errors_reach_the_caller(client: InferenceServerClient) -> None:
    with pytest.raises(InferenceServerException, match="did you mean 'numbers'") as raised:
        client.infer("number", [tensor([[1, 2, 3]])])
    assert raised.value.status() == "404"
    with pytest.raises(InferenceServerException, match="x") as raised:
        client.infer("numbers", [tensor([[1, 2, 3, 4]])])
    assert raised.value.status() == "400"


def test_the_metrics_agree_with_what_was_sent(server: Live, client: InferenceServerClient) -> None:
    """Counted by the front end and by the engine, in processes of their own, and summed on the page."""

    def counts() -> list[float]:
        model = {"model": "same-INT16"}
        return [
            server.metric("nv_inference_request_success", **model),
            server.metric("nv_inference_count", **model),
            server.metric("carpool_request_duration_seconds_count", **model),
            server.metric("carpool_queue_duration_seconds_count", **model),
            server.metric("carpool_infer_duration_seconds_count", **model),
            server.metric("nv_inference_request_failure", **model),
        ]

    before = counts()
    executions = server.metric("nv_inference_exec_count", model="same-INT16")
    for images in (1, 2, 3):
        client.infer("same-INT16", [tensor([[1, 2]] * images, "INT16")])
    with pytest.raises(InferenceServerException):
        client.infer("same-INT16", [tensor([[1, 2, 3]], "INT16")])
    expected = [was + more for was, more in zip(before, (3, 6, 3, 3, 3, 1), strict=True)]
    until(lambda: counts() == expected, f"{expected}, was {before}")
    server.until_metric(executions + 3, "nv_inference_exec_count", model="same-INT16")
    server.until_metric(0, "nv_inference_pending_request_count", model="same-INT16")
    assert server.metric("carpool_up") == 1
    assert server.get("/metrics").status == 200


# ---- the asyncio client

Use = Callable[[aio.InferenceServerClient], Awaitable[None]]


def with_aio(server: Live, use: Use) -> None:
    async def inside() -> None:
        async with aio.InferenceServerClient(server.url) as client, asyncio.timeout(30):
            await use(client)

    asyncio.run(inside())


def test_aio_documents(server: Live) -> None:
    async def use(client: aio.InferenceServerClient) -> None:
        assert await client.is_server_live()
        assert await client.is_server_ready()
        assert await client.is_model_ready("numbers")
        assert not await client.is_model_ready("nothing")
        assert (await client.get_server_metadata())["name"] == "carpool"
        assert (await client.get_model_metadata("numbers"))["name"] == "numbers"
        assert (await client.get_model_config("numbers"))["name"] == "numbers"
        assert (await client.get_inference_statistics("numbers"))["model_stats"][0]["name"] == "numbers"
        assert len((await client.get_inference_statistics())["model_stats"]) > 1
        assert len(await client.get_model_repository_index()) > 10

    with_aio(server, use)


@pytest.mark.parametrize("algorithm", [None, "gzip", "deflate"])
def test_aio_infer(server: Live, algorithm: str | None) -> None:
    async def use(client: aio.InferenceServerClient) -> None:
        async def one(n: int) -> InferResult:
            return await client.infer(
                "wide",
                [tensor(np.full((1, 5000), n, np.float32), binary=n % 2 == 0)],
                outputs=[InferRequestedOutput("y", binary_data=n % 4 < 2)],
                request_id=str(n),
                headers={"X-Carpool-Source": f"camera {n}"},
                request_compression_algorithm=algorithm,
                response_compression_algorithm=algorithm,
            )

        answers = await asyncio.gather(*map(one, range(12)))
        assert [answer.get_response()["id"] for answer in answers] == [str(n) for n in range(12)]
        assert [answer.as_numpy("y")[0, -1] for answer in answers] == list(range(12))

    with_aio(server, use)


def test_aio_classification_bytes_and_errors(server: Live) -> None:
    async def use(client: aio.InferenceServerClient) -> None:
        wanted = [InferRequestedOutput("scores", class_count=1)]
        found = await client.infer("classes", [tensor([[1, 1, 1, 1]], "UINT8", "image")], outputs=wanted)
        assert found.as_numpy("scores").tolist() == [[b"2.000000:2:owl"]]
        texts = await client.infer("same-BYTES", [tensor(VALUES["BYTES"], "BYTES")])
        assert texts.as_numpy("y").tolist() == VALUES["BYTES"]
        with pytest.raises(InferenceServerException, match="unknown model") as raised:
            await client.infer("nothing", [tensor([[1, 2, 3]])])
        assert raised.value.status() == "404"

    with_aio(server, use)
