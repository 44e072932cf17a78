"""The tensors of a .pth file as numpy arrays, without torch and without running anything from the file.

These files date from before torch wrote zip archives. They are five pickles in a row (a magic number, the
protocol, facts about the machine, the names with their tensors, the keys of the storages) and then the
storages: for each key, in that order, a count and the raw numbers.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from carpool.errors import InvalidInput

MAX_BYTES = 1 << 30

_MAGIC = 0x1950A86A20F9469CFC6C
_PROTOCOL = 1001
_STORAGES = {"FloatStorage": np.dtype("<f4"), "LongStorage": np.dtype("<i8")}


def read_weights(path: Path) -> dict[str, NDArray[Any]]:
    """Every tensor by name. InvalidInput for a file that is damaged or asks for more than tensors."""
    if path.stat().st_size > MAX_BYTES:
        raise InvalidInput(f"{path}: more than {MAX_BYTES >> 20} MiB of weights", field="weights")
    stream = io.BytesIO(path.read_bytes())
    try:
        named, keys = _pickles(stream)
        storages = _read_storages(stream, named, keys)
        return {name: _view(tensor, storages[tensor.storage.key]) for name, tensor in named.items()}
    except InvalidInput as error:
        raise InvalidInput(f"{path}: {error.message}", field="weights") from None
    except Exception as error:  # a damaged pickle may raise anything
        raise InvalidInput(f"{path}: not weights that can be read ({error})", field="weights") from None


@dataclass(frozen=True, slots=True)
class _Storage:
    key: str
    dtype: np.dtype[Any]
    count: int


@dataclass(frozen=True, slots=True)
class _Tensor:
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Rebuild:
    """Stands for torch's own function. It has no attributes, so that a file can set none."""

    __slots__ = ()

    def __call__(self, *given: Any) -> _Tensor:
        storage, offset, shape, strides, *_ = given
        numbers = (offset, *shape, *strides)
        if not isinstance(storage, _Storage) or len(shape) != len(strides) or len(shape) > 8:
            raise InvalidInput("a tensor that is not described as torch describes them")
        if not all(type(number) is int and 0 <= number <= MAX_BYTES for number in numbers):
            raise InvalidInput("a tensor with sizes that cannot be")
        return _Tensor(storage, offset, tuple(shape), tuple(strides))


class _TensorsOnly(pickle.Unpickler):
    """Knows four names. Whatever else a file asks for (a function to call, say) is refused."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _Rebuild()
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        raise InvalidInput(f"it asks for {module[:64]}.{name[:64]}, which weights have no need of")

    def persistent_load(self, pid: Any) -> _Storage:
        kind, dtype, key, _location, count, view = pid
        plain = kind == "storage" and isinstance(key, str) and type(count) is int and view is None
        if not plain or not isinstance(dtype, np.dtype) or not 0 <= count <= MAX_BYTES:
            raise InvalidInput("a storage that is not described as torch describes them")
        return _Storage(key, dtype, count)


def _pickles(stream: io.BytesIO) -> tuple[dict[str, _Tensor], list[str]]:
    magic, protocol, machine, named, keys = (_unpickle(stream) for _ in range(5))
    if magic != _MAGIC or protocol != _PROTOCOL or machine.get("little_endian") is not True:
        raise InvalidInput("not a .pth file of the kind that torch wrote before 1.6")
    if not isinstance(named, dict) or not all(isinstance(tensor, _Tensor) for tensor in named.values()):
        raise InvalidInput("it holds more than tensors by name")
    return named, keys


def _unpickle(stream: io.BytesIO) -> Any:
    """The next pickle, after a look at its instructions: a memo of billions would take the memory for it."""
    start, length = stream.tell(), len(stream.getbuffer())
    for opcode, argument, _ in pickletools.genops(stream):
        if opcode.name.endswith("PUT") and not 0 <= (argument or 0) <= length:
            raise InvalidInput("it numbers more objects than it can hold")
    stream.seek(start)
    return _TensorsOnly(stream).load()


def _read_storages(stream: io.BytesIO, named: dict[str, _Tensor], keys: list[str]) -> dict[str, NDArray[Any]]:
    declared = {tensor.storage.key: tensor.storage for tensor in named.values()}
    found: dict[str, NDArray[Any]] = {}
    for key in keys:
        storage = declared[key]
        size = storage.count * storage.dtype.itemsize
        if int.from_bytes(stream.read(8), "little") != storage.count:
            raise InvalidInput(f"storage {key} has another length than its tensor says")
        data = stream.read(size)
        if len(data) != size:
            raise InvalidInput(f"it ends in the middle of storage {key}")
        found[key] = np.frombuffer(data, storage.dtype)
    return found


def _view(tensor: _Tensor, storage: NDArray[Any]) -> NDArray[Any]:
    """The tensor's numbers in the usual order: what was transposed on its way to torch has odd strides."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.strides, strict=True))
    numbers = math.prod(tensor.shape)  # more than the storage holds would be one number many times over
    if not 0 < numbers <= storage.size or tensor.offset + reach >= storage.size:
        raise InvalidInput("a tensor that reaches beyond its storage")
    strides = [stride * storage.itemsize for stride in tensor.strides]
    view = np.lib.stride_tricks.as_strided(storage[tensor.offset :], tensor.shape, strides, writeable=False)
    return np.array(view, order="C")
