"""Reads what model.toml says of a model that writes, and what does not go with it."""

from __future__ import annotations

from dataclasses import fields, replace

from carpool.config.declared_keys import read_declared
from carpool.config.model import ModelConfig
from carpool.config.settings_part import SettingsPart
from carpool.config.table import TomlTable
from carpool.extensions.text.settings import EncoderSettings, GenerateSettings, PoolSettings, TextSettings

_NOT_WRITTEN = ("batching", "max_batch", "max_open", "slo_may_grow", "input", "output")
"""What says nothing of a model that writes: its batches are steps, and its tensors are known."""


def _read(top: TomlTable) -> TextSettings:
    ttft_ms, per_token_ms = (top.number(key, 0, above=True) for key in ("ttft_ms", "per_token_ms"))
    generate, encoder, decoder = (top.table(name) for name in ("generate", "encoder", "decoder"))
    settings = TextSettings(
        GenerateSettings() if generate is None else read_declared(generate, GenerateSettings),
        None if encoder is None else read_declared(encoder, EncoderSettings),
        None if decoder is None else read_declared(decoder, PoolSettings),
        None if ttft_ms is None else ttft_ms / 1e3,
        None if per_token_ms is None else per_token_ms / 1e3,
    )
    if generate is None:
        key = next(key for key in ("ttft_ms", "per_token_ms", "encoder", "decoder") if top.has(key))
        other = ", or use slo_ms" if key.endswith("_ms") else ""
        raise top.error(key, f"is for models that write token by token: add [generate]{other}")
    if settings.encoder is not None and settings.encoder.own_process:
        raise top.error("encoder.own_process", "was removed: encoders are threads beside the decoders")
    for key in _NOT_WRITTEN:
        if top.has(key):
            raise top.error(key, "does not go with [generate]")
    if settings.apart and top.has("instances"):
        raise top.error("instances", "does not go with [encoder] and [decoder], which have their own")
    return settings


def _settled(top: TomlTable, config: ModelConfig) -> ModelConfig:
    """Returns the settings with the backend and the file that such models have."""
    if config.image is not None and config.image.decode == "device":
        raise top.error("image.decode", 'cannot be "device" with [generate]: front ends decode its images')
    if config.pytorch.compile != "off":
        raise top.error("pytorch.compile", "does not go with [generate]: its steps are CUDA graphs already")
    if config.backend not in (None, "pytorch", "fake"):
        raise top.error("backend", f'cannot be "{config.backend}" with [generate]: "pytorch" has such models')
    if config.backend == "fake":
        return config
    return replace(config, backend="pytorch", file=config.file or "model.safetensors")


PART = SettingsPart(
    kind=TextSettings,
    tables={
        name: tuple(each.name for each in fields(kind))
        for name, kind in (
            ("generate", GenerateSettings),
            ("encoder", EncoderSettings),
            ("decoder", PoolSettings),
        )
    },
    read=_read,
    settle=_settled,
    changes_answers=True,
)
