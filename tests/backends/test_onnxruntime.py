"""ONNX files: what is read from them, how they fail, and how instances share."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from backends import onnx_models
from backends.cases import load_file, settings
from carpool import backends
from carpool.backends import onnxruntime as onnx_backend
from carpool.backends.backend import KeepsMemory, Placement
from carpool.backends.onnxruntime import CPU, CUDA, OPENVINO, TENSORRT, OnnxBackend, _providers
from carpool.config.model import InstanceGroup, InstanceKind, ModelConfig, ModelSignature, OnnxruntimeSettings
from carpool.config.repository import ModelVersion
from carpool.engine.profile.measuring import sample
from carpool.errors import ConfigError, InvalidInput, ModelError, Unsupported
from carpool.memory.free_memory import own_bytes
from carpool.types import Datatype, Signature, TensorSpec


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.onnx"


def signature(file: Path) -> ModelSignature:
    return backends.read_signature(settings("onnxruntime", file), ModelVersion(1, file))


def shapes(file: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    found = signature(file)
    return {t.name: (t.datatype, t.shape) for t in (*found.inputs, *found.outputs)}


def test_read_signature_equals_that_of_the_instance(path: Path) -> None:
    onnx_models.classifier(path, features=12, classes=5)
    assert shapes(path) == {"image": ("UINT8", (-1, 12)), "scores": ("FP32", (-1, 5))}
    assert load_file(path).signature == signature(path)


def test_a_fixed_first_dimension_cannot_batch(path: Path) -> None:
    assert not signature(onnx_models.identity(path, shape=(1, 3))).can_batch
    assert not signature(onnx_models.identity(path, shape=(4, "n"))).can_batch
    assert not signature(onnx_models.identity(path, shape=())).can_batch
    assert signature(onnx_models.identity(path, shape=("n", 3, "m"))).can_batch


@pytest.mark.parametrize("datatype", onnx_models.ELEMENT_TYPES)
def test_every_datatype_is_read(path: Path, datatype: str) -> None:
    assert shapes(onnx_models.identity(path, datatype))["x"] == (datatype, (-1, 3))


def test_shapes_without_any_dimension(path: Path) -> None:
    backend = load_file(onnx_models.identity(path, shape=()))
    y = backend.run({"x": np.array(4, np.float32)}, ["y"])["y"]
    assert (y.shape, y.item()) == ((), 4.0)


def test_bytes_that_are_not_text_are_the_callers_fault(path: Path) -> None:
    backend = load_file(onnx_models.identity(path, "BYTES"))
    with pytest.raises(InvalidInput, match=r"input 'x' holds bytes that are not UTF-8") as caught:
        backend.run({"x": np.array([[b"good", b"\xff", b""]], dtype=object)}, ["y"])
    assert caught.value.field == "x"
    good = np.array([[b"good", b"", b"too"]], dtype=object)
    assert backend.run({"x": good}, ["y"])["y"].tolist() == good.tolist()


@pytest.mark.parametrize(("source", "target"), [("FP32", "BF16"), ("BF16", "FP32"), ("BF16", "BYTES")])
def test_bf16_meets_other_datatypes(path: Path, source: str, target: str) -> None:
    nodes = [helper.make_node("Cast", ["x"], ["f"], to=TensorProto.FLOAT)]
    nodes.append(helper.make_node("Cast", ["f"], ["y"], to=onnx_models.ELEMENT_TYPES[target]))
    onnx_models.write(path, nodes, [("x", source, ("n", 2))], [("y", target, ("n", 2))])
    one_and_a_half = {"FP32": np.float32(1.5), "BF16": np.uint16(0x3FC0), "BYTES": b"1.5"}
    x = np.full((3, 2), one_and_a_half[source])
    y = load_file(path).run({"x": x[::-1]}, ["y"])["y"]
    assert y.tolist() == [[one_and_a_half[target]] * 2] * 3


def test_bf16_of_text_is_not_possible(path: Path) -> None:
    nodes = [helper.make_node("Cast", ["x"], ["f"], to=TensorProto.FLOAT)]
    nodes.append(helper.make_node("Cast", ["f"], ["y"], to=TensorProto.BFLOAT16))
    onnx_models.write(path, nodes, [("x", "BYTES", ("n", 2))], [("y", "BF16", ("n", 2))])
    with pytest.raises(Unsupported, match="cannot take BYTES and answer BF16"):
        load_file(path)


def test_a_sequence_is_not_a_tensor(path: Path) -> None:
    nodes = [helper.make_node("SequenceConstruct", ["x"], ["s"])]
    onnx_models.write(path, nodes, [("x", "FP32", ("n", 2))], [])
    model = onnx_models.onnx.load(str(path))
    kind = helper.make_sequence_type_proto(helper.make_tensor_type_proto(TensorProto.FLOAT, ("n", 2)))
    model.graph.output.append(helper.make_value_info("s", kind))
    onnx_models.onnx.save(model, str(path))
    with pytest.raises(Unsupported, match=r'output "s" is a seq\(tensor\(float\)\)'):
        signature(path)


def test_a_batch_that_fails_leaves_the_instance_working(path: Path) -> None:
    backend = load_file(onnx_models.fragile(path))
    with pytest.raises(ModelError, match=r"^model: .*out of data bounds") as caught:
        backend.run({"x": np.array([[1], [99]])}, ["y"])
    assert "\n" not in caught.value.message
    assert backend.alive
    assert backend.run({"x": np.array([[1], [3]])}, ["y"])["y"].tolist() == [[10.0], [30.0]]


@pytest.mark.parametrize(
    ("inputs", "cause"),
    [
        ({"x": np.zeros((2, 4), np.float32)}, "invalid dimensions for input: x"),
        ({"x": np.zeros((2, 3), np.float64)}, r"^model: Unexpected input data type.*double.*float"),
        ({"z": np.zeros((2, 3), np.float32)}, r"\['x'\]"),
        ({}, r"\['x'\]"),
    ],
)
def test_wrong_inputs_are_named_by_the_runtime(path: Path, inputs: dict, cause: str) -> None:
    with pytest.raises(ModelError, match=cause):
        load_file(onnx_models.identity(path)).run(inputs, ["y"])


def test_an_unknown_input_of_a_text_model_is_named(path: Path) -> None:
    with pytest.raises(ModelError, match="no input 'z'; it has x"):
        load_file(onnx_models.identity(path, "BYTES")).run({"z": np.array([[b""]], object)}, ["y"])


def truncated(path: Path) -> Path:
    data = onnx_models.classifier(path, features=100).read_bytes()
    path.write_bytes(data[: len(data) // 2])
    return path


def filled(content: bytes) -> Callable[[Path], Path]:
    def write(path: Path) -> Path:
        path.write_bytes(content)
        return path

    return write


def without_weights(path: Path) -> Path:
    onnx_models.external_weights(path)
    (path.parent / "weights.bin").unlink()
    return path


@pytest.mark.parametrize(
    ("write", "cause"),
    [
        (filled(b"this is no model"), "Protobuf parsing failed"),
        (filled(b""), "No graph was found"),
        (truncated, "Protobuf parsing failed"),
        (onnx_models.unknown_operator, "No Op registered for NoSuchOperator"),
        (onnx_models.future_opset, "Opset 99"),
        (without_weights, "weights.bin"),
    ],
)
def test_a_file_that_cannot_be_loaded_is_named_with_the_cause(
    path: Path, write: Callable[[Path], Path], cause: str
) -> None:
    write(path)
    for read in (signature, lambda file: backends.load(settings("onnxruntime", file), ModelVersion(1, file))):
        with pytest.raises(ModelError) as caught:
            read(path)
        message = caught.value.message
        assert message.startswith(f"model: {path} cannot be loaded: ")
        assert cause in message
        assert "\n" not in message
        assert "onnxruntime_src" not in message
        assert "ONNXRuntimeError" not in message


def test_weights_in_a_second_file(path: Path) -> None:
    backend = load_file(onnx_models.external_weights(path))
    assert backend.run({"x": np.zeros((2, 1024), np.float32)}, ["y"])["y"].sum() == 2048


def configured(path: Path, **fields: object) -> ModelConfig:
    onnx_models.identity(path)
    return replace(settings("onnxruntime", path), onnxruntime=OnnxruntimeSettings(**fields))


def test_an_unknown_provider_is_refused_with_those_there_are(path: Path) -> None:
    config = configured(path, providers=("NoSuchProvider",))
    with pytest.raises(ConfigError, match=r"no provider 'NoSuchProvider' here; it has .*CPUExec"):
        backends.load(config, ModelVersion(1, path))


def providers(*names: str) -> Any:
    """A runtime with these, beside the CPU."""
    return SimpleNamespace(get_available_providers=lambda: [*names, CPU])


def on(*kinds: InstanceKind, **settings_say: Any) -> ModelConfig:
    groups = tuple(InstanceGroup(kind=kind) for kind in kinds)
    config = settings("onnxruntime", Path("model.onnx"))
    return replace(config, onnxruntime=OnnxruntimeSettings(**settings_say), instances=groups)


@pytest.mark.parametrize(
    ("there", "gpu", "chosen"),
    [
        ((), None, [CPU]),
        ((), 0, [CPU]),
        ((CUDA,), None, [CPU]),
        ((CUDA,), 1, [(CUDA, {"device_id": "1"}), CPU]),
        ((TENSORRT, CUDA), 0, [(CUDA, {"device_id": "0"}), CPU]),
        ((TENSORRT,), 0, [(TENSORRT, {"device_id": "0"}), CPU]),
        ((OPENVINO,), None, [(OPENVINO, {"device_type": "CPU", "num_of_threads": "3"}), CPU]),
        ((OPENVINO, CUDA), 0, [(CUDA, {"device_id": "0"}), CPU]),
    ],
)
def test_the_provider_is_chosen_by_what_is_there(
    there: tuple[str, ...], gpu: int | None, chosen: list[Any]
) -> None:
    assert _providers(providers(*there), on(InstanceKind.AUTO), gpu, 3) == chosen


def test_an_accelerator_of_tritons_is_taken_where_it_is_there(caplog: pytest.LogCaptureFixture) -> None:
    config = replace(on(InstanceKind.GPU), accelerators=(TENSORRT, OPENVINO))
    there = _providers(providers(TENSORRT, CUDA), config, 0, 1)
    assert [one[0] for one in there[:-1]] == [TENSORRT, CUDA]
    assert not caplog.records
    assert _providers(providers(CUDA), config, 0, 1) == [(CUDA, {"device_id": "0"}), CPU]
    assert f"ignored: this onnxruntime has no {TENSORRT}" in caplog.text


def test_tensorrt_that_was_asked_for_has_cuda_behind_it() -> None:
    config = on(InstanceKind.GPU, providers=(TENSORRT,))
    chosen = _providers(providers(TENSORRT, CUDA), config, 2, 1)
    assert chosen == [(TENSORRT, {"device_id": "2"}), (CUDA, {"device_id": "2"}), CPU]


@pytest.mark.parametrize(
    ("there", "config", "gpus"),
    [
        ((CUDA,), on(InstanceKind.AUTO), (0,)),
        ((CUDA,), on(InstanceKind.CPU), ()),
        ((CUDA,), on(InstanceKind.MODEL), ()),
        ((CUDA,), on(InstanceKind.AUTO, providers=(CPU,)), ()),
        ((CUDA,), on(InstanceKind.AUTO, providers=(CUDA,)), (0,)),
        ((TENSORRT,), replace(on(), instances=(InstanceGroup(kind=InstanceKind.GPU, gpus=(3, 1)),)), (1, 3)),
    ],
)
def test_instances_go_to_gpus_where_the_runtime_can_use_them(
    monkeypatch: pytest.MonkeyPatch, there: tuple[str, ...], config: ModelConfig, gpus: tuple[int, ...]
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", providers(*there))
    assert onnx_backend.devices(config) == gpus


def test_a_gpu_without_the_package_for_it_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", providers())
    onnx_backend._say_what_is_missing.cache_clear()
    with caplog.at_level(logging.WARNING, "carpool"):
        assert [onnx_backend.devices(on(InstanceKind.AUTO)) for _ in range(2)] == [(), ()]
        assert onnx_backend.devices(on(InstanceKind.CPU)) == ()
    assert len(caplog.records) == 1
    assert "install onnxruntime-gpu" in caplog.text


def test_the_settings_choose_threads(path: Path) -> None:
    config = configured(path, providers=("CPUExecutionProvider",), intra_op_threads=2, inter_op_threads=2)
    backend = backends.load(config, ModelVersion(1, path), Placement(threads=1))
    assert isinstance(backend, OnnxBackend)
    session = backend._session
    assert session is not None
    options = session.get_session_options()
    assert (options.intra_op_num_threads, options.inter_op_num_threads) == (2, 2)
    assert session.get_providers() == ["CPUExecutionProvider"]


def test_instances_of_one_thread_share_a_session_until_the_file_changes(path: Path) -> None:
    first, second = load_file(onnx_models.identity(path)), load_file(path)
    wide = load_file(path, threads=2)
    assert isinstance(first, OnnxBackend)
    assert isinstance(second, OnnxBackend)
    assert isinstance(wide, OnnxBackend)
    assert first._session is second._session
    assert first._session is not wide._session
    path.unlink()
    changed = load_file(onnx_models.arithmetic(path))
    assert {t.name for t in changed.signature.outputs} == {"double", "total"}
    for backend in (first, second, wide, changed):
        backend.close()
    assert not any(str(path) in str(key) for key in onnx_backend._shared)


def test_weights_in_a_file_of_their_own_end_the_sharing_too(path: Path) -> None:
    first = load_file(onnx_models.identity(path))
    (path.parent / "weights.bin").write_bytes(b"new")
    second = load_file(path)
    assert isinstance(first, OnnxBackend)
    assert isinstance(second, OnnxBackend)
    assert first._session is not second._session


def test_aborting_one_of_two_sharing_instances_leaves_the_other(path: Path) -> None:
    onnx_models.identity(path)
    first, second = load_file(path), load_file(path)
    first.abort()
    x = np.ones((2, 3), np.float32)
    assert second.run({"x": x}, ["y"])["y"].sum() == 6
    with pytest.raises(ModelError, match="stopped"):
        first.run({"x": x}, ["y"])


def test_abort_reaches_a_graph_that_is_working(path: Path) -> None:
    backend = load_file(onnx_models.endless(path))
    errors: list[ModelError] = []

    def run() -> None:
        try:
            backend.run({"x": np.zeros((1, 3), np.float32)}, ["y"])
        except ModelError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert thread.ident is not None
    clock = time.pthread_getcpuclockid(thread.ident)
    while time.clock_gettime(clock) < 0.05:  # processor time: by then it is far inside the loop
        assert thread.is_alive()
    backend.abort()
    thread.join()
    assert [error.reason for error in errors] == ["aborted"]


def wide(path: Path) -> Path:
    """Two steps whose values are 4 MiB for each image."""
    nodes = [
        helper.make_node("Add", ["x", "x"], ["a"]),
        helper.make_node("Mul", ["a", "x"], ["b"]),
        helper.make_node("ReduceSum", ["b"], ["y"], keepdims=1),
    ]
    return onnx_models.write(path, nodes, [("x", "FP32", ("n", 1 << 20))], [("y", "FP32", (1, 1))])


def test_what_batches_took_is_given_back(path: Path) -> None:
    config = settings("onnxruntime", wide(path))
    here, other = (backends.load(config, ModelVersion(1, path), Placement(n, threads=1)) for n in range(2))
    assert isinstance(here, OnnxBackend)
    x = {"x": np.ones((32, 1 << 20), np.float32)}
    before = own_bytes()
    for _ in range(2):  # what is known of the first shapes the second
        here.run(x, ())
    held = own_bytes()
    assert held - before > 64 << 20
    here.give_back()
    assert own_bytes() < held - (64 << 20)
    assert here.alive
    assert here.run({"x": np.ones((1, 1 << 20), np.float32)}, ())["y"].item() == 1 << 21
    here.abort()
    here.give_back()
    other.give_back()  # type: ignore[attr-defined]
    assert other.run({"x": np.ones((1, 1 << 20), np.float32)}, ())["y"].item() == 1 << 21
    here.close()
    here.give_back()


def test_a_second_batch_of_a_size_takes_no_more_than_the_first(path: Path) -> None:
    """With patterns it would: one block for all of its values, beside the blocks that the first took."""
    backend = load_file(wide(path))
    x = {"x": np.ones((32, 1 << 20), np.float32)}
    backend.run(x, ())
    held = own_bytes()
    for _ in range(3):
        backend.run(x, ())
    assert own_bytes() < held + (32 << 20)


@pytest.mark.parametrize("datatype", onnx_models.ELEMENT_TYPES)
def test_giving_back_runs_nothing_and_breaks_nothing(path: Path, datatype: str) -> None:
    backend = load_file(onnx_models.identity(path, datatype))
    assert isinstance(backend, KeepsMemory)
    backend.give_back()
    assert backend.alive
    assert backend.run(sample(Signature("m", signature_specs(backend), (), 4), 2), ())["y"].shape == (2, 3)


def signature_specs(backend: Any) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(t.name, Datatype(t.datatype), t.shape[1:]) for t in backend.signature.inputs)
