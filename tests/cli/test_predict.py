"""`carpool predict`: pictures, folders and patterns; tables, JSON and drawn pictures; and clear failures."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from PIL import Image
from typer.testing import CliRunner, Result

from carpool.cli import predict_command
from carpool.cli.main import app
from carpool.cli.predict_command import in_words, pictures
from carpool.errors import InvalidInput, Refused
from frontend.http.front_end import FrontEnd, front_end
from frontend.picture_models import BLUE, GREEN, RED, classifier, detector, embedder, picture


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


def predict(served: FrontEnd | None, *arguments: object, url: str = "") -> Result:
    words = ["predict", *map(str, arguments), "--url", url or f"http://{served.url if served else ''}"]
    return CliRunner().invoke(app, words)


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


def test_who_is_told_to_come_back_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = json.dumps({"error": "too much", "reason": "overload", "retry_after_s": 0.2}).encode()
    answers = [(429, refused), (503, refused), (200, b'{"classes": []}')]
    slept: list[float] = []
    monkeypatch.setattr(predict_command, "sleep", slept.append)
    server = SimpleNamespace(ask=lambda *_, **__: answers.pop(0))
    picture = tmp_path / "a.jpg"
    picture.touch()
    found = predict_command._ask(cast(Any, server), "/classify", picture, None)
    assert found.good
    assert len(slept) == 2
    assert 0.2 <= slept[0] <= 0.3
    assert slept[1] >= 0.3


def test_patience_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(predict_command, "sleep", sleep)
    monkeypatch.setattr(predict_command, "monotonic", lambda: now[0])
    refused = json.dumps({"error": "too much", "reason": "overload", "retry_after_s": 0.2}).encode()
    server = SimpleNamespace(ask=lambda *_, **__: (429, refused))
    picture = tmp_path / "a.jpg"
    picture.touch()
    found = predict_command._ask(cast(Any, server), "/classify", picture, None)
    assert not found.good
    assert 60 < now[0] < 70


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
        assert "is the server running there?" in failed.stderr
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
