"""A pipeline of the demo's models on a whole server: over both doors it answers what its models answer when
they are called by hand."""

from __future__ import annotations

import base64
import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np
import pytest
from PIL import Image

from carpool.demo import bundled_models, pictures
from carpool.extensions.pipelines.picture_graph import placed
from carpool.extensions.pipelines.settings import CropSettings
from carpool.observe import columns
from carpool.vision.decode import decode
from frontend.whole_server import PATIENCE_S, WholeServer, whole_server

STREET = Path(__file__).parents[3] / "examples" / "street"
BY_NAME = {path.stem: path.read_bytes() for path in pictures()}
_QUICK = "\n[onnxruntime]\nintra_op_threads = 1\n"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without promises of their own, which a busy machine would break, and which take long to measure."""
    folder = tmp_path_factory.mktemp("pipelines")
    for name in ("nanodet", "efficientnet_lite0"):
        shutil.copytree(bundled_models() / name, folder / name)
        settings = folder / name / "model.toml"
        lines = settings.read_text().splitlines(keepends=True)
        settings.write_text("".join(line for line in lines if not line.startswith("slo")) + _QUICK)
    shutil.copytree(STREET, folder / "street")
    settings = folder / "street" / "pipeline.toml"
    settings.write_text(settings.read_text().replace("slo_ms = 2000", ""))
    return folder


@pytest.fixture(scope="module")
def server(models: Path) -> Iterator[WholeServer]:
    with whole_server(models, model_control_mode="explicit", load_models=("*",)) as running:
        yield running


def collage() -> bytes:
    """Four photos beside each other: several objects."""
    whole = Image.new("RGB", (800, 600), (127, 127, 127))
    for place, name in enumerate(("astronaut", "chelsea", "coffee", "astronaut")):
        part = Image.open(io.BytesIO(BY_NAME[name])).resize((400, 300))
        whole.paste(part, (400 * (place % 2), 300 * (place // 2)))
    return png(np.asarray(whole))


def png(pixels: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def post(server: WholeServer, path: str, body: bytes, **headers: str) -> Any:
    request = Request(f"http://{server.url}{path}", body, {"Content-Type": "image/x", **headers})
    with urlopen(request, timeout=PATIENCE_S) as answer:
        return json.loads(answer.read()), answer.headers


def by_hand(server: WholeServer, picture: bytes) -> Any:
    """The same in two questions: what a client without pipelines does."""
    answer, _ = post(server, "/detect?model=nanodet", picture)
    pixels = decode(picture).pixels
    crop = CropSettings(pad=0.1, least=16)
    answer["detections"] = answer["detections"][:8]
    for one in answer["detections"]:
        left, top, right, bottom, _ = placed(one, crop, (pixels.shape[1], pixels.shape[0]))
        kind, _ = post(server, "/classify", png(np.ascontiguousarray(pixels[top:bottom, left:right])))
        one["kind"] = {"classes": kind["classes"]}
    return answer


def nothing() -> bytes:
    return png(np.full((240, 320, 3), 127, np.uint8))


MADE = {"collage": collage, "nothing": nothing}


@pytest.mark.parametrize("name", [*BY_NAME, *MADE])
def test_the_answer_is_that_of_the_models(server: WholeServer, name: str) -> None:
    picture = MADE[name]() if name in MADE else BY_NAME[name]
    answer, headers = post(server, "/detect?model=street", picture)
    expected = by_hand(server, picture)
    assert answer == {**expected, "model": "street"}
    found = len(answer["detections"])
    assert found == 0 if name == "nothing" else found >= {"collage": 3, "astronaut": 1}.get(name, 0)
    times = headers["Server-Timing"]
    assert f'kind.images;desc="{found}"' in times or not found
    assert "find.queue;dur=" in times


def test_by_its_name_and_with_its_times(server: WholeServer) -> None:
    answer, _ = post(server, "/models/street/predict?explain=1", BY_NAME["astronaut"])
    assert [(step["step"], step["images"]) for step in answer["steps"]] == [("find", 1), ("kind", 1)]
    assert all(step["infer_ms"] > 0 and step["batch"] >= 1 for step in answer["steps"])


def test_several_pictures_and_a_drawing(server: WholeServer) -> None:
    listed = [base64.b64encode(BY_NAME[name]).decode() for name in ("astronaut", "coffee")]
    body = json.dumps({"images": listed}).encode()
    answer, _ = post(server, "/models/street/predict", body, **{"Content-Type": "application/json"})
    assert answer["results"][0]["detections"]
    request = Request(
        f"http://{server.url}/detect?model=street&overlay=1", BY_NAME["astronaut"], {"Accept": "image/png"}
    )
    with urlopen(request, timeout=PATIENCE_S) as drawn:
        assert Image.open(io.BytesIO(drawn.read())).size == (512, 512)


def test_as_a_tensor_of_the_v2_protocol(server: WholeServer) -> None:
    picture = BY_NAME["astronaut"]
    data = [base64.b64encode(picture).decode()]
    image = {"name": "image", "shape": [1], "datatype": "BYTES", "data": data}
    answer, headers = post(
        server, "/v2/models/street/infer", json.dumps({"inputs": [image]}).encode(), **{"Content-Type": "x"}
    )
    (output,) = answer["outputs"]
    assert (output["name"], output["shape"], output["datatype"]) == ("answer", [1], "BYTES")
    assert json.loads(output["data"][0]) == post(server, "/detect?model=street", picture)[0]
    assert 'kind.images;desc="1"' in headers["Server-Timing"]
    two = {**image, "shape": [2], "data": data * 2}
    with pytest.raises(HTTPError, match="400"):
        post(server, "/v2/models/street/infer", json.dumps({"inputs": [two]}).encode())


def test_what_can_be_read_of_it(server: WholeServer) -> None:
    def get(path: str) -> Any:
        with urlopen(f"http://{server.url}{path}", timeout=PATIENCE_S) as answer:
            return json.loads(answer.read())

    metadata = get("/v2/models/street")
    assert (metadata["platform"], metadata["versions"]) == ("pipeline", ["1"])
    assert metadata["inputs"] == [{"name": "image", "datatype": "BYTES", "shape": [1]}]
    assert get("/v2/models/street/stats")["model_stats"][0]["inference_count"] > 0
    steps = json.loads(get("/v2/models/street/config")["parameters"]["pipeline"]["string_value"])["step"]
    assert [step["model"] for step in steps] == ["nanodet", "efficientnet_lite0"]
    rows = {row.step: row.cells for row in server.host.engine.table.steps()}
    assert sum(rows["kind"][columns.FAN_OUT.buckets]) > 0
    assert sum(rows["find"][columns.INFER_SECONDS.buckets]) > 0


def test_bad_pictures_and_unknown_options(server: WholeServer) -> None:
    for path, body in (("/detect?model=street", b"no picture"), ("/detect?model=street&explian=1", b"")):
        with pytest.raises(HTTPError, match="400"):
            post(server, path, body)
    pipeline = next(one for one in server.host.engine.served.values() if one.name == "street")
    assert not pipeline.runtime.route().under_way  # type: ignore[attr-defined]


def test_steps_come_and_go(server: WholeServer, models: Path) -> None:
    """A step that is loaded again is used from then on; one that is unloaded takes the pipeline along."""
    post(server, "/v2/repository/models/nanodet/load", b"{}")
    assert post(server, "/detect?model=street", BY_NAME["astronaut"])[0]["detections"]
    post(server, "/v2/repository/models/efficientnet_lite0/unload", b"{}")
    with pytest.raises(HTTPError) as raised:
        post(server, "/models/street/predict", BY_NAME["astronaut"])
    assert "efficientnet_lite0, which it needs, was unloaded" in raised.value.read().decode()
    settings = models / "street" / "pipeline.toml"
    good = settings.read_text()
    settings.write_text(good.replace('"nanodet"', '"nanodett"'))
    with pytest.raises(HTTPError) as raised:
        post(server, "/v2/repository/models/street/load", b"{}")
    assert "pipeline.toml:13: step find.model: there is no model" in raised.value.read().decode()
    settings.write_text(good)
    post(server, "/v2/repository/models/street/load", b"{}")  # and its steps before it
    assert post(server, "/detect?model=street", BY_NAME["astronaut"])[0]["detections"]
