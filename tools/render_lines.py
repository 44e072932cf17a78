#!/usr/bin/env python3
"""Renders lines of text whose truth is known, to measure readers with.

    python tools/render_lines.py 200 --into lines --noise 8 --blur 0.6

writes lines/00000.png … and lines/truth.tsv (file, font, text). As a module: `render_line` draws one line,
`made_texts` says what might stand in it, `made_lines` does both. The same seed gives the same pixels with the
same fonts and the same Pillow. Fonts are those of the system; DejaVu is in Debian's fonts-dejavu-core.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter, ImageFont

Pixels = NDArray[np.uint8]

FONT_FOLDERS = (Path("/usr/share/fonts"), Path("/usr/local/share/fonts"))
_NOT_FOR_TEXT = ("math", "symbol", "emoji", "extralight", "dingbat")
_SIZES = (22, 26, 30, 36)
_WORDS = """
about above across after again against almost along always among animal answer area around arrive away
back balance basket because before begin behind better between beyond board bottle bridge bring brother
build butter camera carry castle centre change chapter circle city clear clock close cloud coffee colour
common company copper corner cotton country course cover credit cross danger daughter decide deep degree
detail device different dinner direct distance doctor double dream drive early earth east edge effect
eight either electric engine enough entry equal evening every example except explain family farmer
fashion father figure final finger first flower follow forest forward fresh friend front garden general
gentle given glass ground group grow guard half hammer happen harbour heart heavy height history holiday
hotel hundred idea imagine inside instead invoice island join journey judge jump kettle kitchen knife
known ladder language large later laugh leather length letter level library light listen little local
long machine market matter measure member method middle minute mirror moment money month morning mother
mountain music narrow nature nearly number object ocean offer office often open orange order other paper
parcel parent particular people perhaps person picture pilot place plain planet plenty pocket point
possible power present price private problem product profit public purple quarter question quick quiet
railway reach ready reason record region remember repeat report result return river round salt sample
school science season second secret serial service seven shadow sheet shoulder signal silver simple
single sister sleep small smooth soldier south space special spring square station steel still stone
store story straight street strong sudden sugar summer supply surface system table taste teacher thank
their thing third thousand through ticket together tomorrow total touch toward travel treaty under until
usual valley value various village visit voice volume walk warm watch water weather weight western
window winter wonder wooden world yellow young zero
"""
WORDS = tuple(_WORDS.split())


class Line(NamedTuple):
    text: str
    font: str  # the file's name without its ending
    pixels: Pixels  # RGB [height, width, 3]


def render_line(
    text: str,
    font: str | Path,
    size: int = 30,
    seed: int = 0,
    *,
    noise: float = 0.0,
    blur: float = 0.0,
    margin: float = 0.2,
    ink: int = 24,
    paper: int = 250,
) -> Pixels:
    """One line, as large as its font says and `margin` times its size on all sides, RGB. `noise` is the
    standard deviation of what is added to each grey level, `blur` the radius of a Gaussian."""
    face = ImageFont.truetype(str(font), size)
    left, top, right, bottom = face.getbbox(text)
    ascent, descent = face.getmetrics()
    upper, lower = min(top, ascent - round(0.75 * size)), max(bottom, ascent + descent // 2)
    edge = max(1, round(margin * size))
    width, height = round(right - left) + 2 * edge, round(lower - upper) + 2 * edge
    drawn = Image.new("L", (width, height), paper)
    ImageDraw.Draw(drawn).text((edge - left, edge - upper), text, ink, face)
    if blur > 0:
        drawn = drawn.filter(ImageFilter.GaussianBlur(blur))
    grey = np.asarray(drawn, np.float32)
    if noise > 0:
        grey = grey + np.random.default_rng(seed).normal(0.0, noise, grey.shape).astype(np.float32)
    level = np.clip(np.rint(grey), 0, 255).astype(np.uint8)
    return np.repeat(level[:, :, None], 3, axis=2)


def made_texts(count: int, seed: int = 0, *, most: int = 34) -> list[str]:
    """Words, numbers, dates, prices and codes, at most so many characters a line; no line comes twice."""
    random = np.random.default_rng(seed)
    found: dict[str, None] = {}
    while len(found) < count:
        length, text = int(random.integers(6, most + 1)), ""
        while len(text) < length:
            part = _part(random)
            if len(text) + 1 + len(part) > most:
                break
            text = f"{text} {part}".strip()
        found[text or _part(random)[:most]] = None
    return list(found)


def _part(random: np.random.Generator) -> str:
    kind = random.random()
    word = WORDS[random.integers(len(WORDS))]
    if kind < 0.55:
        return word
    if kind < 0.73:
        return word.capitalize()
    if kind < 0.79:
        return word.upper()
    return _number(random, kind)


def _number(random: np.random.Generator, kind: float) -> str:
    big, two = int(random.integers(1, 10_000)), int(random.integers(100))
    day, month = int(random.integers(1, 29)), int(random.integers(1, 13))
    if kind < 0.85:
        return str(big)
    if kind < 0.89:
        return f"{big % 1000}.{two:02d}"
    if kind < 0.93:
        return f"{day:02d}.{month:02d}.{2000 + two}"
    if kind < 0.96:
        return f"{day % 24:02d}:{two % 60:02d}"
    letters = "".join(chr(65 + int(one)) for one in random.integers(26, size=3))
    return f"{letters}-{big:04d}"


def system_fonts(folders: Sequence[Path] = FONT_FOLDERS) -> list[Path]:
    """TrueType and OpenType files that hold ordinary letters, by name."""
    files = [file for folder in folders for ending in ("ttf", "otf") for file in folder.rglob(f"*.{ending}")]
    plain = [file for file in files if not any(word in file.stem.lower() for word in _NOT_FOR_TEXT)]
    return sorted(plain, key=lambda file: (file.stem, str(file)))


def made_lines(
    count: int, seed: int = 0, fonts: Sequence[Path] | None = None, *, most: int = 34, **looks: Any
) -> Iterator[Line]:
    """Each in a font and a size of its own; `looks` are for `render_line`."""
    faces = list(fonts) if fonts is not None else system_fonts()
    if not faces:
        raise SystemExit("no font was found; on Debian: apt install fonts-dejavu-core")
    random = np.random.default_rng([seed, 1])
    for number, text in enumerate(made_texts(count, seed, most=most)):
        face = faces[int(random.integers(len(faces)))]
        size = int(random.choice(_SIZES))
        yield Line(text, face.stem, render_line(text, face, size, seed * 100_003 + number, **looks))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("count", type=int)
    parser.add_argument("--into", type=Path, default=Path("lines"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--noise", type=float, default=0.0, help="standard deviation, of 255")
    parser.add_argument("--blur", type=float, default=0.0, help="radius in pixels")
    parser.add_argument("--fonts", type=Path, nargs="*", help="files; the system's, if none")
    given = parser.parse_args()
    given.into.mkdir(parents=True, exist_ok=True)
    rows = []
    for number, line in enumerate(
        made_lines(given.count, given.seed, given.fonts, noise=given.noise, blur=given.blur)
    ):
        name = f"{number:05d}.png"
        Image.fromarray(line.pixels).save(given.into / name)
        rows.append(f"{name}\t{line.font}\t{line.text}\n")
    (given.into / "truth.tsv").write_text("".join(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
