"""Roboflow's routes over real sockets, with a fake engine: requests as inference-sdk 1.8.3 sends them."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from carpool.config.server import ServerSettings
from carpool.errors import ConfigError
from carpool.extensions.roboflow.roboflow_format import told
from carpool.extensions.roboflow.roboflow_settings import begin
from carpool.frontend.access.guard import Guard
from frontend.access.key_files import ALICE, api_keys
from frontend.http.front_end import FrontEnd, front_end
from frontend.http.harness import Client, Response
from frontend.picture_models import GREEN, RED, classifier, detector, picture, segmenter

PHOTO = {"type": "base64", "value": base64.b64encode(picture(RED)).decode()}
ASKED = {
    "api_key": "KEY",
    "model_id": "finder/1",
    "image": PHOTO,
    "confidence": 0.4,
    "iou_threshold": 0.5,
    "visualize_predictions": False,
    "disable_active_learning": True,
}


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> ServerSettings:
    file = tmp_path_factory.mktemp("settings") / "apis.toml"
    file.write_text('[roboflow.aliases]\n"coco/3" = "finder"\n')
    return ServerSettings(api=("roboflow",), api_settings=str(file))


@pytest.fixture(scope="module")
def served(settings: ServerSettings) -> Iterator[FrontEnd]:
    with front_end(detector(), classifier(), segmenter(), settings=settings) as found:
        yield found


@pytest.fixture
def client(served: FrontEnd) -> Iterator[Client]:
    with served.connect() as found:
        yield found


def post(client: Client, path: str, document: object) -> Response:
    return client.post(f"/roboflow{path}", orjson.dumps(document), b"Content-Type: application/json\r\n")


def said(response: Response, status: int = 200) -> Any:
    assert response.status == status, response.body
    return orjson.loads(response.body)


def test_the_registry_has_the_models_and_their_other_names(client: Client) -> None:
    for response in (
        client.get("/roboflow/model/registry?api_key=KEY"),
        post(client, "/model/add", {"model_id": "coco/3", "api_key": "KEY"}),
        post(client, "/model/remove", {"model_id": "coco/3", "api_key": "KEY"}),
        client.post("/roboflow/model/clear", b""),
    ):
        models = {one["model_id"]: one["task_type"] for one in said(response)["models"]}
        assert models == {
            "finder/1": "object-detection",
            "coco/3": "object-detection",
            "namer/1": "classification",
            "cutter/1": "instance-segmentation",
        }


def test_what_is_not_served_cannot_be_added(client: Client) -> None:
    assert "finder/1" in said(post(client, "/model/add", {"model_id": "other/1"}), 404)["message"]


def test_the_server_has_a_name_and_a_version(client: Client) -> None:
    assert said(client.get("/roboflow/info")).keys() == {"name", "version", "uuid"}


@pytest.mark.parametrize("model_id", ["finder/1", "finder", "coco/3"])
def test_boxes_are_those_of_detect_by_their_centre(client: Client, model_id: str) -> None:
    answer = said(post(client, "/infer/object_detection", ASKED | {"model_id": model_id}))
    [box] = said(client.post("/detect", picture(RED)))["detections"]
    left, top, right, bottom = box["box"]
    assert answer["image"] == {"width": 32, "height": 24}
    [found] = answer["predictions"]
    assert found == {
        "x": (left + right) / 2,
        "y": (top + bottom) / 2,
        "width": right - left,
        "height": bottom - top,
        "confidence": box["score"],
        "class": "red",
        "class_id": 0,
    }


def test_a_list_is_answered_by_a_list_in_its_order(client: Client) -> None:
    green = {"type": "base64", "value": base64.b64encode(picture(GREEN)).decode()}
    answer = said(post(client, "/infer/object_detection", ASKED | {"image": [PHOTO, green, PHOTO]}))
    assert [one["predictions"][0]["class"] for one in answer] == ["red", "green", "red"]
    assert len(said(post(client, "/infer/object_detection", ASKED | {"image": [PHOTO]}))) == 1


def test_a_bad_image_of_a_list_is_an_error_for_the_whole(client: Client) -> None:
    bad = {"type": "base64", "value": base64.b64encode(b"no image").decode()}
    answer = said(post(client, "/infer/object_detection", ASKED | {"image": [PHOTO, bad]}), 400)
    assert answer["message"].startswith("image 1: ")


def test_the_first_version_sends_bare_base64(client: Client) -> None:
    body = base64.b64encode(picture(RED))
    query = "?api_key=KEY&confidence=0.4&overlap=0.5&disable_active_learning=true"
    response = client.post(f"/roboflow/finder/1{query}", body, b"Content-Type: application/json\r\n")
    assert said(response)["predictions"][0]["class"] == "red"
    assert said(client.post("/roboflow/coco/3", picture(RED)))["predictions"]


def test_classes_and_confidence_filter(client: Client) -> None:
    for more in ({"class_filter": ["green"]}, {"confidence": 0.9999}):
        assert said(post(client, "/infer/object_detection", ASKED | more))["predictions"] == []


def test_a_classifier_names_the_best(client: Client) -> None:
    answer = said(
        post(
            client,
            "/infer/classification",
            {name: ASKED[name] for name in ("model_id", "image")} | {"model_id": "namer/1"},
        )
    )
    assert (answer["top"], answer["confidence"]) == ("red", answer["predictions"][0]["confidence"])


def test_a_mask_is_told_by_its_outline(client: Client) -> None:
    answer = said(post(client, "/infer/instance_segmentation", ASKED | {"model_id": "cutter/1"}))
    [found] = answer["predictions"]
    corners = {(one["x"], one["y"]) for one in found["points"]}
    assert corners == {(0.0, 0.0), (31.0, 0.0), (31.0, 23.0), (0.0, 23.0)}


def test_keypoints_and_small_masks_are_told() -> None:
    thing = {"label": "a", "class_id": 0, "score": 0.5, "box": [0, 0, 4, 2]}
    pose = told({"image": {}, "detections": [thing | {"keypoints": [[1.0, 2.0], [3.0, 1.0, 0.25]]}]})
    assert pose["predictions"][0]["keypoints"] == [
        {"x": 1.0, "y": 2.0, "confidence": 1.0, "class_id": 0, "class": "0"},
        {"x": 3.0, "y": 1.0, "confidence": 0.25, "class_id": 1, "class": "1"},
    ]
    mask = thing | {"rle": {"size": [2, 4], "counts": [0, 1, 7]}}
    assert len(told({"image": {}, "masks": [mask]})["predictions"][0]["points"]) == 4


def test_a_workflow_is_a_model(client: Client) -> None:
    sent = {"api_key": "KEY", "inputs": {"image": PHOTO, "confidence": 0.5}}
    answer = said(post(client, "/anywhere/workflows/finder", sent))
    assert answer["outputs"][0]["predictions"]["predictions"][0]["class"] == "red"
    sent = {"inputs": {"image": [PHOTO, PHOTO]}}
    assert len(said(post(client, "/anywhere/workflows/finder", sent))["outputs"]) == 2


@pytest.mark.parametrize(
    ("path", "document", "status", "says"),
    [
        ("/infer/object_detection", ASKED | {"model_id": "nobody/1"}, 404, "nobody"),
        ("/infer/object_detection", ASKED | {"model_id": "namer/1"}, 400, "is for classify"),
        ("/infer/object_detection", ASKED | {"image": "text"}, 400, "image must be"),
        ("/infer/object_detection", ASKED | {"confidence": "high"}, 400, "confidence must be"),
        ("/infer/object_detection", {}, 400, "image must be"),
        ("/infer/lmm", ASKED, 404, "/infer/lmm is not offered"),
        ("/clip/embed_image", {}, 400, "image must be"),
        ("/clip/embed_text", {"text": "a cat"}, 404, "texts have no vectors here"),
        ("/clip/compare", {"subject": PHOTO, "prompt": "a cat"}, 404, "texts have no vectors here"),
        ("/clip/other", {}, 404, "/clip/other is not offered"),
        ("/doctr/ocr", {"image": PHOTO}, 404, "no model is for read"),
        ("/gaze/ocr", {"image": PHOTO}, 404, "/gaze/ocr is not offered"),
        ("/workflows/run", {}, 404, "/workflows/run is not offered"),
        ("/nothing", {}, 404, "there is nothing at"),
    ],
)
def test_errors_have_a_message(client: Client, path: str, document: object, status: int, says: str) -> None:
    assert says in said(post(client, path, document), status)["message"]


def test_it_is_off_unless_named() -> None:
    with front_end(detector()) as found, found.connect() as client:
        assert client.get("/roboflow/model/registry").status == 404


def test_keys_where_the_sdk_sends_them(settings: ServerSettings, tmp_path: Path) -> None:
    guard = Guard(api_key_file=api_keys(tmp_path))
    with front_end(detector(), guard=guard, settings=settings) as found, found.connect() as client:
        assert "message" in said(client.get("/roboflow/model/registry"), 401)
        said(client.get("/roboflow/model/registry?api_key=wrong"), 401)
        said(client.get(f"/roboflow/model/registry?api_key={ALICE}"))
        said(post(client, "/infer/object_detection", ASKED | {"api_key": ALICE}))
        said(post(client, "/infer/object_detection", ASKED), 401)
        said(client.post(f"/roboflow/finder/1?api_key={ALICE}", base64.b64encode(picture(RED))))
        bearer = b"Authorization: Bearer %b\r\n" % ALICE.encode()
        said(client.post("/roboflow/infer/object_detection", orjson.dumps(ASKED), bearer))


@pytest.mark.parametrize("text", ["[roboflow]\naliases = 3", "[roboflow]\nalias = {}", "roboflow = 1"])
def test_mistakes_in_the_settings_are_found_at_the_start(text: str, tmp_path: Path) -> None:
    (tmp_path / "apis.toml").write_text(text)
    with pytest.raises(ConfigError):
        begin(ServerSettings(api=("roboflow",), api_settings=str(tmp_path / "apis.toml")))
