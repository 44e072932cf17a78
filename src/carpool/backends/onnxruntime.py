"""Runs ONNX files on onnxruntime.

Instances that run on one CPU thread each share one session: its weights are in memory once, every run keeps
to the thread that calls it, and a replaced instance is back at once. An abort takes effect between two
operators (a loop in the graph is many of them); one single operator cannot be interrupted.

A session's arena keeps the memory of its largest batches: without arenas batches took up to 1.4 times as
long, since all pages were new. So arenas stay, and are emptied after measuring and while no requests come.
"""

from __future__ import annotations

import ctypes
import logging
import math
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakValueDictionary

import numpy as np

from carpool.backends.backend import Backend, Placement, aborted, check_wanted, listed_gpus
from carpool.config.fingerprint import beside
from carpool.config.model import DYNAMIC, InstanceKind, ModelConfig, ModelSignature, TensorSignature
from carpool.config.repository import ModelVersion
from carpool.errors import CarpoolError, ConfigError, InvalidInput, ModelError, Unsupported
from carpool.types import DATATYPES, Array, Datatype

if TYPE_CHECKING:
    import onnxruntime

# ---- onnxruntime's tensors: which datatype is which, and the two kinds that numpy does not hold as they are

_OWN_NAMES = {
    Datatype.FP32: "float",
    Datatype.FP64: "double",
    Datatype.BF16: "bfloat16",
    Datatype.BYTES: "string",
}
ONNX_TYPES = {f"tensor({_OWN_NAMES.get(datatype, datatype.dtype.name)})": datatype for datatype in Datatype}
_BFLOAT16 = 16  # its number in the ONNX format


def from_ort(answer: Any, datatype: Datatype) -> Array:
    if datatype is Datatype.BF16:
        # A copy of the 16-bit patterns: the runtime makes no numpy array of what numpy lacks.
        shape = tuple(answer.shape())
        bits = np.empty(shape, Datatype.BF16.dtype)
        if math.prod(shape):
            ctypes.memmove(bits.ctypes.data, answer.data_ptr(), bits.nbytes)
        return bits
    array: Array = answer if isinstance(answer, np.ndarray) else answer.numpy()
    return _each(array, str.encode) if datatype is Datatype.BYTES else array


def _each(array: Array, convert: Callable[[Any], str | bytes]) -> Array:
    made = np.empty(array.shape, dtype=object)
    made.ravel()[:] = [convert(item) for item in array.ravel()]
    return made


# ---- the model

CPU = "CPUExecutionProvider"
CUDA = "CUDAExecutionProvider"
TENSORRT = "TensorrtExecutionProvider"
OPENVINO = "OpenVINOExecutionProvider"
ON_GPUS = (TENSORRT, CUDA)

