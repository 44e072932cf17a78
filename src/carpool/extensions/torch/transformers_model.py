"""Runs folders of Hugging Face's transformers: config.json and model.safetensors, which hold no code to
run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from carpool.config.regular_file import read_regular
from carpool.errors import ModelError
from carpool.types import Array

_MOST_BYTES = 1 << 20
_INPUT = "pixel_values"
_SIDE = 224  # where neither file says how large pictures are


class Model:
    def setup(self, settings: Mapping[str, Any]) -> None:
        folder = Path(settings["file"]).parent
        said = _read(folder / "config.json")
        if "auto_map" in said:
            raise ModelError("its config.json asks for code of its own (auto_map), which is not run here")
        architecture = next(iter(said.get("architectures") or ()), None)
        if not isinstance(architecture, str):
            timm = ": it is timm's, so export the model to ONNX" if "architecture" in said else ""
            raise ModelError(f"its config.json names no architecture of transformers{timm}")
        if architecture == "VisionEncoderDecoderModel":
            raise ModelError("it writes text: put a model.toml with a table [generate] beside it")
        import torch
        import transformers

        kind = getattr(transformers, architecture, None)
        if kind is None:
            raise ModelError(f"transformers {transformers.__version__} has no {architecture}")
        torch.set_num_threads(settings["threads"] or 1)
        self._torch = torch
        self._network = kind.from_pretrained(
            str(folder), use_safetensors=True, local_files_only=True, trust_remote_code=False
        ).eval()
        channels = said.get("num_channels", 3)
        height, width = _size(folder, said)
        zeros = torch.zeros((1, channels, height, width)).numpy()
        self.tensors = (
            [(_INPUT, "FP32", (-1, channels, height, width))],
            [(name, "FP32", (-1, *array.shape[1:])) for name, array in self.predict({_INPUT: zeros}).items()],
        )

    def predict(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        pixels = self._torch.from_numpy(inputs[_INPUT].copy())
        with self._torch.inference_mode():
            answer = self._network(pixel_values=pixels, return_dict=True)
        # Among them may be caches and lists of hidden layers, which are no answer.
        return {
            name: tensor.float().numpy()
            for name, tensor in answer.items()
            if isinstance(tensor, self._torch.Tensor) and len(tensor) == len(pixels)
        }


def _size(folder: Path, said: Mapping[str, Any]) -> tuple[int, int]:
    file = folder / "preprocessor_config.json"
    prepared = _read(file) if file.is_file() else {}
    cut = prepared.get("crop_size") if prepared.get("do_center_crop") else None
    size = cut or prepared.get("size") or said.get("image_size") or _SIDE
    if isinstance(size, dict):
        size = (size["height"], size["width"]) if "height" in size else size.get("shortest_edge", _SIDE)
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))


def _read(file: Path) -> dict[str, Any]:
    try:
        text = read_regular(file, _MOST_BYTES)
    except FileNotFoundError:
        raise ModelError(f"{file.name} is not beside it") from None
    except OSError as error:
        raise ModelError(f"{file.name} cannot be read: {error.strerror or error}") from None
    try:
        said = json.loads(text)
    except ValueError as error:
        raise ModelError(f"{file.name} is not JSON: {error}") from None
    if not isinstance(said, dict):
        raise ModelError(f"{file.name} is not an object")
    return said
