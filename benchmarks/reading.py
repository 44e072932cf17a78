"""One-line pictures in eleven fonts: how many does `/read` answer exactly, and how many tesseract?

    python benchmarks/reading.py --misses
    python benchmarks/reading.py --quick

Both read the same pictures: dark text on light paper, 12 to 56 pixels high. Carpool's side is the finder and
the reader that come with the package, asked as the pipeline `ocr` asks them; tesseract is told that the
picture is one line (`--psm 7`), which is more than Carpool is told. A line is exact if nothing is missing and
nothing is added, spaces included. The fonts are in Debian's fonts-dejavu, fonts-liberation, fonts-noto-core.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests" / "vision"), str(ROOT / "tools")]

from ocr_models import ByHand, read_page  # noqa: E402

from carpool.demo import bundled_models  # noqa: E402
from carpool.types import Array  # noqa: E402
from render_lines import made_texts, render_line, system_fonts  # noqa: E402

FONTS = (
    *("DejaVuSans", "DejaVuSansMono", "DejaVuSerif", "DejaVuSansCondensed", "DejaVuSans-Bold"),
    *("LiberationSans-Regular", "LiberationSerif-Regular", "LiberationMono-Regular"),
    *("LiberationSansNarrow-Regular", "NotoSans-Regular", "NotoSerif-Regular"),
)
SIZES = (12, 14, 16, 20, 24, 28, 32, 40, 48, 56)
OCR = bundled_models().parent / "ocr"


@dataclass(frozen=True)
class Row:
    pixels: int  # the font's size
    lines: int
    carpool: int  # exact
    tesseract: int
    fragments: int  # answers of Carpool with more lines than the one that is there


def with_tesseract(pixels: Array) -> str:
    file = BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    command = ["tesseract", "-", "-", "--psm", "7"]
    environment = {**os.environ, "OMP_THREAD_LIMIT": "1"}
    done = subprocess.run(command, input=file.getvalue(), capture_output=True, env=environment, check=True)
    return " ".join(done.stdout.decode().split())


def measured(size: int, fonts: dict[str, Path], each: int, seed: int, misses: list[dict[str, Any]]) -> Row:
    finder, reader = ByHand(OCR / "text_finder"), ByHand(OCR / "line_reader")
    texts = made_texts(each * len(fonts), seed * 1000 + size)
    right = theirs = fragments = 0
    for number, text in enumerate(texts):
        font = list(fonts)[number % len(fonts)]
        pixels = render_line(text, fonts[font], size, number, margin=0.6)
        answer = read_page(finder, reader, pixels)
        ours, other = answer["text"], with_tesseract(pixels)
        right, theirs = right + (ours == text), theirs + (other == text)
        fragments += len(answer["lines"]) > 1
        if ours != text or other != text:
            misses.append({"pixels": size, "font": font, "text": text, "carpool": ours, "tesseract": other})
    return Row(size, len(texts), right, theirs, fragments)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="three sizes, one line a font")
    parser.add_argument("--each", type=int, default=4, help="lines of each font and size")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print the rows and every miss for machines")
    parser.add_argument("--misses", action="store_true", help="print the lines that either did not read")
    given = parser.parse_args()
    if shutil.which("tesseract") is None:
        print("there is no tesseract to compare with: apt install tesseract-ocr")
        return
    there = {path.stem: path for path in system_fonts()}
    fonts = {name: there[name] for name in FONTS if name in there}
    if len(fonts) < len(FONTS) and not given.json:
        print(f"without {', '.join(sorted(set(FONTS) - set(fonts)))}: not installed")
    rows, misses = list[Row](), list[dict[str, Any]]()
    if not given.json:
        print(f"{'px':>4} {'lines':>6} {'carpool':>8} {'tesseract':>10} {'fragments':>10}")
    for size in SIZES[::4] if given.quick else SIZES:
        row = measured(size, fonts, 1 if given.quick else given.each, given.seed, misses)
        rows.append(row)
        if not given.json:
            counts = f"{row.carpool:8} {row.tesseract:10} {row.fragments:10}"
            print(f"{row.pixels:4} {row.lines:6} {counts}", flush=True)
    if given.json:
        document = {"fonts": list(fonts), "rows": [asdict(row) for row in rows], "misses": misses}
        print(json.dumps(document, indent=1))
        return
    for miss in misses if given.misses else ():
        shown = ", ".join(repr(miss[name]) for name in ("text", "carpool", "tesseract"))
        print(f"{miss['pixels']:3} {miss['font']}: {shown}")


if __name__ == "__main__":
    main()
