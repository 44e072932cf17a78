#!/usr/bin/env python3
"""Renders the page of text that the demo `ocr` reads: src/carpool/demo/ocr/ocr/page.jpg.

    python tools/make_demo_page.py

Needs the fonts of Debian's fonts-dejavu-core (free to use; only what they draw is in the picture).
"""

from __future__ import annotations

from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

INTO = Path(__file__).parents[1] / "src" / "carpool" / "demo" / "ocr" / "ocr" / "page.jpg"
FONTS = Path("/usr/share/fonts/truetype/dejavu")
SIZE = (760, 560)
PAPER, INK, BAND = (250, 249, 245), (28, 30, 36), (32, 74, 110)
LEFT = 48

# what it says, where its top is, its font and its size; with a number, this one stands at the right
LINES: tuple[tuple[str, int, str, int, str], ...] = (
    ("HARBOUR CYCLE WORKS", 34, "DejaVuSans-Bold", 34, ""),
    ("Invoice 2041-07, 16.11.2026", 120, "DejaVuSans", 22, ""),
    ("Chain and two sprockets", 180, "DejaVuSerif", 22, "64.90"),
    ("Brake cable, 1.8 m", 222, "DejaVuSerif", 22, "7.25"),
    ("Labour, 3 hours", 264, "DejaVuSerif", 22, "135.00"),
    ("Total", 318, "DejaVuSerif-Bold", 24, "207.15"),
    ("Please pay within 14 days. Thank you for your visit.", 392, "DejaVuSans", 20, ""),
    ("Order AKT-5518 / stand 12", 440, "DejaVuSansMono", 20, ""),
    ("Open 08:30 to 17:45, closed on Sunday", 488, "DejaVuSans-Oblique", 20, ""),
)


def main() -> None:
    page = Image.new("RGB", SIZE, PAPER)
    pen = ImageDraw.Draw(page)
    pen.rectangle((0, 18, SIZE[0], 90), fill=BAND)
    pen.line((LEFT, 306, SIZE[0] - LEFT, 306), fill=INK, width=2)
    for text, top, face, size, amount in LINES:
        font = ImageFont.truetype(str(FONTS / f"{face}.ttf"), size)
        colour = PAPER if top < 90 else INK
        pen.text((LEFT, top), text, colour, font)
        pen.text((SIZE[0] - LEFT, top), amount, colour, font, "ra")
    page.save(INTO, quality=82)
    print(f"{INTO}: {INTO.stat().st_size} bytes")


if __name__ == "__main__":
    main()
