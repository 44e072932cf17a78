"""Frigate's own plugins, as they are: 200 pictures, too many boxes, overload, and a kill of the server."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from carpool.config.server import ServerSettings
from carpool.demo import bundled_models
from carpool.errors import Refused
from carpool.types import Datatype, TensorSpec
from conformance.api_clients_venv import VARIABLE, said_by
from conformance.tool_sources import sources_of
from frontend.fake_door import FakeModel
from frontend.http.front_end import front_end
from frontend.picture_models import detector
from live.server import Live, free_ports, serving, start
from waiting import until

pytestmark = pytest.mark.conformance
ROOT = Path(__file__).parents[3]
LABELS = bundled_models() / "nanodet" / "coco_labels.txt"
SERVED = {"CARPOOL_API": "frigate", "CARPOOL_SLO_MS": "60000"}
BACK_S = 3.0  # after its server is there again
STUBS = """
import json, sys, time, types
import numpy as np, requests
from io import BytesIO
from pathlib import Path
from PIL import Image
folder, url, labelmap, *more = sys.argv[1:]
def module(name, **values):
    found = sys.modules[name] = types.ModuleType(name)
    vars(found).update(values)
    return found
for name in ("frigate", "frigate.detectors", "frigate.detectors.plugins", "frigate.util"):
    module(name).__path__ = [str(Path(folder, *name.split(".")))]
def load_labels(path, encoding="utf-8", prefill=91, indexed=None):
    listed = Path(path).read_text(encoding).splitlines()
    return {number: "unknown" for number in range(prefill)} | dict(enumerate(map(str.strip, listed)))
module("frigate.const", DEFAULT_ATTRIBUTE_LABEL_MAP={}, MODEL_CACHE_DIR="/nowhere")
module("frigate.plus", PlusApi=object)
module("frigate.util.builtin", load_labels=load_labels, generate_color_palette=lambda n: [(0, 0, 0)] * n)
from frigate.detectors.detector_config import ModelConfig
model = ModelConfig(labelmap_path=labelmap, path="/models/any.onnx", width=320, height=320)
numbers = {}
for number, label in sorted(model.merged_labelmap.items()):
    numbers.setdefault(label, number)