_QUIET = 4  # the runtime's severity "fatal": errors come as exceptions, and need no second copy in the log
_CODE = re.compile(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ")
_SHRINK = "memory.enable_memory_arena_shrinkage"
_SOURCE = re.compile(r"^/\S+\.(?:cc|h):\d+ .*?\)(?: const)? (?=\S)|^Load model from .*? failed:\s*")

_log = logging.getLogger(__name__)
_shared: WeakValueDictionary[tuple[object, ...], Any] = WeakValueDictionary()
_sharing = threading.Lock()


def load(config: ModelConfig, version: ModelVersion, placement: Placement) -> Backend:
    session = _session(config, cast(Path, version.file), placement)
    return OnnxBackend(config, session)


def read_signature(config: ModelConfig, version: ModelVersion) -> ModelSignature:
    """Reads a file that is opened without optimising, which is where most of the time of loading goes."""
    runtime = _runtime(config)
    options = _options(runtime, threads=1)
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return _signature(config, _open(runtime, config, cast(Path, version.file), options, [CPU]))


class OnnxBackend:
    def __init__(self, config: ModelConfig, session: onnxruntime.InferenceSession) -> None:
        import onnxruntime

        self._model = model = config.name
        self._session: onnxruntime.InferenceSession | None = session
        self._values = onnxruntime.OrtValue
        self.signature = _signature(config, session)
        self._inputs = {tensor.name: DATATYPES[tensor.datatype] for tensor in self.signature.inputs}
        self._outputs = {tensor.name: DATATYPES[tensor.datatype] for tensor in self.signature.outputs}
        if Datatype.BYTES in self._inputs.values() and Datatype.BF16 in self._outputs.values():
            raise Unsupported(f"{model}: onnxruntime cannot take BYTES and answer BF16 in one model")
        datatypes = {*self._inputs.values(), *self._outputs.values()}
        self._plain = not datatypes & {Datatype.BF16, Datatype.BYTES}
        self.in_any_thread = session.get_providers() == [CPU]
        self._wanted: Sequence[str] = ()
        self._names: Sequence[str] = tuple(self._outputs)
        # One for the life of the instance: once it says terminate, so does every run to come.
        self._options = onnxruntime.RunOptions()
        self._options.log_severity_level = _QUIET

    @property
    def alive(self) -> bool:
        return self._session is not None and not self._options.terminate

    def run(self, inputs: Mapping[str, Array], wanted: Sequence[str]) -> Mapping[str, Array]:
        answers: list[Mapping[str, Array] | CarpoolError] = []
        self.run_singly((inputs,), wanted, answers)
        return cast(Mapping[str, Array], answers[0])

    def run_singly(
        self,
        requests: Iterable[Mapping[str, Array]],
        wanted: Sequence[str],
        answers: list[Mapping[str, Array] | CarpoolError],
    ) -> None:
        if wanted != self._wanted:  # than what was asked for last
            self._names = check_wanted(self._model, wanted, self._outputs)
            self._wanted = wanted
        names = self._names
        session = self._session
        if session is None or self._options.terminate:
            raise aborted(self._model)
        ran: list[Sequence[Array]] = []
        run = session.run if self._plain else partial(self._run, session)
        try:
            for inputs in requests:
                ran.append(run(names, dict(inputs), self._options))  # noqa: PERF401  (those before one that raises)
        except CarpoolError:
            raise
        except Exception as error:  # the runtime's exceptions have no base class of their own
            if self._options.terminate:
                raise aborted(self._model) from None
            raise ModelError(f"{self._model}: {_cause(error)}") from None
        finally:
            answers += [dict(zip(names, arrays, strict=True)) for arrays in ran]

    def _run(
        self,
        session: onnxruntime.InferenceSession,
        names: Sequence[str],
        inputs: Mapping[str, Array],
        options: onnxruntime.RunOptions,
    ) -> Sequence[Array]:
        fed = {name: self._fed(name, array) for name, array in inputs.items()}
        if Datatype.BF16 in (self._outputs[name] for name in names):
            # Only in its own wrapping does the runtime hand out what numpy has no type for.
            made = self._values.ortvalue_from_numpy
            values = {
                name: made(np.asarray(item, order="C")) if isinstance(item, np.ndarray) else item
                for name, item in fed.items()
            }
            answers = session.run_with_ort_values(names, values, options)
        else:
            answers = session.run(names, fed, options)
        return [from_ort(answer, self._outputs[name]) for name, answer in zip(names, answers, strict=True)]

    def _fed(self, name: str, array: Array) -> Any:
        if name not in self._inputs:
            raise ModelError(f"{self._model} has no input {name!r}; it has {', '.join(self._inputs)}")
        if self._inputs[name] is Datatype.BF16:
            return self._values.ortvalue_from_numpy_with_onnx_type(np.asarray(array, order="C"), _BFLOAT16)
        if self._inputs[name] is not Datatype.BYTES:
            return array
        try:  # ONNX strings are text: left as bytes, they would arrive as the text b'…'
            return _each(array, lambda item: item if isinstance(item, str) else bytes(item).decode())
        except UnicodeDecodeError:
            raise InvalidInput(
                f"input '{name}' holds bytes that are not UTF-8, and an ONNX model takes only text",
                field=name,
            ) from None

    def give_back(self) -> None:
        """The arena can only be emptied at the end of a run; this one ends before its first operator."""
        session = self._session
        if session is None or not self.in_any_thread:
            return
        import onnxruntime

        options = onnxruntime.RunOptions()
        options.log_severity_level = _QUIET
        options.add_run_config_entry(_SHRINK, "cpu:0")
        options.terminate = True
        fed = {
            tensor.name: self._fed(tensor.name, _smallest(tensor))
            for tensor in self.signature.inputs
            if not tensor.optional
        }
        with suppress(Exception):  # it always ends with one
            session.run(list(self._outputs)[:1], fed, options)

    def abort(self) -> None:
        self._options.terminate = True

    def close(self) -> None:
        self._session = None


def _smallest(tensor: TensorSignature) -> Array:
    shape = [1 if length == DYNAMIC else length for length in tensor.shape]
    datatype = DATATYPES[tensor.datatype]
    return np.full(shape, b"", object) if datatype is Datatype.BYTES else np.zeros(shape, datatype.dtype)


def _session(config: ModelConfig, file: Path, placement: Placement) -> onnxruntime.InferenceSession:
    runtime = _runtime(config)
    settings = config.onnxruntime
    threads = settings.intra_op_threads or placement.threads or 0
    providers = _providers(runtime, config, placement.gpu, threads)
    options = _options(runtime, threads, settings.inter_op_threads or 1)
    # For each size a pattern takes one block for all of a batch, beside those of the batch from which it was
    # learned: up to 1.8 times the memory. Batches were at most 3 % faster.
    options.enable_mem_pattern = providers != [CPU]
    if threads != 1 or options.inter_op_num_threads != 1 or providers != [CPU]:
        return _open(runtime, config, file, options, providers)
    key = (file, beside(file))  # its weights may lie in files of their own
    with _sharing:
        session = _shared.get(key)
        if session is None:
            session = _shared[key] = _open(runtime, config, file, options, providers)
    return session


def _runtime(config: ModelConfig) -> Any:
    try:
        import onnxruntime
    except ImportError as error:
        raise Unsupported(f"{config.name}: needs onnxruntime (pip install onnxruntime): {error}") from None
    return onnxruntime


def _options(runtime: Any, threads: int, inter_op_threads: int = 1) -> onnxruntime.SessionOptions:
    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads  # 0 leaves it to the runtime: one per core
    options.inter_op_num_threads = inter_op_threads
    if inter_op_threads > 1:
        options.execution_mode = runtime.ExecutionMode.ORT_PARALLEL
    options.log_severity_level = _QUIET
    # Threads that spin between batches would keep an idle server busy.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.inter_op.allow_spinning", "0")
    return cast("onnxruntime.SessionOptions", options)


def devices(config: ModelConfig) -> tuple[int, ...]:
    """Returns the GPUs to run on; none: the CPU. A machine without any has put every instance on the CPU
    before."""
    asked = config.onnxruntime.providers
    placed = any(group.kind in (InstanceKind.AUTO, InstanceKind.GPU) for group in config.instances)
    if not placed or (asked and not {*asked} & {*ON_GPUS}):
        return ()
    if not {*_runtime(config).get_available_providers()} & {*ON_GPUS}:
        _say_what_is_missing(config.name)
        return ()
    return listed_gpus(config)


@cache
def _say_what_is_missing(model: str) -> None:
    """Warns once for a model, however often it is loaded."""
    _log.warning(
        "%s: runs on the CPU. There is a GPU, but this onnxruntime is the package without CUDA. Uninstall "
        "onnxruntime and install onnxruntime-gpu; or pip install 'carpool[onnx-torch]' and set backend = "
        '"onnx_torch" to run it on PyTorch',
        model,
    )


@cache
def _say_ignored(model: str, provider: str) -> None:
    _log.warning(
        "%s: the execution accelerator of its settings is ignored: this onnxruntime has no %s",
        model,
        provider,
    )


def _providers(runtime: Any, config: ModelConfig, gpu: int | None, threads: int) -> list[Any]:
    """Returns the providers of the settings, else what is there for the device: CUDA for an instance on a
    GPU, else OpenVINO. Behind TensorRT comes CUDA for what it cannot run, and the CPU is always the last.

    TensorRT is for those who ask, where there is CUDA: it builds its programs anew, for minutes."""
    available = runtime.get_available_providers()
    for name in config.onnxruntime.providers:
        if name not in available:
            listed = ", ".join(available)
            raise ConfigError(f"{config.name}: onnxruntime has no provider {name!r} here; it has {listed}")
    fitting = (OPENVINO,) if gpu is None else (CUDA, TENSORRT)
    wished = [name for name in config.accelerators if name in fitting]
    for name in {*wished} - {*available}:
        _say_ignored(config.name, name)
    wished = [name for name in wished if name in available]
    names = (
        list(config.onnxruntime.providers) or wished or [name for name in fitting if name in available][:1]
    )
    if TENSORRT in names and CUDA in available and CUDA not in names:
        names.insert(names.index(TENSORRT) + 1, CUDA)
    options = {name: {"device_id": str(gpu or 0)} for name in ON_GPUS}
    options[OPENVINO] = {"device_type": "CPU", **({"num_of_threads": str(threads)} if threads else {})}
    return [(name, options[name]) if name in options else name for name in names if name != CPU] + [CPU]


def _open(
    runtime: Any, config: ModelConfig, file: Path, options: onnxruntime.SessionOptions, providers: list[Any]
) -> onnxruntime.InferenceSession:
    try:
        session = runtime.InferenceSession(str(file), options, providers=providers)
    except Exception as error:  # the runtime's exceptions have no base class of their own
        raise ModelError(f"{config.name}: {file} cannot be loaded: {_cause(error)}") from None
    session.disable_fallback()  # it would rebuild the session on another device in the middle of a run
    return cast("onnxruntime.InferenceSession", session)


def _signature(config: ModelConfig, session: onnxruntime.InferenceSession) -> ModelSignature:
    """What has a default is mostly the weights of a network: only what the settings name is an input."""
    declared = {tensor.name for tensor in config.inputs}
    defaults = [node for node in session.get_overridable_initializers() if node.name in declared]
    return ModelSignature(
        (
            *(_tensor(config.name, "input", node) for node in session.get_inputs()),
            *(_tensor(config.name, "input", node, optional=True) for node in defaults),
        ),
        tuple(_tensor(config.name, "output", node) for node in session.get_outputs()),
    )


def _tensor(model: str, kind: str, node: Any, *, optional: bool = False) -> TensorSignature:
    if node.type not in ONNX_TYPES:
        hint = ': export it with options={"zipmap": False} (skl2onnx)' if "map(" in node.type else ""
        raise Unsupported(
            f'{model}: {kind} "{node.name}" is a {node.type}, which the v2 protocol does not have{hint}'
        )
    # A length that varies has a name or nothing in place of a number.
    shape = tuple(dim if isinstance(dim, int) and dim >= 0 else DYNAMIC for dim in node.shape)
    symbols = tuple(dim if isinstance(dim, str) else "" for dim in node.shape)
    return TensorSignature(node.name, ONNX_TYPES[node.type].value, shape, optional, symbols)


def _cause(error: Exception) -> str:
    """Returns the runtime's message as one line, without its error codes and its own source files."""
    text = _CODE.sub("", str(error))
    text = text.rpartition("Status Message: ")[2]
    for _ in range(2):  # a failed load has both prefixes
        text = _SOURCE.sub("", text)
    return " ".join(text.split()).rstrip(".") or type(error).__name__
