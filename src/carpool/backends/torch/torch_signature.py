"""What clients are told about a PyTorch model's tensors: from an exported file, or by running it once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from carpool.backends.torch.torch_device import DATATYPE_OF, FLOATS, TORCH_TYPES, carried
from carpool.backends.torch.torch_files import in_one_line, open_module
from carpool.backends.torch.torch_network import (
    INPUT,
    OUTPUT,
    Feed,
    Named,
    call_for,
    exported_inputs,
    flatten,
    names_of,
    numbers,
)
from carpool.config.model import (
    DYNAMIC,
    ImageSettings,
    ModelConfig,
    ModelSignature,
    TensorConfig,
    TensorSignature,
    values_on_device,
    values_told,
)
from carpool.errors import ModelError, Unsupported
from carpool.types import DATATYPES, Datatype

_TRIED = 2  # images of the trial, so that the batch can be told from other dimensions
_CHANNELS = 3


def signature_of(config: ModelConfig, file: Path) -> ModelSignature:
    """Empty where the settings declare everything and the file says nothing more."""
    if config.inputs and config.outputs and not is_exported(config, file):
        return ModelSignature()
    if not config.inputs and not is_exported(config, file) and assumed_input(config) is None:
        return ModelSignature()  # it is then said that they must be declared
    module, exported = open_module(config, file)
    if exported is not None:
        return _exported(config, exported)
    return _tried(config, module)


def is_exported(config: ModelConfig, file: Path) -> bool:
    return file.suffix == ".pt2" and config.pytorch.module is None


def assumed(config: ModelConfig, file: Path) -> ModelConfig:
    """Networks take floats: pixels that nobody says anything about run from 0 to 1, as everywhere."""
    image = config.image
    if config.inputs or image is None or is_exported(config, file) or assumed_input(config) is None:
        return config
    return config if values_told(image) else replace(config, image=replace(image, scale=1 / 255))


def assumed_input(config: ModelConfig) -> TensorConfig | None:
    """Settings for pictures of a known size are enough: one input of bytes."""
    image = config.image
    if image is None or image.size is None:
        return None
    dims = (*image.size, _CHANNELS) if image.layout == "nhwc" else (_CHANNELS, *image.size)
    return TensorConfig(INPUT.format(0), Datatype.UINT8.value, dims)


# ---- exported programs ----------------------------------------------------------------------------------


def _exported(config: ModelConfig, exported: Any) -> ModelSignature:
    by_place, by_name = exported_inputs(config.name, exported)
    nodes = {node.name: node for node in exported.graph.nodes if node.op == "placeholder"}
    inputs = [_found(config, name, nodes[name].meta["val"]) for name in (*by_place, *by_name)]
    answered = next(node for node in exported.graph.nodes if node.op == "output").args[0]
    count = len(exported.graph_signature.user_outputs)
    values = [node.meta["val"] for node in list(answered)[-count:] if isinstance(node, torch.fx.Node)]
    names = _exported_outputs(exported, len(values))
    outputs = [_found(config, name, value) for name, value in zip(names, values, strict=True)]
    return ModelSignature(
        _as_declared(config, config.inputs, inputs), _as_declared(config, config.outputs, outputs)
    )


def _exported_outputs(exported: Any, count: int) -> list[str]:
    """The keys of a dict; nodes of the graph have names too, but they say nothing to anybody."""
    spec = exported.call_spec.out_spec
    keys = spec.context if spec.type is dict else ()
    if len(keys) == count and all(isinstance(key, str) for key in keys):
        return list(keys)
    return [OUTPUT.format(number) for number in range(count)]


def _found(config: ModelConfig, name: str, value: Any) -> TensorSignature:
    if not isinstance(value, torch.Tensor) or value.dtype not in DATATYPE_OF:
        raise Unsupported(f'{config.name}: "{name}" is no tensor that the v2 protocol can carry')
    datatype = DATATYPE_OF[value.dtype]
    shape = tuple(side if isinstance(side, int) else DYNAMIC for side in value.shape)
    return TensorSignature(name, _answered(datatype), shape)


def _answered(datatype: Datatype) -> str:
    """Clients see FP32, whichever float the network computes with, unless the settings say otherwise."""
    return str((Datatype.FP32 if datatype in FLOATS else datatype).value)


def _as_declared(
    config: ModelConfig, declared: Sequence[TensorConfig], found: Sequence[TensorSignature]
) -> tuple[TensorSignature, ...]:
    """With the names, floats and bytes of the settings, which are converted on the way."""
    places = numbers([tensor.name for tensor in declared])
    if places is not None and len(places) == len(found) and declared:
        by_place = sorted(zip(places, declared, strict=True), key=lambda pair: pair[0])
        found = [_renamed(tensor, told.name) for tensor, (_, told) in zip(found, by_place, strict=True)]
    by_name = {tensor.name: tensor for tensor in declared}
    return tuple(_converted(config, tensor, by_name) for tensor in found)


def _renamed(tensor: TensorSignature, name: str) -> TensorSignature:
    return TensorSignature(name, tensor.datatype, tensor.shape, tensor.optional)


def _converted(
    config: ModelConfig, tensor: TensorSignature, declared: Mapping[str, TensorConfig]
) -> TensorSignature:
    told = declared.get(tensor.name)
    if told is None or tensor.datatype != Datatype.FP32.value:
        return tensor
    bytes_in = tensor.name in {t.name for t in config.inputs} and values_on_device(config)
    if not bytes_in and DATATYPES[told.datatype] not in FLOATS:
        return tensor
    shape = tensor.shape
    if bytes_in and config.image is not None and _turned(config.image, told, shape):
        shape = (*shape[:-3], *shape[-2:], shape[-3])
    return TensorSignature(tensor.name, told.datatype, shape)


def _turned(image: ImageSettings, told: TensorConfig, shape: Sequence[int]) -> bool:
    """Pixels side by side for a network that takes planes: they are turned on the device."""
    return image.layout is None and len(shape) >= 3 and told.dims[-3:] == (*shape[-2:], shape[-3])


# ---- networks that say nothing --------------------------------------------------------------------------


def _tried(config: ModelConfig, module: torch.nn.Module) -> ModelSignature:
    assumed = assumed_input(config)
    inputs = config.inputs or ((assumed,) if assumed else ())
    batched = config.max_batch != 0
    found = _run_once(config, module, inputs, batched)
    names = names_of([key for key, _ in found])
    outputs = tuple(_found(config, name, tensor) for name, (_, tensor) in zip(names, found, strict=True))
    if batched:
        outputs = tuple(_with_batch(tensor) for tensor in outputs)
    told = () if config.inputs else tuple(_whole(tensor, batched) for tensor in inputs)
    return ModelSignature(told, () if config.outputs else outputs)


def _run_once(
    config: ModelConfig, module: torch.nn.Module, inputs: Sequence[TensorConfig], batched: bool
) -> Sequence[Named]:
    """On zeros, on the CPU, in full precision: only names and shapes matter."""
    plain = replace(config.pytorch, precision="fp32", channels_last=False)
    trial = replace(config, inputs=tuple(inputs), pytorch=plain)
    given = []
    for tensor in inputs:
        datatype = DATATYPES[tensor.datatype]
        if DYNAMIC in tensor.dims or datatype not in TORCH_TYPES:
            return []  # it is then said that the outputs must be declared
        shape = (_TRIED, *tensor.dims) if batched else tensor.dims
        given.append(torch.zeros(shape, dtype=carried(datatype)))
    call = call_for(config.name, [tensor.name for tensor in inputs], module, None)
    try:
        with torch.inference_mode():
            return flatten(Feed(trial, module.float(), call, torch.device("cpu"))(*given))
    except Exception as error:  # a network may raise anything
        raise ModelError(f"{config.name}: it cannot be run on zeros: {in_one_line(error)}") from None


def _with_batch(tensor: TensorSignature) -> TensorSignature:
    shape = tensor.shape
    if shape[:1] == (_TRIED,):
        shape = (DYNAMIC, *shape[1:])
    return TensorSignature(tensor.name, tensor.datatype, shape)


def _whole(tensor: TensorConfig, batched: bool) -> TensorSignature:
    shape = (DYNAMIC, *tensor.dims) if batched else tensor.dims
    return TensorSignature(tensor.name, tensor.datatype, shape)
