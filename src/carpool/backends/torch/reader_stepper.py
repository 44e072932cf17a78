"""Our own reader of lines (line_reader.py) as a model that writes in slots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from carpool.backends.torch import line_reader
from carpool.backends.torch.decoder_weights import of_transformer_decoder
from carpool.backends.torch.line_reader import LineReader
from carpool.backends.torch.torch_decoder import DecoderForm, TorchDecoder
from carpool.backends.torch.torch_device import Device
from carpool.errors import InvalidInput, ModelError
from carpool.types import Array

_INPUT = "line"


class ReaderStepper:
    """Lines are uint8 [lines, 32, pixels], grey, up to 512 pixels wide."""

    longest = line_reader.LONGEST
    end = line_reader.END

    def __init__(self, network: LineReader, slots: int, device: Device) -> None:
        self.slots = slots
        self._device = device
        self._network = network.eval().to(device.place)
        state = network.state_dict()
        form = DecoderForm(line_reader.LAYERS, line_reader.HEADS, self.end, self.end, True, "relu")
        weights = of_transformer_decoder(
            state,
            "decoder.",
            line_reader.LAYERS,
            embed=state["characters.weight"],
            positions=state["positions"],
            head=state["head.weight"],
            head_bias=state["head.bias"],
        )
        self._decoder = TorchDecoder(form, weights, slots, self.longest, line_reader.COLUMNS, device)
        self.slot_bytes = self._decoder.slot_bytes
        self.admit = self._decoder.admit
        self.step = self._decoder.step

    @torch.inference_mode()
    def encode(self, parts: Sequence[Mapping[str, Any]], images: Sequence[int]) -> Sequence[Any]:
        """Lines of the same width go together."""
        lines = [line for part, count in zip(parts, images, strict=True) for line in _lines(part, count)]
        self._device.enter()
        found: list[Any] = [None] * len(lines)
        for width in sorted({line.shape[1] for line in lines}):
            places = [place for place, line in enumerate(lines) if line.shape[1] == width]
            batch = torch.from_numpy(np.stack([lines[place] for place in places]))
            grey = batch.to(self._device.place)[:, None].to(self._network.places.dtype) / 255.0
            for place, encoded in zip(places, self._network.encode(grey), strict=True):
                found[place] = encoded
        return found

    def text(self, tokens: Sequence[int]) -> str:
        return line_reader.text_of(list(tokens))


def _lines(part: Mapping[str, Any], count: int) -> Sequence[Array]:
    lines = part.get(_INPUT)
    if not isinstance(lines, np.ndarray) or lines.dtype != np.uint8 or lines.ndim != 3 or len(lines) != count:
        raise InvalidInput(f"{_INPUT} must be uint8 [{count}, {line_reader.HEIGHT}, pixels]")
    height, width = lines.shape[1:]
    most = line_reader.COLUMNS * line_reader.SHRINK
    if height != line_reader.HEIGHT or width % line_reader.SHRINK or not 0 < width <= most:
        raise InvalidInput(
            f"{_INPUT} must be {line_reader.HEIGHT} pixels high and up to {most} wide, a multiple of "
            f"{line_reader.SHRINK}, not {height} by {width}"
        )
    return list(lines)


def load_reader(file: Path, slots: int, device: Device) -> ReaderStepper:
    """From what tools/reader/train_reader.py writes."""
    from safetensors.torch import load_file

    network = LineReader()
    held = {name: tensor.float() for name, tensor in load_file(str(file)).items()}
    wanted = {name for name, tensor in network.state_dict().items() if tensor.is_floating_point()}
    if set(held) != wanted:
        odd = sorted(set(held) ^ wanted)
        raise ModelError(f"{file} is not a reader of this kind: {', '.join(odd[:3])} {'…' * (len(odd) > 3)}")
    try:
        network.load_state_dict(held, strict=False)
    except RuntimeError as error:
        raise ModelError(f"{file} is not a reader of this kind: {str(error).splitlines()[0]}") from None
    return ReaderStepper(network, slots, device)
