"""Files on OpenVINO: how they are found, what can be set, and how they fail."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import openvino
import pytest

from backends import onnx_models
from backends.cases import load, load_file, settings
from carpool import backends
from carpool.backends import Backend
from carpool.config.model import ModelConfig
from carpool.config.repository import ModelVersion, find_models
from carpool.engine.engine import Engine
from carpool.errors import ConfigError, ModelError, Unsupported


@pytest.fixture
def intermediate(tmp_path: Path) -> Path:
    """OpenVINO's own format: model.xml, and the weights in model.bin."""
    file = onnx_models.classifier(tmp_path / "other.onnx", features=12, classes=5)
    openvino.save_model(openvino.Core().read_model(str(file)), str(tmp_path / "model.xml"))
    file.unlink()
    return tmp_path / "model.xml"


def config(file: Path, **parameters: str) -> ModelConfig:
    return replace(settings("openvino", file), parameters=parameters)


def test_its_own_format_is_found_and_run(intermediate: Path, opened: Callable[[Backend], Backend]) -> None:
    [source], warnings = find_models([intermediate.parent])
    assert (source.config.backend, warnings) == ("openvino", [])
    backend = opened(load(source.config, intermediate))
    shapes = {t.name: (t.datatype, t.shape) for t in (*backend.signature.inputs, *backend.signature.outputs)}
    assert shapes == {"image": ("UINT8", (-1, 12)), "scores": ("FP32", (-1, 5))}
    scores = backend.run({"image": np.full((3, 12), 7, np.uint8)}, [])["scores"]
    np.testing.assert_allclose(scores, np.tile(np.arange(5) * 7.0, (3, 1)), rtol=1e-3)


@pytest.mark.parametrize("said", ['backend: "openvino"', 'platform: "openvino"'])
def test_tritons_settings_name_it(tmp_path: Path, said: str) -> None:
    onnx_models.arithmetic(tmp_path / "model.onnx")
    (tmp_path / "config.pbtxt").write_text(
        f'{said} parameters {{ key: "INFERENCE_NUM_THREADS" value: {{ string_value: "2" }} }}'
        ' parameters { key: "NUM_STREAMS" value: { string_value: "4" } }'
    )
    [source], warnings = find_models([tmp_path])
    assert source.config.backend == "openvino"
    assert len(warnings) == 1
    assert warnings[0].endswith("no effect here: parameters.NUM_STREAMS")


def test_weights_that_are_missing_are_named(intermediate: Path) -> None:
    intermediate.with_suffix(".bin").unlink()
    with pytest.raises(ModelError, match=r"cannot be loaded: its weights, model\.bin, are not beside it"):
        backends.read_signature(config(intermediate), ModelVersion(1, intermediate))


@pytest.mark.parametrize(
    ("parameters", "cause"),
    [
        ({"TARGET_DEVICE": "TPU"}, r"TARGET_DEVICE: OpenVINO has no device 'TPU' here; it has .*CPU"),
        ({"INFERENCE_NUM_THREADS": "many"}, "INFERENCE_NUM_THREADS must be 1 to 9999, not 'many'"),
        ({"INFERENCE_PRECISION_HINT": "f8"}, "cannot be 'f8'; it can be f32, bf16, f16"),
    ],
)
def test_a_wrong_parameter_is_named_before_the_file_is_read(
    tmp_path: Path, parameters: dict[str, str], cause: str
) -> None:
    file = tmp_path / "model.onnx"
    file.write_text("not a model")
    with pytest.raises(ConfigError, match=cause):
        backends.read_signature(config(file, **parameters), ModelVersion(1, file))


def test_threads_are_those_of_the_instance_unless_the_settings_say(tmp_path: Path) -> None:
    from carpool.backends.backend import Placement
    from carpool.backends.openvino import _options

    file = tmp_path / "model.onnx"
    assert _options(config(file), Placement(threads=3))[1]["INFERENCE_NUM_THREADS"] == "3"
    said = config(file, INFERENCE_NUM_THREADS="2")
    assert _options(said, Placement(threads=3))[1]["INFERENCE_NUM_THREADS"] == "2"
    assert "INFERENCE_NUM_THREADS" not in _options(config(file), Placement())[1]


def test_values_are_computed_in_full_precision_by_default(tmp_path: Path) -> None:
    """On processors with a narrower format the runtime would take that by itself."""
    features = np.full((1, 3), 1 + 2**-20, np.float32)
    answer = load_file(onnx_models.arithmetic(tmp_path / "model.onnx"), backend="openvino").run(
        {"x": features}, ["double"]
    )
    np.testing.assert_array_equal(answer["double"], features + features)


def test_what_does_not_fit_fails_in_one_sentence_and_the_instance_goes_on(
    tmp_path: Path, opened: Callable[[Backend], Backend]
) -> None:
    backend = opened(load_file(onnx_models.arithmetic(tmp_path / "model.onnx"), backend="openvino"))
    with pytest.raises(ModelError) as caught:
        backend.run({"x": np.ones((2, 4), np.float32)}, [])
    assert "(shape=[?,3]) and the tensor (shape=(2.4)) are incompatible" in caught.value.message
    assert "\n" not in caught.value.message
    assert ".cpp" not in caught.value.message
    with pytest.raises(ModelError, match="has no input 'z'; it has x"):
        backend.run({"z": np.ones((2, 3), np.float32)}, [])
    assert backend.alive
    assert len(backend.run({"x": np.ones((2, 3), np.float32)}, ["double"])["double"]) == 2


def test_a_file_it_cannot_run_is_told_why(tmp_path: Path) -> None:
    file = onnx_models.unknown_operator(tmp_path / "model.onnx")
    with pytest.raises(ModelError, match=r"cannot be loaded: .*NoSuchOperator"):
        load_file(file, backend="openvino")


def test_what_to_install_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openvino", None)
    file = onnx_models.arithmetic(tmp_path / "model.onnx")
    with pytest.raises(Unsupported, match=r"needs openvino.* pip install 'carpool\[openvino\]'"):
        load_file(file, backend="openvino")


def test_versions_of_one_model_run_on_two_engines(tmp_path: Path) -> None:
    file = onnx_models.arithmetic(tmp_path / "m" / "1" / "model.onnx")
    (tmp_path / "m" / "2").mkdir()
    openvino.save_model(openvino.Core().read_model(str(file)), str(tmp_path / "m" / "2" / "model.xml"))
    (tmp_path / "m" / "model.toml").write_text('versions = "all"\n')

    async def story() -> None:
        async with Engine(tmp_path) as engine:
            own = {served.version: served.config.backend for served in engine.fleet.offered.values()}
            assert own == {"1": "onnxruntime", "2": "openvino"}
            for version in own:
                answer = await engine.infer("m", np.ones((1, 3), np.float32), version=version)
                assert answer["double"].tolist() == [[2.0, 2.0, 2.0]]

    asyncio.run(story())
