"""The agent for CVAT, with stand-ins for CVAT's package and for the server."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import carpool
from carpool.vision.python_pictures import Detections

AGENT = Path(__file__).parents[3] / "examples" / "cvat_agent.py"


def detect(_self: object, image: object, **asked: Any) -> Detections:
    assert (image, asked) == ("image", {"model": "nanodet", "score": 0.25})
    boxes = [("car", [1.0, 2.0, 3.0, 4.0]), ("kite", [0.0, 0.0, 1.0, 1.0])]
    return Detections({"detections": [{"label": label, "box": box} for label, box in boxes]})


def test_boxes_become_rectangles_of_the_labels_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    package, annotation, models = (ModuleType(f"cvat_sdk{name}") for name in ("", ".a", ".models"))
    annotation.__dict__.update(
        DetectionFunctionSpec=lambda labels: labels,
        DetectionFunctionContext=object,
        label_spec=lambda name, number, **more: (name, number, more["type"]),
        rectangle=lambda label, points: (label, points),
    )
    models.__dict__["LabeledShapeRequest"] = object
    package.__dict__.update(auto_annotation=annotation, models=models)
    names = {"cvat_sdk": package, "cvat_sdk.auto_annotation": annotation, "cvat_sdk.models": models}
    for name, module in names.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(carpool.Client, "detect", detect)
    spec = importlib.util.spec_from_file_location("cvat_agent", AGENT)
    assert spec is not None
    assert spec.loader is not None
    agent = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(agent)
    assert agent.spec[2] == ("car", 2, "rectangle")
    assert agent.detect(SimpleNamespace(conf_threshold=0.25), "image") == [(2, [1.0, 2.0, 3.0, 4.0])]
