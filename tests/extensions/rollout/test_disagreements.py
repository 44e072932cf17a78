"""The ring of pictures that were answered differently: bounded, whole, and worst first."""

from __future__ import annotations

from pathlib import Path

from carpool.extensions.rollout.disagreements import INDEX, Disagreements
from carpool.extensions.rollout.settings import KeepSettings

JPEG = b"\xff\xd8" + b"x" * 998


def ring(folder: Path, pictures: int = 3, mb: float = 1.0) -> Disagreements:
    return Disagreements(KeepSettings(str(folder), pictures, mb), "m")


def test_worst_first(tmp_path: Path) -> None:
    kept = ring(tmp_path)
    for how_much in (0.2, 0.9, 0.5):
        kept.add({"how_much": how_much, "why": "differs"}, JPEG)
    assert [line["how_much"] for line in kept.worst()] == [0.9, 0.5, 0.2]
    assert [line["number"] for line in kept.worst(after=2)] == [3]
    assert len(kept.worst(limit=1)) == 1
    assert kept.picture(2) == JPEG
    assert kept.picture(99) is None


def test_the_oldest_go_first(tmp_path: Path) -> None:
    kept = ring(tmp_path)
    for number in range(10):
        kept.add({"how_much": number / 10}, JPEG)
    assert sorted(line["number"] for line in kept.worst()) == [8, 9, 10]
    assert sorted(path.name for path in (tmp_path / "m").glob("*.jpg")) == [
        *("00000008.jpg", "00000009.jpg", "00000010.jpg"),
    ]
    assert len((tmp_path / "m" / INDEX).read_bytes().splitlines()) == 3


def test_bytes_are_bounded_too(tmp_path: Path) -> None:
    kept = ring(tmp_path, pictures=1000, mb=1.0)
    for _ in range(30):
        kept.add({"how_much": 0.5}, JPEG * 100)
    assert sum(path.stat().st_size for path in (tmp_path / "m").glob("*.jpg")) <= 1_000_000


def test_it_is_there_after_a_restart_and_a_cut_line_is_left_out(tmp_path: Path) -> None:
    ring(tmp_path).add({"how_much": 0.5}, JPEG)
    with (tmp_path / "m" / INDEX).open("ab") as file:
        file.write(b'{"number": 2, "how_')
    again = ring(tmp_path)
    assert [line["number"] for line in again.worst()] == [1]
    assert again.add({"how_much": 0.6}, b"") == 2
    assert [line["number"] for line in ring(tmp_path).worst()] == [2, 1]


def test_an_index_cannot_point_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    line = '{"number": 1, "how_much": 0.5, "file": "../../secret", "bytes": 1}\n'
    (tmp_path / "m" / INDEX).write_text(line)
    assert ring(tmp_path).worst() == []
