#!/usr/bin/env python3
"""Trains Carpool's reader of printed lines, on lines that are made as it goes.

    python tools/reader/train_reader.py --glyphs out/glyphs.npz --into out/reader --seconds 450

Needs PyTorch and NumPy, and a GPU to get anywhere; `--steps 5 --batch 8` shows on a CPU that it runs. Writes
reader.safetensors (fp16) and report.json: what was trained with, for how long, and the share of characters
that are wrong and of lines that are right, on fonts of families that it has never seen.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import sys
import time
from copy import deepcopy
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn import functional

HERE = Path(__file__).parent


def opened(file: Path) -> ModuleType:
    """A file that needs PyTorch and nothing of what else Carpool does."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[file.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


glyph_lines = opened(HERE / "glyph_lines.py")
line_reader = opened(HERE.parents[1] / "src" / "carpool" / "extensions" / "text" / "line_reader.py")

SHAPES = ((256, 40), (512, line_reader.LONGEST))  # pixels and characters of the lines of a batch
MOST_LEARNED, LEAST_LEARNED, WARM_UP = 1.2e-3, 1e-5, 400  # steps
SMOOTHING, DECAY, MOST_GRADIENT = 0.1, 0.05, 1.0
AVERAGED = 0.998  # of the averaged weights stays at a step


