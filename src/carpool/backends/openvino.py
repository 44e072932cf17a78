"""Runs OpenVINO's own files (.xml beside .bin), ONNX and TensorFlow Lite files on OpenVINO.

Each instance has a compiled model of its own with one stream, so that instances and threads mean the same as
for every other backend. An abort takes effect between two operators; a loop in the graph is one of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np

from carpool.backends.backend import Backend, Placement, aborted, check_wanted
from carpool.config.model import DYNAMIC, ModelConfig, ModelSignature, TensorSignature
from carpool.config.repository import ModelVersion
from carpool.errors import ConfigError, ModelError, Unsupported
from carpool.types import DATATYPES, Array, Datatype

# Text is left out: the runtime frees the strings of an input that is passed through to an output twice.
_SHORT = {"BOOL": "boolean", "UINT": "u", "INT": "i", "FP": "f", "BF": "bf"}
_TYPES = {
    re.sub("[A-Z]+", lambda kind: _SHORT[kind[0]], datatype.value): datatype
    for datatype in Datatype
    if datatype is not Datatype.BYTES
}
_NOISE = re.compile(
    r"Exception from \S+:\d+:|Check '.*?' failed at \S+:\d+:|Caught exception:|Unable to read the model: "
)
_THREADS = re.compile(r"[1-9][0-9]{0,3}")
_PRECISIONS = ("f32", "bf16", "f16")


@cache
def _core() -> Any:
    """One for the process: it loads the plugins, and keeps threads that ended instances leave to new ones."""
    import openvino

    return openvino.Core()


def load(config: ModelConfig, version: ModelVersion, placement: Placement) -> Backend:
    return OpenvinoBackend(config, cast(Path, version.file), placement)


def read_signature(config: ModelConfig, version: ModelVersion) -> ModelSignature:
    _options(config, Placement())
    return _signature(config, _read(config, cast(Path, version.file)))


class OpenvinoBackend:
    def __init__(self, config: ModelConfig, file: Path, placement: Placement) -> None:
        import openvino

        self._model = config.name
        self._tensor, self._bf16 = openvino.Tensor, openvino.Type.bf16
        device, options = _options(config, placement)
        model = _read(config, file)
        self.signature = _signature(config, model)
        self._inputs = {tensor.name: index for index, tensor in enumerate(self.signature.inputs)}
        self._outputs = {tensor.name: index for index, tensor in enumerate(self.signature.outputs)}
        self._halves = {tensor.name for tensor in self.signature.inputs if tensor.datatype == "BF16"}
        self._types = [DATATYPES[tensor.datatype].dtype for tensor in self.signature.outputs]
        try:
            compiled = _core().compile_model(model, device, options)
            self._request: Any = compiled.create_infer_request()
        except Exception as error:  # the runtime's exceptions have no class of their own
            raise ModelError(f"{self._model}: {file} cannot be loaded: {_cause(error)}") from None
        self._stopped = False

    @property
    def alive(self) -> bool:
        return self._request is not None and not self._stopped

    def run(self, inputs: Mapping[str, Array], wanted: Sequence[str]) -> Mapping[str, Array]:
        names = check_wanted(self._model, wanted, self._outputs)
        request = self._request
        if request is None or self._stopped:
            raise aborted(self._model)
        try:
            for name, array in inputs.items():
                request.set_input_tensor(self._inputs[name], self._fed(name, array))
            request.start_async()
            # An abort between the look at `_stopped` above and the start found nothing to cancel.
            if self._stopped:
                request.cancel()
            request.wait()
            return {name: self._answer(request, self._outputs[name]) for name in names}
        except KeyError as error:
            raise ModelError(
                f"{self._model} has no input {error}; it has {', '.join(self._inputs)}"
            ) from None
        except Exception as error:  # the runtime's exceptions have no class of their own
            if self._stopped:
                raise aborted(self._model) from None
            raise ModelError(f"{self._model}: {_cause(error)}") from None

    def _fed(self, name: str, array: Array) -> Any:
        """Read where it lies: the caller waits until the batch is through. The runtime takes only memory that
        could be written for that, and copies the rest."""
        whole = np.asarray(array, order="C")
        if name in self._halves:
            return self._tensor(whole if whole.flags.writeable else whole.copy(), whole.shape, self._bf16)
        return self._tensor(whole, shared_memory=whole.flags.writeable)

    def _answer(self, request: Any, index: int) -> Array:
        """A copy: the next batch is written over the runtime's own."""
        array: Array = request.get_output_tensor(index).data
        return (
            array.view(self._types[index]).copy() if array.size else np.empty(array.shape, self._types[index])
        )

    def abort(self) -> None:
        self._stopped = True
        if (request := self._request) is not None:
            request.cancel()

    def close(self) -> None:
        self._request = None


