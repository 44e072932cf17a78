"""`carpool predict`: pictures, folders and patterns; tables, JSON and drawn pictures; and clear failures."""

from __future__ import annotations

import csv
import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from carpool.cli.predict_command import in_words, pictures
from carpool.errors import InvalidInput, Refused
from cli_run import CliResult, run_cli
from frontend.http.front_end import FrontEnd, front_end
from frontend.picture_models import BLUE, GREEN, RED, classifier, detector, embedder, picture, segmenter


@pytest.fixture
def served() -> Iterator[FrontEnd]:
    with front_end(detector(), classifier(), embedder()) as found:
        yield found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, colour in (("a.jpg", RED), ("b.png", GREEN), ("c.webp", BLUE)):
        kind = {"jpg": "JPEG", "png": "PNG", "webp": "WebP"}[name[2:]]
        (tmp_path / name).write_bytes(picture(colour, kind, size=(640, 480)))
    (tmp_path / "notes.txt").write_text("no picture")
    return tmp_path


def predict(served: FrontEnd | None, *arguments: object, url: str = "") -> CliResult:
    words = ["predict", *map(str, arguments), "--url", url or f"http://{served.url if served else ''}"]
    return run_cli(words)


def test_a_table_with_an_answer_for_every_picture(served: FrontEnd, folder: Path) -> None:
    done = predict(served, folder, "--task", "classify", "--top-k", 1)
    assert done.exit_code == 0, done.output
    for name, label in (("a.jpg", "red"), ("b.png", "green"), ("c.webp", "blue")):
        [line] = [line for line in done.stdout.splitlines() if name in line]
        assert label in line
    assert "640×480" in done.stdout


def test_without_a_task_the_first_model_answers(served: FrontEnd, folder: Path) -> None:
    done = predict(served, folder / "a.jpg", "--json")
    [answer] = json.loads(done.stdout)
    assert answer["model"] == "finder"
    assert answer["file"] == str(folder / "a.jpg")
    named = predict(served, folder / "a.jpg", "--json", "--model", "namer")
    assert json.loads(named.stdout)[0]["model"] == "namer"
    both = predict(served, folder / "a.jpg", "--json", "--model", "namer", "--task", "classify")
    assert json.loads(both.stdout)[0]["model"] == "namer"


def test_drawn_answers_are_saved_and_names_do_not_collide(served: FrontEnd, folder: Path) -> None:
    other = folder / "more"
    other.mkdir()
    (other / "a.png").write_bytes(picture(RED, "PNG", size=(640, 480)))
    done = predict(served, folder / "a.jpg", other / "a.png", "--save", folder / "out" / "deep")
    assert done.exit_code == 0, done.output
    saved = sorted((folder / "out" / "deep").iterdir())
    assert [file.name for file in saved] == ["a-2.jpg", "a.jpg"]
    for file in saved:
        with Image.open(file) as drawn:
            assert drawn.size == (640, 480)


def test_options_go_along(served: FrontEnd, folder: Path) -> None:
    done = predict(served, folder / "a.jpg", "--task", "detect", "--score", 1, "--iou", 0.5)
    assert done.exit_code == 0
    assert "nothing" in done.stdout
    wrong = predict(served, folder / "a.jpg", "--task", "classify", "--iou", 0.5)
    assert wrong.exit_code == 1
    assert "iou" in wrong.stderr


def test_a_bad_picture_fails_alone_and_is_named(served: FrontEnd, folder: Path) -> None:
    done = predict(served, folder / "a.jpg", folder / "notes.txt", "--task", "classify")
    assert done.exit_code == 1
    assert "red" in done.stdout
    assert "notes.txt" in done.stderr
    assert "invalid-input" in done.stderr


def test_a_refusal_says_why(served: FrontEnd, folder: Path) -> None:
    served.door.refusal = Refused("no room for it now", reason="overload")
    done = predict(served, folder / "a.jpg", "--task", "detect")
    assert done.exit_code == 1
    assert "no room for it now (overload)" in done.stderr


def test_what_cannot_be_drawn_is_said(served: FrontEnd, folder: Path) -> None:
    done = predict(served, folder / "a.jpg", "--task", "embed", "--save", folder / "out")
    assert done.exit_code == 1
    assert "cannot be drawn" in done.stderr


