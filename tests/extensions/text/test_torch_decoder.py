"""Slots write what one answer after the other would: token by token, whoever had the slot before."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from carpool.errors import ConfigError, InvalidInput, ModelError
from carpool.extensions.text import line_reader
from carpool.extensions.text.decoder_weights import of_transformer_decoder, of_trocr
from carpool.extensions.text.line_reader import LineReader
from carpool.extensions.text.stepper import ModelPart
from carpool.extensions.text.text_network import line_network, read_line_reader, read_trocr
from carpool.extensions.text.torch_decoder import DecoderForm, TorchDecoder
from carpool.extensions.text.torch_stepper import TorchStepper
from carpool.extensions.torch.torch_device import Device
from later import later

TOOLS = Path(__file__).parents[3] / "tools" / "reader"
WIDTH, HEADS, LAYERS, WORDS, LONGEST, MEMORY, SLOTS = 16, 2, 2, 13, 20, 6, 5
BEGIN, END, PICTURES = 1, 2, 30


class Small(nn.Module):
    """A decoder as PyTorch has it, with what belongs to it."""

    def __init__(self, seed: int, *, norm_first: bool = True, activation: str = "relu") -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.norm_first, self.activation = norm_first, activation
        layer = nn.TransformerDecoderLayer(
            WIDTH, HEADS, 24, 0.0, activation, batch_first=True, norm_first=norm_first
        )
        self.decoder = nn.TransformerDecoder(layer, LAYERS, nn.LayerNorm(WIDTH) if norm_first else None)
        self.embed = nn.Parameter(torch.randn(WORDS, WIDTH))
        self.positions = nn.Parameter(torch.randn(LONGEST + 2, WIDTH))
        self.head = nn.Linear(WIDTH, WORDS)
        for parameter in self.decoder.parameters():
            nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.4)
        self.eval()

    def slots(self, slots: int = SLOTS, device: Device | None = None, **form: Any) -> TorchDecoder:
        state = self.state_dict()
        weights = of_transformer_decoder(
            state,
            "decoder.",
            LAYERS,
            embed=state["embed"],
            positions=state["positions"],
            head=state["head.weight"],
            head_bias=state["head.bias"],
        )
        made = DecoderForm(LAYERS, HEADS, BEGIN, END, self.norm_first, self.activation, **form)
        return TorchDecoder(made, weights, slots, LONGEST, MEMORY, device or Device())

    @torch.no_grad()
    def alone(self, picture: torch.Tensor) -> list[int]:
        """One answer from its beginning, without any cache."""
        tokens = [BEGIN]
        while len(tokens) < LONGEST + 1:
            rows = self.embed[tokens] + self.positions[: len(tokens)]
            mask = torch.ones(len(tokens), len(tokens), dtype=torch.bool).triu(1)
            found = self.decoder(rows[None], picture[None], tgt_mask=mask)[0, -1]
            tokens.append(int(self.head(found).argmax()))
            if tokens[-1] == END:
                break
        return tokens[1:]


def pictures(count: int, seed: int = 1) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(1 + n % MEMORY, WIDTH, generator=random) for n in range(count)]


class Hand:
    """Admits, steps and cancels as told, and compares every token with what the answer would be alone."""

    def __init__(self, decoder: TorchDecoder, truth: list[list[int]], given: list[torch.Tensor]) -> None:
        self.decoder, self.truth, self.given = decoder, truth, given
        self.held: dict[int, tuple[int, int]] = {}  # by slot: which picture, and how many tokens
        self.whole = 0

    def admit(self, slot: int, which: int) -> None:
        self.decoder.admit([slot], [self.given[which]])
        self.held[slot] = which, 0

    def step(self) -> None:
        width = max(self.held) + 1
        tokens = self.decoder.step(width)
        assert tokens.shape == (width,)
        assert ((tokens >= 0) & (tokens < WORDS)).all()
        for slot, (which, done) in list(self.held.items()):
            assert tokens[slot] == self.truth[which][done]
            self.held[slot] = which, done + 1
            if done + 1 == len(self.truth[which]):
                self.whole += 1
                del self.held[slot]


def play(events: int) -> Hand:
    plays, random = hand(), Random(1)
    for _ in range(events):
        move = random.random()
        if move < 0.3 or not plays.held:
            plays.admit(random.randrange(SLOTS), random.randrange(PICTURES))  # whoever was there is gone
        elif move < 0.36:
            del plays.held[random.choice(list(plays.held))]
        else:
            plays.step()
    return plays


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Such small models gain nothing from a team, and a team spins where other tests run beside it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@cache
def varied(norm_first: bool = True) -> tuple[Small, list[list[int]]]:
    """Answers of different lengths, and which: these two seeds make such models."""
    model = Small(10) if norm_first else Small(3, norm_first=False, activation="gelu")
    truth = [model.alone(picture) for picture in pictures(PICTURES)]
    assert len({len(answer) for answer in truth}) > 3
    return model, truth


def hand(norm_first: bool = True) -> Hand:
    model, truth = varied(norm_first)
    return Hand(model.slots(), truth, pictures(PICTURES))


@pytest.mark.parametrize("norm_first", [True, later(False)])
def test_tokens_are_those_of_one_answer_after_the_other(norm_first: bool) -> None:
    plays, waiting = hand(norm_first), list(range(PICTURES))
    while waiting or plays.held:
        for slot in range(SLOTS):
            if waiting and slot not in plays.held:
                plays.admit(slot, waiting.pop(0))
        plays.step()
    assert plays.whole == PICTURES


@pytest.mark.conformance
def test_slots_are_reused_at_any_time() -> None:
    assert play(1500).whole > 20


@pytest.mark.conformance
def test_slots_are_reused_a_hundred_thousand_times() -> None:
    assert play(100_000).whole > 1000


def test_poisoned_slots_reach_nobody() -> None:
    plays = hand()
    for slot in range(SLOTS):
        plays.admit(slot, slot)
    decoder = plays.decoder
    for held in (decoder._keys, decoder._values, decoder._cross_keys, decoder._cross_values):
        held[:, 2] = float("nan")
    del plays.held[2]
    for turn in range(40):
        for slot in (0, 1, 3, 4):
            if slot not in plays.held:
                plays.admit(slot, (7 * turn + slot) % PICTURES)
        plays.step()  # the poisoned slot is run along
    assert plays.whole > 5
    for which in (8, 9, 10):
        for held in (decoder._keys, decoder._values, decoder._cross_keys, decoder._cross_values):
            held[:, 2] = float("nan")
        plays.admit(2, which)
        while 2 in plays.held:
            plays.step()


def test_slots_that_nobody_has_may_be_stepped_for_ever() -> None:
    plays = hand()
    for _ in range(3 * LONGEST):
        assert plays.decoder.step(SLOTS).shape == (SLOTS,)
    assert int(plays.decoder._at.max()) == LONGEST - 1
    for slot in range(SLOTS):
        plays.admit(slot, slot)
    while plays.held:
        plays.step()
    assert plays.whole == SLOTS


def test_the_end_of_the_text_may_be_the_first_token() -> None:
    model = Small(0)
    with torch.no_grad():
        model.head.bias[END] = 1000.0
    decoder = model.slots()
    decoder.admit([3], pictures(1))
    for _ in range(3):
        assert decoder.step(4)[3] == END


def test_what_cannot_be_is_refused() -> None:
    decoder = Small(0).slots()
    for width in (0, SLOTS + 1):
        with pytest.raises(InvalidInput, match="1 to 5 slots"):
            decoder.step(width)
    assert decoder.widths == [1, 2, 4, 5]
    assert decoder.slot_bytes == 4 * LAYERS * WIDTH * 2 * (LONGEST + MEMORY)
    with pytest.raises(InvalidInput, match="no positions"):
        Small(0).slots(offset=3)


# ---- files of others


def as_trocr(model: Small) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The same network as Hugging Face would name it, which shifts positions by two and has a norm more."""
    state, found = model.state_dict(), {}
    for layer in range(LAYERS):
        theirs, ours = f"decoder.model.decoder.layers.{layer}.", f"decoder.layers.{layer}."
        for name, attention in (("self_attn", "self_attn"), ("encoder_attn", "multihead_attn")):
            for kind in ("weight", "bias"):
                packed = state[f"{ours}{attention}.in_proj_{kind}"].chunk(3)
                for part, tensor in zip("qkv", packed, strict=True):
                    found[f"{theirs}{name}.{part}_proj.{kind}"] = tensor.contiguous()
                found[f"{theirs}{name}.out_proj.{kind}"] = state[f"{ours}{attention}.out_proj.{kind}"]
        names = {"fc1": "linear1", "fc2": "linear2", "self_attn_layer_norm": "norm1"}
        names |= {"encoder_attn_layer_norm": "norm2", "final_layer_norm": "norm3"}
        for their, our in names.items():
            for kind in ("weight", "bias"):
                found[f"{theirs}{their}.{kind}"] = state[f"{ours}{our}.{kind}"]
    at = "decoder.model.decoder."
    found[f"{at}embed_tokens.weight"] = state["embed"] / 4.0
    found[f"{at}embed_positions.weight"] = torch.cat([torch.full((2, WIDTH), 9.0), state["positions"]])
    found["decoder.output_projection.weight"] = state["head.weight"]
    config = {
        "decoder": {
            "model_type": "trocr",
            "d_model": WIDTH,
            "decoder_layers": LAYERS,
            "decoder_attention_heads": HEADS,
            "decoder_start_token_id": BEGIN,
            "eos_token_id": END,
            "activation_function": "gelu",
            "scale_embedding": True,
            "layernorm_embedding": False,
        }
    }
    return found, config


