"""Annotates CVAT's tasks with a detector of a running server, where CVAT cannot reach that server itself.

    pip install cvat-cli carpool
    cvat-cli --server-host https://cvat.example task auto-annotate 7 --function-file examples/cvat_agent.py

CARPOOL_URL names the server, CARPOOL_API_KEY its key, and CARPOOL_MODEL the model.
"""

import os

import cvat_sdk.auto_annotation as cvataa
import cvat_sdk.models
import PIL.Image

import carpool

MODEL = os.environ.get("CARPOOL_MODEL", "nanodet")
LABELS = ("person", "bicycle", "car", "motorcycle", "bus", "truck", "cat", "dog")

client = carpool.Client(
    os.environ.get("CARPOOL_URL", "http://localhost:8000"),
    api_key=os.environ.get("CARPOOL_API_KEY", ""),
)
spec = cvataa.DetectionFunctionSpec(
    labels=[cvataa.label_spec(label, number, type="rectangle") for number, label in enumerate(LABELS)]
)


def detect(
    context: cvataa.DetectionFunctionContext, image: PIL.Image.Image
) -> list[cvat_sdk.models.LabeledShapeRequest]:
    found = client.detect(image, model=MODEL, score=context.conf_threshold or 0.5)
    return [
        cvataa.rectangle(LABELS.index(thing["label"]), thing["box"])
        for thing in found.things
        if thing["label"] in LABELS
    ]