def test_a_server_that_is_not_there_is_said_in_one_line(folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        done = predict(None, folder / "a.jpg", "--task", "detect", url=url)
        undecided = predict(None, folder / "a.jpg", url=url)
    for failed in (done, undecided):
        assert failed.exit_code == 1
        assert "is the server running?" in failed.stderr
        assert len(failed.stderr.strip().splitlines()) == 1


def test_files_are_found_by_name_folder_and_pattern(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["a.jpg", "b.png", "c.webp"]
    assert [file.name for file in pictures([str(folder)])] == names
    assert [file.name for file in pictures([str(folder / "*.[jp]*g"), str(folder)])] == names
    monkeypatch.chdir(folder)
    assert pictures(["b.png", "?.jpg"]) == [Path("b.png"), Path("a.jpg")]
    (folder / "empty").mkdir()
    for wrong in ("absent.jpg", "*.tiff", "empty"):
        with pytest.raises(InvalidInput):
            pictures([wrong])


def test_answers_in_words() -> None:
    things = [{"label": f"t{number}", "score": 0.5} for number in range(6)]
    assert in_words({"detections": things}) == "t0 0.50, t1 0.50, t2 0.50, t3 0.50 and 2 more"
    assert in_words({"masks": []}) == "nothing"
    assert in_words({"embedding": [1.0, 2.0]}) == "a vector of 2 numbers"
    assert in_words({"outputs": [{"name": "y", "shape": [2, 3]}]}) == "y [2, 3]"


# ---- many pictures, in files


@pytest.fixture
def album(folder: Path) -> Path:
    """Pictures in folders of folders, and some that are hidden."""
    for name, colour in (("deep/er/d.png", BLUE), ("deep/e.jpg", RED), (".thumbs/f.png", RED)):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(picture(colour, "PNG", size=(64, 48)))
    return folder


def test_folders_are_read_with_those_inside_them(album: Path) -> None:
    names = ["a.jpg", "b.png", "c.webp", "deep/e.jpg", "deep/er/d.png"]
    assert [str(file.relative_to(album)) for file in pictures([str(album)])] == names
    assert [file.name for file in pictures([str(album / "deep/**/*.png")])] == ["d.png"]


def test_a_line_for_every_picture(served: FrontEnd, album: Path) -> None:
    done = predict(served, album, "--task", "classify", "--top-k", 1, "--format", "jsonl")
    assert done.exit_code == 0, done.output
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["classes"][0]["label"] for line in lines] == ["red", "green", "blue", "red", "blue"]
    assert lines[3]["file"] == str(album / "deep" / "e.jpg")


@pytest.mark.parametrize("form", ["jsonl", "csv", "coco"])
def test_a_run_goes_on_where_the_one_before_ended(served: FrontEnd, album: Path, form: str) -> None:
    out = album / "out" / "answers"
    out.parent.mkdir()
    words = ("--task", "detect", "--format", form, "--out", out)
    broken = album / "deep" / "broken.jpg"
    broken.write_bytes(b"no picture")
    first = predict(served, album, *words)
    assert first.exit_code == 1
    assert "5 answered, 1 failed" in first.stderr
    assert "broken.jpg" in first.stderr
    broken.write_bytes(picture(RED))
    journal = out.with_name("answers.jsonl") if form == "coco" else out
    with journal.open("a") as file:
        file.write(f'{{"file": "{broken}", "det' if form != "csv" else f"{broken},32")  # torn
    second = predict(served, album, *words, "--resume")
    assert second.exit_code == 0, second.output
    assert "1 answered, 0 failed, 5 were there before" in second.stderr
    assert "0 answered, 0 failed, 6 were there" in predict(served, album, *words, "--resume").stderr
    fresh = album / "out" / "fresh"
    predict(served, album, "--task", "detect", "--format", form, "--out", fresh)
    if form == "coco":
        found, wanted = (json.loads(path.read_text()) for path in (out, fresh))
        assert {image["file_name"] for image in found["images"]} == set(map(str, pictures([str(album)])))
        assert len(found["annotations"]) == len(wanted["annotations"])
    else:
        assert sorted(out.read_text().splitlines()) == sorted(fresh.read_text().splitlines())


def test_a_table_for_other_programs(served: FrontEnd, folder: Path) -> None:
    nothing = predict(served, folder / "a.jpg", "--task", "detect", "--score", 1, "--format", "csv")
    assert nothing.stdout.splitlines()[1:] == [f"{folder / 'a.jpg'},640,480,finder,,,,,,,"]
    found = predict(served, folder / "a.jpg", "--task", "detect", "--format", "csv")
    [row] = csv.DictReader(found.stdout.splitlines())
    assert (row["label"], row["class_id"], row["x1"], row["x2"]) == ("red", "0", "0.0", "320.0")


def test_coco_has_boxes_and_masks(folder: Path) -> None:
    with front_end(segmenter()) as served:
        out = folder / "coco.json"
        done = predict(served, folder / "a.jpg", "--format", "coco", "--out", out)
    assert done.exit_code == 0, done.output
    document = json.loads(out.read_text())
    [image], [one], [category] = document["images"], document["annotations"], document["categories"]
    assert (image["id"], image["width"], image["height"]) == (1, 640, 480)
    assert one["image_id"] == 1
    assert one["category_id"] == category["id"]
    assert one["bbox"] == [0, 0, 640, 480]
    assert one["segmentation"] == {"size": [480, 640], "counts": [0, 640 * 480]}
    assert one["area"] == 640 * 480


def test_what_does_not_go_together(folder: Path) -> None:
    for words in (
        ["--resume"],
        ["--out", "x"],
        ["--format", "jsonl", "--resume"],
        ["--format", "coco"],
        ["--format", "csv", "--json"],
        ["--format", "csv", "--resume", "--out", folder / "notes.txt"],
        ["--format", "csv", "--out", folder / "absent" / "x.csv"],
    ):
        done = predict(None, folder / "a.jpg", *words, url="http://127.0.0.1:9")
        assert done.exit_code == 2, words
        assert len(done.stderr.strip().splitlines()) == 1
    assert (folder / "notes.txt").read_text() == "no picture"
