"""Large pictures made of the demo's photos, turned and scaled as a number says, with seeds."""

from __future__ import annotations

import io
import random

from PIL import Image

from carpool.demo import pictures

_PHOTOS = {path.stem: path for path in pictures()}


def photos() -> dict[str, Image.Image]:
    return {name: Image.open(path).convert("RGB") for name, path in sorted(_PHOTOS.items())}


def board(number: int, size: tuple[int, int] = (1400, 1050)) -> Image.Image:
    """Some photos of several sizes over each other."""
    chooses, known = random.Random(number), photos()
    whole = Image.new("RGB", size, (90, 110, 130))
    for _ in range(9):
        photo = known[chooses.choice(sorted(known))]
        width = chooses.randrange(220, 700)
        photo = photo.resize((width, round(width * photo.height / photo.width)))
        if chooses.random() < 0.5:
            photo = photo.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        whole.paste(photo, (chooses.randrange(-60, size[0] - 160), chooses.randrange(-60, size[1] - 160)))
    return whole


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG", compress_level=1)
    return file.getvalue()
