"""Settings and results between engine and runner: they come back equal, and nothing else comes in."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from carpool.config.model import (
    ClassifySettings,
    ImageSettings,
    InstanceGroup,
    InstanceKind,
    Mode,
    ModelConfig,
    PytorchSettings,
    SpecificVersions,
    Task,
    TensorConfig,
)
from carpool.config.repository import ModelVersion
from carpool.core.curve import BatchCurve
from carpool.core.objectives import Promise
from carpool.engine.loading.loading import Ready
from carpool.engine.profile.layouts import Layout
from carpool.engine.profile.measuring import Measured, Point
from carpool.engine.profile.model_profile import Profile
from carpool.extensions.drift.settings import DriftSettings
from carpool.extensions.torch.hosted_model import LoadOrder, OpenedAs, Opening, Prepared
from carpool.link.typed_json import read_document, write_document
from carpool.types import Datatype, Signature, TensorSpec
from carpool.vision.plans.settings import VisionSettings

CONFIG = ModelConfig(
    name="network",
    path=Path("/models/network"),
    backend="pytorch",
    task=Task.CLASSIFY,
    inputs=(TensorConfig("x", "UINT8", (3, 8, 8), reshape=(3, 64)),),
    outputs=(TensorConfig("y", "FP32", (10,), labels="labels.txt"),),
    max_batch=8,
    mode=Mode.PROMISE,
    policy=Promise(0.05, 8),
    instances=(InstanceGroup(2, InstanceKind.GPU, (0, 1)),),
    versions=SpecificVersions((1, 3)),
    parameters={"a": "b"},
    execution_timeout=1.5,
    pytorch=PytorchSettings(device="cuda", compile="default", buckets=(1, 8)),
    image=ImageSettings(size=(8, 8)),
    classify=ClassifySettings("softmax"),
)
SPEC = TensorSpec("x", Datatype.UINT8, (3, 8, 8))
VISION = VisionSettings(
    Task.CLASSIFY, ImageSettings(), SPEC, (SPEC,), ClassifySettings(), ("cat", "dog"), True
)
READY = Ready(
    CONFIG,
    Signature("network", (SPEC,), (SPEC,), 8),
    BatchCurve.measured([(1, 0.001), (8, 0.004)], 8, (1, 8)),
    (),
    {"y": ("cat", "dog")},
    VISION,
    Profile(Layout(2, 1), "why", Measured((Point(1, 0.001, 0.0001, 5),), "enough"), "today"),
    8,
    ("Chosen.",),
)
ASKED = LoadOrder(CONFIG, ModelVersion(3, Path("/models/network/3/model.pt")))


def test_what_is_asked_comes_back_equal() -> None:
    assert read_document(LoadOrder, write_document(ASKED)) == ASKED
    eager = LoadOrder(ModelConfig(name="m", path=Path("m")), ModelVersion(1, None))
    assert read_document(LoadOrder, write_document(eager)) == eager


def test_what_was_found_comes_back_equal() -> None:
    document = Prepared(READY, None, [OpenedAs(1_000_000, "cuda:0")], ["torch"])
    back = read_document(Prepared, write_document(document))
    assert back.opened == document.opened
    assert back.packages == ["torch"]
    ready = back.ready
    assert (ready.config, ready.vision, ready.profile) == (CONFIG, VISION, READY.profile)
    assert ready.signature.is_like(READY.signature)
    assert (ready.curve.times, ready.curve.buckets) == (READY.curve.times, READY.curve.buckets)
    assert (ready.labels, ready.piece, ready.choices) == (READY.labels, 8, ("Chosen.",))
    again = read_document(Opening, write_document(Opening(ASKED, replace(ready, vision=None), 2)))
    assert again.asked == ASKED
    assert again.threads == 2


def changed(path: list[Any], value: Any) -> bytes:
    document = json.loads(write_document(Prepared(READY, 1, [OpenedAs(5, "")], [])))
    place = document
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return json.dumps(document).encode()


@pytest.mark.parametrize(
    "lie",
    [
        b"",
        b"[]",
        b'"Prepared"',
        pickle.dumps(OpenedAs(1, "")),
        b"[" * 100_000,
        changed(["is"], "LoadOrder"),
        changed(["threads"], "many"),
        changed(["threads"], True),
        changed(["opened", 0, "number"], 1.5),
        changed(["opened", 0, "is"], "Popen"),
        changed(["opened"], {"0": 1}),
        changed(["more"], 1),
        changed(["packages"], [["os"]]),
        changed(["ready", "config", "policy"], {"is": "Path", "args": ["x"]}),
        changed(["ready", "config", "mode"], "NOTHING"),
        changed(["ready", "curve", "points"], [[1, -1.0]]),
        changed(["ready", "curve", "points"], []),
        changed(["ready", "signature", "inputs", 0, "datatype"], "__class__"),
    ],
)
def test_a_lie_is_noticed(lie: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_document(Prepared, lie)


def test_what_has_no_form_is_not_sent() -> None:
    with pytest.raises(TypeError):
        write_document(object())


def test_settings_of_extensions_have_the_types_that_these_declare() -> None:
    config = ModelConfig(name="m", path=Path("m"), extra={"drift": DriftSettings(sample=0.5)})
    data = write_document(config)
    assert read_document(ModelConfig, data) == config
    with pytest.raises(ValueError, match="KeyError: 'unknown'"):
        read_document(ModelConfig, data.replace(b'"drift"', b'"unknown"', 1))
    with pytest.raises(ValueError, match="DriftSettings"):
        read_document(ModelConfig, data.replace(b'"DriftSettings"', b'"ModelConfig"'))
