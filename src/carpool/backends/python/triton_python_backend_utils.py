"""Defines what a model for Triton's Python backend imports under this name: tensors, requests, answers and
settings.

triton_worker.py puts it where the model finds it, in the process of that model, and gives it `asker`, the way
to the other models of this server. Names, order and defaults of arguments are Triton's.
"""

from __future__ import annotations

import enum
import json
import os
import struct
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from carpool.observe.output import marked
from carpool.types import DATATYPES, Array, Datatype

if TYPE_CHECKING:
    import asyncio

TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = 2
TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
TRITONSERVER_REQUEST_RELEASE_ALL = 1
TRITONSERVER_REQUEST_RELEASE_RESCHEDULE = 2

_ONE_ANSWER = "its settings do not say model_transaction_policy { decoupled: true }"
_CPU, _PINNED = 1, 3  # DLPack's numbers for memory that the CPU reads

# TRITONSERVER_DataType: in the order of `Datatype`, except that strings come before bfloat16.
_NUMBERED = dict(enumerate(sorted(Datatype, key=lambda kind: kind is Datatype.BF16), start=1))
_NUMBERS = {datatype: number for number, datatype in _NUMBERED.items()}
_BY_DTYPE = {kind.dtype: kind for kind in _NUMBERED.values() if kind is not Datatype.BF16}


def __getattr__(name: str) -> Any:
    raise AttributeError(
        f"there is no {name} in the triton_python_backend_utils of Carpool: docs/coming-from.md, "
        '"Triton\'s Python models", lists what is supported'
    )


class TritonModelException(Exception):
    """Represents what a model raises when it gives up on a whole batch."""


class TritonError:
    """Describes what is wrong with one request."""

    class ErrorCode(enum.IntEnum):
        UNKNOWN = 0
        INTERNAL = 1
        NOT_FOUND = 2
        INVALID_ARG = 3
        UNAVAILABLE = 4
        UNSUPPORTED = 5
        ALREADY_EXISTS = 6
        CANCELLED = 7

    UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG, UNAVAILABLE, UNSUPPORTED, ALREADY_EXISTS, CANCELLED = ErrorCode

    def __init__(self, message: str, code: int = ErrorCode.INTERNAL) -> None:
        self._message = str(message)
        self._code = TritonError.ErrorCode(code)

    def message(self) -> str:
        return self._message

    def code(self) -> TritonError.ErrorCode:
        return self._code


# ---- tensors -----------------------------------------------------------------------------------------------


def triton_to_numpy_type(data_type: int) -> Any:
    kind = _NUMBERED.get(data_type)
    return None if kind is None or kind is Datatype.BF16 else kind.dtype.type


def numpy_to_triton_type(data_type: Any) -> int | None:
    dtype = np.dtype(data_type)
    kind = Datatype.BYTES if dtype.kind in "OSU" else _BY_DTYPE.get(dtype)
    return None if kind is None else _NUMBERS[kind]


def triton_string_to_numpy(triton_type_string: str) -> Any:
    """Returns the type of the names in a model's settings, such as TYPE_FP32."""
    name = triton_type_string.removeprefix("TYPE_")
    kind = DATATYPES["BYTES" if name == "STRING" else name]
    if kind is Datatype.BF16:
        raise KeyError(triton_type_string)  # numpy has none, and Triton says so in the same way
    return bool if kind is Datatype.BOOL else kind.dtype.type


def serialize_byte_tensor(input_tensor: Array) -> bytes | tuple[()] | None:
    """Writes every string behind its length in four bytes; None for an array of numbers, as in Triton."""
    if input_tensor.size == 0:
        return ()
    if input_tensor.dtype.kind not in "OS":
        return None
    items = (item if isinstance(item, bytes) else str(item).encode() for item in input_tensor.ravel())
    return b"".join(struct.pack("<I", len(item)) + item for item in items)


def deserialize_bytes_tensor(encoded_tensor: bytes) -> Array:
    strings, start = [], 0
    while start < len(encoded_tensor):
        (length,) = struct.unpack_from("<I", encoded_tensor, start)
        start += 4
        if start + length > len(encoded_tensor):
            raise ValueError(
                f"a string of {length} bytes begins at {start}, and {len(encoded_tensor)} is all"
            )
        strings.append(bytes(encoded_tensor[start : start + length]))
        start += length
    found = np.empty(len(strings), dtype=object)
    found[:] = strings
    return found


