"""Doubtful pictures in a folder that never holds more than it may, and what becomes of them."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simplejpeg

from carpool.cli.predict_output import coco
from carpool.errors import InvalidInput
from carpool.extensions.drift.kept_pictures import INDEX, KeptPictures, doubt, read_index
from carpool.extensions.drift.label_export import answer_of, export
from carpool.extensions.drift.settings import UncertainSettings

HOUR = 3600.0
SETTINGS = UncertainSettings("x", per_hour=3, mb=0.01)


def found(*scores: float | None) -> dict[str, Any]:
    things = [{"label": "cat", "class_id": 1, "score": score, "box": [1, 2, 11, 22]} for score in scores]
    return {"image": {"width": 64, "height": 48}, "detections": things}


def classes(*scores: float) -> dict[str, Any]:
    listed = [{"label": f"c{n}", "class_id": n, "score": score} for n, score in enumerate(scores)]
    return {"image": {"width": 64, "height": 48}, "classes": listed}


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (found(0.9, 0.4), "cat at 0.40"),
        (found(0.9), ""),
        (found(), ""),
        (found(None, 0.9), ""),
        (classes(0.41, 0.38, 0.1), "c0 0.41 or c1 0.38"),
        (classes(0.9, 0.05), ""),
        (classes(0.9), ""),
        ({"embedding": [1.0]}, ""),
        ({}, ""),
    ],
)
def test_which_answers_are_doubtful(answer: dict[str, Any], words: str) -> None:
    assert doubt(answer, SETTINGS) == words


def test_bounded_by_the_hour_and_by_bytes(tmp_path: Path) -> None:
    kept = KeptPictures(tmp_path / "new", SETTINGS)
    now = 1e9
    assert [kept.keep(b"x" * 3000, "JPEG", {}, now + n) for n in range(5)] == [True] * 3 + [False] * 2
    for hour in range(2, 8):
        now = 1e9 + hour * HOUR
        assert kept.keep(b"y" * 3000, "PNG", {"source": "door"}, now)
    lines = read_index(tmp_path / "new")
    assert len(lines) == 3  # 9,000 bytes of 10,000
    assert [line["time"] for line in lines] == sorted(line["time"] for line in lines)
    assert {path.name for path in (tmp_path / "new").iterdir()} == {INDEX, *(one["picture"] for one in lines)}
    assert not kept.keep(b"x" * 20_000, "JPEG", {}, now + 2 * HOUR)
    assert not kept.keep(b"x", "SVG", {}, now + 2 * HOUR)
    assert KeptPictures(tmp_path / "new", SETTINGS).room(now + 1) == 2


def test_killed_in_mid_write(tmp_path: Path) -> None:
    kept = KeptPictures(tmp_path, SETTINGS)
    kept.keep(b"whole", "JPEG", {}, 1e9)
    name = read_index(tmp_path)[0]["picture"]
    (tmp_path / f".{INDEX}.unfinished").write_bytes(b'{"pict')
    (tmp_path / "1000000009000-0007.jpg").write_bytes(b"no line")
    (tmp_path / "mine.jpg").write_bytes(b"somebody put it there")
    with (tmp_path / INDEX).open("ab") as file:
        file.write(b'{"picture": "1000000000001-0002.jpg"}\n{"picture": 3}\n[]\n{"pict')
    KeptPictures(tmp_path, SETTINGS)
    assert {path.name for path in tmp_path.iterdir()} == {INDEX, name, "mine.jpg"}
    assert [line["picture"] for line in read_index(tmp_path)] == [name]


def photo(seed: int, noise: int = 0) -> bytes:
    blocks = np.random.default_rng(seed).integers(0, 255, (6, 8, 3))
    pixels = np.kron(blocks, np.ones((32, 32, 1)))
    pixels += np.random.default_rng(noise).normal(0, 3, pixels.shape)
    return simplejpeg.encode_jpeg(np.clip(pixels, 0, 255).astype(np.uint8))


def keep(folder: Path, *pictures: tuple[bytes, dict[str, Any]]) -> Path:
    kept = KeptPictures(folder, UncertainSettings("x", per_hour=100))
    for number, (data, line) in enumerate(pictures):
        assert kept.keep(data, "JPEG", line, 1e9 + number)
    return folder


def test_a_data_set_with_the_answers_to_begin_with(tmp_path: Path) -> None:
    line = {"why": "uncertain", "source": "door", "answer": found(0.4)}
    doubtful = keep(
        tmp_path / "a",
        (photo(1), line),
        (photo(1, noise=1), line),
        (photo(2), line),
        (photo(1, noise=2), {**line, "source": "yard"}),
        (b"no picture", line),
    )
    other = {"why": "c0 and c1", "source": "door", "stable": classes(0.9), "candidate": classes(0.2)}
    disputed = keep(tmp_path / "b", (photo(2, noise=3), other))
    done = export([doubtful, disputed], tmp_path / "set", coco)
    assert (done.pictures, done.look_alikes, done.unreadable) == (3, 2, 1)
    lines = [json.loads(text) for text in (tmp_path / "set" / INDEX).read_text().splitlines()]
    assert [one["why"] for one in lines] == ["c0 and c1", "uncertain", "uncertain"]
    assert all((tmp_path / "set" / one["picture"]).is_file() for one in lines)
    document = json.loads((tmp_path / "set" / "annotations.json").read_text())
    assert [image["file_name"] for image in document["images"]] == [one["picture"] for one in lines]
    boxes = [one["bbox"] for one in document["annotations"] if "bbox" in one]
    assert boxes == [[1, 2, 10, 20]] * 2
    rows = list(csv.reader((tmp_path / "set" / "labels.csv").read_text().splitlines()))
    assert rows == [["picture", "label"], [lines[0]["picture"], "c0"]]
    with pytest.raises(InvalidInput, match="exists already"):
        export([doubtful], tmp_path / "set")
    with pytest.raises(InvalidInput, match="has no index"):
        export([tmp_path / "none"], tmp_path / "other")


def test_which_answer_is_to_begin_with() -> None:
    assert answer_of({"candidate": {"classes": [1]}, "stable": {"classes": [2]}}) == {"classes": [2]}
    assert answer_of({"answers": {"candidate": {"classes": [1]}}}) == {"classes": [1]}
    assert answer_of({"stable": {"version": "1", "answer": {"classes": [3]}}}) == {"classes": [3]}
    assert answer_of({"picture": "x"}) == {}


def test_a_file_is_whole_whenever_its_writer_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    code = (
        "import sys; from pathlib import Path\n"
        "from carpool.extensions.drift.kept_pictures import write_whole\n"
        "number = 0\n"
        "while True:\n"
        "    number += 1\n"
        "    write_whole(Path(sys.argv[1]), b'%d,' % number * 50_000 + b'end')\n"
        "    print(number, flush=True)\n"
    )
    for wait in (1, 2, 3):
        with subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            for _ in range(wait):
                writer.stdout.readline()
            writer.kill()
        parts = path.read_bytes().split(b",")
        assert parts.pop() == b"end"
        assert len(parts) == 50_000
        assert len(set(parts)) == 1
