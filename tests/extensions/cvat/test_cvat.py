"""CVAT's three calls over real sockets, with a fake engine: requests as its gateway sends them."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import numpy as np
import orjson
import pytest

from carpool.config.server import ServerSettings
from carpool.errors import InvalidInput
from carpool.extensions.cvat.cvat_routes import shapes
from frontend.http.front_end import FrontEnd, front_end
from frontend.http.harness import Client, Response
from frontend.picture_models import LABELS, RED, classifier, detector, picture, segmenter

SETTINGS = ServerSettings(api=("cvat",))
PHOTO = base64.b64encode(picture(RED)).decode()
FIELDS = (
    b"x-nuclio-project-name: cvat\r\nx-nuclio-function-namespace: nuclio\r\nx-nuclio-path: /\r\n"
    b"x-nuclio-invoke-via: domain-name\r\nX-Nuclio-Invoke-Timeout: 120s\r\n"
)


@pytest.fixture(scope="module")
def served() -> Iterator[FrontEnd]:
    with front_end(detector(), classifier(), segmenter(), settings=SETTINGS) as found:
        yield found


@pytest.fixture
def client(served: FrontEnd) -> Iterator[Client]:
    with served.connect() as found:
        yield found


def invoke(client: Client, name: str, document: object) -> Response:
    fields = FIELDS + b"x-nuclio-function-name: %b\r\n" % name.encode()
    return client.post("/api/function_invocations", orjson.dumps(document), fields)


def said(response: Response, status: int = 200) -> Any:
    assert response.status == status, response.body
    return orjson.loads(response.body)


def test_functions_are_models_with_their_labels(client: Client) -> None:
    found = said(client.get("/api/functions", FIELDS))
    assert found.keys() == {"finder", "namer", "cutter"}
    for name, function in found.items():
        assert said(client.get(f"/api/functions/{name}", FIELDS)) == function
        assert function["metadata"]["name"] == name
        assert function["metadata"]["annotations"]["type"] == "detector"
        assert function["spec"]["description"]
        assert isinstance(function["status"]["httpPort"], int)
    spec = orjson.loads(found["finder"]["metadata"]["annotations"]["spec"])
    assert [one["name"] for one in spec] == list(LABELS)
    assert {one["type"] for one in spec} == {"rectangle"}


def test_rectangles(client: Client) -> None:
    [found] = said(invoke(client, "finder", {"image": PHOTO, "threshold": 0.4}))
    [box] = said(client.post("/detect", picture(RED)))["detections"]
    assert found == {
        "confidence": str(box["score"]),
        "label": "red",
        "points": box["box"],
        "type": "rectangle",
    }
    assert said(invoke(client, "finder", {"image": PHOTO, "threshold": 0.9999})) == []


def test_a_class_is_a_tag(client: Client) -> None:
    [found] = said(invoke(client, "namer", {"image": PHOTO}))
    assert (found["type"], found["label"]) == ("tag", "red")


def test_a_mask_has_the_pixels_of_its_box(client: Client) -> None:
    [found] = said(invoke(client, "cutter", {"image": PHOTO}))
    assert found["mask"] == [*[1] * (32 * 24), 0, 0, 31, 23]
    pixels = np.zeros((4, 5), np.uint8)
    pixels[1:3, 2:4] = 1
    pixels[1, 3] = 0
    runs = [9, 2, 3, 1, 5]  # down the columns
    thing = {"label": "a", "class_id": 0, "score": 0.5, "box": [0, 0, 1, 1]}
    answer: Any = shapes({"masks": [thing | {"rle": {"size": [4, 5], "counts": runs}}]})
    assert answer[0]["mask"] == [1, 0, 1, 1, 2, 1, 3, 2]
    empty: Any = shapes({"masks": [thing | {"rle": {"size": [4, 5], "counts": [20]}}]})
    assert empty[0]["mask"] == [0, 0, 0, 0, 0]


def test_other_shapes() -> None:
    thing = {"label": "a", "class_id": 0, "score": 0.5, "box": [0, 0, 4, 2]}
    answer: Any = shapes({"detections": [thing | {"keypoints": [[1, 2, 0.5], [3, 4, 0.5]]}]})
    assert (answer[0]["type"], answer[0]["points"]) == ("points", [1, 2, 3, 4])
    answer = shapes({"detections": [thing | {"corners": [[0, 1], [2, 3], [4, 5], [6, 7]], "angle": 0.0}]})
    assert (answer[0]["type"], answer[0]["points"]) == ("polygon", list(range(8)))
    with pytest.raises(InvalidInput):
        shapes({"model": "a", "embedding": []})


@pytest.mark.parametrize(
    ("name", "document", "status", "says"),
    [
        ("nobody", {"image": PHOTO}, 404, "no function 'nobody'"),
        ("", {"image": PHOTO}, 400, "x-nuclio-function-name"),
        ("finder", {}, 400, "image must be"),
        ("finder", {"image": "!"}, 400, "base64"),
        ("finder", {"image": "aGVsbG8="}, 400, "not an image"),
        ("finder", {"image": PHOTO, "threshold": "high"}, 400, "threshold must be"),
        ("finder", [], 400, "JSON object"),
    ],
)
def test_errors_are_a_sentence(client: Client, name: str, document: object, status: int, says: str) -> None:
    assert says in said(invoke(client, name, document), status)["error"]


def test_an_unknown_function(client: Client) -> None:
    assert said(client.get("/api/functions/nobody"), 404)["error"]
    assert said(client.get("/api/functions/a/b"), 404)["error"]