class _Capsule:
    """A capsule as numpy wants it: with words that say where it lies. Capsules do not say so themselves."""

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, **_: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CPU, 0


class Tensor:
    """Represents a named array in the memory of the CPU."""

    def __init__(self, name: str, data: Array) -> None:
        if not isinstance(data, np.ndarray):
            raise TritonModelException(
                f"the tensor {name!r} must be a numpy array, not a {type(data).__name__}"
            )
        kind = numpy_to_triton_type(data.dtype)
        if kind is None:
            raise TritonModelException(
                f"the tensor {name!r} is an array of {data.dtype}, which is not a type of tensors"
            )
        self._name = str(name)
        self._data = data
        self._number = kind

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> Array:
        return self._data

    def triton_dtype(self) -> int:
        return self._number

    def shape(self) -> list[int]:
        return list(self._data.shape)

    def is_cpu(self) -> bool:
        return True

    def to_dlpack(self) -> Any:
        return self.__dlpack__()

    def __dlpack__(self, *, stream: Any = None, **_: Any) -> Any:
        return self._data.__dlpack__(stream=None)

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CPU, 0

    @staticmethod
    def from_dlpack(name: str, tensor: Any) -> Tensor:
        """Returns a tensor of whatever shares its memory in this way; a bare capsule has to lie in the
        CPU's."""
        if not hasattr(tensor, "__dlpack__"):
            tensor = _Capsule(tensor)
        elif tensor.__dlpack_device__()[0] not in (_CPU, _PINNED):
            raise TritonModelException(f"the tensor {name!r} is on a device: copy it to the CPU first")
        return Tensor(name, np.from_dlpack(tensor))


def get_input_tensor_by_name(inference_request: InferenceRequest, name: str) -> Tensor | None:
    return next((tensor for tensor in inference_request.inputs() if tensor.name() == name), None)


def get_output_tensor_by_name(inference_response: InferenceResponse, name: str) -> Tensor | None:
    return next((tensor for tensor in inference_response.output_tensors() if tensor.name() == name), None)


# ---- requests and answers ----------------------------------------------------------------------------------


class MemoryType(enum.IntEnum):
    TRITONSERVER_MEMORY_GPU = 0
    TRITONSERVER_MEMORY_CPU = 1


TRITONSERVER_MEMORY_GPU, TRITONSERVER_MEMORY_CPU = MemoryType


class PreferredMemory:
    """Taken and not needed: every tensor is in the memory of the CPU."""

    def __init__(self, preferred_memory_type: MemoryType, preferred_device_id: int = 0) -> None:
        self.preferred_memory_type = preferred_memory_type
        self.preferred_device_id = preferred_device_id


class InferenceTrace:
    def get_context(self) -> None: ...


class InferenceResponse:
    """Represents the answer to one request: tensors, or what is wrong with it."""

    def __init__(
        self,
        output_tensors: Sequence[Tensor] = (),
        error: TritonError | None = None,
        parameters: Mapping[str, bool | int | str] | None = None,
    ) -> None:
        self._tensors = list(output_tensors)
        if not all(isinstance(tensor, Tensor) for tensor in self._tensors):
            raise TritonModelException("output_tensors must be a list of Tensor")
        if error is not None and not isinstance(error, TritonError):
            raise TritonModelException(f"error must be a TritonError, not a {type(error).__name__}")
        self._error = error
        self._parameters = json.dumps(dict(parameters or {}))

    def output_tensors(self) -> list[Tensor]:
        return self._tensors

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error

    def parameters(self) -> str:
        return self._parameters


class Answers(Protocol):
    """Defines where the answers to one request of a decoupled model go. For every thread."""

    @property
    def gone(self) -> bool: ...

    def send(self, response: InferenceResponse | None, *, last: bool) -> None: ...

    def forsaken(self) -> None: ...


