"""Protocols of other tools beside caches, keys, overload, rollouts and loading on demand: each answer is that
of the picture, the version and the client that asked."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from onnx import helper

from absent import ABSENT, needs
from backends.onnx_models import write
from carpool.config.server import ServerSettings
from carpool.errors import Refused
from carpool.frontend.access.guard import Guard
from frontend.access.key_files import ALICE, BOB, api_keys
from frontend.fake_door import FakeModel
from frontend.http.front_end import FrontEnd, front_end
from frontend.http.harness import Client, Response
from frontend.picture_models import BLUE, GREEN, RED, classifier, detector, embedder, picture
from frontend.whole_server import WholeServer, whole_server
from waiting import until

JSON = b"Content-Type: application/json\r\n"
COLOURS = {"red": RED, "green": GREEN, "blue": BLUE}
EXACT = {"exact": True}
STRAIGHT, TURNED = (0, 1, 2), (2, 1, 0)


class Protocol(NamedTuple):
    """How a picture is sent in one protocol, and which colour its answer says; `keyed` is as a client of it
    sends a key."""

    path: str
    body: Callable[[bytes], Any]
    said: Callable[[Any], str]
    fields: bytes = JSON
    keyed: Callable[[str], bytes] = lambda key: b"X-API-Key: %b\r\n" % key.encode()


def text(photo: bytes) -> str:
    return base64.b64encode(photo).decode()


def bearer(key: str) -> bytes:
    return b"Authorization: Bearer %b\r\n" % key.encode()


def form(photo: bytes) -> bytes:
    head = b'--f00\r\nContent-Disposition: form-data; name="image"; filename="image"\r\n\r\n'
    return head + photo + b"\r\n--f00--\r\n"


CHOICES = "".join(f'<Choice value="{name}"/>' for name in COLOURS)
CONFIG = f'<View><Image name="i" value="$i"/><Choices name="c" toName="i">{CHOICES}</Choices></View>'
EVERY: dict[str, Protocol] = {
    "roboflow": Protocol(
        "/roboflow/infer/classification",
        lambda photo: {"model_id": "namer", "image": {"type": "base64", "value": text(photo)}},
        lambda document: str(document["top"]),
        keyed=bearer,
    ),
    "doods": Protocol(
        "/doods/detect",
        lambda photo: {"detector_name": "finder", "data": text(photo), "detect": {"*": 50}},
        lambda document: str(document["detections"][0]["label"]),
        keyed=lambda key: b"Doods-Auth-Key: %b\r\n" % key.encode(),
    ),
    "frigate": Protocol(
        "/v1/vision/custom/finder",
        form,
        lambda document: str(document["predictions"][0]["label"]),
        b"Content-Type: multipart/form-data; boundary=f00\r\n",
    ),
    "mcp": Protocol(
        "/mcp",
        lambda photo: {
            "jsonrpc": "2.0",
            "id": 1,
            "method": "tools/call",
            "params": {"name": "classify", "arguments": {"image": text(photo), "model": "namer"}},
        },
        lambda document: str(document["result"]["structuredContent"]["classes"][0]["label"]),
        keyed=bearer,
    ),
    "embeddings": Protocol(
        "/v1/embeddings",
        lambda photo: {"model": "vector", "input": f"data:image/jpeg;base64,{text(photo)}"},
        lambda document: list(COLOURS)[int(np.argmax(document["data"][0]["embedding"]))],
        keyed=bearer,
    ),
    "label_studio": Protocol(
        "/label-studio/namer/predict",
        lambda photo: {
            "tasks": [{"id": 1, "data": {"i": f"data:image/jpeg;base64,{text(photo)}"}}],
            "label_config": CONFIG,
        },
        lambda document: str(document["results"][0]["result"][0]["value"]["choices"][0]),
        keyed=lambda key: b"Authorization: Basic %b\r\n" % base64.b64encode(b"any:" + key.encode()),
    ),
    "cvat": Protocol(
        "/api/function_invocations",
        lambda photo: {"image": text(photo)},
        lambda document: str(document[0]["label"]),
        JSON + b"X-Nuclio-Function-Name: namer\r\n",
    ),
    "tfserving": Protocol(
        "/tfserving/v1/models/namer:predict",
        lambda photo: {"instances": [{"b64": text(photo)}]},
        lambda document: str(document["predictions"][0]["classes"][0]["label"]),
    ),
}
NAMES = [name for name in EVERY if name not in ABSENT]
CLASSIFY = [name for name in NAMES if name not in ("doods", "frigate", "embeddings")]


def models(**more: Any) -> Sequence[FakeModel]:
    return classifier(**more), detector(**more), embedder(**more)


def send(client: Client, name: str, photo: bytes, extra: bytes = b"") -> Response:
    protocol = EVERY[name]
    body = protocol.body(photo)
    sent = body if isinstance(body, bytes) else json.dumps(body).encode()
    return client.post(protocol.path, sent, protocol.fields + extra)


def colour(client: Client, name: str, colour: str, extra: bytes = b"") -> str:
    response = send(client, name, picture(COLOURS[colour]), extra)
    assert response.status == 200, (name, response.body)
    return EVERY[name].said(json.loads(response.body))


@contextmanager
def served(name: str, folder: Path | None = None, **more: Any) -> Iterator[FrontEnd]:
    guard = None if folder is None else Guard(api_key_file=api_keys(folder))
    with front_end(*models(**more), guard=guard, settings=ServerSettings(api=(name,))) as found:
        found.door.answers["label_studio/access"] = lambda _: {"hostname": "", "token": ""}
        yield found


@needs("cache")
@pytest.mark.parametrize("name", NAMES)
def test_a_cached_answer_is_that_of_its_picture(name: str) -> None:
    with served(name, cache=EXACT) as found, found.connect() as client:
        for wanted in ("red", "blue", "red"):
            for _ in range(3):  # an answer is stored when it is asked for again
                response = send(client, name, picture(COLOURS[wanted]))
                assert EVERY[name].said(json.loads(response.body)) == wanted
            assert response.fields["x-carpool-cache"].startswith("hit")


@needs("cache")
@pytest.mark.parametrize("name", NAMES)
def test_a_cached_answer_is_for_those_who_may_ask(name: str, tmp_path: Path) -> None:
    """Bob's key is for other models; a wrong key is for none."""
    keyed = EVERY[name].keyed
    with served(name, tmp_path, cache=EXACT) as found, found.connect() as client:
        for _ in range(2):
            assert colour(client, name, "red", keyed(ALICE)) == "red"
        for key in (BOB, "wrong-0123456789"):
            response = send(client, name, picture(RED), keyed(key))
            assert refused(name, response), response
            assert b'"red"' not in response.body
            assert "x-carpool-cache" not in response.fields
        assert send(client, name, picture(RED), keyed(ALICE)).fields["x-carpool-cache"].startswith("hit")


