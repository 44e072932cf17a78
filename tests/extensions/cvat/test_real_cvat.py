"""CVAT's own LambdaGateway, cut out of its views, against a front end with a fake engine: 200 pictures."""

from __future__ import annotations

import pytest

from carpool.config.server import ServerSettings
from conformance.api_clients_venv import said_by
from conformance.tool_sources import sources_of
from frontend.http.front_end import front_end
from frontend.picture_models import LABELS, classifier, detector, segmenter

pytestmark = pytest.mark.conformance
PROGRAM = """
import ast, base64, colorsys, datetime, enum, io, json, os, sys, types
import requests
from PIL import Image
file, host, port = sys.argv[1:]
wanted = ("LambdaGateway", "LambdaFunction", "InvalidFunctionMetadataError")
tree = ast.parse(open(file).read())
kept = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name in wanted]
class FunctionKind(str, enum.Enum):
    DETECTOR, INTERACTOR, REID, TRACKER = "detector", "interactor", "reid", "tracker"
    def __str__(self):
        return self.value
nuclio = {"SCHEME": "http", "HOST": host, "PORT": int(port), "DEFAULT_TIMEOUT": 120}
nuclio |= {"FUNCTION_NAMESPACE": "nuclio", "INVOKE_METHOD": "dashboard"}
known = {"settings": types.SimpleNamespace(NUCLIO=nuclio), "make_requests_session": requests.Session}
known |= {"FunctionKind": FunctionKind, "json": json, "timedelta": datetime.timedelta, "os": os}
source = "from __future__ import annotations\\n" + "\\n".join(ast.unparse(node) for node in kept)
exec(compile(source, file, "exec"), known)
gateway = known["LambdaGateway"]()
found = {"functions": [one.to_dict() for one in gateway.list()], "worst": 0.0, "labels": []}
functions = {one.id: one for one in gateway.list()}
for number in range(200):
    colour = tuple(round(255 * side) for side in colorsys.hsv_to_rgb(number / 200, 1, 1))
    image = io.BytesIO()
    Image.new("RGB", (32 + number % 7, 24), colour).save(image, "PNG")
    asked = {"image": base64.b64encode(image.getvalue()).decode(), "threshold": 0.4}
    shapes = gateway.invoke(functions["finder"], asked)
    url = f"http://{host}:{port}/detect?score=0.4"
    listed = requests.post(url, data=image.getvalue()).json()["detections"]
    assert [one["label"] for one in shapes] == [one["label"] for one in listed] and shapes
    for one, other in zip(shapes, listed):
        sides = [abs(a - b) for a, b in zip(one["points"], other["box"], strict=True)]
        found["worst"] = max(found["worst"], *sides, abs(float(one["confidence"]) - other["score"]))
        found["labels"].append(one["label"])
mask = gateway.invoke(gateway.get("cutter"), asked)[0]
found["mask"] = [mask["type"], len(mask["mask"]), mask["mask"][-4:]]
found["tag"] = gateway.invoke(gateway.get("namer"), asked)[0]["type"]
for name, call in (("get", lambda: gateway.get("nobody")),
                   ("invoke", lambda: gateway.invoke(types.SimpleNamespace(id="nobody"), asked)),
                   ("bad", lambda: gateway.invoke(functions["finder"], {"image": "AAAA"}))):
    try:
        call()
    except requests.HTTPError as error:
        found[name] = error.response.status_code
print(json.dumps(found))
"""


def test_the_gateway_lists_gets_and_invokes() -> None:
    file = sources_of("cvat-ai/cvat") / "cvat" / "apps" / "lambda_manager" / "views.py"
    models = detector(), segmenter(), classifier()
    with front_end(*models, settings=ServerSettings(api=("cvat",))) as served:
        said = said_by(PROGRAM, file, "127.0.0.1", served.server.port)
    functions = {one["id"]: one for one in said["functions"]}
    assert sorted(functions) == ["cutter", "finder", "namer"]
    assert {one["kind"] for one in functions.values()} == {"detector"}
    assert [one["name"] for one in functions["finder"]["labels_v2"]] == list(LABELS)
    assert said["worst"] <= 1e-6
    assert set(said["labels"]) == set(LABELS)
    assert said["mask"] == ["mask", 35 * 24 + 4, [0, 0, 34, 23]]
    assert said["tag"] == "tag"
    assert (said["get"], said["invoke"], said["bad"]) == (404, 404, 400)
