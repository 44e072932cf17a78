"""Defines the protocol of models that write their answers token by token, in slots.

extensions/text/text_scheduler.py decides when."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from carpool.backends.backend import Placement
from carpool.config.model import ImageSettings, ModelConfig, Task, TensorConfig
from carpool.config.repository import ModelVersion
from carpool.types import Array

PICTURE, TEXT, FINISH = "image", "text_output", "finish_reason"
"""The tensors of every model that writes: a picture, the text, and why it ends there."""

AHEAD = 2
"""Steps that may be launched before the tokens of the first of them are asked for."""


class ModelPart(enum.Enum):
    """Names how much of a model is loaded."""

    WHOLE = "whole"
    ENCODER = "encoder"
    DECODER = "decoder"


class _OnDevice(Protocol):
    """Everything is called from one thread at a time, but `read` and `abort`, which may be called beside the
    others."""

    device: str  # its name, if it is shared with other models; else empty
    broken: bool  # no instance in this process works any more

    @property
    def notes(self) -> Sequence[str]:
        """Returns what was found and chosen when it was loaded, a sentence each."""

    def abort(self) -> None:
        """May be called from another thread: what runs may end with an error."""

    def close(self) -> None:
        """Give back memory and threads; more than once does no harm."""


class Encoder(_OnDevice, Protocol):
    def read(self, inputs: Mapping[str, Array]) -> Array:
        """Returns a copy of one request's picture, checked: InvalidInput for what can never be read."""

    def encode(self, pictures: Sequence[Array]) -> Sequence[Any]:
        """Encodes each of what `read` returned, as something that stays where it is until `admit`. Takes
        e(B). One that is apart from its decoder returns when the device is done."""

    def sample(self) -> Array:
        """As `read` returns it, of the largest picture: for measuring."""


class Decoder(_OnDevice, Protocol):
    """A slot belongs to one answer from `admit` until the next `admit` into it; there is nothing to do when
    an answer ends. Slots are independent: what is in one changes no token of another."""

    slots: int  # shapes never change
    longest: int  # tokens of an answer, and of what it begins with
    widths: Sequence[int]  # of steps: one of any other width runs as the next of these
    end: int  # the token after which nothing comes
    overlaps: bool  # `launch` returns while the device works

    def admit(self, slots: Sequence[int], encoded: Sequence[Any]) -> None:
        """Begins a new answer in each of these slots. Nothing remains of the answer that had the slot before.
        What was encoded on another device is copied here. It may still be on its way."""

    def launch(self, width: int) -> None:
        """Launches a step of slots 0 to `width` - 1, behind everything that was asked before."""

    def tokens(self) -> Array:
        """Returns what the first step says that was launched and not asked for: one token for each of its
        slots, int64 [width]; those of free slots mean nothing."""

    def forget(self) -> None:
        """Waits until everything that was asked of the device is done, and discards the tokens of steps that
        were launched."""

    def step(self, width: int) -> Array:
        """Does both. Takes s(width)."""

    def piece(self, token: int) -> bytes:
        """Returns what it adds to the text, in UTF-8: perhaps a part of a character."""


class Stepper(Encoder, Decoder, Protocol):
    """Defines both, on one device."""


class TextInstance:
    """Represents one instance of a model that writes: a stepper, or a pool of encoders and one of decoders,
    each of them with a thread of its own."""

    def __init__(self, encoders: Sequence[Encoder], decoders: Sequence[Decoder], *, apart: bool) -> None:
        """Takes the parts; where they are not `apart`, encoder and decoder are the same."""
        self.encoders, self.decoders, self.apart = encoders, decoders, apart
        self.read, self.sample = encoders[0].read, encoders[0].sample
        self.slots, self.end = decoders[0].slots, decoders[0].end
        self.widths, self.device = decoders[0].widths, decoders[0].device
        self.notes = tuple(dict.fromkeys(note for part in (*encoders, *decoders) for note in part.notes))

    @classmethod
    def whole(cls, stepper: Stepper) -> TextInstance:
        return cls((stepper,), (stepper,), apart=False)

    @property
    def parts(self) -> Sequence[_OnDevice]:
        return (*self.encoders, *self.decoders) if self.apart else self.decoders

    @property
    def broken(self) -> bool:
        return any(part.broken for part in self.parts)

    def abort(self) -> None:
        for part in self.parts:
            part.abort()

    def close(self) -> None:
        for part in self.parts:
            part.close()


class TextHome(Protocol):
    """Defines what the module of a backend with such models offers beside `load` and `read_signature`."""

    def describe_text(self, config: ModelConfig, version: ModelVersion) -> ModelConfig:
        """Returns the settings with nothing left open. Raises what is wrong with settings and files."""

    def load_text(
        self, config: ModelConfig, version: ModelVersion, placement: Placement, part: ModelPart
    ) -> Stepper:
        """Loads a part of it, which is asked only for what is its own, and any for `read` and `sample`."""


def with_tensors(config: ModelConfig, dims: tuple[int, ...], image: ImageSettings) -> ModelConfig:
    """Returns the settings of a model that takes such pictures."""
    outputs = tuple(TensorConfig(name, "BYTES", (1,)) for name in (TEXT, FINISH))
    return replace(
        config,
        inputs=(TensorConfig(PICTURE, "UINT8", dims),),
        outputs=outputs,
        max_batch=0,
        image=replace(config.image or image, decode="cpu"),
        task=config.task or Task.READ,
    )
