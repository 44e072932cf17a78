"""Inputs that clients do not send: known by their names, constants, and token ids of fixed texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from carpool import backends
from carpool.backends.backend import Placement
from carpool.config.presets import PictureChoice
from carpool.config.repository import find_models
from carpool.engine.loading.trial import Examined
from carpool.errors import ConfigError
from carpool.lab.model_report import look_at
from carpool.types import Array
from carpool.vision.picture_answers import Options
from carpool.vision.plans.picture_plan import PicturePlan
from carpool.vision.plans.settings import Described
from extensions.inputs.two_inputs import SIDE, conditioned, deployed, tokenizer, towers
from vision.made_files import png

RANDOM = np.random.default_rng(3)
BOXES = RANDOM.uniform(0.2, 0.6, (9, 4))
SCORES = np.linspace(0.9, 0.1, 9)
LABELS = np.arange(9) % 4


def seen(file: Path, **choice: Any) -> tuple[Examined, Described]:
    [source], _ = find_models([file])
    return look_at(source, PictureChoice(**choice))


def ran(file: Path, pictures: Array, **more: Array) -> dict[str, Array]:
    """What an instance answers to a batch of pictures and nothing else."""
    [source], _ = find_models([file])
    config = seen(file)[0].config
    backend = backends.load(config, source.versions[-1], Placement(threads=1))
    name = next(tensor.name for tensor in config.inputs if not tensor.optional)
    try:
        return dict(backend.run({name: pictures, **more}, ()))
    finally:
        backend.close()


def settings(folder: Path, text: str) -> None:
    (folder / "model.toml").write_text(f'file = "m.onnx"\n{text}')


@pytest.mark.parametrize("rows", ["N", 1])
def test_boxes_scaled_by_the_model_itself_are_in_the_pictures_pixels(rows: int | str, tmp_path: Path) -> None:
    """D-FINE, DEIM and RT-DETR as their own tools deploy them: `orig_target_sizes` is filled."""
    file = deployed(tmp_path / "m.onnx", BOXES, SCORES, LABELS, rows)
    examined, described = seen(file, preset="rtdetr")
    assert described.vision is not None
    assert (described.vision.task, described.vision.assumed) == ("detect", ())
    plan = PicturePlan(described.vision, "m")
    data, memory = png(np.zeros((90, 120, 3), np.uint8)), bytearray(plan.bytes)
    geometry = plan.prepare(data, memory)
    picture = np.frombuffer(memory, np.float32).reshape(1, 3, SIDE, SIDE)
    outputs = {name: array[0] for name, array in ran(file, picture).items()}
    answer = plan.answer(outputs, geometry, Options(score=0.3))
    assert len(answer["detections"]) == 7
    for found, (x, y, w, h), score, label in zip(answer["detections"], BOXES, SCORES, LABELS, strict=False):
        around = np.clip([x - w / 2, y - h / 2, x + w / 2, y + h / 2], 0, 1) * (120, 90, 120, 90)
        assert found["box"] == pytest.approx(around, abs=0.02)
        assert (found["class_id"], found["score"]) == (label, pytest.approx(score, abs=1e-5))
    assert [tensor.optional for tensor in examined.config.inputs] == [False, True]


def test_a_client_that_sends_the_size_itself_is_believed(tmp_path: Path) -> None:
    file = deployed(tmp_path / "m.onnx", BOXES, SCORES, LABELS)
    pictures = np.zeros((2, 3, SIDE, SIDE), np.float32)
    own, sent = ran(file, pictures), ran(file, pictures, orig_target_sizes=np.full((2, 2), 2 * SIDE))
    np.testing.assert_allclose(2 * own["boxes"], sent["boxes"], rtol=1e-6)


def test_texts_make_a_model_of_pictures_and_words_one_of_pictures(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    towers(tmp_path / "m.onnx")
    tokenizer(tmp_path)
    (tmp_path / "labels.txt").write_text("cat\nred dog\n")
    settings(
        tmp_path,
        'labels = "labels.txt"\npreset = "clip"\n[inputs.input_ids]\n'
        'texts = "labels.txt"\ntemplate = "a photo of a {}"\n',
    )
    examined, described = seen(tmp_path)
    assert [tensor.name for tensor in examined.config.inputs] == ["pixel_values"]
    assert [tensor.name for tensor in examined.config.outputs] == ["logits_per_image", "image_embeds"]
    assert (examined.config.max_batch, examined.config.unbatched) == (32, "")
    assert described.vision is not None
    assert (described.vision.task, described.vision.labels) == ("classify", ("cat", "red dog"))
    pictures = RANDOM.random((3, 3, SIDE, SIDE)).astype(np.float32)
    found = ran(tmp_path, pictures)
    table = np.random.default_rng(5).normal(0, 1, (16, 3)).astype(np.float32)
    texts = np.array([table[[2, 3, 4, 2, 5]].sum(0), table[[2, 3, 4, 2, 7, 6]].sum(0)])
    wanted = pictures.mean((2, 3)) @ texts.T
    np.testing.assert_allclose(found["logits_per_image"], wanted, rtol=1e-4)


def test_a_constant_of_one_request_is_repeated(tmp_path: Path) -> None:
    conditioned(tmp_path / "m.onnx")
    settings(tmp_path, "[inputs.gain]\nvalue = [1.0, 2.0, 3.0]\n")
    pictures = RANDOM.random((2, 3, SIDE, SIDE)).astype(np.float32)
    np.testing.assert_allclose(
        ran(tmp_path, pictures)["logits"], pictures.mean((2, 3)) * (1, 2, 3), rtol=1e-5
    )
    settings(tmp_path, "[inputs.gain]\nvalue = 2\n")
    np.testing.assert_allclose(ran(tmp_path, pictures)["logits"], pictures.mean((2, 3)) * 2, rtol=1e-5)


def test_an_input_that_nobody_knows_is_named_with_its_setting(tmp_path: Path) -> None:
    file = conditioned(tmp_path / "m.onnx")
    ask = seen(file)[1].ask
    assert 'If "gain" is the same for every image, set [inputs.gain] in model.toml' in ask
    with pytest.raises(ConfigError, match=r"set \[inputs.gain\] in model.toml"):
        seen(file, task="classify")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("[inputs]\ngain = 1\n", "inputs.gain must be a table"),
        ("inputs = 3\n", "holds one table for each input"),
        ("[inputs.gain]\n", "needs either value"),
        ("[inputs.gain]\nvalue = 1\ntexts = ['a']\n", "needs either value"),
        ("[inputs.gain]\nvalue = 'x'\n", "must be a number"),
        ("[inputs.gain]\nvalue = 1\nlength = 3\n", "length goes with texts"),
        ("[inputs.gain]\ntexts = ['a']\ntemplate = 'a photo'\n", "must have one {}"),
        ("[inputs.gain]\ntexts = 'labels.txt'\nlength = 0\n", "length must be 1 to 4096"),
        ("[inputs.gain]\nvalues = 1\n", 'unknown key "inputs.gain.values"'),
        ("[inputs.gian]\nvalue = 1\n", r"\[inputs.gian\] is for an input that is not in the model file"),
    ],
)
def test_settings_that_are_wrong(text: str, error: str, tmp_path: Path) -> None:
    conditioned(tmp_path / "m.onnx")
    settings(tmp_path, text)
    with pytest.raises(ConfigError, match=error):
        seen(tmp_path)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("[inputs.gain]\nvalue = [1, 2]\n", r"has the shape \[2\], and the input is \[-1, 3\]"),
        ("[inputs.gain]\nvalue = [[1, 2], [3]]\n", "rows of different lengths"),
    ],
)
def test_values_that_do_not_fit(text: str, error: str, tmp_path: Path) -> None:
    conditioned(tmp_path / "m.onnx")
    settings(tmp_path, text)
    with pytest.raises(ConfigError, match=error):
        ran(tmp_path, np.zeros((1, 3, SIDE, SIDE), np.float32))


def test_texts_without_a_tokenizer_beside_the_file(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    towers(tmp_path / "m.onnx")
    settings(tmp_path, "[inputs.input_ids]\ntexts = ['cat']\n")
    with pytest.raises(ConfigError, match=r"there is no tokenizer\.json in"):
        ran(tmp_path, np.zeros((1, 3, SIDE, SIDE), np.float32))
