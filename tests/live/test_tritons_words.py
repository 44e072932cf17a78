"""What clients of Triton rely on beyond the protocol: its sentences, its name, and optional inputs.

The sentences are the beginning of ours: clients match on them, and what follows is for people.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tritonclient.grpc as over_grpc
import tritonclient.http as over_http
from onnx import TensorProto, helper, numpy_helper
from tritonclient.utils import InferenceServerException, np_to_triton_dtype
from tritonclient.utils import shared_memory as shm

from backends import onnx_models
from live.server import Live, serving
from waiting import until

_MAYBE = """
backend: "python"
max_batch_size: 8
input [
  { name: "A" data_type: TYPE_FP32 dims: [ 2 ] },
  { name: "B" data_type: TYPE_FP32 dims: [ 2 ] optional: true }
]
output [
  { name: "SUM" data_type: TYPE_FP32 dims: [ 2 ] },
  { name: "ROWS" data_type: TYPE_INT32 dims: [ 1 ] }
]
dynamic_batching { preferred_batch_size: [ 8 ] max_queue_delay_microseconds: 200000 }
"""
_MAYBE_CODE = """
import numpy as np


def predict(inputs):
    total = inputs["A"] + inputs.get("B", 100)
    return {"SUM": total.astype("float32"), "ROWS": np.full((len(total), 1), len(total), "int32")}
"""
_NONE = """
backend: "python"
input [
  { name: "A" data_type: TYPE_FP32 dims: [ -1 ] optional: true },
  { name: "B" data_type: TYPE_FP32 dims: [ -1 ] optional: true }
]
output [ { name: "COUNT" data_type: TYPE_INT32 dims: [ 1 ] } ]
"""
_NONE_CODE = """
def predict(A=None, B=None):
    return [int(A is not None) + int(B is not None)]
"""
_SCALED = """
platform: "onnxruntime_onnx"
input [
  { name: "x" data_type: TYPE_FP32 dims: [ 3 ] },
  { name: "scale" data_type: TYPE_FP32 dims: [ 3 ] optional: true }
]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 3 ] } ]
"""


_PLACES = """
backend: "python"
input [ { name: "A" data_type: TYPE_FP32 dims: [ -1, -1 ] } ]
output [ { name: "OUT" data_type: TYPE_FP32 dims: [ 1 ] } ]
"""
_PLACES_CODE = "def predict(A):\n    return [0.0]\n"
_TEXTS = """
backend: "python"
max_batch_size: 8
input [ { name: "TEXT" data_type: TYPE_STRING dims: [ -1 ] } ]
output [ { name: "OUT" data_type: TYPE_STRING dims: [ -1 ] } ]
"""
_TEXTS_CODE = """
def predict(inputs):
    return {"OUT": inputs["TEXT"]}
"""
_TOLD = """
backend: "python"
max_batch_size: 4
input [ { name: "A" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [
  { name: "PARAMETERS" data_type: TYPE_STRING dims: [ 1 ] },
  { name: "EMPTY" data_type: TYPE_FP32 dims: [ -1 ] }
]
response_cache { enable: true }
"""
_TOLD_CODE = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse(
                [
                    pb_utils.Tensor("PARAMETERS", np.array([[request.parameters()]], dtype=object)),
                    pb_utils.Tensor("EMPTY", np.empty((0,), np.float32)),
                ]
            )
            for request in requests
        ]
"""


def scaled(path: Path, *, default: bool) -> None:
    """y = x · scale, which is 10 where nobody says so."""
    shapes = {
        name: helper.make_tensor_value_info(name, TensorProto.FLOAT, [3]) for name in ("x", "scale", "y")
    }
    weights = [numpy_helper.from_array(np.full(3, 10, np.float32), "scale")] if default else []
    graph = helper.make_graph(
        [helper.make_node("Mul", ["x", "scale"], ["y"])],
        "scaled",
        [shapes["x"], shapes["scale"]],
        [shapes["y"]],
        weights,
    )
    path.parent.mkdir(parents=True)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), str(path))


