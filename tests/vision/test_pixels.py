"""How a model sees pixels: what each kind of evidence says, and what is assumed where there is none."""

from __future__ import annotations

import io
import json
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto
from PIL import Image

from carpool.config.file_metadata import read_metadata
from carpool.config.first_layers import BYTES, FRACTIONS, calibrated
from carpool.config.model import ImageSettings
from carpool.config.presets import PRESETS, PictureChoice, preset_fields
from carpool.config.repository import find_models
from carpool.demo import pictures
from carpool.engine.loading.loading import settle
from carpool.engine.loading.trial import examine
from carpool.errors import ConfigError
from carpool.types import Array, Datatype, TensorSpec
from carpool.vision.decode import decode
from carpool.vision.plans.settings import Described, describe
from carpool.vision.transforms import Transform
from vision.classifiers import SIDE, classifier

ALL = ("resize", "mean", "std", "channels")
VIT = {"architectures": ["ViTForImageClassification"], "id2label": {str(n): f"c{n}" for n in range(10)}}
PREPARED = {"size": {"height": SIDE, "width": SIDE}, "image_mean": [0.5] * 3, "image_std": [0.25] * 3}
PREPARED["do_normalize"] = True


def seen(path: Path, choice: PictureChoice | None = None) -> Described:
    [source], _ = find_models([path])
    found = examine((choice or PictureChoice()).applied(source.config), source.versions[-1])
    return describe(found.config, found.signature, found.labels, found.seen)


def image_of(said: Described) -> ImageSettings:
    assert said.vision is not None
    return said.vision.image


def assumed(said: Described) -> tuple[str, ...]:
    assert said.vision is not None
    return said.vision.assumed


def test_where_nothing_says_it_all_is_assumed(tmp_path: Path) -> None:
    said = seen(classifier(tmp_path / "m.onnx"))
    assert assumed(said) == ALL
    assert image_of(said).resize == "letterbox"


def test_strict_models_are_refused_with_what_to_write(tmp_path: Path) -> None:
    file = classifier(tmp_path / "m.onnx")
    with pytest.raises(ConfigError) as error:
        seen(file, PictureChoice(strict=True))
    for words in ('preset = "…"', "--preset", "torchvision", "resize, mean and std", "--picture"):
        assert words in error.value.message
    assert assumed(seen(file, PictureChoice(strict=True, preset="plain"))) == ()


def test_nothing_that_the_settings_say_is_lost(tmp_path: Path) -> None:
    said = {"pad": 7, "anchor": "top_left", "enlarge": 1.5, "kernel": "area", "channels": "bgr"}
    said |= {"scale": 0.5, "mean": (0.25,), "std": (2.0,)}
    classifier(tmp_path / "m" / "1" / "model.onnx")
    lines = (f"{name} = {json.dumps(value)}" for name, value in said.items())
    (tmp_path / "m" / "model.toml").write_text("\n".join(['task = "classify"', "[image]", *lines]))
    image = image_of(seen(tmp_path / "m"))
    assert {name: getattr(image, name) for name in said} == said
    usual = {field.name for field in fields(ImageSettings) if getattr(image, field.name) == field.default}
    assert usual <= {"size", "resize", "crop", "layout", "decode"}  # those are not said above