def _options(config: ModelConfig, placement: Placement) -> tuple[str, dict[str, Any]]:
    """Returns the device and how it is used, checked; Triton's names for what can be chosen."""
    said = config.parameters
    device = said.get("TARGET_DEVICE", "CPU")
    there = _core().available_devices
    if device not in there and device.partition(".")[0] not in there:
        raise ConfigError(
            f"{config.name}: parameter TARGET_DEVICE: OpenVINO has no device {device!r} here; "
            f"it has {', '.join(there)}"
        )
    threads = said.get("INFERENCE_NUM_THREADS") or str(placement.threads or "")
    if threads and not _THREADS.fullmatch(threads):
        raise ConfigError(
            f"{config.name}: parameter INFERENCE_NUM_THREADS must be 1 to 9999, not {threads!r}"
        )
    # What the runtime takes by itself depends on the processor, and answers with it.
    precision = said.get("INFERENCE_PRECISION_HINT", "f32")
    if precision not in _PRECISIONS:
        raise ConfigError(
            f"{config.name}: parameter INFERENCE_PRECISION_HINT cannot be {precision!r}; "
            f"it can be {', '.join(_PRECISIONS)}"
        )
    options: dict[str, Any] = {"INFERENCE_PRECISION_HINT": precision}
    if device == "CPU":
        # Pinned threads of several instances would all be pinned to the same cores.
        options |= {"NUM_STREAMS": "1", "ENABLE_CPU_PINNING": False}
        options |= {"INFERENCE_NUM_THREADS": threads} if threads else {}
    return device, options


def _read(config: ModelConfig, file: Path) -> Any:
    try:
        return _core().read_model(str(file))
    except Exception as error:  # the runtime's exceptions have no class of their own
        weights = file.with_suffix(".bin")
        lacking = file.suffix == ".xml" and not weights.is_file()
        why = f"its weights, {weights.name}, are not beside it" if lacking else _cause(error)
        raise ModelError(f"{config.name}: {file} cannot be loaded: {why}") from None


def _signature(config: ModelConfig, model: Any) -> ModelSignature:
    return ModelSignature(
        tuple(_tensor(config.name, "input", port) for port in model.inputs),
        tuple(_tensor(config.name, "output", port) for port in model.outputs),
    )


def _tensor(model: str, kind: str, port: Any) -> TensorSignature:
    # Of several names the one that other runtimes would show: OpenVINO's own have a number behind them.
    names = sorted(port.get_names(), key=lambda name: (":" in name, len(name), name))
    name = names[0] if names else port.get_node().get_friendly_name()
    element = port.get_element_type().get_type_name()
    if element not in _TYPES:
        raise Unsupported(f'{model}: {kind} "{name}" is {element}, which this backend does not support')
    shape = port.get_partial_shape()
    if shape.rank.is_dynamic:
        raise Unsupported(f'{model}: {kind} "{name}" has no fixed number of dimensions')
    return TensorSignature(
        name, _TYPES[element].value, tuple(DYNAMIC if dim.is_dynamic else dim.get_length() for dim in shape)
    )


def _cause(error: Exception) -> str:
    """Returns the runtime's message as one line, without its own source files."""
    return " ".join(_NOISE.sub("", str(error)).split()).rstrip(".") or type(error).__name__
