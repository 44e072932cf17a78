"""Runs a model with the inputs that its clients do not send."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from carpool.backends.backend import Around, Backend
from carpool.config.model import DYNAMIC, ModelConfig, TensorSignature
from carpool.errors import ConfigError, InvalidInput
from carpool.extensions.inputs.settings import (
    KNOWN,
    MASK,
    FilledInput,
    InputSettings,
    constants,
    input_settings,
    mask_of,
)
from carpool.types import DATATYPES, Array

_CHANNELS = (1, 3)


def wrap(backend: Backend, config: ModelConfig) -> Backend:
    return FilledInputs(backend, config, input_settings(config))


class FilledInputs(Around):
    """Gives each batch the constants of the settings, and what follows from the picture itself."""

    def __init__(self, backend: Backend, config: ModelConfig, settings: InputSettings) -> None:
        super().__init__(backend)
        signature = backend.signature
        self._batched = bool(config.max_batch)
        self._outputs = tuple(tensor.name for tensor in config.outputs)
        self._known = tuple(tensor for tensor in signature.inputs if tensor.name in KNOWN)
        self.in_any_thread: bool = getattr(backend, "in_any_thread", False)
        self.device: str = getattr(backend, "device", "")  # that it shares with other models
        self._constants: dict[str, tuple[Array, bool]] = {}  # with whether each request gets a copy
        by_name = {tensor.name: tensor for tensor in signature.inputs}
        for name, constant in constants(settings, signature).items():
            masks = mask_of(name, settings) is not None and constant.name != name
            self._constants[name] = _constant(config, by_name[name], constant, masks=masks)

    def run(self, inputs: Mapping[str, Array], wanted: Sequence[str]) -> Mapping[str, Array]:
        given = dict(inputs)
        rows = len(next(iter(inputs.values()))) if inputs else 1
        for name, (value, each) in self._constants.items():
            given[name] = np.repeat(value[None], rows, axis=0) if each and self._batched else value
        for tensor in self._known:
            if tensor.name not in given:
                given[tensor.name] = self._follows(tensor, inputs)
        return self._backend.run(given, wanted or self._outputs)

    def _follows(self, tensor: TensorSignature, inputs: Mapping[str, Array]) -> Array:
        """Returns the value of an input that its name defines. Boxes of a model that gets the size of its own
        input are in pixels of that: where the picture lies in it is known, and they are mapped back."""
        picture = next((array for array in inputs.values() if array.ndim == 4), None)
        if picture is None:
            raise InvalidInput(f"the model needs the input {tensor.name!r}", field=tensor.name)
        height, width = picture.shape[2:] if picture.shape[1] in _CHANNELS else picture.shape[1:3]
        datatype = DATATYPES[tensor.datatype].dtype
        if tensor.name == MASK:
            sides = [height, width]
            shape = [
                own if own != DYNAMIC else side for own, side in zip(tensor.shape[-2:], sides, strict=True)
            ]
            return np.ones((len(picture), *shape), datatype)
        return np.full((len(picture), 2), (width, height), datatype)


def _constant(
    config: ModelConfig, tensor: TensorSignature, constant: FilledInput, *, masks: bool
) -> tuple[Array, bool]:
    """Returns the value, and whether each request gets a copy of it: a constant without the file's first
    dimension is that of one request. With it, it is given as it is, as texts beside pictures are."""
    where = f"{config.name}: [inputs.{constant.name}]"
    datatype = DATATYPES[tensor.datatype].dtype
    if constant.tokenized:
        from carpool.extensions.inputs.token_ids import token_ids

        folder = config.path if config.path.is_dir() else config.path.parent
        length = tensor.shape[-1] if len(tensor.shape) == 2 else DYNAMIC
        ids, mask = token_ids(constant, _places(config, folder), length, where)
        value = (mask if masks else ids).astype(datatype)
    else:
        try:
            value = np.asarray(json.loads(constant.value)).astype(datatype)
        except ValueError:
            raise ConfigError(f"{where} value has rows of different lengths") from None
    whole, one = tensor.shape, tensor.shape[1:]
    if value.ndim == 0:
        if DYNAMIC in one:
            raise ConfigError(f"{where} value must have the shape {list(one)}, without the batch")
        return np.broadcast_to(value, one), True
    if _fits(value, whole):
        return value, False
    if _fits(value, one):
        return (value, True) if config.max_batch else (value[None], False)
    raise ConfigError(
        f"{where} has the shape {list(value.shape)}, and the input is {list(whole)}: give it whole, or "
        "without its first dimension for one request"
    )


def _fits(value: Array, shape: tuple[int, ...]) -> bool:
    return value.ndim == len(shape) and all(
        side in (DYNAMIC, actual) for side, actual in zip(shape, value.shape, strict=True)
    )


def _places(config: ModelConfig, folder: Path) -> list[Path]:
    """Returns where files beside the model's may lie: its folder, and those of its versions."""
    versions = sorted((one for one in folder.iterdir() if one.is_dir() and one.name.isdigit()), reverse=True)
    file = [(folder / config.file).parent] if config.file else []
    return [*file, *versions, folder]
