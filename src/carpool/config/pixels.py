"""Where pixels become the model's values: before they reach its input, or behind it, on its device."""

from __future__ import annotations

from carpool.config.backend_kinds import kind_of
from carpool.config.model import ImageSettings, ModelConfig


def values_told(image: ImageSettings) -> bool:
    """True where [image] says anything about values."""
    return image.scale is not None or set(image.mean) != {0.0} or set(image.std) != {1.0}


def values_on_device(config: ModelConfig) -> bool:
    """True for a PyTorch model whose input is declared as bytes although [image] makes other values of them:
    then pixels travel as bytes, and scale, mean and std are applied on the device. The tensors are known."""
    if not kind_of(config.backend).values_on_device or config.image is None or len(config.inputs) != 1:
        return False
    return config.inputs[0].datatype == "UINT8" and values_told(config.image)
