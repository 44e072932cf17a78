"""Triton's own Python clients, against the real server: every call that HTTP v2 has so far."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tritonclient.http.aio as aio
from tritonclient.http import InferenceServerClient, InferInput, InferRequestedOutput
from tritonclient.utils import InferenceServerException

from carpool import __version__
from carpool.frontend.documents import EXTENSIONS
from carpool.link.catalog import IndexEntry
from carpool.types import Datatype
from frontend.http.front_end import IMAGE, FrontEnd, front_end
from waiting import until, until_in_loop

SUM = [15.0, 1.0, 2.0, 3.0]
NUMPY_TYPED = [datatype for datatype in Datatype if datatype is not Datatype.BF16]


@pytest.fixture(scope="module")
def front() -> Iterator[FrontEnd]:
    with front_end() as running:
        yield running


@pytest.fixture
def client(front: FrontEnd) -> Iterator[InferenceServerClient]:
    with InferenceServerClient(front.url, concurrency=4) as connected:
        yield connected


def image(*, binary: bool = True, images: int = 1) -> InferInput:
    tensor = InferInput("image", [images, 2, 3], "UINT8")
    tensor.set_data_from_numpy(np.repeat(IMAGE, images, 0), binary_data=binary)
    return tensor


def test_health(client: InferenceServerClient) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("image")
    assert client.is_model_ready("versions", "2")
    assert not client.is_model_ready("versions", "3")
    assert not client.is_model_ready("nothing")


def test_server_metadata(client: InferenceServerClient) -> None:
    document = client.get_server_metadata()
    assert document == {"name": "carpool", "version": __version__, "extensions": list(EXTENSIONS)}


def test_model_metadata(client: InferenceServerClient) -> None:
    assert client.get_model_metadata("image") == {
        "name": "image",
        "versions": ["1"],
        "platform": "fake",
        "inputs": [{"name": "image", "datatype": "UINT8", "shape": [-1, 2, 3]}],
        "outputs": [{"name": "scores", "datatype": "FP32", "shape": [-1, 4]}],
    }
    assert client.get_model_metadata("versions", "2")["versions"] == ["2", "10"]
    assert client.get_model_metadata("unbatched")["inputs"][0]["shape"] == [2]


def test_model_config(client: InferenceServerClient) -> None:
    document = client.get_model_config("image")
    assert document["max_batch_size"] == 8
    assert document["input"][0] == {"name": "image", "data_type": "TYPE_UINT8", "dims": [2, 3]}


def test_statistics(client: InferenceServerClient) -> None:
    client.infer("image-eager", [image()])
    stats = client.get_inference_statistics("image-eager", "1")["model_stats"]
    assert [(model["name"], model["version"]) for model in stats] == [("image-eager", "1")]
    assert stats[0]["inference_stats"]["success"]["count"] == 1
    every = client.get_inference_statistics()["model_stats"]
    assert {"image", "nan", "versions"} < {model["name"] for model in every}
    with pytest.raises(InferenceServerException, match="unknown model"):
        client.get_inference_statistics("nothing")


def test_repository_index(front: FrontEnd, client: InferenceServerClient) -> None:
    index = client.get_model_repository_index()
    assert {"name": "versions", "version": "10", "state": "READY"} in index
    assert len(index) == len(front.door.catalog.index)


@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False])
def test_infer(client: InferenceServerClient, binary_in: bool, binary_out: bool) -> None:
    outputs = [InferRequestedOutput("scores", binary_data=binary_out)]
    result = client.infer("image", [image(binary=binary_in)], outputs=outputs, request_id="r-1")
    assert result.as_numpy("scores").tolist() == [SUM]
    response = result.get_response()
    assert (response["model_name"], response["model_version"], response["id"]) == ("image", "1", "r-1")


def test_no_outputs_listed_are_all_outputs(client: InferenceServerClient) -> None:
    tensors = []
    for name, values in (("a", [[5, 6]]), ("b", [[1, 2]])):
        tensor = InferInput(name, [1, 2], "INT32")
        tensors.append(tensor.set_data_from_numpy(np.array(values, np.int32)))
    result = client.infer("pair", tensors)
    assert result.as_numpy("sum").tolist() == [[6, 8]]
    assert result.as_numpy("difference").tolist() == [[4, 4]]


def test_outputs_come_in_the_order_asked_for(client: InferenceServerClient) -> None:
    tensors = []
    for name, binary in (("a", True), ("b", False)):  # one in the body's tail, one in its JSON
        tensor = InferInput(name, [1, 1], "INT32")
        tensors.append(tensor.set_data_from_numpy(np.array([[7]], np.int32), binary_data=binary))
    wanted = [InferRequestedOutput("difference", binary_data=False), InferRequestedOutput("sum")]
    result = client.infer("pair", tensors, outputs=wanted)
    assert [output["name"] for output in result.get_response()["outputs"]] == ["difference", "sum"]
    assert (result.as_numpy("difference").tolist(), result.as_numpy("sum").tolist()) == ([[0]], [[14]])
    only = client.infer("pair", tensors, outputs=wanted[1:])
    assert only.get_output("difference") is None


def test_a_batch(client: InferenceServerClient) -> None:
    assert client.infer("image", [image(images=3)]).as_numpy("scores").tolist() == [SUM] * 3


def test_classification(client: InferenceServerClient) -> None:
    outputs = [InferRequestedOutput("scores", class_count=2)]
    found = client.infer("image", [image()], outputs=outputs).as_numpy("scores")
    assert found.tolist() == [[b"15.000000:0:cat", b"3.000000:3:elk"]]


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
@pytest.mark.parametrize("binary", [True, False])
def test_compression(client: InferenceServerClient, algorithm: str, binary: bool) -> None:
    values = np.zeros((1, 20_000), np.float32)
    tensor = InferInput("x", [1, 20_000], "FP32").set_data_from_numpy(values, binary_data=binary)
    result = client.infer(
        "echo-FP32",
        [tensor],
        outputs=[InferRequestedOutput("y", binary_data=binary)],
        request_compression_algorithm=algorithm,
        response_compression_algorithm=algorithm,
    )
    assert np.array_equal(result.as_numpy("y"), values)


@pytest.mark.parametrize("datatype", NUMPY_TYPED, ids=lambda datatype: datatype.value)
def test_every_datatype(client: InferenceServerClient, datatype: Datatype) -> None:
    values = np.array([[b"ab", b""]] if datatype is Datatype.BYTES else [[1, 0]], datatype.dtype)
    tensor = InferInput("x", [1, 2], datatype.value).set_data_from_numpy(values)
    result = client.infer(f"echo-{datatype.value}", [tensor])
    assert result.as_numpy("y").tolist() == values.tolist()


def test_bf16(client: InferenceServerClient) -> None:
    values = np.array([[1, 2]], ml_dtypes.bfloat16)
    tensor = InferInput("x", [1, 2], "BF16").set_data_from_numpy(values)
    assert client.infer("echo-BF16", [tensor]).as_numpy("y").tolist() == [[1.0, 2.0]]


def test_versions(client: InferenceServerClient) -> None:
    tensor = InferInput("x", [1, 1], "FP32").set_data_from_numpy(np.ones((1, 1), np.float32))
    assert client.infer("versions", [tensor], model_version="2").get_response()["model_version"] == "2"
    with pytest.raises(InferenceServerException, match="it serves 2, 10") as raised:
        client.infer("versions", [tensor], model_version="3")
    assert raised.value.status() == "404"


def test_priority_timeout_and_parameters(front: FrontEnd, client: InferenceServerClient) -> None:
    headers = {"X-Carpool-Source": "camera 7"}
    parameters = {"tag": "a"}
    client.infer("image-knobs", [image()], priority=2, timeout=5_000, headers=headers, parameters=parameters)
    call = front.door.calls[-1]
    assert (call.head.options.priority, call.head.options.timeout) == (2, 0.005)
    assert call.head.options.custom == {"tag": "a"}
    assert call.source == "camera 7"


def test_query_parameters_change_nothing(client: InferenceServerClient) -> None:
    assert client.infer("image", [image()], query_params={"a": "1"}).as_numpy("scores").tolist() == [SUM]


def test_async_infer(client: InferenceServerClient) -> None:
    pending = [client.async_infer("image", [image()], request_id=str(n)) for n in range(8)]
    answers = [request.get_result() for request in pending]
    assert [answer.get_response()["id"] for answer in answers] == [str(n) for n in range(8)]
    assert all(answer.as_numpy("scores").tolist() == [SUM] for answer in answers)


def test_generated_bodies(front: FrontEnd) -> None:
    """A body made by the client and sent by something else."""
    body, length = InferenceServerClient.generate_request_body([image()])
    with front.connect() as plain:
        field = b"Inference-Header-Content-Length: %d\r\n" % length
        response = plain.post("/v2/models/image/infer", body, field)
    size = int(response.fields["inference-header-content-length"])
    result = InferenceServerClient.parse_response_body(response.body, header_length=size)
    assert result.as_numpy("scores").tolist() == [SUM]


def test_errors_reach_the_caller(client: InferenceServerClient) -> None:
    with pytest.raises(
        InferenceServerException, match="Request for unknown model: 'imag' is not found; did you mean 'image'"
    ) as raised:
        client.infer("imag", [image()])
    assert raised.value.status() == "404"


def test_models_that_are_not_ready(front: FrontEnd, client: InferenceServerClient) -> None:
    line = IndexEntry("later", "1", "LOADING")
    catalog = front.door.catalog
    front.run(lambda: setattr(front.door, "catalog", _with_index(catalog, line)))
    try:
        assert {"name": "later", "version": "1", "state": "LOADING"} in client.get_model_repository_index()
        assert not client.is_model_ready("later")
        with pytest.raises(
            InferenceServerException, match="'later' has no available versions; it is loading"
        ) as raised:
            client.infer("later", [image()])
        assert raised.value.status() == "503"
    finally:
        front.run(lambda: setattr(front.door, "catalog", catalog))


def _with_index(catalog: Any, line: IndexEntry) -> Any:
    return type(catalog)(2, True, catalog.entries, catalog.newest, [*catalog.index, line])


# ── the asyncio client ──


def with_aio(front: FrontEnd, use: Any) -> Any:
    async def inside() -> Any:
        async with aio.InferenceServerClient(front.url) as client:
            return await use(client)

    return asyncio.run(inside())


def test_aio_documents(front: FrontEnd) -> None:
    async def use(client: aio.InferenceServerClient) -> None:
        assert await client.is_server_live()
        assert await client.is_server_ready()
        assert await client.is_model_ready("image")
        assert not await client.is_model_ready("nothing")
        assert (await client.get_server_metadata())["name"] == "carpool"
        assert (await client.get_model_metadata("image"))["name"] == "image"
        assert (await client.get_model_config("image"))["name"] == "image"
        assert (await client.get_inference_statistics("image"))["model_stats"][0]["name"] == "image"
        assert len((await client.get_inference_statistics())["model_stats"]) > 1
        assert len(await client.get_model_repository_index()) == len(front.door.catalog.index)

    with_aio(front, use)


@pytest.mark.parametrize("algorithm", [None, "gzip", "deflate"])
def test_aio_infer(front: FrontEnd, algorithm: str | None) -> None:
    async def use(client: aio.InferenceServerClient) -> None:
        def one(n: int) -> Any:
            return client.infer(
                "image",
                [image(binary=n % 2 == 0)],
                request_id=str(n),
                request_compression_algorithm=algorithm,
                response_compression_algorithm=algorithm,
            )

        answers = await asyncio.gather(*map(one, range(8)))
        assert [answer.get_response()["id"] for answer in answers] == [str(n) for n in range(8)]
        assert all(answer.as_numpy("scores").tolist() == [SUM] for answer in answers)

    with_aio(front, use)


def test_aio_reads_what_its_library_lets_us_compress(front: FrontEnd) -> None:
    """aiohttp offers gzip and deflate by itself, so a long answer in JSON comes compressed."""

    async def use(client: aio.InferenceServerClient) -> None:
        values = np.zeros((1, 20_000), np.float32)
        tensor = InferInput("x", [1, 20_000], "FP32").set_data_from_numpy(values)
        for binary in (True, False):
            wanted = [InferRequestedOutput("y", binary_data=binary)]
            result = await client.infer("echo-FP32", [tensor], outputs=wanted)
            assert np.array_equal(result.as_numpy("y"), values)

    with_aio(front, use)


def test_aio_errors(front: FrontEnd) -> None:
    async def use(client: aio.InferenceServerClient) -> None:
        with pytest.raises(InferenceServerException, match="unknown model") as raised:
            await client.infer("nothing", [image()])
        assert raised.value.status() == "404"

    with_aio(front, use)


def test_aio_client_that_gives_up_frees_its_place(front: FrontEnd) -> None:
    front.door.held = True
    try:

        async def use(client: aio.InferenceServerClient) -> None:
            task = asyncio.create_task(client.infer("image", [image()]))
            before = len(front.door.calls)
            await until_in_loop(lambda: len(front.door.calls) > before)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        with_aio(front, use)
        until(lambda: front.door.calls[-1].cancelled)
    finally:
        front.door.held = False
    front.until_slots_are_back()
