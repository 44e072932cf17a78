"""Runs TensorFlow's SavedModels, by the functions that they sign."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from carpool.errors import ModelError
from carpool.types import DATATYPES, Array

_NAMES = {datatype.dtype.name: name for name, datatype in DATATYPES.items() if name not in ("BF16", "BYTES")}
_NAMES |= {"string": "BYTES"}
_MAIN = "serving_default"


class Model:
    def setup(self, settings: Mapping[str, Any]) -> None:
        import tensorflow

        tensorflow.config.threading.set_intra_op_parallelism_threads(settings["threads"] or 1)
        tensorflow.config.threading.set_inter_op_parallelism_threads(1)
        loaded = tensorflow.saved_model.load(str(Path(settings["file"]).parent))
        if not loaded.signatures:
            raise ModelError("it has no function with a signature")
        key = _MAIN if _MAIN in loaded.signatures else next(iter(loaded.signatures))
        self._loaded, self._function, self._tensor = loaded, loaded.signatures[key], tensorflow.constant
        self.tensors = (
            [_described(name, spec) for name, spec in self._function.structured_input_signature[1].items()],
            [_described(name, spec) for name, spec in self._function.structured_outputs.items()],
        )

    def predict(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        answer = self._function(**{name: self._tensor(array) for name, array in inputs.items()})
        return {name: np.asarray(tensor.numpy()) for name, tensor in answer.items()}


def _described(name: str, spec: Any) -> tuple[str, str, list[int]]:
    if spec.shape.rank is None:
        raise ModelError(f'the tensor "{name}" has no fixed number of dimensions')
    datatype = _NAMES.get(spec.dtype.name, spec.dtype.name)
    return name, datatype, [-1 if dim is None else dim for dim in spec.shape.as_list()]
