"""Rollouts of models that take pictures: versions of two sizes, compared by what they answer."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper

from backends.onnx_models import write
from frontend.picture_models import BLUE, GREEN, RED, picture
from frontend.whole_server import WholeServer, whole_server
from waiting import until

PATIENCE_S = 30.0
HELD = "shadow = 0\ncanary = [0.5]\ncanary_h = 24\nleast = 20\n"
SHADOW = "shadow = 1.0\nshadow_h = 24\nleast = 20\n"
COLOURS = (RED, GREEN, BLUE)
SAME_SIZE = pytest.param(16, marks=pytest.mark.conformance)


def mean_colour(path: Path, side: int, factor: float) -> Path:
    """logits = factor × the mean of each channel."""
    nodes = [
        helper.make_node("GlobalAveragePool", ["images"], ["pooled"]),
        helper.make_node("Flatten", ["pooled"], ["flat"]),
        helper.make_node("Mul", ["flat", "factor"], ["logits"]),
    ]
    return write(
        path,
        nodes,
        [("images", "FP32", ("batch", 3, side, side))],
        [("logits", "FP32", ("batch", 3))],
        {"factor": np.array([factor], np.float32)},
    )


def fails_on_red(path: Path, side: int) -> Path:
    """As `mean_colour`, but whatever is quite red has no row in its table."""
    nodes = [
        helper.make_node("GlobalAveragePool", ["images"], ["pooled"]),
        helper.make_node("Flatten", ["pooled"], ["flat"]),
        helper.make_node("Gather", ["flat", "first"], ["red"], axis=1),
        helper.make_node("Mul", ["red", "steep"], ["scaled"]),
        helper.make_node("Floor", ["scaled"], ["floor"]),
        helper.make_node("Cast", ["floor"], ["row"], to=7),
        helper.make_node("Gather", ["table", "row"], ["added"], axis=0),
        helper.make_node("Add", ["flat", "added"], ["logits"]),
    ]
    weights = {
        "first": np.array(0, np.int64),
        "steep": np.array(1.5, np.float32),
        "table": np.zeros((1, 3), np.float32),
    }
    shapes = [("images", "FP32", ("batch", 3, side, side))], [("logits", "FP32", ("batch", 3))]
    return write(path, nodes, *shapes, weights)


def repository(folder: Path, plan: str, *versions: tuple[int, float]) -> Path:
    model = folder / "models" / "namer"
    model.mkdir(parents=True)
    (model / "labels.txt").write_text("red\ngreen\nblue\n")
    (model / "model.toml").write_text(
        f'task = "classify"\nslo_ms = 5000\nlabels = "labels.txt"\n[rollout]\n{plan}'
    )
    for number, (side, factor) in enumerate(versions, 1):
        mean_colour(model / str(number) / "model.onnx", side, factor)
    return folder / "models"


def ask(server: WholeServer, method: str, path: str, body: bytes | None = None, **headers: str) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
    try:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, body, named)
        answer = connection.getresponse()
        return answer.status, answer.read(), dict(answer.getheaders())
    finally:
        connection.close()


def status(server: WholeServer) -> dict[str, Any]:
    return dict(json.loads(ask(server, "GET", "/v2/models/namer/rollout")[1]))


def until_state(server: WholeServer, state: str, work: Callable[[], object] | None = None) -> dict[str, Any]:
    return until(lambda: (now := status(server))["state"] == state and now, lambda: status(server), work=work)


def classify(server: WholeServer, colour: tuple[int, int, int] = RED, source: str = "") -> Any:
    headers = {"X_Carpool_Source": source} if source else {}
    code, body, fields = ask(
        server, "POST", "/classify", picture(colour), Content_Type="image/jpeg", **headers
    )
    assert code == 200, body
    return json.loads(body), fields


@pytest.mark.parametrize("side", [SAME_SIZE, 24])
def test_both_sizes_answer_and_agree(tmp_path: Path, side: int) -> None:
    home = repository(tmp_path, HELD, (16, 10.0), (side, 10.0))
    with whole_server(home, state_dir=tmp_path / "state") as server:
        until_state(server, "canary")
        seen = set()
        for number in range(30):
            answer, fields = classify(server, COLOURS[number % 3], f"camera-{number}")
            assert answer["classes"][0]["label"] == ("red", "green", "blue")[number % 3]
            assert answer["version"] == fields["X-Carpool-Version"]
            assert fields["X-Carpool-Id"].startswith(f"{answer['version']}-")
            seen.add(answer["version"])
        assert seen == {"1", "2"}
        until(lambda: status(server)["counts"]["compared"], work=lambda: classify(server))
        assert status(server)["counts"]["differ"] == 0
        if side != 16:
            check_tensors_stay_with_stable(server)


def check_tensors_stay_with_stable(server: WholeServer) -> None:
    """Where sizes differ: they were made for stable."""
    data = [0.5] * (3 * 16 * 16)
    tensor = {"name": "images", "datatype": "FP32", "shape": [1, 3, 16, 16], "data": data}
    body = json.dumps({"inputs": [tensor]}).encode()
    for _ in range(8):
        code, answer, _ = ask(server, "POST", "/v2/models/namer/infer", body)
        assert (code, json.loads(answer)["model_version"]) == (200, "1")


@pytest.mark.parametrize(
    ("plan", "side"),
    [
        (HELD, 24),
        (SHADOW, 16),
        pytest.param(HELD, 16, marks=pytest.mark.conformance),
        pytest.param(SHADOW, 24, marks=pytest.mark.conformance),
    ],
)
def test_other_answers_send_it_back_and_the_pictures_are_kept(tmp_path: Path, plan: str, side: int) -> None:
    kept = f"keep = {{ folder = {json.dumps(str(tmp_path / 'kept'))} }}\n"
    home = repository(tmp_path, plan + kept, (16, 10.0), (side, -10.0))
    with whole_server(home, state_dir=tmp_path / "state") as server:
        until_state(server, "shadow" if plan is SHADOW else "canary")
        found = until_state(server, "rolled-back", lambda: classify(server))
        assert found["rollbacks"] == {"disagreement": 1}
        path = "/v2/models/namer/rollout/disagreements"
        lines = until(lambda: json.loads(ask(server, "GET", path)[1])["disagreements"])
        assert lines[0]["stable"]["classes"][0]["label"] == "red"
        assert lines[0]["candidate"]["classes"][0]["label"] != "red"
        status, body, headers = ask(server, "GET", f"{path}/{lines[0]['number']}")
        assert (status, body, headers["content-type"]) == (200, picture(), "image/jpeg")


@pytest.mark.parametrize("side", [SAME_SIZE, 24])
def test_a_picture_that_the_candidate_fails_is_answered_by_stable(tmp_path: Path, side: int) -> None:
    home = repository(tmp_path, HELD, (16, 10.0))
    settings = home / "namer" / "model.toml"
    settings.write_text(f"max_batch = 8\n{settings.read_text()}")  # noise may fail, too: nothing else says it
    fails_on_red(home / "namer" / "2" / "model.onnx", side)
    with whole_server(home, state_dir=tmp_path / "state") as server:
        until_state(server, "canary")
        answers = []
        found = until_state(server, "rolled-back", lambda: answers.append(classify(server)[0]))
        assert {(answer["version"], answer["classes"][0]["label"]) for answer in answers} == {("1", "red")}
        assert found["rollbacks"] == {"errors": 1}
        assert found["history"][-1]["counts"]["fallbacks"] > 0


def test_other_labels_are_another_model(tmp_path: Path) -> None:
    home = repository(tmp_path, HELD, (16, 10.0))
    model = home / "namer"
    nodes = [
        helper.make_node("GlobalAveragePool", ["images"], ["pooled"]),
        helper.make_node("Flatten", ["pooled"], ["scores"]),
    ]
    write(
        model / "2" / "model.onnx",
        nodes,
        [("images", "FP32", ("batch", 3, 16, 16))],
        [("scores", "FP32", ("batch", 3))],
    )
    with whole_server(home, state_dir=tmp_path / "state") as server:
        found = until_state(server, "failed")
        assert "output 'logits' is missing" in found["why"]
        assert classify(server)[0]["version"] == "1"