def python_model(folder: Path, settings: str, code: str) -> None:
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text(code)
    (folder / "config.pbtxt").write_text(settings)


def repository(folder: Path) -> Path:
    python_model(folder / "maybe", _MAYBE, _MAYBE_CODE)
    python_model(folder / "none", _NONE, _NONE_CODE)
    python_model(folder / "places", _PLACES, _PLACES_CODE)
    python_model(folder / "texts", _TEXTS, _TEXTS_CODE)
    python_model(folder / "told", _TOLD, _TOLD_CODE)
    scaled(folder / "scaled" / "1" / "model.onnx", default=True)
    (folder / "scaled" / "config.pbtxt").write_text(_SCALED)
    onnx_models.identity(folder / "same" / "2" / "model.onnx")
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("words")
    environment = {
        "CARPOOL_MODEL_CONTROL_MODE": "explicit",
        "CARPOOL_LOAD_MODELS": "maybe,none,scaled,same,places,texts,told",
        "CARPOOL_ALLOW_CLIENT_SHM": "true",
        "CARPOOL_SERVER_NAME": "triton",
        "CARPOOL_METRICS_CONFIG": "histogram_latencies=true",
        "CARPOOL_HTTP_HEADER_FORWARD_PATTERN": "^(my_.*|priority|triton_.*|admin-key)$",
        "CARPOOL_GRPC_HEADER_FORWARD_PATTERN": "^(my_.*|priority|triton_.*|triton-grpc-protocol-admin-key)$",
        "CARPOOL_HTTP_RESTRICTED_API": "trace:admin-key=SECRET",
        "CARPOOL_GRPC_RESTRICTED_PROTOCOL": "trace:admin-key=SECRET",
    }
    models = repository(folder / "models")
    onnx_models.identity(models / "later" / "1" / "model.onnx")
    with serving(models, grpc=1, folder=folder, environment=environment) as running:
        yield running


class Wire:
    """One of Triton's clients and how it names things."""

    def __init__(self, kind: str, server: Live) -> None:
        self.api: Any = over_http if kind == "http" else over_grpc
        url = server.url if kind == "http" else f"127.0.0.1:{server.grpc_port}"
        self.client = self.api.InferenceServerClient(url)

    def input(self, name: str, array: Any, shape: list[int] | None = None) -> Any:
        given = self.api.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
        given.set_data_from_numpy(array)
        if shape is not None:
            given.set_shape(shape)
        return given

    def infer(self, model: str, version: str = "", **arrays: Any) -> Any:
        inputs = [self.input(name, array) for name, array in arrays.items()]
        return self.client.infer(model, inputs, model_version=version)

    def is_ready(self) -> bool:
        try:
            return bool(self.client.is_server_ready())
        except InferenceServerException:
            return False

    def server_name(self) -> str:
        found = self.client.get_server_metadata()
        return str(found["name"] if isinstance(found, dict) else found.name)

    def refusal(self, call: Callable[[], object]) -> str:
        with pytest.raises(InferenceServerException) as caught:
            call()
        return str(caught.value.message())


@pytest.fixture(params=["http", "grpc"])
def wire(request: pytest.FixtureRequest, server: Live) -> Iterator[Wire]:
    made = Wire(request.param, server)
    until(made.is_ready, "ready")  # over gRPC too: each process hears from the engine by itself
    yield made
    made.client.close()


ROW = np.ones((1, 3), np.float32)
PAIR = np.ones((1, 2), np.float32)

# ---- optional inputs


def test_a_python_model_does_not_see_what_was_left_out(wire: Wire) -> None:
    assert wire.infer("maybe", A=PAIR).as_numpy("SUM").tolist() == [[101, 101]]
    assert wire.infer("maybe", A=PAIR, B=PAIR * 2).as_numpy("SUM").tolist() == [[3, 3]]


def test_a_request_without_any_input(wire: Wire) -> None:
    assert wire.infer("none").as_numpy("COUNT").tolist() == [0]
    assert wire.infer("none", B=np.ones(4, np.float32)).as_numpy("COUNT").tolist() == [1]