def pictures(count):
    chance = np.random.default_rng(7)
    photos = [Image.open(path).convert("RGB") for path in sorted(Path(more[0]).glob("*.jpg"))]
    for number in range(count):
        photo = photos[number % len(photos)]
        side = int(chance.integers(min(photo.size) // 2, min(photo.size) + 1))
        left, top = (int(chance.integers(0, whole - side + 1)) for whole in photo.size)
        yield np.asarray(photo.crop((left, top, left + side, top + side)).resize((320, 320)))[None]
def file_of(pixels, kind):
    file = BytesIO()
    Image.fromarray(np.squeeze(pixels)).save(file, kind)
    return file.getvalue()
def rows_of(found):
    rows = np.zeros((20, 6), np.float32)
    for row, one in zip(rows, sorted(found, key=lambda one: -one["score"])):
        left, top, right, bottom = one["box"]
        label = "car" if one["label"] == "truck" and kind == "JPEG" else one["label"]
        row[:] = numbers[label], one["score"], top / 320, left / 320, bottom / 320, right / 320
    return rows
def compared(detect, base):
    worst, found = 0.0, 0
    for pixels in pictures(200):
        rows = detect(pixels)
        answer = requests.post(f"{base}/detect?score=0.4", data=file_of(pixels, kind), timeout=60).json()
        wanted = rows_of(answer["detections"])
        assert rows.shape == (20, 6) and (np.diff(rows[:, 1]) <= 0).all(), rows
        worst, found = max(worst, float(np.abs(rows - wanted).max())), found + int((rows[:, 1] > 0).sum())
    return {"worst": worst, "found": found}
"""
DEEPSTACK = (
    STUBS
    + """
kind = "JPEG"
from frigate.detectors.plugins.deepstack import DeepStack, DeepstackDetectorConfig
config = DeepstackDetectorConfig(type="deepstack", model=model, api_url=url, api_timeout=60)
plugin = DeepStack(config)
"""
)
DEEPSTACK_200 = (
    DEEPSTACK
    + """
print(json.dumps(compared(plugin.detect_raw, url.partition("/v1/")[0])))
"""
)
DEEPSTACK_ROWS = (
    DEEPSTACK
    + """
print(json.dumps([plugin.detect_raw(pixels).tolist() for pixels in pictures(5)]))
"""
)
ZMQ = (
    STUBS
    + """
kind = "PNG"
from frigate.detectors.plugins.zmq_ipc import ZmqIpcDetector, ZmqDetectorConfig
limit = int(more[2])
config = ZmqDetectorConfig(type="zmq", model=model, endpoint=url, request_timeout_ms=limit)
plugin = ZmqIpcDetector(config)
"""
)
ZMQ_200 = (
    ZMQ
    + """
print(json.dumps(compared(plugin.detect_raw, more[1])))
"""
)
ZMQ_KILL = (
    ZMQ
    + """
from frigate.detectors.plugins.zmq_ipc import logger
logger.disabled = True
[pixels] = pictures(1)
def tell(word):
    print(word, flush=True)
assert plugin.detect_raw(pixels).any()
tell("asked")
assert sys.stdin.readline() == "killed\\n"
while plugin.detect_raw(pixels).any():
    pass
tell("nothing")
assert sys.stdin.readline() == "back\\n"
begun = time.monotonic()
while not plugin.detect_raw(pixels).any():
    time.sleep(0.02)
tell(json.dumps(time.monotonic() - begun))
"""
)
KSERVE = (
    STUBS
    + """
module("onnxruntime")
from frigate.util.model import post_process_yolo
import importlib.util
spec = importlib.util.spec_from_file_location("kserve", more[1])
kserve = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kserve)
config = {"type": "kserve", "model": model.model_copy(update={"model_type": "yolo-generic"})}
plugin = kserve.KServe(kserve.KServeConfig(**config, url=url, model_name="yolo", timeout=60))
worst = 0.0
for pixels in pictures(20):
    tensor = (pixels[:, ::2, ::2].transpose(0, 3, 1, 2) / 255).astype(np.float32)
    mean = tensor.mean()
    answer = np.zeros((1, 6, 8), np.float32)
    answer[0, :, 0] = 160, 120, 80 * mean, 40, mean, 0.1
    answer[0, :, 1] = 40, 40, 20, 20, 0.05, 0.9
    wanted = post_process_yolo([answer], 320, 320)
    worst = max(worst, float(np.abs(plugin.detect_raw(tensor) - wanted).max()))
    assert wanted[0, 1] > 0.8
plugin.url = "http://127.0.0.1:9/v2/models/yolo"  # where no server is
print(json.dumps({"worst": worst, "gone": int(plugin.detect_raw(tensor).any())}))
"""
)


@pytest.fixture(scope="module")
def sources() -> Path:
    return sources_of("blakeblackshear/frigate")


@pytest.fixture(scope="module")
def server(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with serving(
        bundled_models() / "nanodet", folder=tmp_path_factory.mktemp("served"), environment=SERVED
    ) as found:
        yield found


PHOTOS = ROOT / "src" / "carpool" / "demo" / "pictures"


def test_deepstack_finds_what_detect_finds_in_200_pictures(server: Live, sources: Path) -> None:
    url = f"http://{server.url}/v1/vision/detection"
    said = said_by(DEEPSTACK_200, sources, url, LABELS, PHOTOS)
    assert said["worst"] <= 1 / 320
    assert said["found"] > 100


def many(inputs: Any) -> dict[str, Any]:
    """Forty boxes apart from each other, of three labels, unsorted."""
    count = len(inputs["images"])
    sides = np.arange(40.0)
    boxes = np.stack([sides % 8 * 2, sides // 8 * 2, sides % 8 * 2 + 1.5, sides // 8 * 2 + 1.5], 1)
    scores = np.zeros((40, 3))
    scores[np.arange(40), np.arange(40) % 3] = 0.5 + (np.arange(40) * 7 % 40) / 100
    return {"boxes": np.tile(boxes, (count, 1, 1)), "scores": np.tile(scores, (count, 1, 1))}


def test_deepstack_survives_many_boxes_unknown_labels_and_overload(sources: Path, tmp_path: Path) -> None:
    labelmap = tmp_path / "labelmap.txt"
    labelmap.write_text("red\nblue\n")  # not green
    (tmp_path / "apis.toml").write_text('[frigate]\nlabels = ["red", "blue"]\n')
    settings = ServerSettings(api=("frigate",), api_settings=str(tmp_path / "apis.toml"))
    with front_end(detector(anchors=40, function=many), settings=settings) as served:
        url = f"http://{served.url}/v1/vision/detection"
        for rows in map(np.asarray, said_by(DEEPSTACK_ROWS, sources, url, labelmap, PHOTOS)):
            assert (rows[:, 1] > 0.4).all()
            assert (np.diff(rows[:, 1]) <= 0).all()
            assert set(rows[:, 0]) == {0.0, 1.0}
        served.door.refusal = Refused("too much", predicted_ms=400.0, retry_after_s=2.0)
        assert not np.any(said_by(DEEPSTACK_ROWS, sources, url, labelmap, PHOTOS))


@contextmanager
def bridge(server: Live, folder: Path) -> Iterator[str]:
    """Runs `carpool frigate` with pyzmq of the clients' environment; yields its endpoint."""
    packages = folder / "packages"
    packages.mkdir()
    for found in Path(os.environ[VARIABLE]).parents[1].glob("lib/python*/site-packages/*zmq*"):
        (shutil.copytree if found.is_dir() else shutil.copy)(found, packages / found.name)
    [port] = free_ports(1)
    endpoint = f"tcp://127.0.0.1:{port}"
    code = "import sys; from carpool.cli.main import main; sys.argv[0] = 'carpool'; main()"
    options = ("--url", f"http://{server.url}", "--listen", endpoint, "--labelmap", str(LABELS))
    log = folder / "bridge.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", code, "frigate", *options, "--timeout-ms", "60000"],
            env=os.environ | {"PYTHONPATH": str(packages)},
            stdout=file,
            stderr=file,
        )
    try:
        until(lambda: b"Answering" in log.read_bytes() or process.poll() is not None, "the bridge answers")
        assert process.poll() is None, log.read_text()
        yield endpoint
        assert process.poll() is None, log.read_text()
    finally:
        process.terminate()
        process.wait(60)