def test_a_trocr_folder_writes_the_same(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    model = Small(3, norm_first=False, activation="gelu")
    with torch.no_grad():
        model.head.bias.zero_()
    state, config = as_trocr(model)
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    form, weights = of_trocr(state, config)
    assert (form.offset, form.scale, form.norm_first) == (2, 4.0, False)
    given = pictures(10)
    decoder = TorchDecoder(form, weights, len(given), LONGEST, MEMORY, Device())
    for slot, picture in enumerate(given):
        decoder.admit([slot], [picture])
    steps = [decoder.step(len(given)) for _ in range(LONGEST)]
    for slot, picture in enumerate(given):
        wanted = model.alone(picture)
        assert [int(tokens[slot]) for tokens in steps[: len(wanted)]] == wanted
    for wrong, words in (
        ({"model_type": "gpt2"}, "gpt2"),
        ({"activation_function": "swish"}, "activation_function"),
        ({"use_learned_position_embeddings": False}, "learned positions"),
    ):
        with pytest.raises(ConfigError, match=words):
            of_trocr(state, {"decoder": config["decoder"] | wrong})
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="is missing"):
        read_trocr(tmp_path)


# ---- our own reader


def tool(name: str) -> ModuleType:
    spec = spec_from_file_location(name, TOOLS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def reader() -> LineReader:
    torch.manual_seed(1)
    network = LineReader().eval()
    with torch.no_grad():  # as it begins it would write the same for every picture
        for parameter in network.decoder.parameters():
            parameter.mul_(2.0)
        network.characters.weight.mul_(30.0)
        network.places.mul_(30.0)
    return network


def lines(count: int, width: int, seed: int) -> Any:
    return np.random.default_rng(seed).integers(0, 256, (count, 32, width), dtype=np.uint8)


@torch.no_grad()
def read_alone(network: LineReader, line: Any, longest: int) -> list[int]:
    encoded = network.encode(torch.from_numpy(line)[None, None].float() / 255.0)
    tokens = [line_reader.END]
    while len(tokens) <= longest and not (len(tokens) > 1 and tokens[-1] == line_reader.END):
        tokens.append(int(network.write(encoded, torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[1:]


def test_the_reader_has_3_9_million_parameters_and_reads_in_slots(reader: LineReader) -> None:
    assert sum(parameter.numel() for parameter in reader.parameters()) == pytest.approx(3.94e6, rel=0.01)
    stepper = TorchStepper(line_network(reader), 4, Device())
    each = [*lines(1, 64, 0), *lines(2, 128, 1), *lines(1, 64, 2)]
    pictures = [stepper.read({"image": line[None]}) for line in each]
    stepper.admit(range(4), stepper.encode(pictures))
    steps = [stepper.step(4) for _ in range(8)]
    answers = [read_alone(reader, line, 8) for line in each]
    assert len({tuple(answer) for answer in answers}) > 1
    for slot, wanted in enumerate(answers):
        assert [int(tokens[slot]) for tokens in steps[: len(wanted)]] == wanted
    assert stepper.slot_bytes == 4 * 4 * 192 * 2 * (80 + 64)


def test_an_encoder_and_two_decoders_apart_write_what_one_line_after_the_other_would(
    reader: LineReader,
) -> None:
    """Slots are taken again, and rows are handed over in threads: the decoders' are not the encoder's."""
    encoder, *decoders = (
        TorchStepper(line_network(reader), 2, Device(1), part=part)
        for part in (ModelPart.ENCODER, ModelPart.DECODER, ModelPart.DECODER)
    )
    each = [*lines(4, 64, 3), *lines(4, 128, 4)]
    answers = [read_alone(reader, line, 6) for line in each]
    assert len({tuple(answer) for answer in answers}) > 1

    def write(decoder: TorchStepper, encoded: list[Any]) -> list[list[int]]:
        decoder.admit(range(2), encoded)
        steps = [decoder.step(2) for _ in range(6)]
        return [[int(tokens[slot]) for tokens in steps] for slot in range(2)]

    with ThreadPoolExecutor(2) as threads:
        for first in range(0, len(each), 4):
            pictures = [encoder.read({"image": line[None]}) for line in each[first : first + 4]]
            rows = list(encoder.encode(pictures))
            halves = threads.map(write, decoders, (rows[:2], rows[2:]))
            for wanted, written in zip(
                answers[first:], (one for half in halves for one in half), strict=False
            ):
                assert written[: len(wanted)] == wanted
    assert [bool(part.slot_bytes) for part in (encoder, *decoders)] == [False, True, True]
    assert not encoder.notes


def test_lines_of_another_shape_are_refused(reader: LineReader) -> None:
    stepper = TorchStepper(line_network(reader), 1, Device())
    for wrong in (lines(1, 60, 0), lines(1, 520, 0), lines(2, 64, 0), lines(1, 64, 0).astype(np.float32)):
        with pytest.raises(InvalidInput, match="image must be"):
            stepper.read({"image": wrong})


def test_weights_are_written_and_read(reader: LineReader, tmp_path: Path) -> None:
    train = tool("train_reader")
    state = {name: value for name, value in reader.state_dict().items() if value.is_floating_point()}
    file = tmp_path / "reader.safetensors"
    train.write_safetensors(file, state, {"model": "carpool line reader"})
    assert file.stat().st_size < 8e6
    network = line_network(read_line_reader(file))
    assert b"".join(network.pieces[token] for token in (42, 1, 43, 0)) == b"I J"
    train.write_safetensors(file, {"a": torch.zeros(1)}, {})
    with pytest.raises(ModelError, match="not a reader of this kind"):
        read_line_reader(file)


@pytest.fixture(scope="module")
def glyphs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two fonts, whose letters are bars, of which one is held out."""
    file = tmp_path_factory.mktemp("glyphs") / "glyphs.npz"
    count = len(line_reader.ALPHABET)
    cells = np.zeros((2, count, 40, 60), np.uint8)
    cells[:, 1:, 10:30, 10:16] = 255
    fonts = [{"name": name, "held_out": name == "other"} for name in ("one", "other")]
    np.savez_compressed(
        file,
        glyphs=cells,
        advances=np.full((2, count), 12.0, np.float32),
        fonts=np.array(json.dumps(fonts)),
        words=np.array("some words to read"),
    )
    return file


@pytest.mark.conformance
def test_lines_are_made_with_their_truth(glyphs: Path) -> None:
    maker = tool("glyph_lines").LineMaker(glyphs, line_reader.ALPHABET, torch.device("cpu"))
    torch.manual_seed(0)
    made = maker.make(64, 256, 40, maker.numbers(held_out=True), clean=True)
    assert made.pictures.shape == (64, 1, 32, 256)
    assert set(made.fonts.tolist()) == {1}
    texts = [line_reader.text_of(row) for row in made.tokens.tolist()]
    assert all(text == text.rstrip() for text in texts)
    assert any(" " in text for text in texts)
    for text, picture in zip(texts, made.pictures, strict=True):
        ink = (picture[0, 12:20] < 0.5).any(0).int()
        bars = int((ink[1:] > ink[:-1]).sum())
        assert bars == len(text.replace(" ", ""))
    worn = maker.make(8, 512, 80, maker.numbers(held_out=False))
    assert torch.isfinite(worn.pictures).all()
    assert ((worn.pictures >= 0) & (worn.pictures <= 1)).all()


@pytest.mark.conformance
def test_the_reader_trains_for_a_few_steps(glyphs: Path, tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(TOOLS / "train_reader.py"),
        "--glyphs",
        str(glyphs),
        "--into",
        str(tmp_path),
    ]
    command += ["--steps", "5", "--batch", "8", "--lines", "8"]
    subprocess.run(command, check=True, timeout=300, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert {file.name for file in tmp_path.iterdir()} == {"reader.safetensors", "report.json"}
    read_line_reader(tmp_path / "reader.safetensors")


class Captures(Device):
    """Takes the way of a GPU: answers are taken in by programs of a few sizes."""

    captures = True


def test_answers_that_are_taken_in_by_programs_write_the_same() -> None:
    small, random = Small(3), Random(4)
    plain, captured = small.slots(), small.slots(device=Captures())
    torch.manual_seed(5)
    for _ in range(60):
        count = random.randint(1, SLOTS)
        slots = random.sample(range(SLOTS), count)
        rows = MEMORY if random.random() < 0.7 else random.randint(1, MEMORY)
        encoded = [torch.randn(rows, WIDTH) for _ in range(count)]
        for decoder in (plain, captured):
            decoder.admit(slots, encoded)
        for _ in range(random.randint(0, 12)):
            width = random.randint(1, SLOTS)
            assert captured.step(width).tolist() == plain.step(width).tolist()