class InferenceResponseSender:
    """Sends answers that come later than `execute` returns: one, or as many as a decoupled model likes."""

    def __init__(self, answers: Answers | None = None) -> None:
        self.answer: Future[InferenceResponse] = Future()
        self._answers = answers
        self._sending = threading.Lock()

    def __del__(self) -> None:
        if self._answers is not None:
            self._answers.forsaken()

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        if not (isinstance(response, InferenceResponse) or (response is None and flags)):
            raise TritonModelException("an InferenceResponse is sent, or the flag that completes a request")
        if self._answers is not None:
            self._answers.send(response, last=bool(flags))
            return
        with self._sending:  # threads of the model may race for it
            if response is None and not self.answer.done():
                self.answer.set_exception(TritonModelException("a request was ended without a response"))
            elif response is not None and self.answer.done():
                raise TritonModelException(f"a request was answered before, and {_ONE_ANSWER}")
            elif response is not None:
                self.answer.set_result(response)

    def is_cancelled(self) -> bool:
        return self._answers is not None and self._answers.gone


Asker = Callable[["InferenceRequest"], "Future[InferenceResponse]"]
asker: Asker | None = None
"""Sends requests to other models; None while no server is there to answer them."""


class InferenceRequest:
    """Represents a request that came for this model, or one that it makes of another model and sends with
    `exec`."""

    def __init__(
        self,
        request_id: str = "",
        correlation_id: int | str = 0,
        inputs: Sequence[Tensor] = (),
        requested_output_names: Sequence[str] = (),
        model_name: str | bytes = "",
        model_version: int = -1,
        flags: int = 0,
        timeout: int = 0,
        preferred_memory: PreferredMemory | None = None,
        trace: InferenceTrace | None = None,
        parameters: Mapping[str, bool | int | str] | None = None,
    ) -> None:
        if not all(isinstance(tensor, Tensor) for tensor in inputs):
            raise TritonModelException("inputs must be a list of Tensor")
        self.model_name = model_name.decode() if isinstance(model_name, bytes) else str(model_name)
        self.model_version = int(model_version)
        self.sender: InferenceResponseSender | None = None
        self.answers: Answers | None = None  # of a decoupled model
        self._id = str(request_id)
        self._correlation = correlation_id
        self._inputs = list(inputs)
        self._wanted = [str(name) for name in requested_output_names]
        self._flags = flags
        self._timeout = timeout
        self._memory = preferred_memory or PreferredMemory(TRITONSERVER_MEMORY_CPU)
        self._trace = trace or InferenceTrace()
        self._parameters = json.dumps(dict(parameters or {}))

    def inputs(self) -> list[Tensor]:
        return self._inputs

    def request_id(self) -> str:
        return self._id

    def correlation_id(self) -> int | str:
        return self._correlation

    def requested_output_names(self) -> list[str]:
        return self._wanted

    def preferred_memory(self) -> PreferredMemory:
        return self._memory

    def flags(self) -> int:
        return self._flags

    def set_flags(self, flags: int) -> None:
        self._flags = flags

    def timeout(self) -> int:
        """Returns the timeout in microseconds; 0: none."""
        return self._timeout

    def parameters(self) -> str:
        return self._parameters

    def trace(self) -> InferenceTrace:
        return self._trace

    def is_cancelled(self) -> bool:
        return self.answers is not None and self.answers.gone

    def set_release_flags(self, flags: int) -> None:
        if flags & TRITONSERVER_REQUEST_RELEASE_RESCHEDULE:
            raise TritonModelException("a request cannot be put back into the queue here")

    def get_response_sender(self) -> InferenceResponseSender:
        if self.sender is None:
            self.sender = InferenceResponseSender(self.answers)
        return self.sender

    def exec(self, decoupled: bool = False) -> InferenceResponse:
        """Ask another model and wait for its answer, which may be an error."""
        return self._asked(decoupled).result()

    def async_exec(self, decoupled: bool = False) -> asyncio.Future[InferenceResponse]:
        """The same to be awaited; it is on its way from now on."""
        from asyncio import wrap_future  # who awaits it has it loaded

        return wrap_future(self._asked(decoupled))

    def _asked(self, decoupled: bool) -> Future[InferenceResponse]:
        if decoupled:
            raise TritonModelException("other models can only be called for exactly one response here")
        if not self.model_name:
            raise TritonModelException("a request of another model needs its model_name")
        if asker is None:
            raise TritonModelException("other models cannot be called: this model runs without a server")
        return asker(self)


