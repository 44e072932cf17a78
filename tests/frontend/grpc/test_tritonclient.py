"""Triton's own Python clients, against the real server: every call they have."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tritonclient.grpc.aio as aio
from tritonclient.grpc import InferenceServerClient, InferInput, InferRequestedOutput, KeepAliveOptions
from tritonclient.utils import InferenceServerException

from carpool import __version__
from carpool.errors import Unsupported
from carpool.frontend.documents import EXTENSIONS
from carpool.link.catalog import IndexEntry
from carpool.memory.client_files import Region
from carpool.types import Datatype
from frontend.grpc.front_end import SUM, FrontEnd, front_end, wait_for
from frontend.http.front_end import IMAGE
from waiting import until, until_in_loop

NUMPY_TYPED = [datatype for datatype in Datatype if datatype is not Datatype.BF16]


@pytest.fixture(scope="module")
def front() -> Iterator[FrontEnd]:
    with front_end() as running:
        yield running


@pytest.fixture
def client(front: FrontEnd) -> Iterator[InferenceServerClient]:
    with InferenceServerClient(front.url) as connected:
        yield connected


@pytest.fixture
def asked(front: FrontEnd) -> Iterator[dict[str, Mapping[str, Any]]]:
    """What the engine was asked, by question; it answers with nothing."""
    heard: dict[str, Mapping[str, Any]] = {}
    known = dict(front.door.answers)
    for what in ("load", "unload", "register-memory", "unregister-memory"):
        front.door.answers[what] = lambda arguments, what=what: heard.update({what: arguments}) or {}
    yield heard
    front.door.answers = known


def image(images: int = 1) -> InferInput:
    tensor = InferInput("image", [images, 2, 3], "UINT8")
    return tensor.set_data_from_numpy(np.repeat(IMAGE, images, 0))


def test_health(front: FrontEnd, client: InferenceServerClient) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("image")
    assert client.is_model_ready("versions", "2")
    assert not client.is_model_ready("versions", "3")
    assert not client.is_model_ready("nothing")
    front.door.serving = False
    try:
        assert not client.is_server_ready()
        assert not client.is_model_ready("image")
        assert client.is_server_live()
    finally:
        front.door.serving = True


def test_server_metadata(client: InferenceServerClient) -> None:
    metadata = client.get_server_metadata()
    assert (metadata.name, metadata.version, list(metadata.extensions)) == (
        "carpool",
        __version__,
        list(EXTENSIONS),
    )


def test_model_metadata(client: InferenceServerClient) -> None:
    assert client.get_model_metadata("image", as_json=True) == {
        "name": "image",
        "versions": ["1"],
        "platform": "fake",
        "inputs": [{"name": "image", "datatype": "UINT8", "shape": ["-1", "2", "3"]}],
        "outputs": [{"name": "scores", "datatype": "FP32", "shape": ["-1", "4"]}],
    }
    assert list(client.get_model_metadata("versions", "2").versions) == ["2", "10"]
    with pytest.raises(InferenceServerException, match="unknown model") as caught:
        client.get_model_metadata("nothing")
    assert caught.value.status() == "StatusCode.NOT_FOUND"


def test_model_config(client: InferenceServerClient) -> None:
    config = client.get_model_config("image").config
    assert (config.max_batch_size, config.input[0].name, list(config.input[0].dims)) == (8, "image", [2, 3])
    assert config.input[0].data_type == 2


def test_statistics(client: InferenceServerClient) -> None:
    client.infer("image-eager", [image()])
    found = client.get_inference_statistics("image-eager", "1").model_stats
    assert [(model.name, model.version) for model in found] == [("image-eager", "1")]
    assert found[0].inference_stats.success.count == 1
    assert len(client.get_inference_statistics().model_stats) > 5
    with pytest.raises(InferenceServerException, match="unknown model"):
        client.get_inference_statistics("nothing")


def test_repository_index(front: FrontEnd, client: InferenceServerClient) -> None:
    before = front.door.catalog.index
    front.run(lambda: front.door.renew(index=[*before, IndexEntry("bad", "1", "UNAVAILABLE", "no file")]))
    try:
        index = client.get_model_repository_index().models
        assert len(index) == len(before) + 1
        assert (index[-1].name, index[-1].state, index[-1].reason) == ("bad", "UNAVAILABLE", "no file")
    finally:
        front.run(lambda: front.door.renew(index=before))


def test_load_and_unload(client: InferenceServerClient, asked: dict[str, Mapping[str, Any]]) -> None:
    client.load_model("m")
    assert asked["load"] == {"model": "m"}
    client.load_model("m", config='{"name": "m"}', files={"file:1/model.onnx": b"\0\1\2"})
    assert asked["load"] == {
        "model": "m",
        "config": '{"name": "m"}',
        "files": {"1/model.onnx": base64.b64encode(b"\0\1\2").decode()},
    }
    client.unload_model("m")
    assert asked["unload"] == {"model": "m", "dependents": False}
    client.unload_model("m", unload_dependents=True)
    assert asked["unload"]["dependents"] is True


def test_a_question_that_the_engine_does_not_know_is_unimplemented(
    front: FrontEnd, client: InferenceServerClient
) -> None:
    def unknown(_arguments: Mapping[str, Any]) -> None:
        raise Unsupported("the engine knows no question 'load'")

    front.door.answers["load"] = unknown
    with pytest.raises(InferenceServerException) as caught:
        client.load_model("m")
    assert caught.value.status() == "StatusCode.UNIMPLEMENTED"


def test_a_bug_in_a_call_is_internal_and_does_not_show_itself(
    front: FrontEnd, client: InferenceServerClient
) -> None:
    front.door.answers.pop("unload", None)
    with pytest.raises(InferenceServerException, match="KeyError") as caught:
        client.unload_model("m")
    assert caught.value.status() == "StatusCode.INTERNAL"
    assert "Traceback" not in caught.value.message()


def test_system_shared_memory(
    front: FrontEnd, client: InferenceServerClient, asked: dict[str, Mapping[str, Any]]
) -> None:
    client.register_system_shared_memory("r", "/key", 64, offset=8)
    assert asked["register-memory"] == {"name": "r", "key": "/key", "offset": 8, "byte_size": 64}
    assert not client.get_system_shared_memory_status().regions
    front.run(lambda: front.door.renew(regions={"r": Region(1, "r", "/key", 8, 64, inode=0)}))
    try:
        for status in (client.get_system_shared_memory_status(), client.get_system_shared_memory_status("r")):
            region = status.regions["r"]
            assert (region.name, region.key, region.offset, region.byte_size) == ("r", "/key", 8, 64)
        with pytest.raises(InferenceServerException, match="Unable to find system shared memory region"):
            client.get_system_shared_memory_status("other")
    finally:
        front.run(lambda: front.door.renew(regions={}))
    client.unregister_system_shared_memory("r")
    assert asked["unregister-memory"] == {"name": "r"}
    client.unregister_system_shared_memory()
    assert asked["unregister-memory"] == {"name": ""}


def test_cuda_shared_memory_is_not_offered_and_never_in_the_way(client: InferenceServerClient) -> None:
    assert not client.get_cuda_shared_memory_status().regions
    client.unregister_cuda_shared_memory()
    with pytest.raises(InferenceServerException, match="not offered") as caught:
        client.register_cuda_shared_memory("r", base64.b64encode(b"handle"), 0, 64)
    assert caught.value.status() == "StatusCode.UNIMPLEMENTED"


def test_trace_settings(front: FrontEnd, client: InferenceServerClient) -> None:
    heard: list[Mapping[str, Any]] = []

    def answer(arguments: Mapping[str, Any]) -> dict[str, Any]:
        heard.append(arguments)
        return {"trace_level": ["TIMESTAMPS"], "trace_rate": "100"}

    front.door.answers["tracing/settings"] = answer
    found = client.update_trace_settings("image", {"trace_level": ["TIMESTAMPS"], "trace_rate": None})
    assert heard == [{"model": "image", "settings": {"trace_level": ["TIMESTAMPS"], "trace_rate": None}}]
    assert list(found.settings["trace_level"].value) == ["TIMESTAMPS"]
    assert list(found.settings["trace_rate"].value) == ["100"]
    client.get_trace_settings()
    assert heard[-1] == {"model": "", "settings": {}}


def test_log_settings(front: FrontEnd, client: InferenceServerClient) -> None:
    heard: list[Mapping[str, Any]] = []

    def answer(arguments: Mapping[str, Any]) -> dict[str, Any]:
        heard.append(arguments)
        return {"log_info": True, "log_verbose_level": 2, "log_format": "default"}

    front.door.answers["log-settings"] = answer
    found = client.update_log_settings({"log_info": True, "log_verbose_level": 2, "log_format": "default"})
    assert heard == [{"settings": {"log_info": True, "log_verbose_level": 2, "log_format": "default"}}]
    assert found.settings["log_info"].bool_param is True
    assert found.settings["log_verbose_level"].uint32_param == 2
    assert client.get_log_settings().settings["log_format"].string_param == "default"
    assert heard[-1] == {"settings": {}}


# ---- inference


def test_infer(client: InferenceServerClient) -> None:
    outputs = [InferRequestedOutput("scores")]
    result = client.infer(
        "image", [image(2)], outputs=outputs, request_id="r-1", headers={"x-carpool-source": "c"}
    )
    assert result.as_numpy("scores").tolist() == [SUM, SUM]
    response = result.get_response()
    assert (response.model_name, response.model_version, response.id) == ("image", "1", "r-1")
    assert response.parameters["carpool_batch"].int64_param == 17


@pytest.mark.parametrize("datatype", NUMPY_TYPED)
def test_every_datatype(client: InferenceServerClient, datatype: Datatype) -> None:
    given = (
        np.array([[b"ab", b""]], object) if datatype is Datatype.BYTES else np.ones((1, 2), datatype.dtype)
    )
    tensor = InferInput("x", [1, 2], datatype.value).set_data_from_numpy(given)
    assert client.infer(f"echo-{datatype.value}", [tensor]).as_numpy("y").tolist() == given.tolist()


def test_bf16(client: InferenceServerClient) -> None:
    tensor = InferInput("x", [1, 2], "BF16").set_data_from_numpy(np.array([[1.5, -2.0]], ml_dtypes.bfloat16))
    assert client.infer("echo-BF16", [tensor]).as_numpy("y").tolist() == [[1.5, -2.0]]


def test_classification(client: InferenceServerClient) -> None:
    result = client.infer("image", [image()], outputs=[InferRequestedOutput("scores", class_count=2)])
    assert result.as_numpy("scores").tolist() == [[b"15.000000:0:cat", b"3.000000:3:elk"]]


def test_priority_and_timeout_are_passed_on(front: FrontEnd, client: InferenceServerClient) -> None:
    client.infer("image", [image()], priority=2, timeout=5_000_000, parameters={"mine": 1.5})
    options = front.door.calls[-1].head.options
    assert (options.priority, options.timeout, options.custom) == (2, 5.0, {"mine": 1.5})


def test_sequences_are_not_offered(client: InferenceServerClient) -> None:
    with pytest.raises(InferenceServerException, match="sequences are not supported here") as caught:
        client.infer("image", [image()], sequence_id=7, sequence_start=True)
    assert caught.value.status() == "StatusCode.UNIMPLEMENTED"


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_compression(client: InferenceServerClient, algorithm: str) -> None:
    headers = {"x-carpool-compression": algorithm}
    result = client.infer("image", [image()], compression_algorithm=algorithm, headers=headers)
    assert result.as_numpy("scores").tolist() == [SUM]


def test_errors_carry_status_and_sentence(client: InferenceServerClient) -> None:
    with pytest.raises(InferenceServerException) as caught:
        client.infer("imagee", [image()])
    assert caught.value.status() == "StatusCode.NOT_FOUND"
    assert caught.value.message() == "Request for unknown model: 'imagee' is not found; did you mean 'image'?"


def test_client_timeout_is_the_deadline(front: FrontEnd, client: InferenceServerClient) -> None:
    front.door.held = True
    front.door.calls.clear()
    try:
        for seconds in (0.2, 1.0, 5.0):  # the first is enough, unless the machine is slow to take the call
            with pytest.raises(InferenceServerException, match="Deadline") as caught:
                client.infer("image", [image()], client_timeout=seconds)
            assert caught.value.status() == "StatusCode.DEADLINE_EXCEEDED"
            if front.door.calls:
                break
        until(lambda: front.door.calls[-1].cancelled)
    finally:
        front.door.held = False


def test_async_infer_can_be_cancelled(front: FrontEnd, client: InferenceServerClient) -> None:
    answers: list[Any] = []
    front.door.held = True
    front.door.calls.clear()
    try:
        context = client.async_infer("image", [image()], callback=lambda result, error: answers.append(error))
        call = front.wait_for_calls()[0]
        context.cancel()
        until(lambda: bool(answers))
        assert answers[0].status() == "StatusCode.CANCELLED"
        until(lambda: call.cancelled)
    finally:
        front.door.held = False
    front.until_slots_are_back()


def test_keepalive_pings_are_welcome(front: FrontEnd) -> None:
    options = KeepAliveOptions(keepalive_time_ms=10_000, keepalive_permit_without_calls=True)
    with InferenceServerClient(front.url, keepalive_options=options) as client:
        assert client.is_server_live()


def test_stream(client: InferenceServerClient) -> None:
    answers: list[tuple[Any, Any]] = []
    client.start_stream(callback=lambda result, error: answers.append((result, error)))
    for number in range(20):
        client.async_stream_infer(
            "image" if number % 2 else "nothing",
            [image()],
            request_id=str(number),
            enable_empty_final_response=True,
        )
    until(lambda: len(answers) == 20)
    client.stop_stream()
    good = [result for result, _ in answers if result is not None]
    bad = [error for _, error in answers if error is not None]
    assert {result.get_response().id for result in good} == {str(number) for number in range(1, 20, 2)}
    for result in good:
        assert result.as_numpy("scores").tolist() == [SUM]
        assert result.get_response().parameters["triton_final_response"].bool_param
    assert {error.message() for error in bad} == {"Request for unknown model: 'nothing' is not found"}
    assert len(bad) == 10


# ---- the asyncio client


def run_aio(front: FrontEnd, work: Any) -> Any:
    async def inside() -> Any:
        async with aio.InferenceServerClient(front.url) as client:
            return await work(client)

    return wait_for(inside())


def test_aio_calls(front: FrontEnd, asked: dict[str, Mapping[str, Any]]) -> None:
    async def work(client: aio.InferenceServerClient) -> None:
        assert await client.is_server_live()
        assert await client.is_server_ready()
        assert await client.is_model_ready("image")
        assert (await client.get_server_metadata()).name == "carpool"
        assert (await client.get_model_metadata("image")).platform == "fake"
        assert (await client.get_model_config("image")).config.max_batch_size == 8
        assert (await client.get_inference_statistics("image")).model_stats[0].name == "image"
        assert (await client.get_model_repository_index()).models
        await client.load_model("m")
        await client.unload_model("m")
        await client.register_system_shared_memory("r", "/key", 64)
        await client.unregister_system_shared_memory("r")
        assert not (await client.get_system_shared_memory_status()).regions
        assert not (await client.get_cuda_shared_memory_status()).regions
        await client.unregister_cuda_shared_memory()

    run_aio(front, work)
    assert set(asked) == {"load", "unload", "register-memory", "unregister-memory"}


def test_aio_infers_many_at_once(front: FrontEnd) -> None:
    async def work(client: aio.InferenceServerClient) -> list[Any]:
        return await asyncio.gather(*(client.infer("image", [image()], request_id=str(n)) for n in range(40)))

    results = run_aio(front, work)
    assert [result.get_response().id for result in results] == [str(number) for number in range(40)]
    assert all(result.as_numpy("scores").tolist() == [SUM] for result in results)


def test_aio_cancelling_the_task_cancels_the_call(front: FrontEnd) -> None:
    front.door.held = True
    front.door.calls.clear()

    async def work(client: aio.InferenceServerClient) -> None:
        task = asyncio.create_task(client.infer("image", [image()]))
        await until_in_loop(lambda: front.door.calls)
        task.cancel()
        with pytest.raises((asyncio.CancelledError, InferenceServerException)):
            await task
        await until_in_loop(lambda: front.door.calls[0].cancelled)

    try:
        run_aio(front, work)
    finally:
        front.door.held = False


def test_aio_stream(front: FrontEnd) -> None:
    async def work(client: aio.InferenceServerClient) -> list[str]:
        async def requests() -> Any:
            for number in range(5):
                yield {"model_name": "image", "inputs": [image()], "request_id": str(number)}

        found = []
        async for result, error in client.stream_infer(requests()):
            assert error is None
            found.append(result.get_response().id)
        return found

    assert sorted(run_aio(front, work)) == ["0", "1", "2", "3", "4"]
