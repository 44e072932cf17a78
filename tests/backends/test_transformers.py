"""Folders that transformers itself saved: what is served is what it answers (`make engines`)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends.cases import load
from backends.test_contract import held_resources
from carpool.backends import Backend
from carpool.config.repository import find_models
from carpool.errors import ModelError
from carpool.types import Array

hf = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

_SIDE = 32
_SMALL = {"hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 64}
_VIT = {**_SMALL, "image_size": _SIDE, "patch_size": 16}
_NETWORKS: dict[str, Callable[[], Any]] = {
    "classifier": lambda: hf.ViTForImageClassification(hf.ViTConfig(num_labels=9, **_VIT)),
    "detector": lambda: hf.YolosForObjectDetection(
        hf.YolosConfig(**{**_VIT, "image_size": [_SIDE, _SIDE]}, num_labels=7, num_detection_tokens=5)
    ),
    "segmenter": lambda: hf.SegformerForSemanticSegmentation(
        hf.SegformerConfig(num_labels=6, depths=[1, 1, 1, 1], image_size=_SIDE)
    ),
    "depth": lambda: hf.GLPNForDepthEstimation(hf.GLPNConfig(depths=[1, 1, 1, 1], image_size=_SIDE)),
    "embedding": lambda: hf.CLIPVisionModelWithProjection(hf.CLIPVisionConfig(projection_dim=32, **_VIT)),
}


@pytest.fixture(params=_NETWORKS, scope="module")
def network(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(7)
    return _NETWORKS[request.param]().eval()


def opened_folder(network: Any, folder: Path) -> Backend:
    network.save_pretrained(str(folder / "net"))
    size = {"size": {"height": _SIDE, "width": _SIDE}}
    (folder / "net" / "preprocessor_config.json").write_text(json.dumps(size))
    [source], warnings = find_models([folder / "net"])
    assert (source.config.backend, warnings) == ("transformers", [])
    file = source.versions[0].file
    assert file is not None
    return load(source.config, file)


@pytest.fixture(scope="module")
def served(network: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Backend]:
    backend = opened_folder(network, tmp_path_factory.mktemp("served"))
    yield backend
    backend.close()


def pictures(count: int) -> Array:
    made: Array = np.random.default_rng(count).random((count, 3, _SIDE, _SIDE), np.float32)
    return made


def own_answer(network: Any, x: Array) -> dict[str, Array]:
    with torch.inference_mode():
        answer = network(pixel_values=torch.from_numpy(x.copy()))
    return {name: value.numpy() for name, value in answer.items() if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize("batch", [1, 2, 7])
def test_answers_are_those_of_transformers(network: Any, served: Backend, batch: int) -> None:
    x = pictures(batch)
    expected = own_answer(network, x)
    answer = served.run({"pixel_values": x}, [])
    assert set(answer) == set(expected)
    for name, values in expected.items():
        np.testing.assert_allclose(answer[name], values, rtol=1e-3, atol=1e-4)


def test_the_signature_is_what_it_answers(network: Any, served: Backend) -> None:
    signature = served.signature
    assert [(t.name, t.datatype, t.shape) for t in signature.inputs] == [
        ("pixel_values", "FP32", (-1, 3, _SIDE, _SIDE))
    ]
    expected = {name: (-1, *array.shape[1:]) for name, array in own_answer(network, pictures(1)).items()}
    assert {t.name: t.shape for t in signature.outputs} == expected
    assert signature.can_batch


def test_inputs_may_be_read_only_views_and_outputs_be_chosen(network: Any, served: Backend) -> None:
    x = pictures(6)[::2]
    x.setflags(write=False)
    name = served.signature.outputs[0].name
    [found] = served.run({"pixel_values": x}, [name]).values()
    np.testing.assert_allclose(found, own_answer(network, x)[name], rtol=1e-3, atol=1e-4)
    with pytest.raises(ModelError, match="no output 'nope'"):
        served.run({"pixel_values": x}, ["nope"])
    assert served.alive


def test_it_ends_and_gives_everything_back(tmp_path: Path) -> None:
    network = _NETWORKS["classifier"]()
    first = opened_folder(network, tmp_path)
    first.abort()
    with pytest.raises(ModelError, match="stopped"):
        first.run({"pixel_values": pictures(1)}, [])
    first.close()
    before = held_resources()
    second = opened_folder(network, tmp_path)
    second.run({"pixel_values": pictures(2)}, [])
    second.close()
    assert held_resources() == before
