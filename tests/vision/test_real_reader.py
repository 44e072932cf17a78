"""The finder and the reader that come with the package, on rendered text; and PP-OCR's, if installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest

from carpool.demo import ocr_models
from carpool.demo.ocr_repository import write_repository
from carpool.types import Array
from vision.ocr_models import ByHand, read_page, render, unspaced

FONTS = [file for file in render.system_fonts() if file.stem.startswith("DejaVu")]
pytestmark = pytest.mark.skipif(not FONTS, reason="no DejaVu font is installed")


@pytest.fixture(scope="module")
def finder() -> ByHand:
    return ByHand(ocr_models() / "text_finder")


@pytest.fixture(scope="module")
def reader() -> ByHand:
    return ByHand(ocr_models() / "line_reader")


def page_of(texts: list[str], degrees: float = 0.0, **looks: float) -> Array:
    plain = next(file for file in FONTS if file.stem == "DejaVuSans")
    lines = [render.render_line(text, plain, 26, number, **looks) for number, text in enumerate(texts)]
    width = 80 + max(line.shape[1] for line in lines)
    page = np.full((80 + 48 * len(texts), width, 3), 250, np.uint8)
    for number, line in enumerate(lines):
        top = 40 + 48 * number
        page[top : top + line.shape[0], 40 : 40 + line.shape[1]] = line
    if degrees:
        turn = cv2.getRotationMatrix2D((width / 2, len(page) / 2), degrees, 1.0)
        page = cv2.warpAffine(page, turn, (width, len(page)), borderValue=(250, 250, 250))
    return page


def exact(reader: ByHand, count: int, seed: int, **looks: float) -> float:
    lines = list(render.made_lines(count, seed, FONTS, **looks))
    return sum(unspaced(reader.read(line.pixels)["text"]) == unspaced(line.text) for line in lines) / count


def test_the_shipped_reader_reads_rendered_lines(reader: ByHand) -> None:
    """Measured: 40 of 40 with these fonts; other ones, and other versions of Pillow, may cost one or two."""
    assert exact(reader, 40, seed=11) >= 0.95


def test_light_on_dark_is_read_as_well(reader: ByHand) -> None:
    assert exact(reader, 12, seed=12, ink=240, paper=20) >= 0.9


def test_a_width_that_is_longer_than_the_line_changes_nothing(reader: ByHand) -> None:
    [line] = render.made_lines(1, 13, FONTS, most=12)
    assert reader.read(line.pixels, (640,))["text"] == reader.read(line.pixels)["text"] == line.text


def test_very_long_lines_are_squeezed(reader: ByHand) -> None:
    """Twice as long as the widest bucket: read all the same, with some mistakes; never an error."""
    [line] = render.made_lines(1, 14, FONTS, most=60)
    text = reader.read(line.pixels, (320,))["text"]
    assert len(text) > 0.5 * len(line.text)


@pytest.mark.parametrize("degrees", [0.0, 2.0, -2.0])
def test_a_page_is_read_line_by_line(finder: ByHand, reader: ByHand, degrees: float) -> None:
    texts = render.made_texts(6, 15)
    answer = read_page(finder, reader, page_of(texts, degrees))
    assert [unspaced(line["text"]) for line in answer["lines"]] == [unspaced(text) for text in texts]
    assert answer["text"].count("\n") == 5


def test_an_empty_page_says_nothing(finder: ByHand, reader: ByHand) -> None:
    blank = np.full((300, 400, 3), 255, np.uint8)
    assert read_page(finder, reader, blank) == {"text": "", "lines": []}


def test_a_single_pixel_is_a_picture(finder: ByHand, reader: ByHand) -> None:
    dot = np.zeros((1, 1, 3), np.uint8)
    assert read_page(finder, reader, dot)["lines"] == []
    assert 0 <= reader.read(dot)["score"] <= 1


# ---- PP-OCRv4, from the wheel that carries it

_WHEEL = "rapidocr-onnxruntime==1.4.4"
_KEPT = Path(__file__).parents[2] / ".venv" / "conformance" / "ocr"


@pytest.fixture(scope="module")
def ppocr(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ByHand]:
    """The wheel is fetched once, and opened as an archive."""
    if not list(_KEPT.glob("*.whl")):
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            _WHEEL,
            "--no-deps",
            "--quiet",
            "--dest",
            str(_KEPT),
        ]
        if subprocess.run(command, capture_output=True).returncode:
            pytest.skip(f"{_WHEEL} cannot be fetched")
    folder = tmp_path_factory.mktemp("ppocr") / "models"
    write_repository(folder, list(_KEPT.glob("*.whl")))
    return {part: ByHand(folder / f"ppocr4_{part}") for part in ("det", "rec")}


@pytest.mark.conformance
def test_ppocr_reads_200_clean_lines(ppocr: dict[str, ByHand]) -> None:
    assert ppocr["rec"].plan.task == "read"
    assert exact(ppocr["rec"], 200, seed=21) >= 0.95


@pytest.mark.conformance
@pytest.mark.parametrize("degrees", [0.0, 15.0, -30.0])
def test_ppocr_reads_turned_pages(ppocr: dict[str, ByHand], degrees: float) -> None:
    assert ppocr["det"].plan.task == "text_regions"
    texts = render.made_texts(5, 16, most=24)
    page = cv2.copyMakeBorder(page_of(texts), 200, 200, 60, 60, cv2.BORDER_CONSTANT, value=(250, 250, 250))
    turn = cv2.getRotationMatrix2D((page.shape[1] / 2, page.shape[0] / 2), degrees, 1.0)
    page = cv2.warpAffine(page, turn, page.shape[1::-1], borderValue=(250, 250, 250))
    answer = read_page(ppocr["det"], ppocr["rec"], page, stretch=1.0)
    read = {unspaced(line["text"]) for line in answer["lines"]}
    assert len(read & {unspaced(text) for text in texts}) >= 4
