"""Label Studio's own MLApi, as it is, against a front end with a fake engine: 200 tasks, eight at a time, and
its health check while many others ask."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from carpool.config.server import ServerSettings
from carpool.errors import Refused
from carpool.extensions.label_studio.label_access import ACCESS, SETUP, LabelAccess
from carpool.frontend.access.guard import Guard
from conformance.api_clients_venv import said_by
from conformance.tool_sources import sources_of
from frontend.access.key_files import ALICE, api_keys
from frontend.http.front_end import FrontEnd, front_end
from frontend.picture_models import LABELS, detector

pytestmark = pytest.mark.conformance
STUBS = """
import base64, colorsys, datetime, io, json, sys, threading, types
import requests
from PIL import Image
file, url, key = sys.argv[1:]
def module(name, **values):
    sys.modules[name] = types.ModuleType(name)
    vars(sys.modules[name]).update(values)
for name in ("core", "core.utils", "data_export", "django", "django.contrib", "django.contrib.auth"):
    module(name)
for name in ("label_studio", "label_studio.core", "label_studio.core.utils"):
    module(name)
module("core.feature_flags", flag_set=lambda *given: True)
module("core.utils.common", load_func=None)
module("core.version", get_git_version=lambda: "1")
module("data_export.serializers", ExportDataSerializer=None)
module("django.conf", settings=types.SimpleNamespace(HOSTNAME="http://labels.example", INTERNAL_PORT="80"))
module("django.contrib.auth.models", AnonymousUser=object)
module("django.db")
module("django.db.models", Count=None)
module("label_studio.core.utils.params", get_env=lambda name, default: default)
known = {}
exec(compile(open(file).read(), file, "exec"), known)
labels = "".join(f'<Label value="{label}"/>' for label in ("red", "green", "blue"))
config = '<View><Image name="image" value="$image"/><RectangleLabels name="label" toName="image">'
config += f"{labels}</RectangleLabels></View>"
token = types.SimpleNamespace(auth_token=types.SimpleNamespace(key="a-token-of-label-studio"))
project = types.SimpleNamespace(id=7, created_at=datetime.datetime.now(), label_config=config)
project.created_by = token
project.task_data_login = project.task_data_password = None
def api():
    return known["MLApi"](url=url, timeout=100, auth_method="basic", basic_auth_user="u", basic_auth_pass=key)
def picture(number):
    colour = tuple(round(255 * side) for side in colorsys.hsv_to_rgb(number / 200, 1, 1))
    image = io.BytesIO()
    Image.new("RGB", (32 + number % 7, 24), colour).save(image, "PNG")
    return image.getvalue()
def task(number):
    data = base64.b64encode(picture(number)).decode()
    return {"id": number, "data": {"image": f"data:image/png;base64,{data}"}}
"""
PROGRAM = (
    STUBS
    + """
client, found = api(), {"worst": 0.0, "labels": []}
for name, answer in (("health", client.health()), ("setup", client.setup(project)),
                     ("validate", client.validate(config)), ("versions", client.get_versions(project))):
    found[name] = [answer.type, answer.status_code, answer.response]
for start in range(0, 200, 8):
    tasks = [task(number) for number in range(start, start + 8)]
    answer = client.make_predictions(tasks, project)
    results = answer.response["results"]
    assert not answer.is_error and len(results) == 8, answer.response
    for number, one in zip(range(start, start + 8), results, strict=True):
        fields = {"X-API-Key": key, "Content-Type": "image/png"}
        base = url.partition("/label-studio")[0]
        seen = requests.post(f"{base}/detect", data=picture(number), headers=fields).json()
        assert len(one["result"]) == len(seen["detections"]) > 0
        for region, other in zip(one["result"], seen["detections"], strict=True):
            value, (left, top, right, bottom) = region["value"], other["box"]
            wide, high = region["original_width"], region["original_height"]
            assert (wide, high) == (32 + number % 7, 24)
            sides = [value["x"] * wide / 100 - left, value["y"] * high / 100 - top]
            sides += [value["width"] * wide / 100 - right + left, value["height"] * high / 100 - bottom + top]
            found["worst"] = max(found["worst"], *map(abs, sides))
            assert value["rectanglelabels"] == [other["label"]]
            found["labels"].append(other["label"])
print(json.dumps(found))
"""
)
BUSY = (
    STUBS
    + """
import os
errors, begun = [], threading.Semaphore(0)
def ask():
    client, tasks = api(), [task(number) for number in range(8)]
    begun.release()
    answer = client.make_predictions(tasks, project)
    errors.append(answer.status_code if answer.is_error else 0)
threads = [threading.Thread(target=ask, daemon=True) for _ in range(12)]
for thread in threads:
    thread.start()
for thread in threads:
    begun.acquire()
healthy = [api().health() for _ in range(40)]
print(json.dumps({"ill": [one.response for one in healthy if one.is_error], "errors": errors}), flush=True)
os._exit(0)
"""
)


@contextmanager
def serving(folder: Path) -> Iterator[FrontEnd]:
    """Serves a detector, with keys; the engine's part answers for the tokens."""
    access = LabelAccess()
    guard, settings = Guard(api_key_file=api_keys(folder)), ServerSettings(api=("label_studio",))
    with front_end(detector(), guard=guard, settings=settings) as found:
        found.door.answers |= {SETUP: access.setup, ACCESS: access.access}
        yield found


@pytest.fixture
def file() -> Path:
    return sources_of("HumanSignal/label-studio") / "label_studio" / "ml" / "api_connector.py"


def test_predictions_are_in_order_and_what_detect_finds(file: Path, tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        said = said_by(PROGRAM, file, f"http://{served.url}/label-studio", ALICE)
    for name in ("health", "setup", "validate", "versions"):
        assert said[name][:2] == ["ok", 200], said[name]
    assert said["versions"][2]["versions"] == ["finder/1"]
    assert said["worst"] <= 1e-6
    assert set(said["labels"]) == set(LABELS)


@pytest.mark.parametrize("refused", [False, True])
def test_health_is_answered_within_its_second_while_predictions_wait(
    file: Path, tmp_path: Path, refused: bool
) -> None:
    """The client itself gives up after a second; predictions get no answer at all, or a rejection,
    as do those beyond the server's capacity."""
    with serving(tmp_path) as served:
        served.door.held = True
        if refused:
            served.door.refusal = Refused("too much", predicted_ms=400.0, retry_after_s=2.0)
        said = said_by(BUSY, file, f"http://{served.url}/label-studio", ALICE)
        assert bool(served.door.calls) is not refused
    assert said["ill"] == []
    assert set(said["errors"]) <= {429, 503}