def test_zmq_finds_what_detect_finds_in_200_pictures(server: Live, sources: Path, tmp_path: Path) -> None:
    with bridge(server, tmp_path) as endpoint:
        said = said_by(ZMQ_200, sources, endpoint, LABELS, PHOTOS, f"http://{server.url}", 60_000)
    assert said["worst"] <= 0.005
    assert said["found"] > 100


def test_zmq_answers_again_when_its_server_is_back(sources: Path, tmp_path: Path) -> None:
    """Kills all of the server, and starts it again at the same port."""
    first = start(bundled_models() / "nanodet", folder=tmp_path, environment=SERVED)
    again: subprocess.Popen[bytes] | None = None
    try:
        first.until_ready()
        with bridge(first, tmp_path) as endpoint:
            arguments = [sources, endpoint, LABELS, PHOTOS, f"http://{first.url}", "60000"]
            client = subprocess.Popen(
                [os.environ[VARIABLE], "-W", "ignore", "-c", ZMQ_KILL, *map(str, arguments)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            assert client.stdin is not None
            assert client.stdout is not None
            with client:
                try:
                    assert client.stdout.readline() == "asked\n"
                    pids = first.all_pids()
                    for pid in pids:
                        os.kill(pid, signal.SIGKILL)
                    first.process.wait()
                    client.stdin.write("killed\n")
                    client.stdin.flush()
                    assert client.stdout.readline() == "nothing\n"
                    own = {name: text for name, text in os.environ.items() if not name.startswith("CARPOOL_")}
                    own |= {**SERVED, "CARPOOL_CACHE_DIR": str(tmp_path / "cache")}
                    again = subprocess.Popen(first.arguments, env=own, stdout=subprocess.DEVNULL)
                    second = replace(first, process=again)
                    second.until_ready()
                    client.stdin.write("back\n")
                    client.stdin.flush()
                    assert float(client.stdout.readline()) <= BACK_S
                finally:
                    client.kill()
            second.end()
    finally:
        first.end()
        if again is not None:
            again.kill()
            again.wait()


def test_the_proposed_plugin_gets_the_outputs(sources: Path) -> None:
    """The model's answer depends on the picture, so that a wrong tensor would be seen."""

    def rows(inputs: Any) -> dict[str, Any]:
        found = np.zeros((len(inputs["images"]), 6, 8), np.float32)
        for one, image in zip(found, inputs["images"], strict=True):
            mean = np.float32(image.mean())
            one[:, 0] = 160, 120, 80 * mean, 40, mean, 0.1
            one[:, 1] = 40, 40, 20, 20, 0.05, 0.9
        return {"output0": found}

    images = TensorSpec("images", Datatype.FP32, (3, 160, 160))
    model = FakeModel("yolo", [images], [TensorSpec("output0", Datatype.FP32, (6, 8))], rows, mode="eager")
    with front_end(model) as served:
        url = f"http://{served.url}"
        said = said_by(KSERVE, sources, url, LABELS, PHOTOS, ROOT / "examples" / "frigate_kserve.py")
    assert said["worst"] <= 1e-5
    assert not said["gone"]
