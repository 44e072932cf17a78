"""inference-sdk and supervision, as they are, against a front end with a fake engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from carpool.config.server import ServerSettings
from carpool.frontend.access.guard import Guard
from conformance.api_clients_venv import said_by
from frontend.access.key_files import ALICE, api_keys
from frontend.http.front_end import front_end
from frontend.picture_models import RED, classifier, detector, embedder, picture, segmenter, writer

pytestmark = pytest.mark.conformance
PROGRAM = """
import json, sys
import supervision
from inference_sdk import InferenceConfiguration, InferenceHTTPClient
from inference_sdk.http.errors import HTTPCallErrorError
url, key, path = sys.argv[1:]
client = InferenceHTTPClient(api_url=url, api_key=key)
found = {"info": client.get_server_info().name}
found["one"] = client.infer(path, model_id="finder/1")
found["boxes"] = supervision.Detections.from_inference(found["one"]).xyxy.tolist()
client.configure(InferenceConfiguration(confidence_threshold=0.3, max_batch_size=2, class_filter=["red"]))
found["list"] = client.infer([path, path, path], model_id="finder/1")
found["class"] = client.infer(path, model_id="namer/1")
found["mask"] = client.infer(path, model_id="cutter/1")
found["area"] = int(supervision.Detections.from_inference(found["mask"]).mask.sum())
client.configure(InferenceConfiguration(confidence_threshold=0.3, api_key_transport="header"))
found["header"] = client.infer(path, model_id="finder/1")
client.configure(InferenceConfiguration(confidence_threshold=0.3))
with client.use_api_v0():
    found["old"] = client.infer(path, model_id="finder/1")
found["models"] = [one.model_id for one in client.list_loaded_models().models]
client.load_model("finder/1"), client.unload_model("finder/1"), client.unload_all_models()
found["task"] = client.get_model_description("finder/1").task_type
found["flow"] = client.run_workflow(workspace_name="w", workflow_id="finder", images={"image": path})
found["vectors"] = client.get_clip_image_embeddings([path, path])
found["similar"] = client.clip_compare(path, path, prompt_type="image")["similarity"]
engines = ("doctr", "trocr", "easy_ocr", "pp_ocr")
found["text"] = [client.ocr_image(path, model=name)["result"] for name in engines]
try:
    client.get_clip_text_embeddings("a cat")
except HTTPCallErrorError as error:
    found["clip"] = error.api_message
try:
    client.infer(path, model_id="nobody/1")
except HTTPCallErrorError as error:
    found["nobody"] = error.status_code
print(json.dumps(found))
"""


def test_every_call_of_the_smallest_set(tmp_path: Path) -> None:
    photo = tmp_path / "photo.jpg"
    photo.write_bytes(picture(RED, size=(64, 48)))
    guard, settings = Guard(api_key_file=api_keys(tmp_path)), ServerSettings(api=("roboflow",))
    models = detector(), classifier(), segmenter(), embedder(), writer()
    with front_end(*models, guard=guard, settings=settings) as served, served.connect() as client:
        said = said_by(PROGRAM, f"http://{served.url}/roboflow", ALICE, photo)
        key = b"X-API-Key: %b\r\n" % ALICE.encode()
        [box] = json.loads(client.post("/detect", photo.read_bytes(), key).body)["detections"]
        assert ALICE not in client.get("/metrics", key).body.decode()
    assert said["info"] == "carpool"
    for answer in (said["one"], said["header"], said["old"], *said["list"]):
        [one] = answer["predictions"]
        assert one["x"] == pytest.approx((box["box"][0] + box["box"][2]) / 2, abs=0.01)
        assert one["y"] == pytest.approx((box["box"][1] + box["box"][3]) / 2, abs=0.01)
    assert len(said["list"]) == 3
    [corners] = said["boxes"]
    assert corners == pytest.approx(box["box"], abs=0.01)
    assert said["class"]["top"] == "red"
    assert said["area"] == 64 * 48
    assert sorted(said["models"]) == ["cutter/1", "finder/1", "namer/1"]
    assert said["task"] == "object-detection"
    assert said["flow"][0]["predictions"]["predictions"][0]["class"] == "red"
    assert "texts have no vectors here" in said["clip"]
    assert len(said["vectors"]) == 2
    assert said["similar"] == [pytest.approx(1.0)]
    assert said["text"] == ["Red and blue…"] * 4
    assert said["nobody"] == 404
