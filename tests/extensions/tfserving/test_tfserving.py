"""TensorFlow Serving's REST routes over real sockets, with a fake engine."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from carpool.config.server import ServerSettings
from carpool.frontend.access.guard import Guard
from frontend.access.key_files import ALICE, BOB, api_keys
from frontend.http.front_end import FrontEnd, front_end, models
from frontend.http.harness import Client, Response
from frontend.http.mutations import COUNTS, JSON, Recorded, check_mutations
from frontend.picture_models import RED, classifier, picture

SETTINGS = ServerSettings(api=("tfserving",))
PHOTO = base64.b64encode(picture(RED)).decode()
ROW = [[0, 1, 2], [3, 4, 5]]
PAIR = {"a": [1, 2], "b": [3, 5]}


@pytest.fixture(scope="module")
def served() -> Iterator[FrontEnd]:
    with front_end(*models(), classifier(), settings=SETTINGS) as found:
        yield found


@pytest.fixture
def client(served: FrontEnd) -> Iterator[Client]:
    with served.connect() as found:
        yield found


def post(client: Client, path: str, document: object, fields: bytes = b"") -> Response:
    return client.post(f"/tfserving/v1/models/{path}", orjson.dumps(document), fields)


def said(response: Response, status: int = 200) -> Any:
    assert response.status == status, response.body
    return orjson.loads(response.body)


def test_rows_are_answered_by_rows(client: Client) -> None:
    answer = said(post(client, "image:predict", {"instances": [ROW, ROW]}))
    assert answer == {"predictions": [[15.0, 1.0, 2.0, 3.0]] * 2}
    named = {"instances": [{"image": ROW}], "signature_name": "serving_default"}
    assert said(post(client, "image:predict", named))["predictions"] == [[15.0, 1.0, 2.0, 3.0]]
    assert said(post(client, "image/versions/1:predict", named))["predictions"]


def test_several_outputs_have_names(client: Client) -> None:
    answer = said(post(client, "pair:predict", {"instances": [PAIR, PAIR]}))
    assert answer == {"predictions": [{"sum": [4, 7], "difference": [-2, -3]}] * 2}


def test_columns_are_answered_by_columns(client: Client) -> None:
    answer = said(post(client, "pair:predict", {"inputs": {name: [row] for name, row in PAIR.items()}}))
    assert answer == {"outputs": {"sum": [[4, 7]], "difference": [[-2, -3]]}}
    assert said(post(client, "image:predict", {"inputs": [ROW]}))["outputs"] == [[15.0, 1.0, 2.0, 3.0]]


@pytest.mark.parametrize("row", [{"b64": PHOTO}, {"image_bytes": {"b64": PHOTO}}])
def test_images_are_answered_as_on_image_routes(client: Client, row: object) -> None:
    [first, _] = said(post(client, "namer:predict", {"instances": [row, row]}))["predictions"]
    assert first["classes"][0]["label"] == "red"


def test_status_and_metadata(client: Client) -> None:
    path = "/tfserving/v1/models/versions"
    listed = said(client.get(path))["model_version_status"]
    assert [one["version"] for one in listed] == ["2", "10"]
    assert listed[0]["state"] == "AVAILABLE"
    assert len(said(client.get(f"{path}/versions/2"))["model_version_status"]) == 1
    found = said(client.get("/tfserving/v1/models/image/metadata"))
    signature = found["metadata"]["signature_def"]["signature_def"]["serving_default"]
    assert signature["inputs"]["image"]["dtype"] == "DT_UINT8"
    sides = [one["size"] for one in signature["inputs"]["image"]["tensor_shape"]["dim"]]
    assert sides == ["-1", "2", "3"]


@pytest.mark.parametrize(
    ("path", "document", "status", "says"),
    [
        ("nobody:predict", {"instances": [1]}, 404, "nobody"),
        ("image:classify", {"instances": [1]}, 404, "is not offered"),
        ("image", {"instances": [1]}, 404, "is not offered"),
        ("image/versions/7:predict", {"instances": [ROW]}, 404, "version 7"),
        ("image:predict", {}, 400, "either instances or inputs"),
        ("image:predict", {"instances": []}, 400, "at least one"),
        ("image:predict", {"inputs": None}, 400, "must be tensors"),
        ("image:predict", {"instances": [ROW], "examples": 1}, 400, "unknown"),
        ("image:predict", {"instances": [ROW], "signature_name": "x"}, 400, "signature_name must be"),
        ("image:predict", {"instances": [[0]]}, 400, "shape"),
        ("image:predict", {"instances": [ROW, [ROW]]}, 400, ""),
        ("image:predict", {"instances": ["text"]}, 400, ""),
        ("image:predict", {"instances": [{"photo": ROW}]}, 400, "unknown input"),
        ("image:predict", {"instances": [{"b64": PHOTO}]}, 400, "takes tensors"),
        ("pair:predict", {"instances": [PAIR, {"a": [1]}]}, 400, "the same inputs"),
        ("pair:predict", {"instances": [[1, 2]]}, 400, "name the inputs"),
        ("namer:predict", {"instances": [{"b64": "aGVsbG8="}]}, 400, "not an image"),
        ("broken:predict", {"inputs": {}}, 500, "the model raised"),
    ],
)
def test_errors_are_a_sentence(client: Client, path: str, document: object, status: int, says: str) -> None:
    answer = said(post(client, path, document), status)
    assert list(answer) == ["error"]
    assert says in answer["error"]


def test_a_key_that_is_for_other_models(tmp_path: Path) -> None:
    guard = Guard(api_key_file=api_keys(tmp_path))
    with front_end(guard=guard, settings=SETTINGS) as found, found.connect() as client:
        said(post(client, "pair:predict", {"instances": [PAIR]}), 401)
        for key, status in ((ALICE, 200), (BOB, 403)):
            fields = b"Authorization: Bearer %b\r\n" % key.encode()
            said(post(client, "pair:predict", {"instances": [PAIR]}, fields), status)
            said(client.get("/tfserving/v1/models/pair/metadata", fields), status)


KEYED = {**JSON, "X-API-Key": ALICE}


def recorded(path: str, document: object) -> Recorded:
    return Recorded("POST", f"/tfserving/v1/models/{path}", json.dumps(document).encode(), KEYED)


RECORDED = [
    recorded("image:predict", {"instances": [ROW, ROW]}),
    recorded("image:predict", {"instances": [{"image": ROW}], "signature_name": "serving_default"}),
    recorded("image/versions/1:predict", {"inputs": {"image": [ROW]}}),
    recorded("namer:predict", {"instances": [{"b64": PHOTO}, {"b64": PHOTO}]}),
    Recorded("GET", "/tfserving/v1/models/image/metadata", fields={"X-API-Key": ALICE}),
]


def is_answer(status: int, document: Any) -> bool:
    return status == 200 or list(document) == ["error"]


@pytest.mark.parametrize("count", COUNTS)
def test_mutated_requests_get_answers_of_the_protocol(count: int, tmp_path: Path) -> None:
    check_mutations("tfserving", RECORDED, is_answer, count, tmp_path, *models(), classifier())
