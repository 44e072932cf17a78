"""`carpool evaluate`: classes, boxes and masks, of a server and of a folder, and two versions of a model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from PIL import Image

from cli_run import CliResult, run_cli
from frontend.http.front_end import FrontEnd, front_end
from frontend.picture_models import BLUE, GREEN, RED, classifier, detector, picture, segmenter

COLOURS = {"red": RED, "green": GREEN, "blue": BLUE}


@pytest.fixture
def served() -> Iterator[FrontEnd]:
    with front_end(classifier(), detector(), segmenter()) as found:
        yield found


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    """Three classes; one picture of blue lies among the red ones."""
    for name, colour in COLOURS.items():
        (tmp_path / "val" / name).mkdir(parents=True)
        for number in range(3):
            (tmp_path / "val" / name / f"{number}.png").write_bytes(picture(colour, "PNG"))
    (tmp_path / "val" / "red" / "odd.png").write_bytes(picture(BLUE, "PNG"))
    return tmp_path / "val"


def evaluate(*arguments: object) -> CliResult:
    return run_cli(["evaluate", *map(str, arguments)])


def test_classes_of_a_server(served: FrontEnd, folders: Path) -> None:
    done = evaluate(f"http://{served.url}", "--data", folders, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["pictures"] == 10
    assert found["scored"]["figures"] == {"top1": 0.9, "top5": 1.0}
    assert found["scored"]["per_class"] == {"red": 0.75, "green": 1.0, "blue": 1.0}
    assert found["scored"]["model"] == "namer"
    assert found["scored"]["p99_ms"] >= found["scored"]["p50_ms"] > 0
    assert found["gap"] is found["against"] is None
    shown = evaluate(f"http://{served.url}", "--data", folders)
    assert "top-1 accuracy" in shown.stdout
    assert "0.9000" in shown.stdout


def test_names_are_mapped_and_what_is_left_is_told(served: FrontEnd, folders: Path) -> None:
    (folders / "red").rename(folders / "n001")
    (folders / "zebra").mkdir()
    (folders / "zebra" / "1.png").write_bytes(picture(RED, "PNG"))
    done = evaluate(f"http://{served.url}", "--data", folders)
    assert "Not in the data, and not counted: red." in done.stdout
    assert "n001, zebra" in done.stdout
    names = folders.parent / "names.csv"
    names.write_text("n001,red\n")
    named = evaluate(f"http://{served.url}", "--data", folders, "--names", names, "--json")
    assert json.loads(named.stdout)["scored"]["per_class"]["n001"] == 0.75


def test_boxes_of_a_server(served: FrontEnd, tmp_path: Path) -> None:
    """The stand-in finds the colour in the left half: right for the first picture, wrong for the second."""
    for name, colour in COLOURS.items():
        (tmp_path / f"{name}.png").write_bytes(picture(colour, "PNG", size=(64, 48)))
    data = {
        "images": [{"id": n, "file_name": f"{name}.png"} for n, name in enumerate(COLOURS)],
        "categories": [{"id": n, "name": name} for n, name in enumerate(COLOURS)],
        "annotations": [
            {"image_id": 0, "category_id": 0, "bbox": [0, 0, 32, 48]},
            {"image_id": 1, "category_id": 1, "bbox": [32, 0, 32, 48]},
            {"image_id": 2, "category_id": 2, "bbox": [0, 0, 32, 44]},
        ],
    }
    (tmp_path / "val.json").write_text(json.dumps(data))
    done = evaluate(f"http://{served.url}", "--data", tmp_path / "val.json", "--score", 0.5, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)["scored"]
    assert found["model"] == "finder"
    assert found["per_class"]["red"] == 1.0
    assert found["per_class"]["green"] == 0.0
    assert 0.8 <= found["per_class"]["blue"] < 1.0  # an overlap of 0.92
    assert found["figures"]["mAP50"] == pytest.approx(2 / 3, abs=1e-5)


def test_masks_of_a_server(served: FrontEnd, tmp_path: Path) -> None:
    """The stand-in takes what is red for foreground."""
    pictures, masks = tmp_path / "pictures", tmp_path / "masks"
    for folder in (pictures, masks):
        folder.mkdir()
    pixels = np.zeros((16, 16, 3), np.uint8)
    pixels[:, :8] = RED
    truth = np.zeros((16, 16), np.uint8)
    truth[:, :4] = 255
    for number in range(2):
        Image.fromarray(pixels).save(pictures / f"{number}.png")
        Image.fromarray(truth).save(masks / f"{number}.png")
    url = f"http://{served.url}"
    done = evaluate(url, "--data", masks, "--pictures", pictures, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)["scored"]
    assert found["per_class"]["foreground"] == pytest.approx(0.5, abs=0.1)
    assert found["per_class"]["background"] == pytest.approx(8 / 12, abs=0.1)
    assert found["figures"]["miou"] == pytest.approx(np.mean(list(found["per_class"].values())), abs=1e-5)
    Image.fromarray(truth[:8]).save(masks / "1.png")
    odd = evaluate(url, "--data", masks, "--pictures", pictures)
    assert odd.exit_code == 2
    assert "1.png has 16×8 pixels, its image 16×16" in odd.stderr


def test_pictures_that_fail_do_not_count_and_are_told(served: FrontEnd, folders: Path) -> None:
    (folders / "red" / "odd.png").write_bytes(b"no picture")
    done = evaluate(f"http://{served.url}", "--data", folders)
    assert done.exit_code == 1
    assert "9 images" in done.stdout
    assert "odd.png" in done.stderr


def test_what_cannot_be_asked_is_said_in_one_line(served: FrontEnd, folders: Path, tmp_path: Path) -> None:
    url = f"http://{served.url}"
    for arguments, code, said in (
        ((url,), 2, "--data is needed"),
        ((url, "--data", folders, "--tolerate", -1), 2, "--tolerate"),
        ((url, "--data", folders, "--version", 1, "--against", 1), 2, "compared with itself"),
        ((url, "--data", folders, "--model", "finder"), 2, "top_k"),
        ((url, "--data", folders, "--model", "absent"), 2, "absent"),
        ((tmp_path / "none.onnx", "--data", folders), 2, "no such file or folder"),
    ):
        done = evaluate(*arguments)
        assert done.exit_code == code, done.output
        assert said in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1


# ---- a model that is loaded here


def colour_model(folder: Path, *, upside_down: bool = False) -> None:
    """The mean of each channel, or its opposite."""
    folder.mkdir(parents=True)
    nodes = [
        helper.make_node("ReduceMean", ["images"], ["mean"], axes=[2, 3], keepdims=0),
        helper.make_node("Neg" if upside_down else "Identity", ["mean"], ["logits"]),
    ]
    images = helper.make_tensor_value_info("images", TensorProto.FLOAT, ["batch", 3, 8, 8])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 3])
    graph = helper.make_graph(nodes, "colours", [images], [logits])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    onnx.save(model, str(folder / "model.onnx"))


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CARPOOL_CACHE_DIR", str(tmp_path / "cache"))
    folder = tmp_path / "colours"
    colour_model(folder / "1")
    colour_model(folder / "2", upside_down=True)
    (folder / "model.toml").write_text('task = "classify"\nlabels = "labels.txt"\n')
    (folder / "labels.txt").write_text("red\ngreen\nblue\n")
    return folder


def test_a_version_that_is_worse_is_told_by_the_exit_code(model: Path, folders: Path) -> None:
    done = evaluate(model, "--data", folders, "--version", 2, "--against", 1, "--json")
    assert done.exit_code == 1, done.output
    found = json.loads(done.stdout)
    assert (found["scored"]["version"], found["against"]["version"]) == ("2", "1")
    assert found["against"]["figures"]["top1"] == 0.9
    gap = found["gap"]
    assert gap["worse"]
    assert gap["sure"]
    assert gap["low"] <= gap["difference"] <= gap["high"] < 0
    better = evaluate(model, "--data", folders, "--version", 1, "--against", 2)
    assert better.exit_code == 0, better.output
    assert "not worse" in " ".join(better.stdout.split())


def test_the_newest_version_answers_unless_one_is_named(model: Path, folders: Path) -> None:
    newest = evaluate(model, "--data", folders, "--json")
    assert json.loads(newest.stdout)["scored"]["version"] == "2"
    missing = evaluate(model, "--data", folders, "--version", 3)
    assert missing.exit_code == 2
    assert "there is no version 3 of colours" in missing.stderr


def test_versions_without_files_are_two_as_well(folders: Path, tmp_path: Path) -> None:
    home = tmp_path / "pretended"
    for version in ("1", "2"):
        (home / version).mkdir(parents=True)
    (home / "labels.txt").write_text("red\ngreen\nblue\n")
    (home / "model.toml").write_text(
        'backend = "fake"\ntask = "classify"\nlabels = "labels.txt"\n[fake]\ncurve = "1+1"\n'
        '[[input]]\nname = "x"\ndatatype = "FP32"\nshape = [3, 16, 16]\n'
        '[[output]]\nname = "y"\ndatatype = "FP32"\nshape = [3]\n'
    )
    done = evaluate(home, "--data", folders, "--version", 2, "--against", 1, "--json")
    found = json.loads(done.stdout)
    assert (found["scored"]["version"], found["against"]["version"]) == ("2", "1")
    done = evaluate(home, "--data", folders, "--against", 2)
    assert done.exit_code != 0
    assert "version 2 would be compared with itself" in done.output
