"""Lines of text whose truth is known, put together from packed letters on whatever device trains with them.

All lines of a batch are made at once by lookups in tables: no font is rendered, and the CPU has nothing to
do.
"""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional

BOX, CELL, MARGIN = 40, 60, 8  # as in make_glyphs.py
HEIGHT = 32
END = 0
ITEMS = 10  # words and the like in a line at most
LONGEST_ITEM = 20
SMALLEST, LARGEST = 0.55, 0.95  # of a line over its letters' boxes
NARROWEST, WIDEST = 0.82, 1.15
_SEPARATORS = (
    *(" ",) * 14,
    *(", ",) * 4,
    *(". ", ".", "; ", ": ", " - ", "-", "/", " / ", " & ", " + ", " (", ") ", '" ', ' "', "'", "? ", "! "),
    *("_", "@", "=", " = ", "|", "*", " # ", "..."),
)
_ENDS = ("", "", "", "", ".", ".", ",", ":", ";", "!", "?", ")", '"', "...", "%")


class Lines(NamedTuple):
    pictures: torch.Tensor  # [lines, 1, 32, pixels], grey from 0 to 1
    tokens: torch.Tensor  # [lines, characters + 1], the end of the text behind it and as padding
    fonts: torch.Tensor  # [lines], of the first word


def made_items(words: list[str], alphabet: str, seed: int = 0) -> tuple[list[str], list[int]]:
    """Strings, and where each kind of them ends: words, numbers and dates and prices, codes, anything."""
    random = Random(seed)
    digits, capitals = "0123456789", "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    symbols = alphabet[1:]  # but the space
    short = [word for word in words if len(word) <= LONGEST_ITEM]
    found = [word for word in short if not word.endswith("'s") or random.random() < 0.05]
    ends = [len(found)]
    for _ in range(40_000):
        n, cents = random.randrange(10 ** random.randint(1, 7)), random.randrange(100)
        day, month, year = random.randint(1, 31), random.randint(1, 12), random.randint(1900, 2040)
        name = random.choice(("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov"))
        found.append(
            random.choice(
                (
                    f"{n}",
                    f"{n:,}",
                    f"{n}.{cents:02}",
                    f"{n},{cents:02}",
                    f"{n:,}.{cents:02}",
                    f"{random.choice('$€£')}{n}.{cents:02}",
                    f"{random.choice('$€£')}{n:,}",
                    f"{n}.{cents:02}{random.choice('$€£%')}",
                    f"{cents}%",
                    f"{year}-{month:02}-{day:02}",
                    f"{day:02}/{month:02}/{year}",
                    f"{day}.{month}.{year}",
                    f"{day} {name} {year}",
                    f"{random.randrange(24):02}:{random.randrange(60):02}",
                    f"+{random.randrange(1, 99)} {random.randrange(10**8)}",
                    f"#{n}",
                    f"-{n}",
                    f"{n}{random.choice(('kg', 'mm', 'cm', 'm', 'km', 'ml', 'V', 'W', 'kWh', 'GB', 'MHz'))}",
                )
            )
        )
    ends.append(len(found))
    for _ in range(30_000):
        pool = random.choice(
            (capitals + digits, capitals, digits + capitals.lower(), capitals + digits + "-")
        )
        found.append("".join(random.choices(pool, k=random.randint(2, 12))))
    ends.append(len(found))
    found += ("".join(random.choices(symbols, k=random.randint(1, 10))) for _ in range(40_000))
    ends.append(len(found))
    return found, ends


