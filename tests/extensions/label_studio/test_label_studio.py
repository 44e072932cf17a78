"""Label Studio's backend over real sockets, with a fake engine: requests as its connector sends them."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from carpool.config.server import ServerSettings
from carpool.errors import InvalidInput
from carpool.extensions.label_studio.label_access import ACCESS, SETUP, LabelAccess
from carpool.extensions.label_studio.label_config import image_of, read_config
from carpool.extensions.label_studio.label_results import packed_runs, prediction
from carpool.frontend.access.guard import Guard
from carpool.frontend.http import picture_fetch
from carpool.types import Array
from frontend.access.key_files import ALICE, api_keys
from frontend.http.front_end import FrontEnd, front_end
from frontend.http.harness import Client, Response
from frontend.picture_models import BLUE, GREEN, RED, classifier, detector, picture, segmenter

SETTINGS = ServerSettings(api=("label-studio",))
PROJECT = "7.1763550000"
TOKEN = "0123456789abcdef"


def config(tag: str, *labels: str, child: str = "Label") -> str:
    inside = "".join(f'<{child} value="{label}"/>' for label in labels)
    image = '<Image name="image" value="$photo"/>'
    return f'<View>{image}<{tag} name="label" toName="image">{inside}</{tag}></View>'


BOXES = config("RectangleLabels", "Red", "green")


def url(colour: tuple[int, int, int] = RED) -> str:
    return "data:image/jpeg;base64," + base64.b64encode(picture(colour)).decode()


def tasks(*images: str) -> list[dict[str, Any]]:
    return [{"id": number, "data": {"photo": image}} for number, image in enumerate(images)]


def with_access(found: FrontEnd) -> FrontEnd:
    """As the engine's part answers."""
    access = LabelAccess()
    found.door.answers |= {SETUP: access.setup, ACCESS: access.access}
    return found


@pytest.fixture(scope="module")
def served() -> Iterator[FrontEnd]:
    with front_end(detector(), classifier(), segmenter(), settings=SETTINGS) as found:
        yield with_access(found)


@pytest.fixture
def client(served: FrontEnd) -> Iterator[Client]:
    with served.connect() as found:
        yield found


def post(client: Client, path: str, document: object, fields: bytes = b"") -> Response:
    sent = b"Content-Type: application/json\r\n" + fields
    return client.post(f"/label-studio/{path}", orjson.dumps(document), sent)


def said(response: Response, status: int = 200) -> Any:
    assert response.status == status, response.body
    return orjson.loads(response.body)


def predict(client: Client, listed: object, label_config: str = BOXES, path: str = "predict") -> Any:
    params = {"login": None, "password": None, "context": None}
    sent = {"tasks": listed, "project": PROJECT, "label_config": label_config, "params": params}
    return post(client, path, sent)


def test_small_routes(client: Client) -> None:
    assert said(client.get("/label-studio/health"))["status"] == "UP"
    assert said(client.get("/label-studio/finder/health"))["status"] == "UP"
    assert "finder/1" in said(client.get("/label-studio/versions"))["versions"]
    assert said(post(client, "validate", {"config": BOXES}))["status"] == "ok"
    asked = {"project": PROJECT, "schema": BOXES, "hostname": "http://ls", "access_token": TOKEN}
    assert said(post(client, "setup", asked | {"extra_params": None}))["model_version"] == "carpool"


def test_rectangles_are_in_percent_with_the_projects_labels(client: Client) -> None:
    [found] = said(predict(client, tasks(url())))["results"]
    [region] = found["result"]
    assert region["value"] == {
        "x": 0.0,
        "y": 0.0,
        "width": 50.0,
        "height": 100.0,
        "rotation": 0,
        "rectanglelabels": ["Red"],
    }
    assert (region["from_name"], region["to_name"], region["type"]) == ("label", "image", "rectanglelabels")
    assert (region["original_width"], region["original_height"]) == (32, 24)
    assert found["score"] == region["score"] > 0.9
    assert found["model_version"] == "finder/1"


