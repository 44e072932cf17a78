"""Runs TensorFlow Lite files on LiteRT."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from carpool.errors import ModelError
from carpool.types import DATATYPES, Array

_NAMES = {datatype.dtype: name for name, datatype in DATATYPES.items() if name not in ("BF16", "BYTES")}
_MAIN = "serving_default"


class Model:
    """Whole numbers that stand for others (quantised ones) are answered as the FP32 that they stand for, and
    taken so unless they are UINT8, which are the pixels of a picture. `quantized = "raw"` leaves them."""

    def setup(self, settings: Mapping[str, Any]) -> None:
        from ai_edge_litert.interpreter import Interpreter

        self._interpreter = Interpreter(model_path=settings["file"], num_threads=settings["threads"] or 1)
        self._interpreter.allocate_tensors()
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._raw = settings["parameters"].get("quantized") == "raw"
        self._inputs, self._outputs = self._named()
        self.tensors = (
            [
                (name, self._datatype(it, taken=True), it["shape_signature"])
                for name, it in self._inputs.items()
            ],
            [(name, self._datatype(it), it["shape_signature"]) for name, it in self._outputs.items()],
        )

    def _named(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the tensors by the names of the file's signature where it has one: those of tensors say
        less."""
        signatures = self._interpreter.get_signature_list()
        try:
            if signatures:
                key = _MAIN if _MAIN in signatures else next(iter(signatures))
                runner = self._interpreter.get_signature_runner(key)
                return runner.get_input_details(), runner.get_output_details()
            inputs, outputs = self._interpreter.get_input_details(), self._interpreter.get_output_details()
        except ValueError:
            raise ModelError("it has a tensor of a datatype that this backend does not support") from None
        return {it["name"]: it for it in inputs}, {it["name"]: it for it in outputs}

    def _datatype(self, tensor: Mapping[str, Any], *, taken: bool = False) -> str:
        if self._stands_for_others(tensor, taken=taken):
            return "FP32"
        if issubclass(tensor["dtype"], np.bytes_):
            return "BYTES"
        dtype: np.dtype[Any] = np.dtype(tensor["dtype"])
        return _NAMES.get(dtype) or str(dtype.name)

    def _stands_for_others(self, tensor: Mapping[str, Any], *, taken: bool = False) -> bool:
        scaled = len(tensor["quantization_parameters"]["scales"]) == 1
        whole = issubclass(tensor["dtype"], np.integer) and not (taken and tensor["dtype"] is np.uint8)
        return scaled and whole and not self._raw

    def predict(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        shapes = {name: array.shape for name, array in inputs.items()}
        if shapes != self._shapes:
            self._shapes = {}  # should this fail halfway, the next batch begins anew
            for name, shape in shapes.items():
                self._interpreter.resize_tensor_input(self._inputs[name]["index"], shape, strict=True)
            self._interpreter.allocate_tensors()
            self._shapes = shapes
        for name, array in inputs.items():
            tensor = self._inputs[name]
            self._interpreter.set_tensor(tensor["index"], self._to_whole(array, tensor))
        self._interpreter.invoke()
        return {
            name: self._from_whole(self._interpreter.get_tensor(tensor["index"]), tensor)
            for name, tensor in self._outputs.items()
        }

    def _to_whole(self, array: Array, tensor: Mapping[str, Any]) -> Array:
        if not self._stands_for_others(tensor, taken=True):
            return array
        scale, zero = tensor["quantization"]
        limits = np.iinfo(tensor["dtype"])
        whole: Array = np.clip(np.rint(array / scale) + zero, limits.min, limits.max)
        return whole.astype(tensor["dtype"])

    def _from_whole(self, array: Array, tensor: Mapping[str, Any]) -> Array:
        if not self._stands_for_others(tensor):
            return array
        scale, zero = tensor["quantization"]
        return (array.astype(np.float32) - np.float32(zero)) * np.float32(scale)
