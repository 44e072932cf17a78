"""DOODS over real sockets, with a fake engine: requests as pydoods 1.0.2 sends them."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from carpool.config.server import ServerSettings
from carpool.frontend.access.guard import Guard
from frontend.access.key_files import ALICE, api_keys
from frontend.http.front_end import FrontEnd, front_end
from frontend.http.harness import Client, Response
from frontend.picture_models import LABELS, RED, SIDE, classifier, detector, picture

SETTINGS = ServerSettings(api=("doods",))
ASKED = {
    "data": base64.b64encode(picture(RED)).decode(),
    "detector_name": "finder",
    "detect": {"red": 50},
    "id": "7",
}


@pytest.fixture(scope="module")
def served() -> Iterator[FrontEnd]:
    with front_end(detector(), classifier(), settings=SETTINGS) as found:
        yield found


@pytest.fixture
def client(served: FrontEnd) -> Iterator[Client]:
    with served.connect() as found:
        yield found


def detect(client: Client, document: object, fields: bytes = b"") -> Response:
    return client.post("/doods/detect", orjson.dumps(document), fields)


def said(response: Response, status: int = 200) -> Any:
    assert response.status == status, response.body
    return orjson.loads(response.body)


def test_detectors_list_their_labels(client: Client) -> None:
    found = said(client.get("/doods/detectors"))["detectors"]
    assert [one["name"] for one in found] == ["finder", "default"]
    assert found[0]["labels"] == list(LABELS)
    assert (found[0]["width"], found[0]["height"]) == (SIDE, SIDE)


@pytest.mark.parametrize("name", ["finder", "default"])
def test_boxes_are_shares_of_the_image(client: Client, name: str) -> None:
    answer = said(detect(client, ASKED | {"detector_name": name}))
    assert answer["id"] == "7"
    [box] = answer["detections"]
    assert {key: box[key] for key in ("top", "left", "bottom", "right", "label")} == {
        "top": 0.0,
        "left": 0.0,
        "bottom": 1.0,
        "right": 0.5,
        "label": "red",
    }
    assert 90 < box["confidence"] <= 100


@pytest.mark.parametrize("wanted", [{"green": 1}, {"red": 99.99}, {"*": 99.99}])
def test_thresholds_are_percentages_by_label(client: Client, wanted: dict[str, float]) -> None:
    assert said(detect(client, ASKED | {"detect": wanted}))["detections"] == []


@pytest.mark.parametrize("wanted", [{"*": 10}, {}, None, {"green": 90, "*": 5}])
def test_a_star_is_every_label(client: Client, wanted: object) -> None:
    assert len(said(detect(client, ASKED | {"detect": wanted}))["detections"]) == 1


@pytest.mark.parametrize(
    ("document", "status", "says"),
    [
        ({}, 400, "data must be"),
        (ASKED | {"data": "!"}, 400, "base64"),
        (ASKED | {"data": "aGVsbG8="}, 400, "not an image"),
        (ASKED | {"detect": {"red": "much"}}, 400, "0 to 100 percent"),
        (ASKED | {"detect": []}, 400, "detect must be"),
        (ASKED | {"detector_name": 3}, 400, "must be strings"),
        (ASKED | {"detector_name": "nobody"}, 404, "nobody"),
        (ASKED | {"detector_name": "namer"}, 400, "no boxes"),
        ([], 400, "JSON object"),
    ],
)
def test_errors_are_a_sentence(client: Client, document: object, status: int, says: str) -> None:
    answer = said(detect(client, document), status)
    assert answer.keys() == {"error"}
    assert says in answer["error"]


def test_the_key_in_its_own_field(tmp_path: Path) -> None:
    guard = Guard(api_key_file=api_keys(tmp_path))
    with front_end(detector(), guard=guard, settings=SETTINGS) as found, found.connect() as client:
        assert said(client.get("/doods/detectors"), 401).keys() == {"error"}
        field = b"doods-auth-key: %b\r\n" % ALICE.encode()
        assert said(client.get("/doods/detectors", field))["detectors"]
        assert said(detect(client, ASKED, field))["detections"]
        said(detect(client, ASKED, b"doods-auth-key: wrong\r\n"), 401)
