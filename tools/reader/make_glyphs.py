#!/usr/bin/env python3
"""Packs the letters of many fonts, and words, into one file, of which lines are made to train a reader with.

    python tools/reader/make_glyphs.py --fonts /usr/share/fonts --into out/glyphs.npz

The fonts are those of Debian packages (PACKAGES: which, and under what licence). Only pictures of their
letters are kept, and they are not part of Carpool. Fonts that are not there are left out, and named.
`--fonts` may be given more than once; packages need not be installed: `dpkg -x` into a folder does.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

BOX, INK = 40, 36  # pixels: of a letter's cell, and from the highest to the lowest that a font has
CELL, MARGIN = 60, 8  # width of a cell, and where in it the pen stands
ALPHABET = "".join(map(chr, range(32, 127))) + "€£"  # as in line_reader.py

PACKAGES: dict[str, tuple[str, str]] = {
    "fonts-dejavu": (
        "Bitstream Vera licence, changes in the public domain",
        "DejaVuSans DejaVuSans-Bold DejaVuSans-Oblique DejaVuSansCondensed DejaVuSansMono "
        "DejaVuSansMono-Bold DejaVuSerif DejaVuSerif-Bold DejaVuSerif-Italic DejaVuSerifCondensed",
    ),
    "fonts-liberation": (
        "OFL-1.1 or GPL-2 with font exception, by version",
        "LiberationSans-Regular LiberationSans-Bold LiberationSans-Italic LiberationSansNarrow-Regular "
        "LiberationSerif-Regular LiberationSerif-Bold LiberationSerif-Italic LiberationMono-Regular "
        "LiberationMono-Bold",
    ),
    "fonts-freefont-ttf": (
        "GPL-3+ with font exception",
        "FreeSans FreeSansBold FreeSansOblique FreeSerif FreeSerifBold FreeSerifItalic FreeMono FreeMonoBold",
    ),
    "fonts-noto-core": (
        "OFL-1.1",
        "NotoSans-Regular NotoSans-Bold NotoSans-Italic NotoSerif-Regular NotoSerif-Bold NotoSerif-Italic "
        "NotoSerifDisplay-Regular NotoSansDisplay-Regular",
    ),
    "fonts-linuxlibertine": (
        "OFL-1.1 or GPL-2+ with font exception",
        "LinLibertine_R LinLibertine_RB LinLibertine_RI LinLibertine_M LinBiolinum_R",
    ),
    "fonts-urw-base35": (
        "AGPL-3 with font exception",
        "C059-Roman C059-Bold C059-Italic NimbusMonoPS-Regular NimbusMonoPS-Bold NimbusRoman-Regular "
        "NimbusRoman-Bold NimbusRoman-Italic NimbusSans-Regular NimbusSans-Bold URWGothic-Book "
        "URWGothic-Demi P052-Roman URWBookman-Light NimbusSansNarrow-Regular",
    ),
    "fonts-lato": ("OFL-1.1", "Lato-Regular Lato-Bold Lato-Italic Lato-Light Lato-Black"),
    "fonts-roboto-unhinted": (
        "Apache-2.0",
        "Roboto-Regular Roboto-Bold Roboto-Light Roboto-Italic RobotoCondensed-Regular RobotoCondensed-Bold",
    ),
    "fonts-crosextra-carlito": ("OFL-1.1", "Carlito-Regular Carlito-Bold Carlito-Italic"),
    "fonts-cantarell": ("OFL-1.1", "Cantarell-Regular Cantarell-Bold"),
    "fonts-cmu": ("OFL-1.1", "cmunrm cmunbx cmunti cmunss cmuntt"),
    "fonts-inconsolata": ("OFL-1.0", "Inconsolata"),
    "fonts-hack": ("MIT and Bitstream Vera licence", "Hack-Regular Hack-Bold"),
    "fonts-quicksand": ("OFL-1.1", "Quicksand-Regular Quicksand-Bold"),
    "fonts-sil-gentiumplus": ("OFL-1.1", "GentiumPlus-Regular GentiumPlus-Italic GentiumBookPlus-Bold"),
    "fonts-vollkorn": ("OFL-1.1", "Vollkorn-Regular Vollkorn-Italic Vollkorn-Bold"),
    "fonts-cardo": ("OFL-1.1", "Cardo104s Cardoi99"),
    "fonts-fanwood": ("MIT", "Fanwood Fanwood-Italic"),
    "fonts-prociono": ("public domain", "Prociono"),
    "fonts-georgewilliams": ("BSD-3-Clause or OFL-1.1, by font", "CaslonRoman CaslonItalic"),
    "fonts-essays1743": ("LGPL-2.1 or OFL-1.1, by version", "Essays1743 Essays1743-Italic"),
    "fonts-oldstandard": ("OFL-1.1", "OldStandard-Regular OldStandard-Italic OldStandard-Bold"),
    "fonts-adf-baskervald": ("GPL-2+ with font exception", "BaskervaldADFStd BaskervaldADFStd-Italic"),
    "fonts-adf-gillius": ("GPL-2+ with font exception", "GilliusADF-Regular GilliusADF-BoldCond"),
    "fonts-adf-libris": ("GPL-2+ with font exception", "LibrisADFStd-Regular LibrisADFStd-Italic"),
    "fonts-adf-romande": ("GPL-2+ with font exception", "RomandeADFStd-Regular RomandeADFStd-Italic"),
    "fonts-adf-universalis": ("GPL-2+ with font exception", "UniversalisADFStd-Cond"),
    "fonts-sil-charis": ("OFL-1.1", "CharisSIL-Regular CharisSIL-Italic"),
    "fonts-sil-andika": ("OFL-1.1", "Andika-Regular"),
    "fonts-inter": ("OFL-1.1", "Inter-Regular Inter-Italic Inter-SemiBold"),
    "fonts-cabin": ("OFL-1.1", "Cabin-Regular Cabin-BoldItalic"),
    "fonts-jetbrains-mono": (
        "OFL-1.1 or Apache-2.0, by version",
        "JetBrainsMono-Regular JetBrainsMono-Italic",
    ),
    "fonts-mononoki": ("OFL-1.1", "mononoki-Regular"),
    "fonts-dosis": ("OFL-1.1", "Dosis-Medium"),
    "fonts-b612": ("OFL-1.1 or EPL-2.0, by version", "B612-Regular"),
    "fonts-yanone-kaffeesatz": ("OFL-1.1", "YanoneKaffeesatz-Regular"),
    "fonts-junicode": ("OFL-1.1", "JunicodeTwoBeta-Italic"),
    "fonts-crosextra-caladea": ("Apache-2.0", "Caladea-Regular"),
    "fonts-open-sans": ("Apache-2.0", "OpenSans-Regular"),
    "fonts-ebgaramond": ("OFL-1.1", "EBGaramond12-Italic"),
    "fonts-firacode": ("OFL-1.1", "FiraCode-Regular"),
}
HELD_OUT = (
    *("Caladea-Regular", "OpenSans-Regular", "EBGaramond12-Italic", "FiraCode-Regular"),
    *("P052-Roman", "URWBookman-Light", "NimbusSansNarrow-Regular", "LinBiolinum_R"),
)
"""Nothing of their families is trained with."""


def drawn(file: Path) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """The letters of a font [characters, BOX, CELL], and how far the pen goes on after each."""
    face = ImageFont.truetype(str(file), 100)
    boxes = [face.getbbox(character, anchor="ls") for character in ALPHABET[1:]]
    top, bottom = min(box[1] for box in boxes), max(box[3] for box in boxes)
    scale = INK / (bottom - top)
    face = ImageFont.truetype(str(file), 100 * scale)
    baseline = round((BOX - INK) / 2 - top * scale)
    cells = np.zeros((len(ALPHABET), BOX, CELL), np.uint8)
    advances = np.zeros(len(ALPHABET), np.float32)
    for number, character in enumerate(ALPHABET):
        cell = Image.new("L", (CELL, BOX), 0)
        ImageDraw.Draw(cell).text((MARGIN, baseline), character, 255, face, anchor="ls")
        cells[number] = np.asarray(cell)
        advances[number] = face.getlength(character)
    return cells, advances


def missing(file: Path) -> str:
    """The characters that a font does not have: it draws them as what no font has, or not at all."""
    face = ImageFont.truetype(str(file), 40)
    unknown = bytes(face.getmask("\U0010fffe"))
    drawn = {character: bytes(face.getmask(character)) for character in ALPHABET[1:]}
    return "".join(character for character, mask in drawn.items() if mask == unknown or not any(mask))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fonts", type=Path, action="append", help="where to look (default: the system's)")
    parser.add_argument(
        "--words", type=Path, default=Path("/usr/share/dict/american-english"), help="of Debian's wamerican"
    )
    parser.add_argument("--into", type=Path, default=Path("out/glyphs.npz"))
    args = parser.parse_args()
    there = {
        file.stem: file
        for folder in args.fonts or [Path("/usr/share/fonts")]
        for kind in ("*.ttf", "*.otf")
        for file in sorted(folder.rglob(kind))
    }
    fonts: list[dict[str, Any]] = []
    cells, advances = [], []
    for package, (licence, names) in PACKAGES.items():
        for name in names.split():
            if name not in there:
                print(f"left out: {name} of {package} is not there", file=sys.stderr)
                continue
            if lacks := missing(there[name]):
                print(f"left out: {name} of {package} has no {lacks}", file=sys.stderr)
                continue
            glyphs, widths = drawn(there[name])
            cells.append(glyphs)
            advances.append(widths)
            fonts.append({"name": name, "package": package, "licence": licence, "held_out": name in HELD_OUT})
    if not fonts:
        print("none of the fonts is there", file=sys.stderr)
        return 1
    args.into.parent.mkdir(parents=True, exist_ok=True)
    words = [word for word in args.words.read_text("utf-8").split() if set(word) <= set(ALPHABET)]
    np.savez_compressed(
        args.into,
        glyphs=np.stack(cells),
        advances=np.stack(advances),
        fonts=np.array(json.dumps(fonts)),
        words=np.array("\n".join(words)),
    )
    held = sum(font["held_out"] for font in fonts)
    print(
        f"{args.into}: {len(fonts)} fonts, {held} of them held out, {args.into.stat().st_size / 1e6:.1f} MB"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