# ---- settings ----------------------------------------------------------------------------------------------

Config = dict[str, Any]


def get_input_config_by_name(model_config: Config, name: str) -> Config | None:
    return _named(model_config.get("input", ()), name)


def get_output_config_by_name(model_config: Config, name: str) -> Config | None:
    return _named(model_config.get("output", ()), name)


def using_decoupled_model_transaction_policy(model_config: Config) -> bool:
    return bool(model_config.get("model_transaction_policy", {}).get("decoupled", False))


def _named(tensors: Sequence[Config], name: str) -> Config | None:
    return next((tensor for tensor in tensors if tensor["name"] == name), None)


class ModelConfig:
    """Holds a model's settings, which `auto_complete_config` completes; what the user wrote stays as it
    is."""

    def __init__(self, model_config: str) -> None:
        self._config: Config = json.loads(model_config)

    def as_dict(self) -> Config:
        return self._config

    def set_max_batch_size(self, max_batch_size: int) -> None:
        written = self._config.get("max_batch_size", 0)
        if written > max_batch_size:
            raise ValueError(
                f"max_batch_size is {written} in the settings, and the model can do {max_batch_size}"
            )
        self._config["max_batch_size"] = max_batch_size

    def set_dynamic_batching(self) -> None:
        for other in ("sequence_batching", "ensemble_scheduling"):
            if other in self._config:
                raise ValueError(f"the settings say {other}, which excludes dynamic_batching")
        self._config.setdefault("dynamic_batching", {})

    def add_input(self, input: Config) -> None:  # noqa: A002  # Triton's name for it
        self._add("input", input, {"name", "data_type", "dims", "optional"})

    def add_output(self, output: Config) -> None:
        self._add("output", output, {"name", "data_type", "dims"})

    def set_model_transaction_policy(self, transaction_policy_dict: Config) -> None:
        for key in transaction_policy_dict.keys() - {"decoupled"}:
            raise ValueError(f"model_transaction_policy has no {key!r}")
        policy = self._config.setdefault("model_transaction_policy", {})
        wanted = transaction_policy_dict.get("decoupled", policy.get("decoupled", False))
        if policy.setdefault("decoupled", wanted) != wanted:
            raise ValueError("model_transaction_policy: the settings and the model contradict each other")

    def _add(self, kind: str, tensor: Config, known: set[str]) -> None:
        where = f"{kind} {tensor.get('name', '')!r}"
        for key in tensor.keys() - known:
            raise ValueError(f"{where} has the property {key!r}; there are {', '.join(sorted(known))}")
        for key in ("name", "data_type", "dims"):
            if key not in tensor:
                raise ValueError(f"{where} has no {key!r}")
        tensors = self._config.setdefault(kind, [])
        written = _named(tensors, tensor["name"])
        if written is None:
            tensors.append(dict(tensor))
            return
        for key, value in tensor.items():
            said = written.get(key)
            if said not in (None, [], "TYPE_INVALID", value):
                raise ValueError(f"{where}: the settings say {key} {said}, the model {value}")
            written[key] = value


# ---- the log -----------------------------------------------------------------------------------------------


class Logger:
    """Writes lines on standard error, which is where the server's log is; verbose ones at --log-level
    debug."""

    class LogLevel(enum.Enum):
        INFO = "info"
        WARNING = "warning"
        ERROR = "error"
        VERBOSE = "debug"

    INFO, WARNING, ERROR, VERBOSE = LogLevel

    @staticmethod
    def log(message: str, level: LogLevel = LogLevel.INFO) -> None:
        if level is not Logger.VERBOSE or os.environ.get("CARPOOL_LOG_LEVEL", "").lower() == "debug":
            sys.stderr.write(marked(message, level.value, f"{level.value}: "))

    @staticmethod
    def log_info(message: str) -> None:
        Logger.log(message, Logger.INFO)

    @staticmethod
    def log_warn(message: str) -> None:
        Logger.log(message, Logger.WARNING)

    @staticmethod
    def log_error(message: str) -> None:
        Logger.log(message, Logger.ERROR)

    @staticmethod
    def log_verbose(message: str) -> None:
        Logger.log(message, Logger.VERBOSE)