def test_a_preset_that_would_replace_known_values_is_not_advised(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        seen(classifier(tmp_path / "m.onnx", ("Div", (255.0,)), ("Sub", (0.5,))), PictureChoice(strict=True))
    assert 'Set resize = "letterbox", "stretch" or "crop" in [image]' in error.value.message
    assert "preset" not in error.value.message


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_leaves_nothing_open(preset: str, tmp_path: Path) -> None:
    file = classifier(tmp_path / "m.onnx")
    said = seen(file, PictureChoice(preset=preset))
    assert assumed(said) == ()
    image = image_of(said)
    for name, value in preset_fields(preset, "classify").items():
        assert getattr(image, name) == value, name
    (tmp_path / "model.toml").write_text(
        f'file = "m.onnx"\npreset = "{preset}"\n[image]\nresize = "stretch"\n'
    )
    changed = image_of(seen(file))
    assert (changed.resize, changed.mean, changed.scale) == ("stretch", image.mean, image.scale)


@pytest.mark.parametrize(
    ("toml", "left"),
    [
        ("[image]\nsize = 64\n", ALL),
        ('[image]\nresize = "letterbox"\n', ("mean", "std", "channels")),
        ("[image]\nmean = 0\n", ("resize", "scale", "channels")),
        ("[image]\nscale = 0.5\n", ("resize", "channels")),
        ('[image]\nresize = "crop"\nstd = 1\nchannels = "bgr"\n', ("scale",)),
        ('[image]\nresize = "crop"\nstd = 255\nchannels = "rgb"\n', ()),
        ('[image]\nresize = "crop"\nmean = [0.485, 0.456, 0.406]\n', ()),  # red, green, blue
        ('[image]\nresize = "crop"\nmean = [103.939, 116.779, 123.68]\n', ("channels",)),
    ],
)
def test_keys_count_also_where_they_say_the_usual(toml: str, left: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "model.toml").write_text(f'file = "m.onnx"\n{toml}')
    assert assumed(seen(classifier(tmp_path / "m.onnx"))) == left


@pytest.mark.parametrize("where", ["1", ""])
def test_settings_of_transformers_count_in_both_folders(where: str, tmp_path: Path) -> None:
    classifier(tmp_path / "m" / "1" / "model.onnx")
    (tmp_path / "m" / "model.toml").write_text("slo_ms = 50\n")
    folder = tmp_path / "m" / where
    (folder / "config.json").write_text(json.dumps(VIT))
    assert assumed(seen(tmp_path / "m")) == ALL  # without the preprocessor's
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPARED))
    said = seen(tmp_path / "m")
    assert assumed(said) == ()
    assert (image_of(said).resize, image_of(said).mean, image_of(said).scale) == (
        "stretch",
        (0.5,) * 3,
        1 / 255,
    )


def test_a_partial_image_table_is_completed_from_the_metadata(tmp_path: Path) -> None:
    classifier(tmp_path / "m" / "model.onnx")
    (tmp_path / "m" / "config.json").write_text(json.dumps(VIT))
    (tmp_path / "m" / "preprocessor_config.json").write_text(json.dumps(PREPARED))
    (tmp_path / "m" / "model.toml").write_text('[image]\nresize = "crop"\n')
    image = image_of(seen(tmp_path / "m"))
    assert (image.resize, image.mean, image.std) == ("crop", (0.5,) * 3, (0.25,) * 3)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"do_flip_channel_order": True}, {"channels": "bgr"}),
        ({"rescale_factor": 1 / 127.5, "rescale_offset": True}, {"scale": 1 / 127.5, "mean": (1.5,) * 3}),
        ({"do_normalize": False}, {"scale": 1 / 255, "mean": (0.0,)}),
        ({"size": {"shortest_edge": 64}, "crop_pct": 0.875}, {"resize": "crop", "crop": 64 / 73}),
        ({"do_normalize": None}, {"scale": None}),  # each processor has its own default
        (
            {"do_normalize": None, "image_processor_type": "MobileViTImageProcessor"},
            {"scale": 1 / 255, "mean": (0.0,), "std": (1.0,), "channels": "bgr"},
        ),
        (
            {"do_normalize": None, "feature_extractor_type": "GLPNFeatureExtractor"},
            {"scale": 1 / 255, "mean": (0.0,), "std": (1.0,), "channels": "rgb"},
        ),
        ({"resample": 1}, {"kernel": "pil-lanczos"}),
    ],
)
def test_what_a_processor_may_say(
    said: dict[str, object], expected: dict[str, object], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(VIT))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**PREPARED, **said}))
    image = image_of(seen(classifier(tmp_path / "m.onnx")))
    assert {name: getattr(image, name) for name in expected} == expected


def test_a_processor_that_keeps_proportions_says_nothing_of_one_size(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(VIT))
    prepared = {**PREPARED, "size": {"shortest_edge": 800, "longest_edge": 1333}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(prepared))
    assert assumed(seen(classifier(tmp_path / "m.onnx"))) == ("resize",)
    prepared |= {
        "size": {"shortest_edge": 24},
        "do_center_crop": True,
        "crop_size": 32,
    }  # cuts out more than is there
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(prepared))
    assert assumed(seen(classifier(tmp_path / "m.onnx"))) == ("resize",)


MEAN = (123.675, 116.28, 103.53)


