"""Reads labelled pictures on disk: COCO's JSON, a folder for each class, a CSV file, or masks as PNG
files."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import orjson

from carpool.config.rules import read_bytes, shown
from carpool.errors import ConfigError, InvalidInput

_PICTURES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif")
_MOST_JSON = 2 << 30
_MOST_CSV = 256 << 20
_MOST_PICTURES = 2_000_000
_CLASSES = "classes.txt"


def plain(name: str) -> str:
    """A class's name as it is compared: `Traffic_Light` is a traffic light."""
    return " ".join(name.casefold().replace("_", " ").replace("-", " ").split())


@dataclass(frozen=True, slots=True)
class Boxes:
    """Holds boxes as COCO has them. `document` holds images, categories and annotations, checked; the places
    of `files` are those of `image_ids`."""

    files: tuple[Path, ...]
    image_ids: tuple[int, ...]
    document: Mapping[str, Any] = field(repr=False)


@dataclass(frozen=True, slots=True)
class NamedPictures:
    """Each picture has one class."""

    files: tuple[Path, ...]
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MaskedPictures:
    """Beside each picture a PNG whose pixels are class numbers; `classes` names them, if names are given."""

    files: tuple[Path, ...]
    masks: tuple[Path, ...]
    classes: tuple[str, ...] = ()


LabelledData: TypeAlias = Boxes | NamedPictures | MaskedPictures


def read_data(data: Path, pictures: Path | None) -> LabelledData:
    """Reads the data by what lies there: a .json file is COCO's, a .csv file names classes, a folder holds
    masks or, in folders of its own, the pictures of each class."""
    if pictures is not None and not pictures.is_dir():
        raise InvalidInput(f"--pictures: there is no folder {pictures}", field="pictures")
    if data.is_dir():
        masks = _listed(data, (".png",))
        return _read_masks(data, masks, pictures) if masks else _read_folders(data)
    if not data.is_file():
        raise InvalidInput(f"--data: there is no file or folder {data}", field="data")
    if data.suffix.lower() == ".csv":
        return _read_csv(data, pictures or data.parent)
    if data.suffix.lower() == ".json":
        return _read_coco(data, pictures or data.parent)
    raise InvalidInput(f"--data must be a .json or .csv file, or a folder, not {data}", field="data")


def _bytes(path: Path, most: int) -> bytes:
    try:
        return read_bytes(path, most, f"larger than {most} bytes, too large for such a file")
    except ConfigError as error:
        raise InvalidInput(f"--data: {error.message}", field="data") from None


def _listed(folder: Path, endings: Sequence[str]) -> list[Path]:
    found = [file for file in folder.iterdir() if file.suffix.lower() in endings and file.is_file()]
    return sorted(file for file in found if not file.name.startswith("."))


def _inside(pictures: Path, name: str, where: str) -> Path:
    """A picture that a data set names: it may not lead elsewhere."""
    path = pictures / name
    if not name or "\0" in name or Path(name).is_absolute() or ".." in Path(name).parts:
        raise InvalidInput(f"{where}: {shown(name)} must be a file inside --pictures", field="data")
    if not path.is_file():
        raise InvalidInput(f"{where}: there is no image {path}", field="pictures")
    return path


def _some(files: Sequence[Path], data: Path) -> tuple[Path, ...]:
    if not files:
        raise InvalidInput(f"--data: {data} names no images", field="data")
    if len(files) > _MOST_PICTURES:
        raise InvalidInput(f"--data: more than {_MOST_PICTURES:,} images", field="data")
    return tuple(files)


# ---- classes


def _read_folders(data: Path) -> NamedPictures:
    files, names = [], []
    for folder in sorted(path for path in data.iterdir() if path.is_dir() and not path.name.startswith(".")):
        for file in _listed(folder, _PICTURES):
            files.append(file)
            names.append(folder.name)
    if not files:
        raise InvalidInput(
            f"--data: {data} holds neither masks as PNG files nor folders with the images of each class",
            field="data",
        )
    return NamedPictures(_some(files, data), tuple(names))


def _read_csv(data: Path, pictures: Path) -> NamedPictures:
    """Reads a file with a line of titles: `file` and `label` among them."""
    try:
        lines = csv.DictReader(io.StringIO(_bytes(data, _MOST_CSV).decode("utf-8-sig"), newline=""))
        titles = lines.fieldnames or ()
        missing = [title for title in ("file", "label") if title not in titles]
        if missing:
            raise InvalidInput(
                f"--data: {data} has no column {missing[0]!r} in its first line: {shown(', '.join(titles))}",
                field="data",
            )
        files, names = [], []
        for number, line in enumerate(lines, 2):
            name, label = (line["file"] or "").strip(), (line["label"] or "").strip()
            if not label:
                raise InvalidInput(f"--data: {data} line {number}: the label is empty", field="data")
            files.append(_inside(pictures, name, f"--data: {data} line {number}: file"))
            names.append(label)
    except (UnicodeDecodeError, csv.Error) as error:
        raise InvalidInput(f"--data: {data} is not a CSV file: {error}", field="data") from None
    return NamedPictures(_some(files, data), tuple(names))