def test_a_graph_uses_its_default(wire: Wire) -> None:
    x = np.arange(3, dtype=np.float32)
    assert wire.infer("scaled", x=x).as_numpy("y").tolist() == [0, 10, 20]
    assert wire.infer("scaled", x=x, scale=x).as_numpy("y").tolist() == [0, 1, 4]


def test_only_requests_with_the_same_inputs_share_a_batch(server: Live) -> None:
    """Sixteen at once, for a model that waits for eight of a kind."""
    wire = Wire("grpc", server)
    until(wire.is_ready, "ready")

    def ask(number: int) -> tuple[list[float], int]:
        a = np.full((1, 2), number, np.float32)
        given = {"A": a} if number % 2 else {"A": a, "B": a}
        answer = wire.infer("maybe", **given)
        return answer.as_numpy("SUM")[0].tolist(), int(answer.as_numpy("ROWS")[0, 0])

    with ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(ask, range(16)))
    wire.client.close()
    for number, (total, rows) in enumerate(answers):
        assert total == [number + (100 if number % 2 else number)] * 2
        assert rows <= 8


def test_too_few_inputs(wire: Wire) -> None:
    said = wire.refusal(lambda: wire.infer("maybe", B=PAIR))
    assert said == (
        "expected number of inputs between 1 and 2 but got 1 inputs for model 'maybe'. Got input(s) ['B'],"
        " but missing required input(s) ['A']. Please provide all required input(s)."
    )
    said = wire.refusal(lambda: wire.infer("same"))
    assert said == (
        "expected 1 inputs but got 0 inputs for model 'same'. Got input(s) [],"
        " but missing required input(s) ['x']. Please provide all required input(s)."
    )


def test_a_graph_without_a_default_cannot_have_an_optional_input(wire: Wire, server: Live) -> None:
    models = Path(server.arguments[5])
    if not (models / "scarce").exists():
        scaled(models / "scarce" / "1" / "model.onnx", default=False)
        (models / "scarce" / "config.pbtxt").write_text(_SCALED)
    said = wire.refusal(lambda: wire.client.load_model("scarce"))
    assert 'input "scale" is declared optional, but the model file has no default for it' in said


# ---- sentences


def test_models_that_are_not_there(wire: Wire) -> None:
    ask = wire.infer
    assert wire.refusal(lambda: ask("nothing", x=ROW)) == "Request for unknown model: 'nothing' is not found"
    said = wire.refusal(lambda: ask("sane", x=ROW))
    assert said == "Request for unknown model: 'sane' is not found; did you mean 'same'?"
    said = wire.refusal(lambda: ask("same", "7", x=ROW))
    assert said == "Request for unknown model: 'same' version 7 is not found; it serves 2"
    said = wire.refusal(lambda: wire.client.get_model_metadata("nothing"))
    assert said.startswith("Request for unknown model: 'nothing' is not found")
    said = wire.refusal(lambda: wire.client.get_inference_statistics("nothing"))
    assert said.startswith("Request for unknown model: 'nothing' is not found")


def test_models_that_were_there(wire: Wire) -> None:
    wire.client.load_model("later")
    wire.client.unload_model("later")
    said = wire.refusal(lambda: wire.infer("later", x=ROW))
    assert said.startswith("Request for unknown model: 'later' has no available versions")
    said = wire.refusal(lambda: wire.infer("later", "1", x=ROW))
    assert said.startswith("Request for unknown model: 'later' version 1 is not at ready state")


def test_loading_what_cannot_be_read(wire: Wire) -> None:
    poll = "failed to load '{}', failed to poll from model repository"
    said = wire.refusal(lambda: wire.client.load_model("nothing"))
    assert said.startswith(poll.format("nothing"))
    for config in ('{"max_batch_sise": 3}', '"parameters": {"config": {{"max_batch_size": "16"}}}'):
        said = wire.refusal(lambda config=config: wire.client.load_model("same", config=config))
        assert said.startswith(poll.format("same"))


