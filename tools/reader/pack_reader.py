#!/usr/bin/env python3
"""Packs the trained reader for the package: weights in 8 bits, with a scale for each row.

    python tools/reader/pack_reader.py out/reader/reader.safetensors --into src/carpool/demo/reader/reader/1

Matrices become int8, the largest of each row ±127; what is small (norms, biases, positions) stays fp16. Reads
nothing but the numbers; loading multiplies them out again (extensions/text/text_network.py).

With `--measure out/glyphs.npz`, the same lines in held-out fonts are read with both, and it is told how many
characters are wrong and how many lines are exact.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
import train_reader
from safetensors.torch import load_file, save_file

from carpool.extensions.text.text_network import read_line_reader

SCALE = ".scale"
_LEAST = 4096  # numbers: what is smaller stays as it is


def packed(held: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for name, tensor in held.items():
        wide = tensor.float()
        if wide.dim() < 2 or wide.numel() < _LEAST:
            found[name] = wide.half()
            continue
        most = wide.flatten(1).abs().amax(1).clamp(min=1e-8)
        scale = (most / 127.0).half().float()
        rows = wide / scale.view(-1, *(1 for _ in wide.shape[1:]))
        found[name] = rows.round().clamp(-127, 127).to(torch.int8)
        found[name + SCALE] = scale.half()
    return found


def measure(file: Path, args: argparse.Namespace) -> None:
    network = read_line_reader(file).eval()
    torch.manual_seed(args.seed)
    alphabet = train_reader.line_reader.ALPHABET
    maker = train_reader.glyph_lines.LineMaker(args.measure, alphabet, torch.device("cpu"))
    for anything in (False, True):
        found = train_reader.evaluated(
            network, maker, args.lines, held_out=True, clean=False, anything=anything, batch=25
        )
        told = (
            f"{found['characters_wrong']:.2%} of characters wrong, {found['lines_exact']:.1%} of lines exact"
        )
        what = "with strings of anything" if anything else "words, numbers and codes"
        print(f"{file}: {what}: {told}, of {found['lines']}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="of train_reader.py")
    parser.add_argument("--into", type=Path, required=True, help="folder for model.safetensors")
    parser.add_argument(
        "--measure", type=Path, metavar="GLYPHS", help="read lines with both; of make_glyphs.py"
    )
    parser.add_argument("--lines", type=int, default=100, help="to measure with, of each of two kinds")
    parser.add_argument("--seed", type=int, default=1, help="of those lines")
    args = parser.parse_args()
    args.into.mkdir(parents=True, exist_ok=True)
    file = args.into / "model.safetensors"
    save_file(packed(load_file(str(args.file))), str(file), {"model": "carpool line reader, 8 bits"})
    print(f"{file}: {file.stat().st_size} bytes")
    for measured in (args.file, file) if args.measure else ():
        measure(measured, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
