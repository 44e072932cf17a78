"""The functions that models for Triton's Python backend import, by themselves."""

from __future__ import annotations

import json

import numpy as np
import pytest

from carpool.backends.python import triton_python_backend_utils as pb_utils


@pytest.mark.parametrize(
    ("number", "name", "kind"),
    [
        (1, "TYPE_BOOL", np.bool_),
        (2, "TYPE_UINT8", np.uint8),
        (5, "TYPE_UINT64", np.uint64),
        (9, "TYPE_INT64", np.int64),
        (10, "TYPE_FP16", np.float16),
        (11, "TYPE_FP32", np.float32),
        (12, "TYPE_FP64", np.float64),
        (13, "TYPE_STRING", np.object_),
    ],
)
def test_datatypes_have_tritons_numbers_and_names(number: int, name: str, kind: type) -> None:
    assert pb_utils.triton_to_numpy_type(number) is kind
    assert pb_utils.numpy_to_triton_type(kind) == number
    assert np.dtype(pb_utils.triton_string_to_numpy(name)) == np.dtype(kind)


def test_what_numpy_has_no_type_for() -> None:
    assert pb_utils.triton_to_numpy_type(14) is None
    assert pb_utils.numpy_to_triton_type(np.complex64) is None
    assert pb_utils.numpy_to_triton_type(np.bytes_) == 13
    with pytest.raises(KeyError):
        pb_utils.triton_string_to_numpy("TYPE_BF16")


def test_strings_are_written_and_read() -> None:
    words = np.array([[b"a\0b", "Zürich"], [b"", "x"]], dtype=object)
    written = pb_utils.serialize_byte_tensor(words)
    assert isinstance(written, bytes)
    assert written.startswith(b"\x03\0\0\0a\0b")
    assert pb_utils.deserialize_bytes_tensor(written).tolist() == [b"a\0b", "Zürich".encode(), b"", b"x"]
    assert pb_utils.serialize_byte_tensor(np.empty(0, object)) == ()
    assert pb_utils.serialize_byte_tensor(np.ones(1)) is None
    with pytest.raises(ValueError, match="a string of 9 bytes"):
        pb_utils.deserialize_bytes_tensor(b"\x09\0\0\0abc")


def test_requests_and_answers_say_what_they_were_given() -> None:
    tensor = pb_utils.Tensor("x", np.zeros((2, 3), np.int8))
    request = pb_utils.InferenceRequest(
        "one", 7, [tensor], ["y"], b"model", 3, flags=1, timeout=5, parameters={"a": 1}
    )
    assert (request.request_id(), request.correlation_id(), request.timeout()) == ("one", 7, 5)
    assert (request.model_name, request.model_version) == ("model", 3)
    assert request.requested_output_names() == ["y"]
    assert json.loads(request.parameters()) == {"a": 1}
    request.set_flags(pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END)
    assert request.flags() == 2
    assert request.trace().get_context() is None
    assert request.preferred_memory().preferred_memory_type is pb_utils.TRITONSERVER_MEMORY_CPU
    assert pb_utils.get_input_tensor_by_name(request, "x") is tensor
    assert pb_utils.get_input_tensor_by_name(request, "z") is None
    response = pb_utils.InferenceResponse([tensor], parameters={"b": "c"})
    assert pb_utils.get_output_tensor_by_name(response, "x") is tensor
    assert pb_utils.get_output_tensor_by_name(response, "z") is None
    assert (response.has_error(), response.error(), response.parameters()) == (False, None, '{"b": "c"}')


def test_an_error_has_a_code() -> None:
    assert pb_utils.TritonError("what").code() == pb_utils.TritonError.INTERNAL == 1
    error = pb_utils.TritonError(message="gone", code=pb_utils.TritonError.CANCELLED)
    assert (error.message(), error.code()) == ("gone", 7)


def test_a_tensor_on_a_device_is_named() -> None:
    class OnDevice:
        def __dlpack__(self) -> None: ...

        def __dlpack_device__(self) -> tuple[int, int]:
            return 2, 0

    with pytest.raises(pb_utils.TritonModelException, match="'y' is on a device"):
        pb_utils.Tensor.from_dlpack("y", OnDevice())


def test_torch_shares_memory_with_a_tensor() -> None:
    torch = pytest.importorskip("torch")
    tensor = pb_utils.Tensor("x", np.zeros(3, np.float32))
    torch.from_dlpack(tensor)[1] = 5
    assert tensor.as_numpy().tolist() == [0, 5, 0]
    back = pb_utils.Tensor.from_dlpack("y", torch.utils.dlpack.to_dlpack(torch.ones(2)))
    assert back.as_numpy().tolist() == [1, 1]


def test_settings_that_exclude_dynamic_batching() -> None:
    config = pb_utils.ModelConfig('{"sequence_batching": {}, "max_batch_size": 4}')
    with pytest.raises(ValueError, match="sequence_batching"):
        config.set_dynamic_batching()
    with pytest.raises(ValueError, match="max_batch_size is 4"):
        config.set_max_batch_size(2)


def test_the_log(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CARPOOL_LOG_LEVEL", raising=False)
    pb_utils.Logger.log("one")
    pb_utils.Logger.log_warn("two")
    pb_utils.Logger.log("three", pb_utils.Logger.ERROR)
    pb_utils.Logger.log_verbose("four")
    assert capfd.readouterr().err == "info: one\nwarning: two\nerror: three\n"