def read_names(path: Path) -> dict[str, str]:
    """Returns what the data calls a class, and what the model calls it: `n01440764,tench` a line."""
    try:
        rows = list(csv.reader(io.StringIO(_bytes(path, _MOST_CSV).decode("utf-8-sig"), newline="")))
    except (UnicodeDecodeError, csv.Error) as error:
        raise InvalidInput(f"--names: {path} is not a CSV file: {error}", field="names") from None
    for number, row in enumerate(rows, 1):
        if row and len(row) != 2:
            raise InvalidInput(
                f"--names: {path} line {number} must have two parts, the data's name and the model's",
                field="names",
            )
    return {plain(row[0]): row[1] for row in rows if row}


# ---- masks


def _read_masks(data: Path, masks: Sequence[Path], pictures: Path | None) -> MaskedPictures:
    if pictures is None:
        raise InvalidInput(
            f"--pictures is needed with masks: the folder that {data} is for", field="pictures"
        )
    by_stem: dict[str, Path] = {}
    for file in _listed(pictures, _PICTURES):
        if file.stem in by_stem:
            raise InvalidInput(
                f"--pictures: {by_stem[file.stem].name} and {file.name} would have the same mask",
                field="pictures",
            )
        by_stem[file.stem] = file
    files = []
    for mask in masks:
        if mask.stem not in by_stem:
            raise InvalidInput(
                f"--pictures: {pictures} has no image for the mask {mask.name}", field="pictures"
            )
        files.append(by_stem[mask.stem])
    named = data / _CLASSES
    classes: tuple[str, ...] = ()
    if named.is_file():
        classes = tuple(line.strip() for line in _bytes(named, 1 << 20).decode(errors="replace").splitlines())
    return MaskedPictures(_some(files, data), tuple(masks), classes)


# ---- boxes


def _read_coco(data: Path, pictures: Path) -> Boxes:
    try:
        document = orjson.loads(_bytes(data, _MOST_JSON))
    except orjson.JSONDecodeError as error:
        raise InvalidInput(f"--data: {data} is not JSON: {error}", field="data") from None
    if not isinstance(document, dict):
        raise InvalidInput(f"--data: {data} must hold an object as COCO has it", field="data")
    parts = {key: _objects(document, key, data) for key in ("images", "categories", "annotations")}
    images = [(_number(one, "id", where), one, where) for one, where in parts["images"]]
    categories = {_number(one, "id", where): str(one.get("name", "")) for one, where in parts["categories"]}
    twice = [number for number, times in Counter(number for number, _, _ in images).items() if times > 1]
    if twice:
        raise InvalidInput(f"--data: {data} images: the id {twice[0]} is given twice", field="data")
    if not all(categories.values()):
        raise InvalidInput(f"--data: {data} categories: every one needs a name", field="data")
    known = {number for number, _, _ in images}
    boxes = [_annotation(one, where, known, categories) for one, where in parts["annotations"]]
    for number, box in enumerate(boxes, 1):
        box["id"] = number
    files = [
        _inside(pictures, str(one.get("file_name", "")), f"{where}.file_name") for _, one, where in images
    ]
    checked = {
        "info": {},
        "images": [
            {"id": number, "width": one.get("width", 0), "height": one.get("height", 0)}
            for number, one, _ in images
        ],
        "categories": [{"id": number, "name": name} for number, name in categories.items()],
        "annotations": boxes,
    }
    return Boxes(_some(files, data), tuple(number for number, _, _ in images), checked)


def _objects(document: Mapping[str, Any], key: str, data: Path) -> Iterator[tuple[dict[str, Any], str]]:
    values = document.get(key)
    if not isinstance(values, list):
        raise InvalidInput(f"--data: {data} needs a list {key}", field=f"data.{key}")
    for place, value in enumerate(values):
        if not isinstance(value, dict):
            raise InvalidInput(f"--data: {data} {key}[{place}] must be an object", field=f"data.{key}")
        yield value, f"--data: {data} {key}[{place}]"


def _number(one: Mapping[str, Any], key: str, where: str) -> int:
    value = one.get(key)
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidInput(f"{where}.{key} must be a whole number", field=f"data.{key}")
    return value


def _annotation(
    one: Mapping[str, Any], where: str, images: set[int], categories: Mapping[int, str]
) -> dict[str, Any]:
    image, category = _number(one, "image_id", where), _number(one, "category_id", where)
    if image not in images:
        raise InvalidInput(f"{where}.image_id: there is no image {image}", field="data.image_id")
    if category not in categories:
        raise InvalidInput(f"{where}.category_id: there is no category {category}", field="data.category_id")
    box = one.get("bbox")
    listed = box if isinstance(box, list) else []
    sides = [float(side) for side in listed if isinstance(side, int | float) and abs(side) < 1e7]
    if len(sides) != 4 or len(listed) != 4 or min(sides[2:]) < 0:
        raise InvalidInput(f"{where}.bbox must be [x, y, width, height] in pixels", field="data.bbox")
    area = one.get("area")
    return {
        "image_id": image,
        "category_id": category,
        "bbox": sides,
        "area": float(area) if isinstance(area, int | float) else sides[2] * sides[3],
        "iscrowd": int(bool(one.get("iscrowd", 0))),
    }
