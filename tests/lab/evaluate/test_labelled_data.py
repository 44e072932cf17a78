"""Labelled pictures are read, and whatever is wrong with them is named with its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from carpool.errors import InvalidInput
from carpool.lab.evaluate.labelled_data import (
    Boxes,
    MaskedPictures,
    NamedPictures,
    plain,
    read_data,
    read_names,
)

GOOD: dict[str, Any] = {
    "images": [{"id": 7, "file_name": "a.jpg", "width": 8, "height": 6}],
    "categories": [{"id": 3, "name": "cat"}],
    "annotations": [{"id": 1, "image_id": 7, "category_id": 3, "bbox": [1, 2, 3, 4], "iscrowd": 0}],
}


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    folder = tmp_path / "pictures"
    folder.mkdir()
    (folder / "a.jpg").write_bytes(b"a")
    (folder / "b.png").write_bytes(b"b")
    return folder


def coco(folder: Path, **changed: Any) -> Path:
    file = folder / "val.json"
    file.write_text(json.dumps({**GOOD, **changed}))
    return file


def test_coco_is_read_and_checked(tmp_path: Path, pictures: Path) -> None:
    found = read_data(coco(tmp_path), pictures)
    assert isinstance(found, Boxes)
    assert found.files == (pictures / "a.jpg",)
    assert found.image_ids == (7,)
    [box] = found.document["annotations"]
    assert (box["bbox"], box["area"], box["iscrowd"]) == ([1, 2, 3, 4], 12, 0)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"images": 3}, "needs a list images"),
        ({"images": ["a.jpg"]}, r"images\[0\] must be an object"),
        ({"images": [{"id": "7", "file_name": "a.jpg"}]}, r"images\[0\].id must be a whole number"),
        ({"images": GOOD["images"] * 2}, "the id 7 is given twice"),
        ({"images": [{"id": 7, "file_name": "../a.jpg"}]}, r"file_name: \"../a.jpg\" must be a file inside"),
        ({"images": [{"id": 7, "file_name": "/etc/passwd"}]}, "must be a file inside"),
        ({"images": [{"id": 7, "file_name": "c.jpg"}]}, "there is no image"),
        ({"images": []}, "no image 7"),
        ({"images": [], "annotations": []}, "names no images"),
        ({"categories": [{"id": 3}]}, "every one needs a name"),
        ({"categories": []}, r"annotations\[0\].category_id: there is no category 3"),
        ({"annotations": [{**GOOD["annotations"][0], "image_id": 8}]}, "there is no image 8"),
        ({"annotations": [{**GOOD["annotations"][0], "bbox": [1, 2, 3]}]}, "bbox must be"),
        ({"annotations": [{**GOOD["annotations"][0], "bbox": [1, 2, 3, -4]}]}, "bbox must be"),
        ({"annotations": [{**GOOD["annotations"][0], "bbox": [1, 2, 3, "4"]}]}, "bbox must be"),
        ({"annotations": [{**GOOD["annotations"][0], "bbox": [1, 2, 3, 1e30]}]}, "bbox must be"),
    ],
)
def test_what_is_wrong_with_coco_is_named(
    tmp_path: Path, pictures: Path, changed: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidInput, match=said):
        read_data(coco(tmp_path, **changed), pictures)


def test_other_files_are_refused(tmp_path: Path, pictures: Path) -> None:
    for name, content, said in (
        ("broken.json", "{", "is not JSON"),
        ("list.json", "[]", "must hold an object"),
        ("labels.txt", "", "must be a .json or .csv file"),
        ("bare.csv", "picture,class\n", "no column 'file'"),
        ("empty.csv", "file,label\na.jpg,\n", "line 2: the label is empty"),
        ("outside.csv", "file,label\n../a.jpg,cat\n", "must be a file inside"),
        ("none.csv", "file,label\n", "names no images"),
    ):
        (tmp_path / name).write_text(content)
        with pytest.raises(InvalidInput, match=said):
            read_data(tmp_path / name, pictures)
    (tmp_path / "bytes.csv").write_bytes(b"file,label\n\xff\xfe")
    with pytest.raises(InvalidInput, match="is not a CSV file"):
        read_data(tmp_path / "bytes.csv", pictures)
    with pytest.raises(InvalidInput, match="--data: there is no file or folder"):
        read_data(tmp_path / "absent.json", pictures)
    with pytest.raises(InvalidInput, match="--pictures: there is no folder"):
        read_data(coco(tmp_path), tmp_path / "absent")


def test_classes_come_from_folders_or_a_csv(tmp_path: Path, pictures: Path) -> None:
    (tmp_path / "labels.csv").write_text("file,label,who\na.jpg,cat,me\nb.png,dog,me\n")
    found = read_data(tmp_path / "labels.csv", pictures)
    assert isinstance(found, NamedPictures)
    assert list(zip(found.files, found.names, strict=True)) == [
        (pictures / "a.jpg", "cat"),
        (pictures / "b.png", "dog"),
    ]
    folders = tmp_path / "folders"
    for name in ("cat", "dog"):
        (folders / name).mkdir(parents=True)
        (folders / name / "1.jpg").write_bytes(b"")
    found = read_data(folders, None)
    assert isinstance(found, NamedPictures)
    assert found.names == ("cat", "dog")
    (tmp_path / "nothing").mkdir()
    with pytest.raises(InvalidInput, match="holds neither masks"):
        read_data(tmp_path / "nothing", None)


def test_masks_belong_to_pictures_of_their_name(tmp_path: Path, pictures: Path) -> None:
    masks = tmp_path / "masks"
    masks.mkdir()
    (masks / "a.png").write_bytes(b"")
    (masks / "classes.txt").write_text("background\ncat\n")
    found = read_data(masks, pictures)
    assert found == MaskedPictures((pictures / "a.jpg",), (masks / "a.png",), ("background", "cat"))
    with pytest.raises(InvalidInput, match="--pictures is needed"):
        read_data(masks, None)
    (pictures / "a.webp").write_bytes(b"")
    with pytest.raises(InvalidInput, match="would have the same mask"):
        read_data(masks, pictures)
    (masks / "z.png").write_bytes(b"")
    (pictures / "a.webp").unlink()
    with pytest.raises(InvalidInput, match="has no image for the mask z"):
        read_data(masks, pictures)


def test_names(tmp_path: Path) -> None:
    assert plain("  Traffic_Light ") == plain("traffic-light") == "traffic light"
    (tmp_path / "names.csv").write_text("n01440764,tench\n\nN_2,goldfish\n")
    assert read_names(tmp_path / "names.csv") == {"n01440764": "tench", "n 2": "goldfish"}
    (tmp_path / "names.csv").write_text("one\n")
    with pytest.raises(InvalidInput, match="line 1 must have two parts"):
        read_names(tmp_path / "names.csv")