def test_loading_what_does_not_load(wire: Wire, server: Live) -> None:
    file = Path(server.arguments[5]) / "broken" / "1" / "model.onnx"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"no model")
    said = wire.refusal(lambda: wire.client.load_model("broken"))
    assert said.startswith("load failed for model 'broken': ")


def test_settings_without_a_model_file(wire: Wire, server: Live) -> None:
    folder = Path(server.arguments[5]) / "hollow"
    (folder / "1").mkdir(parents=True, exist_ok=True)
    (folder / "config.pbtxt").write_text(_SCALED)
    said = wire.refusal(lambda: wire.client.load_model("hollow"))
    assert said.startswith("load failed for model 'hollow': ")


def test_names_that_no_model_can_have(server: Live) -> None:
    wire = Wire("grpc", server)
    until(wire.is_ready, "ready")
    for name in ("", " ", "\t", " \n "):
        said = wire.refusal(lambda name=name: wire.client.load_model(name))
        assert said == "Model name cannot be empty. Please enter a valid name to deploy."
    for name in ("..", " ..", "../same", "a/b", "/"):
        said = wire.refusal(lambda name=name: wire.client.load_model(name))
        assert said == f"invalid model name '{name}', model name must not contain path traversal characters"
    wire.client.close()


def test_unloading_what_is_not_there_is_no_error(wire: Wire) -> None:
    wire.client.unload_model("nothing")
    wire.client.unload_model("../nothing" if wire.api is over_grpc else "nothing", unload_dependents=True)


def test_inputs_of_the_wrong_size(wire: Wire) -> None:
    given = wire.input("x", np.ones((1, 5), np.float32), [1, 3])
    said = wire.refusal(lambda: wire.client.infer("same", [given]))
    assert said.startswith("input byte size mismatch for input 'x' for model 'same'. Expected 12, got 20")


def test_too_few_texts(wire: Wire) -> None:
    texts = np.array([[b"first", b"second"]], dtype=object)
    said = wire.refusal(lambda: wire.client.infer("texts", [wire.input("TEXT", texts, [1, 3])]))
    assert said.startswith("expected 3 string elements for inference input 'TEXT' for model 'texts', got 2")


def test_an_output_that_is_asked_for_twice(wire: Wire) -> None:
    outputs = [wire.api.InferRequestedOutput("y") for _ in range(2)]
    said = wire.refusal(lambda: wire.client.infer("same", [wire.input("x", ROW)], outputs=outputs))
    assert said == "output 'y' already exists in request"
    said = wire.refusal(lambda: wire.client.infer("same", [wire.input("x", ROW)] * 2))
    assert said == "input 'x' already exists in request"


def test_classes_of_texts(wire: Wire) -> None:
    given = wire.input("TEXT", np.array([[b"a"]], dtype=object))
    wanted = wire.api.InferRequestedOutput("OUT", class_count=1)
    said = wire.refusal(lambda: wire.client.infer("texts", [given], outputs=[wanted]))
    assert said == "class result not available for output due to unsupported type 'BYTES'"


def test_raw_requests_whose_shape_cannot_be_told(server: Live) -> None:
    sentences = {
        "maybe": "Raw request must only have 1 input (found 1) to be deduced but got 2 inputs in 'maybe'"
        " model configuration",
        "places": "The shape of the raw input 'A' can not be deduced because there are more than one"
        " variable-sized dimension",
        "texts": "For BYTE datatype raw input 'TEXT', the model must have input shape [1]",
    }
    with server.connect() as client:
        for model, sentence in sentences.items():
            fields = b"Inference-Header-Content-Length: 0\r\n"
            answer = client.post(f"/v2/models/{model}/infer", b"12345678", fields)
            assert answer.status == 400
            assert json.loads(answer.body)["error"].startswith(sentence)


def test_more_elements_than_can_be_counted(server: Live) -> None:
    given = {"name": "x", "datatype": "FP32", "shape": [2**31, 2**33], "data": [1.0]}
    with server.connect() as client:
        answer = client.post("/v2/models/same/infer", json.dumps({"inputs": [given]}).encode())
    assert answer.status == 400
    assert json.loads(answer.body)["error"].startswith(
        "invalid shape for input 'x': shape [2147483648,8589934592] causes total element count to exceed"
        " maximum size of "
    )


