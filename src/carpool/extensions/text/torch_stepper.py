"""Runs models that write in slots, with PyTorch: an encoder of pictures before torch_decoder.py."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from carpool.backends.backend import Placement
from carpool.backends.device_memory import in_words, ledger_of
from carpool.config.model import ModelConfig
from carpool.errors import CarpoolError, ModelError
from carpool.extensions.text.settings import text_settings
from carpool.extensions.text.stepper import ModelPart
from carpool.extensions.text.text_network import TextNetwork, read_network
from carpool.extensions.text.torch_decoder import TorchDecoder, sizes
from carpool.extensions.torch.torch_device import PRECISIONS, CudaDevice, Device, Program, is_out_of_memory
from carpool.extensions.torch.torch_files import in_one_line
from carpool.types import Array

_SLOTS, _SLOTS_ON_CPU = 64, 8
_LARGEST = 32  # pictures that are encoded at once


class TorchStepper:
    """The whole of a model, or its encoder, or its decoder: then nothing of the other is loaded.

    What an encoder apart hands over is read by another thread, on another stream. It is done by then
    (`encode` waits), and is kept until the step behind its copy has ended: memory without a reference goes to
    the next batch, whatever another stream still reads there.
    """

    def __init__(
        self,
        network: TextNetwork,
        slots: int,
        device: Device,
        model: str = "the model",
        precision: torch.dtype = torch.float32,
        part: ModelPart = ModelPart.WHOLE,
    ) -> None:
        self.slots, self.longest, self.end = slots, network.longest, network.form.end
        self.device = device.name if device.bounded else ""
        self.overlaps = device.captures
        self.broken = False
        self._model = model
        self._device = device
        self._network = network
        self._ledger = ledger_of(device) if device.bounded else None
        self._programs: dict[int, tuple[torch.Tensor, torch.Tensor, Program]] = {}
        self._part = part
        self._taken: list[torch.Tensor] = []
        self._held: deque[list[torch.Tensor]] = deque()  # the same, for each step that was launched
        self._copied = device.marker()  # what was staged for the encoder
        self.widths: Sequence[int] = ()
        self.slot_bytes = 0
        try:
            with nullcontext() if self._ledger is None else self._ledger.loading:
                before = device.allocated()
                if part is not ModelPart.DECODER:
                    self._encode = network.encoder(device.place, precision)
                if part is not ModelPart.ENCODER:
                    self._load_decoder(network, precision)
                if device.bounded and part is not ModelPart.DECODER:
                    most = _LARGEST if part is ModelPart.ENCODER else min(slots, _LARGEST)
                    self._programs = {size: self._prepared(size) for size in sizes(most)}
                if self._ledger is not None:
                    self._ledger.hold(self, model, max(0, device.allocated() - before))
        except Exception as error:
            self.close()
            if isinstance(error, CarpoolError):
                raise
            reason = "device-memory" if is_out_of_memory(error) else ModelError.reason
            raise ModelError(f"{model}: it cannot be loaded: {in_one_line(error)}", reason=reason) from None

    def _load_decoder(self, network: TextNetwork, precision: torch.dtype) -> None:
        weights = {name: tensor.to(precision) for name, tensor in network.weights.items()}
        form, longest, rows = network.form, network.longest, network.pictures.rows
        self._decoder = TorchDecoder(form, weights, self.slots, longest, rows, self._device)
        self.widths, self.slot_bytes = self._decoder.widths, self._decoder.slot_bytes

    @property
    def notes(self) -> Sequence[str]:
        if self._part is ModelPart.ENCODER:
            return ()
        each = in_words(self.slot_bytes)
        return (f"{self.slots} answers may be written at once, in slots of {each} each.",)

    def read(self, inputs: Mapping[str, Array]) -> Array:
        return self._network.pictures.read(inputs)

    @torch.inference_mode()
    def encode(self, pictures: Sequence[Array]) -> Sequence[Any]:
        """Encodes those of the same width together."""
        found: list[Any] = [None] * len(pictures)
        with self._device.turn(), self._noticing():
            self._device.enter()
            for width in sorted({picture.shape[2] for picture in pictures}):
                places = [place for place, picture in enumerate(pictures) if picture.shape[2] == width]
                for first in range(0, len(places), _LARGEST):
                    some = places[first : first + _LARGEST]
                    encoded = self._encoded([pictures[place] for place in some])
                    for place, rows in zip(some, encoded, strict=True):
                        found[place] = rows
            if self._part is ModelPart.ENCODER:
                self._device.wait(len(pictures))
        return found

    def _encoded(self, pictures: Sequence[Array]) -> torch.Tensor:
        count, shape = len(pictures), pictures[0].shape
        size = next((size for size in self._programs if size >= count), 0)
        if not size or shape != self._network.pictures.shape:
            batch = torch.from_numpy(np.stack(pictures)).to(self._device.place)
            return self._encode(batch)
        staged, given, program = self._programs[size]
        self._copied.wait()
        np.stack(pictures, out=staged.numpy()[:count])
        given[:count].copy_(staged[:count], non_blocking=True)
        self._copied.record()
        self._device.launch(program, count)
        return program.outputs["rows"][:count].clone()  # the next batch is written to the same place

    def _prepared(self, size: int) -> tuple[torch.Tensor, torch.Tensor, Program]:
        shape = (size, *self._network.pictures.shape)
        staged, given = (make(shape, torch.uint8) for make in (self._device.staging, self._device.zeros))

        def run() -> Mapping[str, torch.Tensor]:
            return {"rows": self._encode(given)}

        with torch.inference_mode():
            self._device.warm(run)
            return staged, given, self._device.capture(run)

    def admit(self, slots: Sequence[int], encoded: Sequence[Any]) -> None:
        with self._device.turn(), self._noticing():
            for rows in sorted({len(one) for one in encoded}):
                some = [place for place, one in enumerate(encoded) if len(one) == rows]
                with torch.inference_mode():
                    self._device.enter()
                    here = [encoded[place].to(self._device.place) for place in some]
                self._decoder.admit([slots[place] for place in some], here)
            self._taken += encoded

    def launch(self, width: int) -> None:
        with self._device.turn(), self._noticing():
            self._decoder.launch(width)
            self._held.append(self._taken)
            self._taken = []

    def tokens(self) -> Array:
        with self._device.turn(), self._noticing():
            tokens = self._decoder.tokens()
            self._held.popleft()  # the step came behind it, and has ended
            return tokens

    def forget(self) -> None:
        with self._device.turn(), self._noticing():
            self._decoder.forget()
            self._held.clear()

    def step(self, width: int) -> Array:
        self.launch(width)
        return self.tokens()

    @contextmanager
    def _noticing(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            self.broken = "CUDA error" in str(error)
            raise

    def piece(self, token: int) -> bytes:
        return self._network.pieces[token]

    def sample(self) -> Array:
        return np.zeros(self._network.pictures.shape, np.uint8)

    def abort(self) -> None:
        """A step that runs cannot be interrupted: it is short, or hangs for good."""

    def close(self) -> None:
        self._programs.clear()
        if self._ledger is not None:
            self._ledger.drop(self)
            self._ledger = None
        self._device.close()


def load(config: ModelConfig, file: Path, placement: Placement, part: ModelPart) -> TorchStepper:
    """`config` is settled: see `pytorch.describe_text`."""
    told = text_settings(config).generate
    gpu = placement.gpu
    if gpu is None and config.pytorch.device.startswith("cuda"):
        gpu = int(config.pytorch.device.partition(":")[2] or 0)
    device = Device(placement.threads) if gpu is None else CudaDevice(gpu)
    device.look_for_kernels(True)
    slots = told.slots or (_SLOTS if device.bounded else _SLOTS_ON_CPU)
    precision = PRECISIONS[config.pytorch.precision]
    return TorchStepper(read_network(config, file), slots, device, config.name, precision, part)