class LineMaker:
    """`fonts` are those to use, by their numbers in the file; None: all of them."""

    def __init__(self, file: Path, alphabet: str, device: torch.device) -> None:
        with np.load(file, allow_pickle=False) as packed:
            glyphs = packed["glyphs"]
            advances = packed["advances"]
            self.fonts: list[dict[str, Any]] = json.loads(str(packed["fonts"]))
            words = str(packed["words"]).split("\n")
        self.device = device
        self.characters = glyphs.shape[1]
        # Column by column, so that a lookup finds the pixels of one column side by side; the last is empty.
        columns = np.ascontiguousarray(glyphs.transpose(0, 1, 3, 2)).reshape(-1, BOX)
        self._columns = torch.from_numpy(np.concatenate([columns, np.zeros((1, BOX), np.uint8)])).to(device)
        self._advances = torch.from_numpy(advances).to(device)
        number = {character: place + 1 for place, character in enumerate(alphabet)}
        items, self._ends = made_items(words, alphabet)
        strings = [*items, *_SEPARATORS, *_ENDS]
        table = np.zeros((len(strings), LONGEST_ITEM), np.int64)
        for row, string in enumerate(strings):
            table[row, : len(string)] = [number[character] for character in string[:LONGEST_ITEM]]
        self._strings = torch.from_numpy(table).to(device)
        self._lengths = (self._strings > 0).sum(1)
        self._separators = len(items)
        self._last = len(items) + len(_SEPARATORS)
        upper = [0, *(number[c.upper()] if c.upper() in number else number[c] for c in alphabet)]
        self._upper = torch.tensor(upper, device=device)

    def numbers(self, *, held_out: bool) -> torch.Tensor:
        found = [number for number, font in enumerate(self.fonts) if font["held_out"] == held_out]
        return torch.tensor(found, device=self.device)

    def make(
        self,
        count: int,
        width: int,
        longest: int,
        fonts: torch.Tensor,
        *,
        clean: bool = False,
        anything: bool = True,
    ) -> Lines:
        """So many lines, `width` pixels wide, with fewer than `longest` characters. `clean` ones are neither
        slanted nor blurred nor noisy; without `anything` they hold words, numbers, dates, prices and codes,
        but no strings that nobody would write."""
        text, item = self._texts(count, longest, anything=anything)
        first = fonts[self._integers(len(fonts), count)]
        second = fonts[self._integers(len(fonts), count)]
        mixed = (self._uniform(count) < 0.1)[:, None] & (item % 2 == 1)
        font = torch.where(mixed, second[:, None], first[:, None])
        scale = self._uniform(count, low=SMALLEST, high=LARGEST)
        stretch = self._uniform(count, low=NARROWEST, high=WIDEST)
        if clean:
            scale, stretch = torch.full_like(scale, 0.78), torch.ones_like(stretch)
        across = scale * stretch
        spacing = 0.0 if clean else self._uniform(count, 1, low=-0.6, high=1.6)
        advances = self._advances[font, (text - 1).clamp(min=0)] + spacing
        ends = advances.cumsum(1)
        left = self._uniform(count, low=2.0, high=14.0)
        tokens = self._cut(text, item, left[:, None] + ends * across[:, None] <= width - 3.0)
        canvas = self._canvas(tokens, font, ends - advances, int(width / (SMALLEST * NARROWEST)))
        if not clean:
            canvas = self._worn(canvas)
        grey = self._placed(canvas, width, left, scale, across, clean=clean)
        pictures = self._lit(grey, clean=clean)
        ended = functional.pad(tokens, (0, 1))
        return Lines(pictures, ended, first)

    # ---- what is written

    def _texts(self, count: int, longest: int, *, anything: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Characters [lines, longest - 1], and which item of its line each belongs to."""
        kind = torch.multinomial(
            torch.tensor([0.57, 0.25, 0.1, 0.08 * anything], device=self.device),
            count * ITEMS,
            replacement=True,
        ).view(count, ITEMS)
        begins = torch.tensor([0, *self._ends[:-1]], device=self.device)[kind]
        sizes = torch.tensor(self._ends, device=self.device)[kind] - begins
        items = begins + (self._uniform(count, ITEMS) * sizes).long().clamp(max=self._ends[-1] - 1)
        joints = self._separators + self._integers(len(_SEPARATORS), count, ITEMS)
        joints[:, -1] = self._last + self._integers(len(_ENDS), count)
        pieces = torch.stack([items, joints], 2).view(count, 2 * ITEMS)
        # A line of few items ends with one of the ends: what stands after it is cut off.
        many = 1 + (self._uniform(count) ** 1.5 * ITEMS).long().clamp(max=ITEMS - 1)
        last = self._last + self._integers(len(_ENDS), count)
        number = torch.arange(2 * ITEMS, device=self.device)
        pieces = torch.where(number == (2 * many - 1)[:, None], last[:, None], pieces)
        lengths = torch.where(number < (2 * many)[:, None], self._lengths[pieces], 0)
        ends = lengths.cumsum(1)
        place = torch.arange(longest - 1, device=self.device).expand(count, -1).contiguous()
        piece = torch.searchsorted(ends, place, right=True).clamp(max=2 * ITEMS - 1)
        offset = (place - (ends - lengths).gather(1, piece)).clamp(0, LONGEST_ITEM - 1)
        text = self._strings[pieces.gather(1, piece), offset]
        text = torch.where(place < ends[:, -1:], text, END)
        case = self._uniform(count, ITEMS).gather(1, piece // 2)
        whole = (self._uniform(count) < 0.1)[:, None]
        raised = (case < 0.12) | whole | ((case < 0.4) & (offset == 0))
        return torch.where(raised, self._upper[text], text), piece // 2

    def _cut(self, text: torch.Tensor, item: torch.Tensor, fits: torch.Tensor) -> torch.Tensor:
        """Whole items that fit; of a line whose first does not, what does."""
        written = text > 0
        fits = fits & written
        count = fits.sum(1)
        # An item is whole if its last character fits: the next belongs to another item, or there is none.
        following = torch.cat([item[:, 1:], item.new_full((len(item), 1), ITEMS)], 1)
        more = torch.cat([written[:, 1:], written.new_zeros(len(item), 1)], 1)
        ends_item = fits & ((following != item) | ~more)
        place = torch.arange(1, text.shape[1] + 1, device=self.device)
        whole = torch.where(ends_item, place, 0).amax(1)
        keep = torch.where(whole > 0, whole, count)
        kept = torch.where(place <= keep[:, None], text, END)
        # No reader can see a space at the end.
        for _ in range(2):
            last = (kept > 0).sum(1, keepdim=True)
            trailing = (place == last) & (kept == 1)
            kept = torch.where(trailing, END, kept)
        return kept

    # ---- how it looks

    def _canvas(
        self, text: torch.Tensor, font: torch.Tensor, begins: torch.Tensor, width: int
    ) -> torch.Tensor:
        """[lines, 1, BOX, width]: how much ink is where. Letters may lean over their neighbours."""
        count = len(text)
        pens = begins.round().long()
        pixel = torch.arange(width, device=self.device).expand(count, -1).contiguous()
        near = torch.searchsorted(pens, pixel, right=True) - 1
        glyph = font * self.characters + text - 1
        ink: torch.Tensor | None = None
        for step in (-1, 0, 1):
            which = (near + step).clamp(0, text.shape[1] - 1)
            across = pixel - pens.gather(1, which) + MARGIN
            there = (across >= 0) & (across < CELL) & (text.gather(1, which) > 0)
            column = torch.where(there, glyph.gather(1, which) * CELL + across, len(self._columns) - 1)
            found = self._columns[column]
            ink = found if ink is None else torch.maximum(ink, found)
        assert ink is not None
        return (ink.transpose(1, 2).unsqueeze(1).float() / 255.0).contiguous()

    def _worn(self, ink: torch.Tensor) -> torch.Tensor:
        """Bolder or thinner, and out of focus, each line in its own way."""
        count = len(ink)
        kind = self._uniform(count, 1, 1, 1)
        strength = self._uniform(count, 1, 1, 1)
        bold = functional.max_pool2d(ink, 3, 1, 1)
        thin = -functional.max_pool2d(-ink, (1, 2), 1)
        thin = functional.pad(thin, (0, 1))
        ink = torch.where(kind < 0.15, torch.lerp(ink, bold, 0.7 * strength), ink)
        ink = torch.where(kind > 0.88, torch.lerp(ink, thin, 0.6 * strength), ink)
        for _ in range(2):
            soft = functional.avg_pool2d(ink, 3, 1, 1)
            share = (1.6 * self._uniform(count, 1, 1, 1) - 0.6).clamp(min=0.0)
            ink = torch.lerp(ink, soft, share)
        return ink

    def _placed(
        self,
        canvas: torch.Tensor,
        width: int,
        left: torch.Tensor,
        scale: torch.Tensor,
        across: torch.Tensor,
        *,
        clean: bool,
    ) -> torch.Tensor:
        """Into 32 rows: as large as it is to be, slanted and turned a little."""
        count, wide = len(canvas), canvas.shape[3]
        y = torch.arange(HEIGHT, device=self.device).view(1, -1, 1) + 0.5
        x = torch.arange(width, device=self.device).view(1, 1, -1) + 0.5
        column = torch.ones(count, 1, 1, device=self.device)
        if clean:
            shear = turn = 0.0 * column
            top = (HEIGHT - BOX * scale).view(-1, 1, 1) / 2
        else:
            shear = 0.1 * torch.randn(count, 1, 1, device=self.device).clamp(-2.0, 2.0)
            turn = 0.01 * torch.randn(count, 1, 1, device=self.device).clamp(-2.0, 2.0)
            free = (HEIGHT - BOX * scale).view(-1, 1, 1)
            top = free * self._uniform(count, 1, 1, low=0.1, high=0.9)
        u = (x - left.view(-1, 1, 1) + shear * (y - HEIGHT / 2)) / across.view(-1, 1, 1)
        v = (y - top + turn * (x - width / 2) * 0.5) / scale.view(-1, 1, 1)
        grid = torch.stack((2.0 * u / wide - 1.0, (2.0 * v / BOX - 1.0).expand_as(u)), 3)
        return functional.grid_sample(canvas, grid, align_corners=False)

    def _lit(self, ink: torch.Tensor, *, clean: bool) -> torch.Tensor:
        """Paper and ink of some grey, unevenly lit, with noise; one in six is light on dark."""
        count, width = len(ink), ink.shape[3]
        paper = self._uniform(count, 1, 1, 1, low=0.45, high=1.0)
        darkest = (paper - 0.3).clamp(min=0.0)
        inked = darkest * self._uniform(count, 1, 1, 1) ** 1.5
        if clean:
            return 0.98 - 0.88 * ink
        shade = torch.randn(count, 1, 2, max(2, width // 64), device=self.device)
        shade = functional.interpolate(shade, (HEIGHT, width), mode="bilinear", align_corners=True)
        uneven = 0.12 * self._uniform(count, 1, 1, 1) ** 2
        grey = paper + (inked - paper) * ink + uneven * shade
        soft = functional.avg_pool2d(functional.pad(grey, (1, 1, 1, 1), mode="replicate"), 3, 1)
        grey = torch.lerp(grey, soft, (1.5 * self._uniform(count, 1, 1, 1) - 0.7).clamp(min=0.0))
        grey = grey + 0.1 * self._uniform(count, 1, 1, 1) ** 2 * torch.randn_like(grey)
        grey = torch.where(self._uniform(count, 1, 1, 1) < 0.16, 1.0 - grey, grey)
        return (grey.clamp(0.0, 1.0) * 255.0).round() / 255.0

    def _uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> torch.Tensor:
        return torch.rand(*shape, device=self.device) * (high - low) + low

    def _integers(self, most: int, *shape: int) -> torch.Tensor:
        return torch.randint(most, shape, device=self.device)
