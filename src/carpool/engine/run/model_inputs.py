"""Describes what a model takes: its signature, and whether given arrays fit it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from carpool.config.model import ModelConfig, TensorConfig
from carpool.errors import InvalidInput
from carpool.types import DATATYPES, Array, Datatype, Signature, TensorSpec


def signature_of(config: ModelConfig) -> Signature:
    """Returns what the engine checks requests against; the settings are complete."""

    def specs(tensors: Sequence[TensorConfig]) -> tuple[TensorSpec, ...]:
        return tuple(TensorSpec(t.name, DATATYPES[t.datatype], t.dims, t.optional) for t in tensors)

    tensors = specs(config.inputs), specs(config.outputs)
    return Signature(config.name, *tensors, config.max_batch or 0, unbatched=config.unbatched)


def shape_key(signature: Signature, arrays: Mapping[str, Array]) -> tuple[Any, ...] | None:
    """Returns what must be equal to share a batch: only what may vary in shape, or be left out, can
    differ."""
    varying = [spec.name for spec in signature.inputs if spec.optional or -1 in spec.shape]
    if not varying:
        return None
    return tuple(arrays[name].shape[1:] if name in arrays else None for name in varying)


def only_input(signature: Signature) -> TensorSpec:
    if len(signature.inputs) != 1:
        names = ", ".join(spec.name for spec in signature.inputs)
        raise InvalidInput(f"{signature.model} has several inputs ({names}): give them by name")
    return signature.inputs[0]


def check_inputs(signature: Signature, given: Mapping[str, Array]) -> tuple[dict[str, Array], bool]:
    """Returns arrays with their batch dimension, and whether we added it."""
    for name in given:
        if name not in signature.input_named:
            raise InvalidInput(f"{signature.model} has no input {name!r}", field=name)
    arrays: dict[str, Array] = {}
    added = set()
    for spec in signature.inputs:
        if spec.name not in given and spec.optional:
            continue
        if spec.name not in given:
            raise InvalidInput(f"{signature.model} needs the input {spec.name!r}", field=spec.name)
        array = np.asarray(given[spec.name])
        if array.dtype != spec.datatype.dtype:
            hint = " (an array of bytes objects)" if spec.datatype is Datatype.BYTES else ""
            said = f"input {spec.name!r} must be {spec.datatype.value}{hint}, not {array.dtype}"
            raise InvalidInput(said, field=spec.name)
        alone = bool(signature.max_batch) and array.ndim == len(spec.shape)
        added.add(alone)
        arrays[spec.name] = array[np.newaxis] if alone else array
        _check_shape(spec, arrays[spec.name], signature)
    if not arrays and signature.max_batch:
        raise InvalidInput(f"{signature.model} needs at least one of its inputs")
    if len({len(array) for array in arrays.values()} if signature.max_batch else {1}) > 1 or len(added) > 1:
        raise InvalidInput(f"the inputs of {signature.model} hold different numbers of images")
    return arrays, added == {True}


def _check_shape(spec: TensorSpec, array: Array, signature: Signature) -> None:
    expected = spec.full_shape(signature.max_batch)
    if array.ndim != len(expected) or any(
        want not in (-1, got) for want, got in zip(expected, array.shape, strict=True)
    ):
        raise InvalidInput(
            f"input {spec.name!r} must have the shape {list(expected)}, not {list(array.shape)}",
            field=spec.name,
        )
    if signature.max_batch and not 1 <= len(array) <= signature.max_batch:
        raise InvalidInput(
            f"{signature.model} takes 1 to {signature.max_batch} images at once, not {len(array)}",
            field=spec.name,
        )