def test_tasks_are_answered_in_their_order(client: Client) -> None:
    images = [url(one) for one in (RED, GREEN, RED, BLUE, GREEN, RED, GREEN, RED)]
    found = said(predict(client, tasks(*images)))["results"]
    labels = [[one["value"]["rectanglelabels"][0] for one in each["result"]] for each in found]
    assert labels == [["Red"], ["green"], ["Red"], [], ["green"], ["Red"], ["green"], ["Red"]]


def test_a_broken_image_has_an_empty_prediction(client: Client) -> None:
    broken = "data:image/jpeg;base64," + base64.b64encode(b"no image").decode()
    first, second = said(predict(client, tasks(broken, url())))["results"]
    assert first["result"] == []
    assert len(second["result"]) == 1


def test_the_model_in_the_address(client: Client) -> None:
    assert said(predict(client, tasks(url()), path="finder/predict"))["results"][0]["result"]
    assert "namer" in said(predict(client, tasks(url()), path="namer/predict"), 404)["error"]


def test_choices_are_the_best_class(client: Client) -> None:
    asked = config("Choices", "green", "red", child="Choice")
    [found] = said(predict(client, tasks(url()), asked))["results"]
    assert [one["value"] for one in found["result"]] == [{"choices": ["red"]}]


def unpacked(bytes_of_rle: Sequence[int]) -> Array:
    """Reads Label Studio's run lengths, as its converter does."""
    bits = "".join(f"{one:08b}" for one in bytes_of_rle)
    position = 0

    def read(count: int) -> int:
        nonlocal position
        position += count
        return int(bits[position - count : position], 2)

    size, word = read(32), read(5) + 1
    lengths = [read(4) + 1 for _ in range(4)]
    out: list[int] = []
    while len(out) < size:
        is_run, run = read(1), read(lengths[read(2)]) + 1
        out += [read(word)] * run if is_run else [read(word) for _ in range(run)]
    found: Array = np.array(out, np.uint8)
    return found


def test_brushes_are_run_lengths(client: Client) -> None:
    asked = config("BrushLabels", "red", "object")
    [found] = said(predict(client, tasks(url()), asked))["results"]
    [region] = found["result"]
    pixels = unpacked(region["value"]["rle"])
    assert pixels.tolist() == [255] * (32 * 24 * 4)


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (200, 300)])
def test_run_lengths_lose_nothing(shape: tuple[int, int]) -> None:
    random = np.random.default_rng(1)
    pixels = random.random(shape) < 0.3 if shape != (200, 300) else np.zeros(shape, bool)
    assert (unpacked(packed_runs(pixels)).reshape(*shape, 4) == 255 * pixels[..., None]).all()


def test_keypoints_and_text() -> None:
    image = {"width": 200, "height": 100}
    [control] = read_config(config("KeyPointLabels", "nose", "eye"))
    thing = {"label": "p", "class_id": 0, "score": 0.5, "box": [0, 0, 1, 1], "keypoints": [[20, 50, 0.25]]}
    [point] = prediction(control, {"image": image, "detections": [thing]})["result"]
    assert (point["value"]["x"], point["value"]["y"], point["score"]) == (10.0, 50.0, 0.25)
    assert point["value"]["keypointlabels"] == ["nose"]
    [control] = read_config(config("TextArea"))
    [text] = prediction(control, {"image": image, "text": "said"})["result"]
    assert text["value"] == {"text": ["said"]}
    for other in ("KeyPointLabels", "TextArea"):
        [control] = read_config(config(other, "a"))
        with pytest.raises(InvalidInput):
            prediction(control, {"image": image, "model": "m", "detections": [{}]})


def test_labels_have_other_names() -> None:
    text = config("RectangleLabels", "Vehicle").replace("/></", ' predicted_values="car, truck"/></', 1)
    [control] = read_config(text)
    assert control.labels == {"vehicle": "Vehicle", "car": "Vehicle", "truck": "Vehicle"}


