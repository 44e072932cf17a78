"""Holds what is said of a model that writes its answer token by token, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from carpool.config.model import DEVICE, DEVICE_FORM, ModelConfig, key

MAX_TOKENS = 4096
MAX_SLOTS = 1024


@dataclass(frozen=True, slots=True)
class GenerateSettings:
    """Describes a model that writes its answer token by token, many answers at once, each in a slot of its
    own."""

    family: str | None = key(None, "line_reader", "trocr")  # None: recognised from the files
    max_tokens: int = key(128, within=(1, MAX_TOKENS))  # of an answer; a request may ask for fewer
    slots: int | None = key(None, within=(1, MAX_SLOTS))  # answers at once; None: what the promise allows


MAX_POOL = 64


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """Describes the decoders of a model that writes, apart from its encoders."""

    instances: int = key(1, within=(1, MAX_POOL))
    device: str = key("auto", pattern=DEVICE, form=DEVICE_FORM)  # "auto": the model's


@dataclass(frozen=True, slots=True)
class EncoderSettings(PoolSettings):
    """Describes the same of its encoders."""

    own_process: bool = key(False)  # true is refused: processes of their own were removed


@dataclass(frozen=True, slots=True)
class TextSettings:
    """Joins [generate], [encoder], [decoder], ttft_ms and per_token_ms. Durations are seconds."""

    generate: GenerateSettings = GenerateSettings()
    encoder: EncoderSettings | None = None  # absent, both: one instance does both
    decoder: PoolSettings | None = None
    ttft: float | None = None  # the first token is promised within these
    per_token: float | None = None  # and each further one

    @property
    def apart(self) -> bool:
        """Its encoders and decoders are."""
        return not (self.encoder is None and self.decoder is None)


def text_settings(config: ModelConfig) -> TextSettings:
    """Returns a model's; the usual ones, if it says nothing of how it writes."""
    settings = config.extra.get("text")
    return settings if isinstance(settings, TextSettings) else TextSettings()
