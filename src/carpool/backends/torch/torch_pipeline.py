"""A network between the tensors that clients see and its own: bytes become values, precisions are converted.

All of it is one module, so that it is compiled and captured as one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from carpool.backends.torch_datatypes import PRECISIONS, TORCH_TYPES
from carpool.backends.torch_names import Call, flatten, places_of
from carpool.config.model import ImageSettings, ModelConfig, TensorConfig
from carpool.config.pixels import values_on_device
from carpool.types import DATATYPES, Datatype

Convert = Callable[[torch.Tensor], torch.Tensor]


class Feed:
    """Calls a network with the inputs of the settings, in their order, as they are carried."""

    def __init__(
        self, config: ModelConfig, network: torch.nn.Module, call: Call, place: torch.device
    ) -> None:
        self._network = network
        self._call = call
        self._inputs = [tensor.name for tensor in config.inputs]
        self._converts = [_input(config, tensor, place) for tensor in config.inputs]

    def __call__(self, *given: torch.Tensor) -> Any:
        inputs = {
            name: convert(tensor)
            for name, convert, tensor in zip(self._inputs, self._converts, given, strict=True)
        }
        by_name = {name: inputs[name] for name in self._call.by_name}
        return self._network(*(inputs[name] for name in self._call.by_place), **by_name)


class Pipeline(torch.nn.Module):
    """Takes the inputs as they are carried, and answers the outputs of the settings likewise."""

    def __init__(
        self, config: ModelConfig, network: torch.nn.Module, call: Call, place: torch.device
    ) -> None:
        super().__init__()
        self.network = network
        self._feed = Feed(config, network, call, place)
        self._model = config.name
        self._outputs = config.outputs
        self._names = [tensor.name for tensor in config.outputs]
        self._batched = config.max_batch != 0
        self._places: list[int] = []

    def forward(self, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = flatten(self._feed(*given))
        if not self._places:  # the first answer tells; compilers come later
            self._places = places_of(self._model, self._names, [key for key, _ in found])
        return tuple(
            self._answered(found[place][1], config)
            for place, config in zip(self._places, self._outputs, strict=True)
        )

    def _answered(self, tensor: torch.Tensor, config: TensorConfig) -> torch.Tensor:
        """Floats in the datatype that is declared; whatever else differs, the engine names."""
        datatype = DATATYPES[config.datatype]
        if tensor.is_floating_point() and TORCH_TYPES[datatype].is_floating_point:
            tensor = tensor.to(TORCH_TYPES[datatype])
        if config.reshape is not None:
            tensor = tensor.reshape((tensor.shape[0], *config.dims) if self._batched else config.dims)
        tensor = tensor.contiguous()
        return tensor.view(torch.uint16) if tensor.dtype is torch.bfloat16 else tensor


def _input(config: ModelConfig, tensor: TensorConfig, place: torch.device) -> Convert:
    precision = PRECISIONS[config.pytorch.precision]
    values = _values(config.image, tensor, place) if config.image and values_on_device(config) else None
    bits = DATATYPES[tensor.datatype] is Datatype.BF16
    batched = config.max_batch != 0

    def convert(x: torch.Tensor) -> torch.Tensor:
        if bits:
            x = x.view(torch.bfloat16)
        if tensor.reshape is not None:
            x = x.reshape((x.shape[0], *tensor.reshape) if batched else tensor.reshape)
        if values is not None:
            x = values(x)
        if not x.is_floating_point():
            return x
        x = x.to(precision)
        if config.pytorch.channels_last and x.dim() == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        return x

    return convert


def _values(image: ImageSettings, tensor: TensorConfig, place: torch.device) -> Convert:
    """(pixel × scale − mean) ÷ std, as one multiplication and one addition in single precision."""
    std = torch.tensor(image.std, dtype=torch.float64)
    mean = torch.tensor(image.mean, dtype=torch.float64)
    gain = torch.full_like(std, 1.0 if image.scale is None else image.scale) / std
    gain, bias = (part.float().reshape(-1, 1, 1).to(place) for part in (gain, -mean / std))
    side_by_side = _layout(image, tensor) == "nhwc"
    to_planes = side_by_side and image.layout != "nhwc"  # networks take planes, unless [image] says otherwise

    def values(x: torch.Tensor) -> torch.Tensor:
        planes = x.movedim(-1, -3) if side_by_side else x
        made = torch.addcmul(bias, planes.float(), gain)
        return made.movedim(-3, -1) if side_by_side and not to_planes else made

    return values


def _layout(image: ImageSettings, tensor: TensorConfig) -> str:
    """Of the pixels as they come: told, or planes if the first of three dimensions can be channels."""
    told = image.layout or tensor.layout
    return told or ("nchw" if tensor.dims[-3] in (1, 3) else "nhwc")


def compile_pipeline(pipeline: Pipeline, mode: str) -> Callable[..., Any]:
    """Compiled anew for each batch size, when it first comes; CUDA graphs are ours, not the compiler's."""
    torch._dynamo.config.cache_size_limit = max(128, torch._dynamo.config.cache_size_limit)
    named = None if mode == "default" else f"{mode}-no-cudagraphs"
    return torch.compile(pipeline, dynamic=False, mode=named)
