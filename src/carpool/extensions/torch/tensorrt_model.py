"""TensorRT's engines; the GPU's memory is PyTorch's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from carpool.errors import ModelError
from carpool.types import Array

_NAMES = {"FLOAT": "FP32", "HALF": "FP16"}  # the others are called as in the v2 protocol
_TORCH = {"FP32": "float32", "FP16": "float16", "BOOL": "bool"}  # the others: in small letters


class Model:
    def setup(self, settings: Mapping[str, Any]) -> None:
        import tensorrt
        import torch

        if not torch.cuda.is_available():
            raise ModelError("PyTorch, which gives TensorRT its memory, finds no GPU")
        self._torch, self._device = torch, f"cuda:{settings['gpu'] or 0}"
        torch.cuda.set_device(self._device)
        # Kept, since the engine needs both for as long as it lives.
        self._logger = tensorrt.Logger(tensorrt.Logger.ERROR)
        self._runtime = tensorrt.Runtime(self._logger)
        self._engine = self._runtime.deserialize_cuda_engine(Path(settings["file"]).read_bytes())
        if self._engine is None:
            raise ModelError(
                f"TensorRT {tensorrt.__version__} cannot read it: an engine runs only on the kind of GPU and "
                "with the version that it was built for"
            )
        self._context = self._engine.create_execution_context()
        names = [self._engine.get_tensor_name(index) for index in range(self._engine.num_io_tensors)]
        taken = [n for n in names if self._engine.get_tensor_mode(n) == tensorrt.TensorIOMode.INPUT]
        self._answered = [name for name in names if name not in taken]
        self.tensors = [self._described(n) for n in taken], [self._described(n) for n in self._answered]

    def _described(self, name: str) -> tuple[str, str, list[int]]:
        return name, self._datatype(name), list(self._engine.get_tensor_shape(name))

    def _datatype(self, name: str) -> str:
        said: str = self._engine.get_tensor_dtype(name).name
        return _NAMES.get(said, said)

    def predict(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        torch, held = self._torch, {}
        for name, array in inputs.items():
            held[name] = torch.from_numpy(array.copy()).to(self._device)
            if not self._context.set_input_shape(name, array.shape):
                raise ModelError(f"the engine was not built for {name} of shape {list(array.shape)}")
        for name in self._answered:
            shape = tuple(self._context.get_tensor_shape(name))
            datatype = self._datatype(name)
            kind = getattr(torch, _TORCH.get(datatype, datatype.lower()))
            held[name] = torch.empty(shape, dtype=kind, device=self._device)
        for name, tensor in held.items():
            self._context.set_tensor_address(name, tensor.data_ptr())
        stream = torch.cuda.current_stream()
        if not self._context.execute_async_v3(stream.cuda_stream):
            raise ModelError("TensorRT did not run the batch")
        stream.synchronize()
        return {name: held[name].cpu().numpy() for name in self._answered}