def test_images_at_label_studio_are_fetched_with_its_token(
    served: FrontEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str]] = []

    def start(_self: object, address: str, _seconds: float, _client: str, authorization: str) -> Any:
        import asyncio

        async def fetched() -> bytearray:
            asked.append((address, authorization))
            return bytearray(picture(RED))

        return asyncio.get_running_loop().create_task(fetched())

    monkeypatch.setattr(picture_fetch.PictureFetcher, "start", start)
    with served.connect() as client:
        setup = {"project": PROJECT, "schema": BOXES, "hostname": "http://ls:8080/", "access_token": TOKEN}
        said(post(client, "setup", setup))
        images = tasks("/data/upload/1.jpg", "http://ls:8080/data/2.jpg", "https://other.example/3.jpg")
        assert len(said(predict(client, images))["results"]) == 3
    assert sorted(asked) == [
        ("http://ls:8080/data/2.jpg", f"Token {TOKEN}"),
        ("http://ls:8080/data/upload/1.jpg", f"Token {TOKEN}"),
        ("https://other.example/3.jpg", ""),
    ]


def test_hosts_must_be_allowed(client: Client) -> None:
    assert "fetches no images" in said(predict(client, tasks("https://other.example/3.jpg")), 403)["error"]


@pytest.mark.parametrize(
    ("listed", "label_config", "status", "says"),
    [
        ("all", BOXES, 400, "tasks must be"),
        ([{}], BOXES, 400, "no image under"),
        (tasks(""), BOXES, 400, "no image under"),
        (tasks("s3://bucket/1.jpg"), BOXES, 400, "images are addresses"),
        (tasks("data:image/jpeg;base64,!"), BOXES, 400, "base64"),
        (tasks(url()), "", 400, "not XML"),
        (tasks(url()), "<View/>", 400, "no tag for an Image"),
        (tasks(url()), '<!DOCTYPE a [<!ENTITY b "c">]><View/>', 400, "without a DOCTYPE"),
        (tasks(url()), config("KeyPointLabels", "nose"), 404, "no model answers KeyPointLabels"),
        ([{"data": {"photo": url()}}] * 65, BOXES, 400, "at most 64"),
    ],
)
def test_errors_are_a_sentence(
    client: Client, listed: object, label_config: str, status: int, says: str
) -> None:
    assert says in said(predict(client, listed, label_config), status)["error"]


def test_no_tasks_no_results(client: Client) -> None:
    assert said(predict(client, []))["results"] == []


def test_what_is_not_offered(client: Client) -> None:
    for path in ("train", "webhook", "job_status"):
        assert said(post(client, path, {}), 404)["error"]


def test_an_image_at_an_unknown_label_studio() -> None:
    [control] = read_config(BOXES)
    with pytest.raises(InvalidInput, match="validate the connection"):
        image_of({"data": {"photo": "/data/1.jpg"}}, control, "")


def test_keys_as_basic_authentication(tmp_path: Path) -> None:
    guard = Guard(api_key_file=api_keys(tmp_path))
    with front_end(detector(), guard=guard, settings=SETTINGS) as found, found.connect() as client:
        with_access(found)
        said(client.get("/label-studio/health"))
        basic = base64.b64encode(f"me:{ALICE}".encode())
        fields = b"Authorization: Basic %b\r\n" % basic
        said(post(client, "validate", {"config": BOXES}), 401)
        said(post(client, "validate", {"config": BOXES}, b"Authorization: Basic x\r\n"), 401)
        said(post(client, "validate", {"config": BOXES}, fields))
        setup = {"project": PROJECT, "schema": BOXES, "hostname": "http://ls", "access_token": TOKEN}
        said(post(client, "setup", setup, fields))
        assert TOKEN not in json.dumps(found.metrics())
