"""DeepStack's detection over real sockets, with a fake engine: forms as Frigate's plugin sends them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from absent import needs
from carpool.config.server import ServerSettings
from carpool.errors import ConfigError
from carpool.extensions.frigate.deepstack import MOST, key_in, told, words
from carpool.extensions.frigate.frigate_settings import begin
from carpool.frontend.access.guard import Guard
from frontend.access.key_files import ALICE, api_keys
from frontend.http.front_end import FrontEnd, front_end
from frontend.http.harness import Client, Response
from frontend.picture_models import GREEN, RED, classifier, detector, picture

BOUNDARY = b"f00bc1a5e1b2c3d4"
DETECTION = "/v1/vision/detection"


def form(photo: bytes, key: str = "") -> bytes:
    """Parts in the plugin's order: the key without a file name, then the image without a type."""
    head = b'--%b\r\nContent-Disposition: form-data; name="%b"%b\r\n\r\n%b\r\n'
    parts = head % (BOUNDARY, b"api_key", b"", key.encode())
    return parts + head % (BOUNDARY, b"image", b'; filename="image"', photo) + b"--%b--\r\n" % BOUNDARY


def send(client: Client, body: bytes, path: str = DETECTION) -> Response:
    return client.post(path, body, b"Content-Type: multipart/form-data; boundary=%b\r\n" % BOUNDARY)


def said(response: Response, status: int = 200) -> Any:
    assert response.status == status, response.body
    document = orjson.loads(response.body)
    assert isinstance(document["predictions"], list)
    return document


def settings(folder: Path, text: str) -> ServerSettings:
    (folder / "apis.toml").write_text(text)
    return ServerSettings(api=("frigate",), api_settings=str(folder / "apis.toml"))


@pytest.fixture(scope="module")
def served() -> Iterator[FrontEnd]:
    with front_end(detector(), classifier(), settings=ServerSettings(api=("frigate",))) as found:
        yield found


@pytest.fixture
def client(served: FrontEnd) -> Iterator[Client]:
    with served.connect() as found:
        yield found


@pytest.mark.parametrize("path", [DETECTION, "/v1/vision/custom/finder"])
def test_boxes_are_those_of_detect(client: Client, path: str) -> None:
    [found] = said(send(client, form(picture(RED)), path))["predictions"]
    [box] = orjson.loads(client.post("/detect", picture(RED)).body)["detections"]
    assert [found[side] for side in ("x_min", "y_min", "x_max", "y_max")] == box["box"]
    assert (found["label"], found["confidence"]) == ("red", box["score"])


def test_many_boxes_are_sorted_and_cut() -> None:
    things = [{"label": "a", "score": score / 100, "box": [0, 0, 1, 1]} for score in (50, 90, *range(41, 80))]
    answer: Any = told((), {"detections": things})
    scores = [one["confidence"] for one in answer["predictions"]]
    assert len(scores) == MOST
    assert scores == sorted(scores, reverse=True)


def test_labels_can_be_limited(tmp_path: Path) -> None:
    some = settings(tmp_path, '[frigate]\nmodel = "finder"\nlabels = ["green"]\n')
    with front_end(detector(), settings=some) as found, found.connect() as client:
        assert said(send(client, form(picture(RED))))["predictions"] == []
        assert len(said(send(client, form(picture(GREEN))))["predictions"]) == 1


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (DETECTION, form(b"no image"), 400),
        (DETECTION, b"", 400),
        (DETECTION, b"--" + BOUNDARY, 400),
        (DETECTION, form(picture(RED)).replace(b'"image"', b'"photo"'), 400),
        ("/v1/vision/custom/nobody", form(picture(RED)), 404),
        ("/v1/vision/custom/namer", form(picture(RED)), 400),
        ("/v1/vision/face", form(picture(RED)), 404),
    ],
)
def test_errors_are_json_without_predictions(client: Client, path: str, body: bytes, status: int) -> None:
    answer = said(send(client, body, path), status)
    assert (answer["success"], answer["predictions"]) == (False, [])
    assert answer["error"]


def test_a_body_that_is_no_form(client: Client) -> None:
    assert "form" in said(client.post(DETECTION, picture(RED)), 400)["error"]


@needs("text")
def test_other_routes_below_v1_keep_their_words(client: Client) -> None:
    assert "message" in orjson.loads(client.get("/v1/nothing").body)["error"]


def test_a_rejection_is_json() -> None:
    status, answer = words(429, {"error": "rejected", "reason": "late"})
    assert status == 429
    assert isinstance(answer, dict)
    assert answer["predictions"] == []


def test_the_key_in_the_form(tmp_path: Path) -> None:
    guard, some = Guard(api_key_file=api_keys(tmp_path)), ServerSettings(api=("frigate",))
    with front_end(detector(), guard=guard, settings=some) as found, found.connect() as client:
        for key in ("", "wrong"):
            said(send(client, form(picture(RED), key)), 401)
        assert said(send(client, form(picture(RED), ALICE)))["predictions"]


@pytest.mark.parametrize("body", [b"", b"--", b"--a\r\n", b"x\r\n--a", b"--a\r\n\r\n\r\n--a--"])
def test_no_key_in_what_is_no_form(body: bytes) -> None:
    assert key_in(body) is None


@pytest.mark.parametrize("text", ["model = 3", "labels = 'person'", "labels = [1]", "label = []"])
def test_mistakes_in_the_settings_are_found_at_the_start(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        begin(settings(tmp_path, f"[frigate]\n{text}"))
