"""Runs PyTorch models: TorchScript, exported programs, and a Python file with its weights. See
docs/gpu.md."""

from __future__ import annotations

import importlib
import logging
from dataclasses import replace
from typing import Any, cast

from carpool.backends.backend import Backend, FillPictures, Finish, Placement
from carpool.config.asked_extensions import asked_extensions
from carpool.config.completing import complete
from carpool.config.model import InstanceKind, ModelConfig, ModelSignature
from carpool.config.repository import ModelVersion
from carpool.errors import ConfigError, Unsupported

_log = logging.getLogger(__name__)
_HERE = "carpool.extensions.torch"


def load(config: ModelConfig, version: ModelVersion, placement: Placement) -> Backend:
    return cast(Backend, _home(config, "torch_backend").load(config, version.file, placement))


def read_signature(config: ModelConfig, version: ModelVersion) -> ModelSignature:
    return cast(ModelSignature, _home(config, "torch_network").signature_of(config, version.file))


def describe(config: ModelConfig, version: ModelVersion) -> ModelConfig:
    """Complete, and with nothing left to be chosen about the device, the batch sizes and the precision."""
    config = _home(config, "torch_network").assumed(config, version.file)
    config = complete(config, read_signature(config, version))
    filled = {name for extension in asked_extensions(config) for name in extension.known_inputs}
    for tensor in config.inputs + config.outputs:
        if tensor.datatype == "BYTES" or (tensor.optional and tensor.name not in filled):
            kind = "optional" if tensor.optional else "BYTES"
            raise Unsupported(
                f'{config.name}: "{tensor.name}" is {kind}, and PyTorch models have no such tensors'
            )
        if tensor.reshape is not None:
            raise Unsupported(
                f'{config.name}: "{tensor.name}" has a reshape, which PyTorch models do not take: give the'
                " shape that the network has, or reshape in the network itself"
            )
    used, device = config.pytorch, device_of(config, config.pytorch.device)
    on_gpu = device != "cpu"
    graphs = on_gpu if used.graphs is None else used.graphs
    last = on_gpu and used.precision in ("fp16", "bf16") if used.channels_last is None else used.channels_last
    buckets = _buckets(config, graphs)
    settled = replace(used, device=device, channels_last=last, graphs=graphs, buckets=buckets)
    return replace(config, pytorch=settled)


def fill_pictures(device: Any, *how: Any) -> FillPictures:
    """Returns what decodes pictures on this device; `how` is the rest of what a `DevicePictures` takes."""
    pictures = importlib.import_module(f"{_HERE}.torch_pictures")  # with torch, which is loaded
    return cast(FillPictures, pictures.DevicePictures(device, *how))


def kept_boxes(*form: Any) -> Finish:
    """Returns what finds the boxes to keep on the device; `form` are the fields of a `BoxForm`."""
    pictures = importlib.import_module(f"{_HERE}.torch_pictures")  # with torch, which is loaded
    return cast(Finish, pictures.KeptBoxes(pictures.BoxForm(*form)))


def decodes_pictures() -> bool:
    """Returns whether the GPU's chip decodes; asked only for a model that has loaded torch."""
    pictures = importlib.import_module(f"{_HERE}.torch_pictures")
    torch = importlib.import_module("torch")
    return bool(pictures.can_decode(torch.device("cuda")))


def devices(config: ModelConfig) -> tuple[int, ...]:
    """Returns the GPUs that this model may run on; none: the CPU. The settings are settled."""
    device = config.pytorch.device
    if device == "cpu":
        return ()
    _, _, number = device.partition(":")
    return (int(number),) if number else tuple(range(_gpus(config)))


def device_names(config: ModelConfig) -> tuple[str, ...]:
    import torch

    return tuple(torch.cuda.get_device_name(index) for index in devices(config))


def device_of(config: ModelConfig, asked: str, key: str = "pytorch.device") -> str:
    """Returns the device that a setting asks for, as far as this machine has it."""
    if asked == "cpu" or all(group.kind is InstanceKind.CPU for group in config.instances):
        return "cpu"
    gpus = _gpus(config)
    if not gpus:
        if asked != "auto":
            _log.warning(
                "%s: runs on the CPU: %s was asked for, and PyTorch finds no GPU", config.name, asked
            )
        return "cpu"
    number = asked.partition(":")[2]
    if number and int(number) >= gpus:
        raise ConfigError(f"{config.name}: {key} is {asked}, but there are {gpus} GPUs, numbered from 0")
    return "cuda" if asked == "auto" else asked


def _buckets(config: ModelConfig, graphs: bool) -> tuple[int, ...]:
    """The batch sizes that run; none: every size as it comes, where nothing is prepared for sizes."""
    used, largest = config.pytorch, config.max_batch or 0
    varies = any(-1 in tensor.dims for tensor in config.inputs)
    if not largest or varies or not (graphs or used.buckets or used.compile != "off"):
        return ()
    for size in used.buckets:
        if size > largest:
            raise ConfigError(
                f"{config.name}: pytorch.buckets has {size}, more than max_batch, which is {largest}"
            )
    sizes = used.buckets or tuple(1 << power for power in range(largest.bit_length()))
    return tuple(sorted({*sizes, largest}))


def _gpus(config: ModelConfig) -> int:
    _home(config, "torch_backend")
    import torch

    return torch.cuda.device_count()


def with_torch(config: ModelConfig, module: str) -> Any:
    """Returns a module that imports torch, which is large and may not be installed: only models that need it
    import it."""
    try:
        importlib.import_module("torch")
    except ImportError as error:
        raise Unsupported(f"{config.name}: needs PyTorch (pip install torch): {error}") from None
    return importlib.import_module(module)


def _home(config: ModelConfig, name: str) -> Any:
    return with_torch(config, f"{_HERE}.{name}")
