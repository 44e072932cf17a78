"""TensorFlow Serving's documents: instances or inputs to tensors, and tensors to predictions or outputs.

Pure functions. A row of `instances` is one item of the batch; `inputs` has the tensors as columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson

from carpool.config.rules import shown
from carpool.errors import InvalidInput
from carpool.frontend.http.image_reading import MAX_PICTURES
from carpool.frontend.pictures.sent_pictures import from_base64
from carpool.types import Datatype, Signature, TensorSpec
from carpool.wire.head import load_object

_KNOWN = ("instances", "inputs", "signature_name")
_SIGNATURE = "serving_default"
_DEEPEST = 32
_TYPES: Mapping[Datatype, str] = {
    Datatype.BOOL: "DT_BOOL",
    Datatype.UINT8: "DT_UINT8",
    Datatype.UINT16: "DT_UINT16",
    Datatype.UINT32: "DT_UINT32",
    Datatype.UINT64: "DT_UINT64",
    Datatype.INT8: "DT_INT8",
    Datatype.INT16: "DT_INT16",
    Datatype.INT32: "DT_INT32",
    Datatype.INT64: "DT_INT64",
    Datatype.FP16: "DT_HALF",
    Datatype.BF16: "DT_BFLOAT16",
    Datatype.FP32: "DT_FLOAT",
    Datatype.FP64: "DT_DOUBLE",
    Datatype.BYTES: "DT_STRING",
}


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: rows or columns; or images, where all rows are in base64."""

    rows: Sequence[Any] = ()
    columns: Any = None
    images: list[bytes] = field(default_factory=list)


def read_request(body: bytes | bytearray) -> Asked:
    document = load_object(body, "request", tensors=False)
    for name in document:
        if name not in _KNOWN:
            raise InvalidInput(f"unknown {shown(name)}; known are {', '.join(_KNOWN)}", field=name[:64])
    if document.get("signature_name") not in (None, "", _SIGNATURE):
        raise InvalidInput(f"signature_name must be {_SIGNATURE}", field="signature_name")
    if ("instances" in document) == ("inputs" in document):
        raise InvalidInput("give either instances or inputs", field="instances")
    if "inputs" in document:
        if document["inputs"] is None:
            raise InvalidInput("inputs must be tensors", field="inputs")
        return Asked(columns=document["inputs"])
    rows = document["instances"]
    if not isinstance(rows, list) or not rows:
        raise InvalidInput("instances must be a list of at least one", field="instances")
    texts = [_base64_of(row) for row in rows]
    if any(text is None for text in texts):
        return Asked(rows)
    if len(rows) > MAX_PICTURES:
        raise InvalidInput(f"instances may have at most {MAX_PICTURES} images", field="instances")
    where = (f"instances[{number}]" for number in range(len(texts)))
    return Asked(
        rows, images=[from_base64(text or "", name) for name, text in zip(where, texts, strict=True)]
    )


def _base64_of(row: object) -> str | None:
    """Returns the text of {"b64": text}, also as the only input of a row."""
    if isinstance(row, dict) and len(row) == 1:
        [(name, inside)] = row.items()
        if name == "b64":
            return inside if isinstance(inside, str) else None
        return _base64_of(inside) if isinstance(inside, dict) and "b64" in inside else None
    return None


def tensors_of(asked: Asked, signature: Signature) -> bytes:
    """Returns the same as a request of the v2 protocol."""
    columns = asked.columns if asked.columns is not None else _columns(asked.rows, signature)
    if not isinstance(columns, dict):
        columns = {_only(signature).name: columns}
    specs = signature.input_named
    inputs = []
    for name, data in columns.items():
        if name not in specs:
            known = ", ".join(specs)
            raise InvalidInput(f"unknown input {shown(name)}; this model has {known}", field=name[:64])
        shape = _shape(data, name)
        inputs.append({"name": name, "datatype": specs[name].datatype.value, "shape": shape, "data": data})
    return orjson.dumps({"inputs": inputs})


def _only(signature: Signature) -> TensorSpec:
    if len(signature.inputs) != 1:
        names = ", ".join(spec.name for spec in signature.inputs)
        raise InvalidInput(f"name the inputs of this model: {names}", field="inputs")
    return signature.inputs[0]


def _columns(rows: Sequence[Any], signature: Signature) -> dict[str, Any]:
    """Returns rows as columns."""
    if not isinstance(rows[0], dict):
        return {_only(signature).name: list(rows)}
    names = rows[0].keys()
    if any(not isinstance(row, dict) or row.keys() != names for row in rows):
        raise InvalidInput("all instances must have the same inputs", field="instances")
    return {name: [row[name] for row in rows] for name in names}


def _shape(data: object, name: str) -> list[int]:
    """Returns the shape of nested lists by their first elements: that the others agree is checked later."""
    shape: list[int] = []
    while isinstance(data, list) and data and len(shape) < _DEEPEST:
        shape.append(len(data))
        data = data[0]
    if not shape or isinstance(data, list | dict):
        raise InvalidInput(f"{shown(name)} must be nested lists of numbers or texts", field=name[:64])
    return shape


def told(asked: Asked, answer: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the outputs in the form in which the inputs came."""
    arrays = {one["name"]: _nested(one) for one in answer["outputs"]}
    if asked.columns is not None:
        return {"outputs": arrays if len(arrays) > 1 else next(iter(arrays.values()))}
    if len(arrays) == 1:
        return {"predictions": next(iter(arrays.values()))}
    rows = zip(*arrays.values(), strict=True)
    return {"predictions": [dict(zip(arrays, row, strict=True)) for row in rows]}


def _nested(output: Mapping[str, Any]) -> Any:
    return np.array(output["data"], object).reshape(output["shape"]).tolist()


def status(versions: Sequence[str]) -> dict[str, Any]:
    fine = {"error_code": "OK", "error_message": ""}
    return {
        "model_version_status": [{"version": one, "state": "AVAILABLE", "status": fine} for one in versions]
    }


def metadata(name: str, version: str, signature: Signature) -> dict[str, Any]:
    inputs, outputs = (
        {spec.name: _described(spec, signature.max_batch) for spec in specs}
        for specs in (signature.inputs, signature.outputs)
    )
    known = {"inputs": inputs, "outputs": outputs, "method_name": "tensorflow/serving/predict"}
    return {
        "model_spec": {"name": name, "signature_name": "", "version": version},
        "metadata": {"signature_def": {"signature_def": {_SIGNATURE: known}}},
    }


def _described(spec: TensorSpec, max_batch: int) -> dict[str, Any]:
    sides = [{"size": str(side), "name": ""} for side in spec.full_shape(max_batch)]
    kind = _TYPES.get(spec.datatype, "DT_INVALID")
    return {"dtype": kind, "tensor_shape": {"dim": sides, "unknown_rank": False}, "name": spec.name}
