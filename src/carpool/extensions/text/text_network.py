"""Models that write, as their files have them: an encoder of pictures, the weights of a decoder, and what its
tokens say. Our own reader of lines, and Hugging Face's TrOCR; nothing in their files is run."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from carpool.config.model import DYNAMIC, ImageSettings, ModelConfig
from carpool.config.rules import read_bytes
from carpool.errors import CarpoolError, ConfigError, InvalidInput, ModelError
from carpool.extensions.text import line_reader
from carpool.extensions.text.decoder_weights import of_transformer_decoder, of_trocr
from carpool.extensions.text.line_reader import LineReader
from carpool.extensions.text.settings import GenerateSettings, text_settings
from carpool.extensions.text.stepper import PICTURE
from carpool.extensions.text.torch_decoder import DecoderForm, Weights
from carpool.extensions.torch.torch_files import in_one_line
from carpool.types import Array

_SCALE = ".scale"
"""Behind the name of a tensor of bytes: what each of its rows is to be multiplied with."""
_MOST_JSON = 64 << 20

Encode = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Pictures:
    """Describes what an encoder takes: uint8 [channels, height, width]. A width that may be less is a
    multiple of `grain`; 0: it may not."""

    shape: tuple[int, int, int]
    rows: int  # of what comes out of the widest
    grain: int
    image: ImageSettings

    @property
    def dims(self) -> tuple[int, ...]:
        return (*self.shape[:2], DYNAMIC) if self.grain else self.shape

    def read(self, inputs: Mapping[str, Array]) -> Array:
        picture = inputs.get(PICTURE)
        channels, height, widest = self.shape
        if picture is not None and picture.dtype == np.uint8 and picture.shape[:-1] == (channels, height):
            width = picture.shape[-1]
            if width == widest or (self.grain and 0 < width < widest and width % self.grain == 0):
                return np.array(picture, order="C")
        few = f" or less, by {self.grain}" if self.grain else ""
        found = "nothing" if picture is None else f"{picture.dtype} {list(picture.shape)}"
        raise InvalidInput(f"{PICTURE} must be uint8 {list(self.shape)}{few}, not {found}", field=PICTURE)


@dataclass(frozen=True, slots=True)
class TextNetwork:
    """Holds a model as its files have it, on the CPU; `encoder` moves it to a given device and data type."""

    pictures: Pictures
    encoder: Callable[[torch.device, torch.dtype], Encode]
    form: DecoderForm
    weights: Weights
    longest: int
    pieces: Sequence[bytes]  # by token


# ---- our own reader of lines


def line_network(network: LineReader) -> TextNetwork:
    state = network.state_dict()
    weights = of_transformer_decoder(
        state,
        "decoder.",
        line_reader.LAYERS,
        embed=state["characters.weight"],
        positions=state["positions"],
        head=state["head.weight"],
        head_bias=state["head.bias"],
    )

    def encoder(place: torch.device, precision: torch.dtype) -> Encode:
        placed = network.eval().to(place, precision)
        return lambda batch: placed.encode(batch.to(precision) / 255.0)

    widest = line_reader.COLUMNS * line_reader.SHRINK
    image = ImageSettings(size=(line_reader.HEIGHT, widest), resize="line", pad=255, kernel="area")
    return TextNetwork(
        Pictures((1, line_reader.HEIGHT, widest), line_reader.COLUMNS, line_reader.SHRINK, image),
        encoder,
        DecoderForm(line_reader.LAYERS, line_reader.HEADS, line_reader.END, line_reader.END, True, "relu"),
        weights,
        line_reader.LONGEST,
        (b"", *(character.encode() for character in line_reader.ALPHABET)),
    )


def read_line_reader(file: Path) -> LineReader:
    """Reads what tools/reader writes: numbers in fp16, or bytes with a scale for each row."""
    from safetensors.torch import load_file

    network = LineReader()
    held = _widened(load_file(str(file)))
    wanted = {name for name, tensor in network.state_dict().items() if tensor.is_floating_point()}
    if set(held) != wanted:
        odd = sorted(set(held) ^ wanted)
        raise ModelError(f"{file} is not a reader of this kind: {', '.join(odd[:3])} {'…' * (len(odd) > 3)}")
    try:
        network.load_state_dict(held, strict=False)
    except RuntimeError as error:
        raise ModelError(f"{file} is not a reader of this kind: {str(error).splitlines()[0]}") from None
    return network


def _widened(held: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = {}
    for name, tensor in held.items():
        scale = held.get(name + _SCALE)
        if scale is not None:
            by_row = scale.float().view(-1, *(1 for _ in tensor.shape[1:]))
            found[name] = tensor.float() * by_row
        elif not name.endswith(_SCALE):
            found[name] = tensor.float()
    return found


# ---- TrOCR: a vision transformer, and a vocabulary of pieces of words

_SPECIAL = frozenset(("<s>", "</s>", "<pad>", "<unk>", "<mask>", "<s>NOTUSED", "</s>NOTUSED"))


def read_trocr(folder: Path) -> TextNetwork:
    """Reads config.json, model.safetensors and tokenizer.json or vocab.json of a
    VisionEncoderDecoderModel."""
    from safetensors.torch import load_file

    try:
        config = _json(folder / "config.json")
        state = load_file(str(folder / "model.safetensors"))
        form, weights = of_trocr(state, config)
        pictures, encoder = _vision_transformer(state, config["encoder"], folder)
        return TextNetwork(
            pictures,
            encoder,
            form,
            weights,
            int(config["decoder"]["max_position_embeddings"]),
            _pieces(folder, len(weights["embed"])),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{folder}: {error} is missing: this is no TrOCR model as it is known") from None


def _json(file: Path) -> Any:
    return json.loads(read_bytes(file, _MOST_JSON, "is larger than any such file"))


def _vision_transformer(
    state: Weights, config: Mapping[str, Any], folder: Path
) -> tuple[Pictures, Callable[[torch.device, torch.dtype], Encode]]:
    if config["model_type"] not in ("vit", "deit"):
        raise ConfigError(
            f"{folder}: the encoder is of type {config['model_type']!r}: vit and deit are known"
        )
    side, patch, heads = (int(config[key]) for key in ("image_size", "patch_size", "num_attention_heads"))
    layers, eps = int(config["num_hidden_layers"]), float(config.get("layer_norm_eps", 1e-12))
    ours = {name: tensor for name, tensor in state.items() if name.startswith(("encoder.", "enc_to_dec"))}
    rows = len(ours["encoder.embeddings.position_embeddings"][0])

    def encoder(place: torch.device, precision: torch.dtype) -> Encode:
        held = {name: tensor.to(place, precision) for name, tensor in ours.items()}
        mean, std = (torch.tensor(one, device=place).view(3, 1, 1) for one in _values(folder))

        def encode(batch: torch.Tensor) -> torch.Tensor:
            x = ((batch.float() / 255.0 - mean) / std).to(precision)
            return _transformed(x, held, patch, heads, layers, eps)

        return encode

    image = ImageSettings(size=(side, side), resize="stretch", kernel="bilinear")
    return Pictures((3, side, side), rows, 0, image), encoder


def _values(folder: Path) -> tuple[list[float], list[float]]:
    """Mean and deviation that pictures were trained with."""
    file = folder / "preprocessor_config.json"
    said = _json(file) if file.is_file() else {}
    mean, std = (said.get(key, [0.5, 0.5, 0.5]) for key in ("image_mean", "image_std"))
    good = all(isinstance(one, list) and len(one) == 3 for one in (mean, std))
    if not good or not all(isinstance(number, int | float) for number in mean + std) or 0 in std:
        raise ConfigError(f"{file}: image_mean and image_std must be three numbers each")
    return mean, std


def _transformed(
    x: torch.Tensor, held: Weights, patch: int, heads: int, layers: int, eps: float
) -> torch.Tensor:
    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        weight = held[f"{name}.weight"]
        return functional.layer_norm(x, weight.shape, weight, held[f"{name}.bias"], eps)

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.linear(x, held[f"{name}.weight"], held.get(f"{name}.bias"))

    at = "encoder.embeddings."
    cut = f"{at}patch_embeddings.projection."
    x = functional.conv2d(x, held[f"{cut}weight"], held[f"{cut}bias"], patch).flatten(2).transpose(1, 2)
    tokens = [held[name] for name in (f"{at}cls_token", f"{at}distillation_token") if name in held]
    x = torch.cat([*(token.expand(len(x), -1, -1) for token in tokens), x], 1)
    x = x + held[f"{at}position_embeddings"]
    for layer in range(layers):
        here = f"encoder.encoder.layer.{layer}."
        y = norm(x, f"{here}layernorm_before")
        query, key, value = (
            linear(y, f"{here}attention.attention.{part}").view(*y.shape[:2], heads, -1).transpose(1, 2)
            for part in ("query", "key", "value")
        )
        y = functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        x = x + linear(y, f"{here}attention.output.dense")
        y = functional.gelu(linear(norm(x, f"{here}layernorm_after"), f"{here}intermediate.dense"))
        x = x + linear(y, f"{here}output.dense")
    x = norm(x, "encoder.layernorm")
    return linear(x, "enc_to_dec_proj") if "enc_to_dec_proj.weight" in held else x


def _pieces(folder: Path, count: int) -> Sequence[bytes]:
    """Returns, by token, the bytes that it stands for."""
    whole = folder / "tokenizer.json"
    model = _json(whole)["model"] if whole.is_file() else {"vocab": _json(folder / "vocab.json")}
    vocabulary = model["vocab"]
    found = [b""] * count
    if isinstance(vocabulary, list):  # pieces with how likely they are; a space is written as a low line
        for token, (piece, _) in enumerate(vocabulary[:count]):
            found[token] = b"" if piece in _SPECIAL else piece.replace("\u2581", " ").encode()
        return found
    byte_of = _bytes_of_characters()
    for piece, token in vocabulary.items():
        if isinstance(token, int) and 0 <= token < count and piece not in _SPECIAL:
            found[token] = bytes(byte_of[character] for character in piece if character in byte_of)
    return found


def _bytes_of_characters() -> dict[str, int]:
    """Returns the byte of each character, since byte-level vocabularies write each byte as a character that
    can be printed: most as themselves, the others, in their order, as those from 256 on."""
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + n): byte for n, byte in enumerate(others)}


# ---- which of them


def read_network(config: ModelConfig, file: Path) -> TextNetwork:
    family = text_settings(config).generate.family
    try:
        if family == "trocr" or (family is None and (file.parent / "config.json").is_file()):
            return read_trocr(file.parent)
        return line_network(read_line_reader(file))
    except CarpoolError:
        raise
    except Exception as error:  # safetensors has an error of its own
        raise ModelError(f"{config.name}: {file.name} cannot be read: {in_one_line(error)}") from None


def longest_answer(config: ModelConfig, network: TextNetwork) -> int:
    """Returns what the settings allow; a ConfigError where they ask for more than the model has positions
    for."""
    asked = text_settings(config).generate.max_tokens
    if asked > network.longest and asked != GenerateSettings().max_tokens:
        raise ConfigError(
            f"{config.name}: generate.max_tokens is {asked}, and the model can write {network.longest}"
        )
    return min(asked, network.longest)