def test_a_body_of_too_many_chunks(server: Live) -> None:
    head = b"POST /v2/models/same/infer HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    with server.connect() as client:
        client.send(head + b"1\r\n{\r\n" * 65_536 + b"1\r\n")
        answer = client.response()
    assert answer.status == 400
    assert json.loads(answer.body)["error"] == (
        "Chunked request body exceeds maximum of 65536 non-empty chunks. Send fewer or larger HTTP chunks."
    )


def test_parameters_that_are_reserved(server: Live) -> None:
    given = {"name": "x", "datatype": "FP32", "shape": [1, 3], "data": [1, 2, 3]}
    document = {"inputs": [given], "parameters": {"triton_mine": 1}}
    with server.connect() as client:
        answer = client.post("/v2/models/same/infer", json.dumps(document).encode())
    assert json.loads(answer.body)["error"].startswith(
        "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified"
    )


def test_a_protocol_that_is_restricted(wire: Wire) -> None:
    said = wire.refusal(wire.client.get_trace_settings)
    if wire.api is over_http:
        assert said == "This API is restricted, expecting header 'admin-key'"
    else:
        header = "triton-grpc-protocol-admin-key"
        assert said == f"This protocol is restricted, expecting header '{header}'"


def test_the_place_of_the_log(wire: Wire) -> None:
    said = wire.refusal(lambda: wire.client.update_log_settings({"log_file": "/tmp/elsewhere.log"}))
    assert said.startswith("log file location can not be updated through network protocol")


def test_shared_memory(wire: Wire, server: Live) -> None:
    client, key = wire.client, f"/carpool-words-{server.pid}"
    said = wire.refusal(lambda: client.register_system_shared_memory("r", key + "-absent", 12))
    assert said.startswith(f"Unable to open shared memory region: '{key}-absent'")
    region = shm.create_shared_memory_region("r", key, 12)
    try:
        said = wire.refusal(lambda: client.register_system_shared_memory("r", key, 13))
        assert said.startswith("failed to register shared memory region 'r': invalid args")
        client.register_system_shared_memory("r", key, 12)
        said = wire.refusal(lambda: client.register_system_shared_memory("r", key, 12))
        assert said.startswith("shared memory region 'r' already in manager")
        for name, offset, beginning in (
            ("other", 0, "Unable to find shared memory region: 'other'"),
            ("r", 12, "Invalid offset for shared memory region: 'r'"),
            ("r", 4, "Invalid offset + byte size for shared memory region: 'r'"),
        ):
            given = wire.api.InferInput("x", [1, 3], "FP32")
            given.set_shared_memory(name, 12, offset)
            assert wire.refusal(lambda given=given: client.infer("same", [given])).startswith(beginning)
        wanted = wire.api.InferRequestedOutput("y")
        wanted.set_shared_memory("r", 8)
        said = wire.refusal(lambda: client.infer("same", [wire.input("x", ROW)], outputs=[wanted]))
        assert said.startswith(
            "shared memory size specified with the request for output 'y' (8 bytes) should be at least"
            " 12 bytes to hold the results"
        )
        said = wire.refusal(lambda: client.register_system_shared_memory("other", "//", 12))
        assert said == "cannot register shared memory region 'other' - invalid shm key '//'"
        said = wire.refusal(lambda: client.get_system_shared_memory_status("other"))
        assert said.startswith("Unable to find system shared memory region: 'other'")
    finally:
        client.unregister_system_shared_memory()
        shm.destroy_shared_memory_region(region)


# ---- what Triton's Python models may count on


def ask_told(wire: Wire, headers: dict[str, str], **more: Any) -> Any:
    return wire.client.infer("told", [wire.input("A", np.ones((1, 1), np.float32))], headers=headers, **more)