def refused(name: str, response: Response) -> bool:
    if response.status != 200:
        return 400 <= response.status < 500
    document = json.loads(response.body)
    return name == "mcp" and ("error" in document or document["result"]["isError"])


@pytest.mark.parametrize("name", NAMES)
def test_overload_is_a_rejection_and_then_all_is_well(name: str) -> None:
    with served(name) as found, found.connect() as client:
        found.door.refusal = Refused("too much", predicted_ms=400.0, retry_after_s=2.0)
        response = send(client, name, picture(RED))
        assert response.status == 429 or refused(name, response), response
        found.door.refusal = None
        assert colour(client, name, "red") == "red"


# ---- the whole server --------------------------------------------------------------------------------------


def mean_colour(path: Path, order: Sequence[int]) -> None:
    """Writes a model with logits of 10 × the mean of each channel, in this order."""
    nodes = [
        helper.make_node("GlobalAveragePool", ["images"], ["pooled"]),
        helper.make_node("Flatten", ["pooled"], ["flat"]),
        helper.make_node("Gather", ["flat", "order"], ["ordered"], axis=1),
        helper.make_node("Mul", ["ordered", "factor"], ["logits"]),
    ]
    shapes = [("images", "FP32", ("batch", 3, 16, 16))], [("logits", "FP32", ("batch", 3))]
    path.parent.mkdir(parents=True, exist_ok=True)
    weights = {"factor": np.array([10.0], np.float32), "order": np.array(order, np.int64)}
    write(path, nodes, *shapes, weights)


def repository(folder: Path, *versions: Sequence[int], more: str = "") -> Path:
    model = folder / "models" / "namer"
    for number, order in enumerate(versions, 1):
        mean_colour(model / str(number) / "model.onnx", order)
    (model / "labels.txt").write_text("red\ngreen\nblue\n")
    (model / "model.toml").write_text(f'task = "classify"\nslo_ms = 60000\nlabels = "labels.txt"\n{more}')
    return folder / "models"


def connect(server: WholeServer) -> Client:
    return Client("127.0.0.1", server.port)


@needs("rollout")
def test_each_answer_is_of_the_version_that_its_source_gets(tmp_path: Path) -> None:
    """The candidate answers otherwise: what a protocol says is what /classify says to the same source."""
    plan = "[rollout]\nshadow = 0\ncanary = [0.5]\ncanary_h = 24\nleast = 100000\n"
    plan += "[rollout.guards]\ndisagreement = false\nlate = false\nerrors = false\n"
    home = repository(tmp_path, STRAIGHT, TURNED, more=plan)
    settings = {"state_dir": tmp_path / "state", "cache_dir": tmp_path / "cache", "api": tuple(CLASSIFY)}
    with whole_server(home, **settings) as server, connect(server) as client:
        rollout = "/v2/models/namer/rollout"
        until(lambda: json.loads(client.get(rollout).body)["state"] == "canary", "the canary gets its share")
        seen = set()
        for number in range(12):
            source = b"X-Carpool-Source: camera-%d\r\n" % number
            answer = json.loads(client.post("/classify", picture(RED), source).body)
            wanted = answer["classes"][0]["label"]
            assert wanted == {"1": "red", "2": "blue"}[answer["version"]]
            seen.add(answer["version"])
            for name in CLASSIFY:
                assert colour(client, name, "red", source) == wanted, (name, number)
        assert seen == {"1", "2"}


@pytest.mark.parametrize("name", CLASSIFY)
def test_a_model_is_loaded_when_a_protocol_asks_for_it(name: str, tmp_path: Path) -> None:
    home = repository(tmp_path, STRAIGHT)
    settings = {"cache_dir": tmp_path / "cache", "api": (name,), "on_demand": True}
    with whole_server(home, **settings) as server, connect(server) as client:
        assert client.get("/v2/models/namer/ready").status == 503
        assert colour(client, name, "blue") == "blue"
        assert colour(client, name, "red") == "red"