@pytest.mark.parametrize(
    ("layers", "takes"),
    [
        ([("Sub", MEAN), ("Div", (58.4, 57.1, 57.4))], BYTES),
        ([("Div", (255.0,)), ("Sub", (0.485, 0.456, 0.406)), ("Div", (0.229, 0.224, 0.225))], BYTES),
        ([("Sub", (103.939, 116.779, 123.68))], BYTES),
        ([("Mul", (1 / 127.5,)), ("Add", (-1.0,))], BYTES),
        ([("Sub", (0.485, 0.456, 0.406)), ("Div", (0.229, 0.224, 0.225))], FRACTIONS),
        ([("Mul", (2.0,)), ("Sub", (1.0,))], FRACTIONS),
        ([], None),
        ([("Mul", (0.458, 0.448, 0.45)), ("Add", (-0.03, -0.088, -0.188))], None),  # of normalised values
        ([("Mul", (1000.0,))], None),
    ],
)
def test_first_layers(layers: list[tuple[str, tuple[float, ...]]], takes: str | None, tmp_path: Path) -> None:
    file = classifier(tmp_path / "m.onnx", *layers)
    found = read_metadata(file).start.layers
    assert (None if found is None else found.takes) == takes
    said = seen(file)
    in_order = layers and layers[-1][1] in ((0.229, 0.224, 0.225), (58.4, 57.1, 57.4))
    left = ("resize",) if in_order else ("resize", "channels")
    assert assumed(said) == (ALL if takes is None else left)
    if takes is not None:
        assert image_of(said).scale == (1.0 if takes == BYTES else 1 / 255)
        assert any("first layers" in line for line in said.evidence)


INSIDE = [("Sub", (0.485, 0.456, 0.406)), ("Div", (0.229, 0.224, 0.225))]


@pytest.mark.parametrize(
    ("text", "warned"),
    [
        ('preset = "torchvision"', True),
        ('preset = "keras-tf"', True),
        ('preset = "plain"', False),  # from 0 to 1, which its layers take
        ('preset = "torchvision"\n[image]\nscale = 0.00392156862745098\nmean = [0.0]\nstd = [1.0]', False),
        ("", False),
    ],
)
def test_a_preset_that_normalises_what_the_layers_normalise_is_a_warning(
    text: str, warned: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    classifier(tmp_path / "m.onnx", *INSIDE)
    (tmp_path / "model.toml").write_text(f'file = "m.onnx"\n{text}\n')
    [source], _ = find_models([tmp_path])
    found = examine(source.config, source.versions[-1])
    settle(found.config, found.signature, found.labels, found.seen)
    notes = [str(record.msg) for record in caplog.records if "normalised twice" in str(record.msg)]
    assert len(notes) == warned
    if warned:
        assert "its first layers (Sub, Div)" in notes[0]
        assert "set scale = 0.00392157, mean = [0.0] and std = [1.0] in [image]" in notes[0]


def test_an_input_of_bytes_takes_pixels(tmp_path: Path) -> None:
    file = classifier(tmp_path / "m.onnx", datatype=TensorProto.UINT8)
    assert assumed(seen(file)) == ("resize", "channels")
    image = image_of(seen(file, PictureChoice(preset="torchvision")))
    assert (image.scale, image.mean, image.std, image.resize) == (1.0, (0.0,), (1.0,), "crop")


def test_a_quantised_input_says_what_it_was_calibrated_for() -> None:
    found = [
        calibrated(scale, zero) for scale, zero in ((1 / 255, -128), (1.0, -128), (1 / 127.5, 0), (0.018, 0))
    ]
    assert [None if one is None else one.takes for one in found] == [FRACTIONS, BYTES, "from -1 to 1", None]


def library(photo: Image.Image, crop: int, side: int, kernel: Image.Resampling) -> Array:
    """Resize the shorter side, cut out the middle: as torchvision, timm and transformers do."""
    scale = crop / min(photo.size)
    width, height = (int(length * scale) for length in photo.size)
    left, top = round((width - side) / 2), round((height - side) / 2)
    return np.asarray(photo.resize((width, height), kernel).crop((left, top, left + side, top + side)))


@pytest.mark.parametrize("kernel", ["bilinear", "bicubic", "lanczos", "nearest"])
@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("photo", pictures(), ids=lambda file: file.stem)
def test_pillows_kernels_are_exact(kernel: str, times: int, photo: Path) -> None:
    with Image.open(photo) as opened:
        large = opened.convert("RGB").resize((opened.width * times, opened.height * times))
    packed = io.BytesIO()
    large.save(packed, "JPEG", quality=92)
    image = ImageSettings(resize="crop", crop=224 / 256, kernel=f"pil-{kernel}", scale=1.0, mean=(110.0,))
    transform = Transform(image, TensorSpec("x", Datatype.FP32, (224, 224, 3)), "m")
    made = np.zeros(transform.shape, np.float32)
    transform.prepare(decode(packed.getvalue(), reduction=transform.reduction), made)
    with Image.open(packed) as opened:
        wanted = library(opened.convert("RGB"), 256, 224, Image.Resampling[kernel.upper()]) - 110.0
    cosine = (made * wanted).sum() / np.linalg.norm(made) / np.linalg.norm(wanted)
    assert cosine >= 0.999