def test_headers_that_match_are_parameters(wire: Wire) -> None:
    quoted = 'a "quoted" string with a backslash\\'
    headers = {"my_header_1": "one", "My_Header_2": quoted, "other": "two", "x-my_header": "three"}
    if wire.api is over_grpc:
        headers = {name.lower(): value for name, value in headers.items()}
    answer = ask_told(wire, headers, parameters={"own": 7, "my_header_1": "sent"})
    found = json.loads(answer.as_numpy("PARAMETERS")[0, 0])
    assert found == {"own": 7, "my_header_1": "one", "my_header_2": quoted}


def test_answers_that_are_kept_are_of_the_same_headers(wire: Wire) -> None:
    for value in ("kept", "kept", "kept", "other"):
        answer = ask_told(wire, {"my_header": value})
        assert json.loads(answer.as_numpy("PARAMETERS")[0, 0]) == {"my_header": value}


def test_headers_that_cannot_be_forwarded(wire: Wire) -> None:
    for name in ("priority", "triton_mine"):
        said = wire.refusal(lambda name=name: ask_told(wire, {name: "1"}))
        assert said == f"Header '{name}' is reserved for Triton usage and cannot be forwarded."
    proof = "admin-key" if wire.api is over_http else "triton-grpc-protocol-admin-key"
    assert json.loads(ask_told(wire, {proof: "SECRET"}).as_numpy("PARAMETERS")[0, 0]) == {}


def test_an_output_without_elements_need_not_have_its_rank(wire: Wire) -> None:
    assert ask_told(wire, {}).as_numpy("EMPTY").size == 0


# ---- what else a client of Triton may count on


def test_the_servers_name(wire: Wire) -> None:
    assert wire.server_name() == "triton"


def test_log_settings_can_be_written_back(wire: Wire) -> None:
    options = {} if wire.api is over_http else {"as_json": True}

    def value(found: Any) -> Any:
        found = found.get("settings", found)["log_format"]
        return found if isinstance(found, str) else found["string_param"]

    assert value(wire.client.get_log_settings(**options)) == "default"
    for form in ("ISO8601", "default"):
        assert value(wire.client.update_log_settings({"log_format": form}, **options)) == form
    said = wire.refusal(lambda: wire.client.update_log_settings({"log_format": "xml"}))
    assert said.startswith("invalid argument for log_format, got: xml")


def test_a_config_that_came_with_a_load_stays(wire: Wire) -> None:
    def largest() -> int:
        found = wire.client.get_model_config("later")
        return int(found["max_batch_size"] if isinstance(found, dict) else found.config.max_batch_size)

    wire.client.load_model("later", config=json.dumps({"max_batch_size": 5}))
    assert largest() == 5
    wire.client.load_model("later")
    assert largest() == 5
    wire.client.unload_model("later")
    wire.client.load_model("later")
    assert largest() != 5
    wire.client.unload_model("later")


def test_a_listed_output_is_json_unless_it_says_otherwise(server: Live) -> None:
    """And data that is nested deeper than its shape is taken as it comes."""
    document = {
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 3], "data": [[[1], [2], [3]]]}],
        "outputs": [{"name": "y"}],
        "parameters": {"binary_data_output": True},
    }
    with server.connect() as client:
        answer = client.post("/v2/models/same/infer", json.dumps(document).encode())
        del document["outputs"]
        whole = client.post("/v2/models/same/infer", json.dumps(document).encode())
    assert json.loads(answer.body)["outputs"][0]["data"] == [1, 2, 3]
    assert whole.body.endswith(np.array([1, 2, 3], np.float32).tobytes())


def test_the_histogram_of_first_responses(server: Live) -> None:
    wire = Wire("http", server)
    before = server.metric("nv_inference_first_response_histogram_ms_count", model="same")
    wire.infer("same", x=ROW)
    wire.client.close()
    server.until_metric(before + 1, "nv_inference_first_response_histogram_ms_count", model="same")
    whole = {"model": "same", "le": "+Inf"}
    assert server.metric("nv_inference_first_response_histogram_ms_bucket", **whole) == before + 1
