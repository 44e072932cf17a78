"""Provides what `carpool demo rollout` sends and to whom: two versions of a classifier, and pictures of which
it is known what they show."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from random import Random
from typing import NamedTuple

from PIL import Image, ImageEnhance

from carpool.demo import bundled_models, pictures

STABLE, CANDIDATE = "EfficientNet-Lite0", "EfficientNet-Lite1"
_LABELS: Mapping[str, Collection[str]] = {  # people are no class of ImageNet: the astronaut is left out
    "chelsea": ("tabby", "tiger cat", "Egyptian cat", "Persian cat", "Siamese cat"),
    "coffee": ("espresso", "cup", "coffee mug"),
}
_LAST_LAYER = b"_fc.weight.packed"
_RAW_DATA = 0x4A  # the field of an ONNX tensor that follows its name: a length, then the numbers


class Labelled(NamedTuple):
    picture: bytes
    labels: Collection[str]  # any of them is right

    def is_right(self, answers: Sequence[str]) -> bool:
        return any(answer in self.labels for answer in answers)


def labelled_pictures(count: int, seed: int = 7) -> list[Labelled]:
    """Photos as several cameras would have taken them: cut, mirrored, darker and brighter."""
    random = Random(seed)
    photos = [(Image.open(path).convert("RGB"), path.stem) for path in pictures() if path.stem in _LABELS]
    return [
        Labelled(_varied(photo, random), _LABELS[name])
        for number in range(count)
        for photo, name in [photos[number % len(photos)]]
    ]


def _varied(photo: Image.Image, random: Random) -> bytes:
    part = random.uniform(0.9, 1.0)
    width, height = (int(side * part) for side in photo.size)
    left, top = random.randint(0, photo.width - width), random.randint(0, photo.height - height)
    made = photo.crop((left, top, left + width, top + height))
    if random.random() < 0.5:
        made = made.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    file = BytesIO()
    ImageEnhance.Brightness(made).enhance(random.uniform(0.7, 1.3)).save(file, "JPEG", quality=85)
    return file.getvalue()


def write_classifier(folder: Path, rollout: str) -> None:
    """Writes versions 1 and 2, with this [rollout]. The size of pictures is not said: each version has its
    own. The promise is wide, since a shadow's batch may take a tenth of it, on a slow and busy machine as
    well."""
    old = bundled_models() / "efficientnet_lite0"
    folder.mkdir(parents=True)
    shutil.copyfile(old / "imagenet_labels.txt", folder / "imagenet_labels.txt")
    lines = (old / "model.toml").read_text("utf-8").splitlines()
    kept = [line for line in lines if not line.startswith(("#", "size", "slo_ms"))]
    (folder / "model.toml").write_text("\n".join(["slo_ms = 5000", *kept, rollout]), "utf-8")
    for version, file in ((1, old / "1" / "model.onnx"), (2, candidate_file())):
        (folder / str(version)).mkdir()
        shutil.copyfile(file, folder / str(version) / "model.onnx")


def candidate_file() -> Path:
    return Path(__file__).parent / "rollout" / "2" / "model.onnx"


def write_broken(folder: Path, version: int) -> None:
    """Writes it as if it had been trained with the classes in another order: it is as fast, raises
    nothing, and is wrong. The rows of its last layer are moved by half of them."""
    data = candidate_file().read_bytes()
    at = data.rindex(_LAST_LAYER) + len(_LAST_LAYER)
    assert data[at] == _RAW_DATA
    at, length, shift = at + 1, 0, 0
    while True:  # a length, seven bits in each byte
        length |= (data[at] & 0x7F) << shift
        at, shift, more = at + 1, shift + 7, data[at] & 0x80
        if not more:
            break
    numbers, half = data[at : at + length], length // 16 * 8
    made = folder / f".{version}"
    made.mkdir()
    (made / "model.onnx").write_bytes(data[:at] + numbers[half:] + numbers[:half] + data[at + length :])
    made.rename(folder / str(version))  # whole, or not there