def loss_of(model: nn.Module, pictures: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Of each character from those before it; behind the end of the text nothing counts."""
    before = functional.pad(tokens[:, :-1], (1, 0), value=line_reader.END)
    found = model(pictures, before).float()
    ended = (tokens == line_reader.END).cumsum(1)
    wanted = torch.where(ended > 1, -100, tokens)
    return functional.cross_entropy(
        found.flatten(0, 1), wanted.flatten(), ignore_index=-100, label_smoothing=SMOOTHING
    )


def train(maker: Any, args: argparse.Namespace, device: torch.device) -> tuple[nn.Module, dict[str, Any]]:
    cuda = device.type == "cuda"
    model = line_reader.LineReader().to(device)
    averaged = deepcopy(model).eval()
    optimizer = torch.optim.AdamW(
        model.parameters(), MOST_LEARNED, betas=(0.9, 0.98), weight_decay=DECAY, fused=cuda
    )
    fonts = maker.numbers(held_out=False)
    began, history, step = time.monotonic(), [], 0
    called = model if args.plain or not cuda else compiled(model, maker, args.batch)
    while True:
        part = part_done(step, time.monotonic() - began, args)
        if part >= 1.0:
            break
        learned = LEAST_LEARNED + (MOST_LEARNED - LEAST_LEARNED) * (1 + math.cos(math.pi * part)) / 2
        for group in optimizer.param_groups:
            group["lr"] = learned * min(1.0, (step + 1) / WARM_UP)
        width, longest = SHAPES[step % len(SHAPES)]
        lines = maker.make(args.batch, width, longest, fonts)
        with torch.autocast(device.type, torch.bfloat16, enabled=cuda):
            loss = loss_of(called, lines.pictures, lines.tokens)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MOST_GRADIENT)
        optimizer.step()
        average(averaged, model, min(AVERAGED, step / (step + 10)))
        step += 1
        if step % args.tell == 0 or step <= len(SHAPES):
            value = float(loss.detach())
            if not math.isfinite(value):
                raise RuntimeError(f"the loss is {value} at step {step}")
            seconds = time.monotonic() - began
            history.append((step, round(seconds, 1), round(value, 4)))
            print(f"step {step}: {seconds:.1f} s, loss {value:.4f}, rate {learned:.2g}", flush=True)
    if cuda:
        torch.cuda.synchronize()
    seconds = time.monotonic() - began
    return averaged, {"steps": step, "seconds": round(seconds, 1), "history": history}


def compiled(model: nn.Module, maker: Any, batch: int) -> Any:
    """For both shapes; the model as it is where that cannot be."""
    called = torch.compile(model, dynamic=False)
    began = time.monotonic()
    try:
        for width, longest in SHAPES:
            lines = maker.make(batch, width, longest, maker.numbers(held_out=False))
            with torch.autocast("cuda", torch.bfloat16):
                loss = loss_of(called, lines.pictures, lines.tokens)
            loss.backward()
        model.zero_grad(set_to_none=True)
    except Exception as error:  # whatever a compiler may say: it is only there for speed
        print(f"not compiled: {type(error).__name__}: {str(error)[:500]}", flush=True)
        torch._dynamo.reset()
        return model
    print(f"compiled in {time.monotonic() - began:.0f} s", flush=True)
    return called


def part_done(step: int, seconds: float, args: argparse.Namespace) -> float:
    if args.steps is not None:
        return step / float(args.steps)
    return seconds / float(args.seconds)


@torch.no_grad()
def average(averaged: nn.Module, model: nn.Module, stays: float) -> None:
    """Weights averaged over the last few hundred steps read better than the last ones."""
    old = [*averaged.parameters(), *(b for b in averaged.buffers() if b.is_floating_point())]
    new = [*model.parameters(), *(b for b in model.buffers() if b.is_floating_point())]
    torch._foreach_lerp_(old, new, 1.0 - stays)


# ---- what it reads


@torch.no_grad()
def read(model: Any, pictures: torch.Tensor, longest: int) -> list[str]:
    """One character after the other, the likeliest each time."""
    encoded = model.encode(pictures)
    tokens = torch.full((len(pictures), 1), line_reader.END, device=pictures.device)
    ended = torch.zeros(len(pictures), dtype=torch.bool, device=pictures.device)
    for _ in range(longest):
        following = model.write(encoded, tokens)[:, -1].argmax(1)
        tokens = torch.cat([tokens, torch.where(ended, line_reader.END, following)[:, None]], 1)
        ended |= following == line_reader.END
        if bool(ended.all()):
            break
    return [line_reader.text_of(row) for row in tokens[:, 1:].tolist()]


def distance(one: str, other: str) -> int:
    """How many characters have to be changed, left out or put in (Levenshtein)."""
    row = list(range(len(other) + 1))
    for number, character in enumerate(one, 1):
        before, row[0] = row[0], number
        for place, wanted in enumerate(other, 1):
            here = row[place]
            row[place] = min(here + 1, row[place - 1] + 1, before + (character != wanted))
            before = here
    return row[-1]


def evaluated(
    model: nn.Module, maker: Any, lines: int, *, held_out: bool, clean: bool, anything: bool, batch: int
) -> dict[str, Any]:
    """On lines of both shapes."""
    fonts = maker.numbers(held_out=held_out)
    wrong = characters = exact = count = 0
    by_font: dict[str, list[int]] = {}
    shown: list[tuple[str, str]] = []
    while count < lines:
        width, longest = SHAPES[(count // batch) % len(SHAPES)]
        made = maker.make(batch, width, longest, fonts, clean=clean, anything=anything)
        found = read(model, made.pictures, longest)
        for font, row, text in zip(made.fonts.tolist(), made.tokens.tolist(), found, strict=True):
            truth = line_reader.text_of(row)
            off = distance(truth, text)
            wrong, characters, count = wrong + off, characters + len(truth), count + 1
            exact += off == 0
            tally = by_font.setdefault(maker.fonts[font]["name"], [0, 0, 0, 0])
            for place, value in enumerate((1, off == 0, off, len(truth))):
                tally[place] += value
            if off and len(shown) < 20:
                shown.append((truth, text))
    return {
        "lines": count,
        "characters_wrong": round(wrong / max(1, characters), 5),
        "lines_exact": round(exact / count, 4),
        "by_font": {
            name: {
                "lines": n,
                "lines_exact": round(right / n, 4),
                "characters_wrong": round(off / max(1, of), 5),
            }
            for name, (n, right, off, of) in sorted(by_font.items())
        },
        "mistakes": shown,
    }


def write_safetensors(file: Path, tensors: dict[str, torch.Tensor], about: dict[str, str]) -> None:
    """The format in a few lines, so that nothing but PyTorch is needed: a head in JSON, then the numbers."""
    head: dict[str, Any] = {"__metadata__": about}
    parts, at = [], 0
    for name, tensor in sorted(tensors.items()):
        data = tensor.detach().to("cpu", torch.float16).contiguous().numpy().tobytes()
        head[name] = {"dtype": "F16", "shape": list(tensor.shape), "data_offsets": [at, at + len(data)]}
        parts.append(data)
        at += len(data)
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(parts))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--glyphs", type=Path, default=Path("out/glyphs.npz"), help="of make_glyphs.py")
    parser.add_argument("--into", type=Path, default=Path("out/reader"))
    parser.add_argument("--seconds", type=float, default=450.0, help="to train for")
    parser.add_argument("--steps", type=int, help="instead of --seconds")
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--lines", type=int, default=4096, help="to measure with, of each kind")
    parser.add_argument("--plain", action="store_true", help="without PyTorch's compiler")
    parser.add_argument("--tell", type=int, default=250, help="of every so many steps")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    maker = glyph_lines.LineMaker(args.glyphs, line_reader.ALPHABET, device)
    model, trained = train(maker, args, device)
    args.into.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor for name, tensor in model.state_dict().items() if tensor.is_floating_point()}
    about = {"model": "carpool line reader", "alphabet": line_reader.ALPHABET}
    write_safetensors(args.into / "reader.safetensors", weights, about)
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "torch": torch.__version__,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "batch": args.batch,
        **trained,
        "fonts": maker.fonts,
    }
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    model.half().float()  # as it was written
    batch = min(args.lines, 512)
    for name, kinds in (
        ("held_out", {"held_out": True, "clean": False, "anything": False}),
        ("held_out_clean", {"held_out": True, "clean": True, "anything": False}),
        ("held_out_anything", {"held_out": True, "clean": False, "anything": True}),
        ("seen", {"held_out": False, "clean": False, "anything": False}),
    ):
        report[name] = evaluated(model, maker, args.lines, batch=batch, **kinds)
        said = {key: report[name][key] for key in ("lines", "characters_wrong", "lines_exact")}
        print(f"{name}: {json.dumps(said)}", flush=True)
        (args.into / "report.json").write_text(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
