"""Loads models that write with PyTorch, as extensions/torch/pytorch.py loads others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar, cast

from carpool.backends.backend import Placement
from carpool.config.model import ModelConfig
from carpool.config.repository import ModelVersion
from carpool.extensions.text.settings import PoolSettings, text_settings
from carpool.extensions.text.stepper import ModelPart, Stepper, with_tensors
from carpool.extensions.torch.pytorch import device_of, with_torch

Pool = TypeVar("Pool", bound=PoolSettings)


def describe_text(config: ModelConfig, version: ModelVersion) -> ModelConfig:
    """Returns complete settings, in which nothing is left to be chosen about the devices."""
    home = _home(config, "text_network")
    network, device = home.read_network(config, version.file), device_of(config, config.pytorch.device)
    text = text_settings(config)
    told = replace(text.generate, max_tokens=home.longest_answer(config, network))
    settled = replace(config.pytorch, device=device, graphs=device != "cpu", channels_last=False)
    pictures = network.pictures

    def placed(pool: Pool | None, key: str) -> Pool | None:
        if pool is None or pool.device == "auto":
            return pool
        return replace(pool, device=device_of(config, pool.device, key))

    encoder, decoder = placed(text.encoder, "encoder.device"), placed(text.decoder, "decoder.device")
    text = replace(text, generate=told, encoder=encoder, decoder=decoder)
    config = replace(config, pytorch=settled, extra={**config.extra, "text": text})
    return with_tensors(config, pictures.dims, pictures.image)


def load_text(config: ModelConfig, version: ModelVersion, placement: Placement, part: ModelPart) -> Stepper:
    return cast(Stepper, _home(config, "torch_stepper").load(config, version.file, placement, part))


def _home(config: ModelConfig, name: str) -> Any:
    return with_torch(config, f"carpool.extensions.text.{name}")
