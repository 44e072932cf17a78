"""What is told from shapes, what is refused, and the way to the front ends and back."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from carpool.config.model import DetectSettings, ImageSettings, SegmentSettings, Task
from carpool.errors import ConfigError
from carpool.types import Datatype, Signature, TensorSpec
from carpool.vision.plans.settings import Described, VisionSettings, describe, read, write
from vision.models import Shapes, config, signature

NOTHING = Described(None, [])
COCO = [f"thing {number}" for number in range(80)]


def told(
    outputs: Shapes,
    labels: list[str] | None = None,
    input_shape: tuple[int, ...] = (3, 640, 640),
    toml: str = "",
) -> tuple[VisionSettings, str]:
    found, notes, *_ = describe(
        config(toml), signature(outputs, input_shape), {next(iter(outputs)): labels} if labels else {}
    )
    assert found is not None
    return found, "; ".join(notes)


def test_boxes_go_before_scores_in_any_order() -> None:
    found, _ = told({"scores": (50, 80), "boxes": (50, 4)}, toml="[detect]")
    assert [spec.name for spec in found.outputs] == ["boxes", "scores"]
    found, _ = told({"scores": (50, 4), "boxes": (50, 4)}, toml="[detect]")
    assert [spec.name for spec in found.outputs] == ["boxes", "scores"]


def test_a_table_is_as_good_as_a_task() -> None:
    found, notes = told({"y": (512,)}, toml="[embed]")
    assert found.task is Task.EMBED
    assert notes == '"y" [512] is a vector'


@pytest.mark.parametrize(
    ("name", "classes", "activation"),
    [
        ("logits", 21, "softmax"),
        ("probabilities", 21, "none"),
        ("Softmax_0", 21, "none"),
        ("1959", 1, "none"),
        ("mask_logits", 1, "sigmoid"),
    ],
)
def test_activation_of_maps_goes_by_the_name(name: str, classes: int, activation: str) -> None:
    found, notes = told({name: (classes, 160, 160)}, toml='task = "segment"')
    assert isinstance(found.table, SegmentSettings)
    assert found.table.activation == activation
    assert f'"{name}" [{classes}, 160, 160]' in notes


@pytest.mark.parametrize(
    ("name", "activation"), [("logits", "softmax"), ("output", "softmax"), ("probs", "none")]
)
def test_activation_of_classes_goes_by_the_name(name: str, activation: str) -> None:
    found, _ = told({name: (1000,)})
    assert found.table is not None
    assert found.table.activation == activation  # type: ignore[union-attr]


def test_declared_activations_stay() -> None:
    found, notes = told({"probs": (1000,)}, toml='[classify]\nactivation = "sigmoid"')
    assert found.table.activation == "sigmoid"  # type: ignore[union-attr]
    assert notes == ""


def test_what_the_settings_say_stays_and_the_rest_is_told() -> None:
    found, _ = told({"y": (3, 640, 640)}, ["road", "grass", "car"], toml="[segment]\nbackground = 2")
    assert found.table == SegmentSettings("softmax", 0.5, 2, "maps")


def test_labels_that_are_too_few_are_noted() -> None:
    _, notes = told({"y": (84, 8400)}, ["one"], toml='[detect]\nformat = "yolov8"')
    assert "1 labels for 80 classes: the others are named by number" in notes


def test_a_model_without_batches_may_carry_a_leading_one() -> None:
    whole = signature({"y": (1, 1, 320, 320)}, (1, 3, 320, 320), max_batch=0)
    found = describe(config('task = "segment"'), whole).vision
    assert found is not None
    assert found.input.shape == (3, 320, 320)
    assert found.outputs[0].shape == (1, 320, 320)


def test_the_layout_is_told_or_declared() -> None:
    assert told({"y": (1000,)}, input_shape=(224, 224, 3))[0].image.layout == "nhwc"
    assert told({"y": (1000,)}, input_shape=(3, 224, 224))[0].image.layout == "nchw"
    assert (
        told({"y": (1000,)}, input_shape=(1, 224, 3), toml='[image]\nlayout = "nhwc"')[0].image.layout
        == "nhwc"
    )
    image = '[image]\nlayout = "nhwc"\nsize = 64'
    assert told({"y": (1000,)}, input_shape=(-1, -1, -1), toml=image)[0].image.layout == "nhwc"


@pytest.mark.parametrize("shape", [(5, 64, 64), (64, 64), (1000,), (3, 3, 64, 64), (-1, 64, 64)])
def test_models_that_take_no_picture_have_no_settings(shape: tuple[int, ...]) -> None:
    assert describe(config(), signature({"y": (1000,)}, shape)).vision is None
    with pytest.raises(ConfigError, match='m: task = "classify" needs one input that can hold an image'):
        describe(config('task = "classify"'), signature({"y": (1000,)}, shape))
    with pytest.raises(ConfigError, match=r"m: \[image\] needs one input"):
        describe(config("[image]"), signature({"y": (1000,)}, shape))
    assert describe(config('task = "raw"'), signature({"y": (1000,)}, shape)) == NOTHING


def test_two_inputs_are_not_one_picture() -> None:
    one = signature({"y": (1000,)})
    two = Signature("m", (*one.inputs, replace(one.inputs[0], name="more")), one.outputs, 8)
    assert "2 inputs, and an image route fills one. If" in describe(config(), two).ask
    optional = """
    [[input]]
    name = "images"
    datatype = "FP32"
    shape = [3, 64, 64]
    [[input]]
    name = "more"
    datatype = "FP32"
    shape = [3, 64, 64]
    optional = true
    """
    assert describe(config(optional), two)[0] is not None
    text = Signature("m", (TensorSpec("t", Datatype.BYTES, (3, 64, 64)),), one.outputs, 8)
    assert describe(config(), text).ask == ""


def test_an_input_of_any_size_needs_one() -> None:
    shapes = signature({"y": (1000,)}, (3, -1, -1))
    found, _, ask, _ = describe(config(), shapes)
    assert found is None
    assert "takes images of any size: set size in [image] of model.toml, or give --size" in ask
    with pytest.raises(ConfigError, match=r"takes images of any size; set size in \[image\]"):
        describe(config('task = "classify"'), shapes)
    assert describe(config("[image]\nsize = 224"), shapes)[0] is not None


@pytest.mark.parametrize(
    ("toml", "outputs", "words"),
    [
        (
            'task = "classify"',
            {"y": (5, 5)},
            'needs an output [classes] of floats; the model\'s outputs are "y" [5, 5]',
        ),
        (
            'task = "detect"',
            {"y": (1000,)},
            "[4 + classes, anchors], [anchors, 5 + classes], [boxes, 6]",
        ),
        ('[detect]\nformat = "yolov8"', {"y": (4, 100)}, "needs for its format outputs of floats"),
        ('[detect]\nformat = "yolov5"', {"y": (100, 5)}, "needs for its format outputs of floats"),
        ('[detect]\nformat = "boxes_scores"', {"y": (84, 8400)}, "[anchors, 4] and [anchors, classes]"),
        (
            'task = "segment"',
            {"y": (1000,)},
            "an output [classes, height, width] or [height, width] of floats",
        ),
        ('task = "segment"', {}, "the model's outputs are none"),
        ("[embed]", {}, "[embed] needs an output of floats"),
        (
            'task = "detect"\n[segment]',
            {"y": (84, 8400)},
            "[segment] is for models of that task, but this model is for detect",
        ),
        ("[classify]\n[embed]", {"y": (1000,)}, "remove one"),
    ],
)
def test_what_the_model_cannot_be_is_an_error(toml: str, outputs: Shapes, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        describe(config(toml), signature(outputs, (3, 640, 640)))
    assert error.value.message.startswith("m: ")
    assert words in error.value.message


def test_declared_detectors_may_be_of_any_size() -> None:
    found, notes = told({"y": (9, 100)}, toml='task = "detect"')
    assert found.table == DetectSettings("yolov8", False, "centers")
    assert "has a box and 5 classes per anchor" in notes
    found, _ = told({"y": (100, 9)}, toml='task = "detect"')
    assert found.table == DetectSettings("yolov5", False, "centers")
    assert told({"y": (-1, -1)}, toml='[detect]\nformat = "yolov5"')[0].outputs[0].shape == (-1, -1)


@pytest.mark.parametrize(
    ("outputs", "toml"),
    [
        ({"y": (2,)}, '[image]\nmean = [1, 2, 3]\nsize = 640\nlayout = "nchw"'),
        ({"y": (84, 8400)}, "[detect]\nscore = 0.5"),
        ({"y": (21, 640, 640)}, "[segment]"),
        ({"y": (56, 8400)}, "[pose]\nkeypoints = [17, 3]"),
        ({"y": (512,)}, "[embed]\nnormalize = false"),
        ({"y": (512,)}, 'task = "raw"'),
    ],
)
def test_settings_survive_json(outputs: Shapes, toml: str) -> None:
    found, _ = told(outputs, ["a", "ü"], toml=toml)
    assert read(json.loads(json.dumps(write(found)))) == found


def test_labels_go_by_number_where_there_are_none() -> None:
    spec = TensorSpec("y", Datatype.FP32, (3,))
    made = VisionSettings(Task.CLASSIFY, ImageSettings(), spec, (spec,), labels=("a", ""))
    assert [made.label(number) for number in range(3)] == ["a", "1", "2"]
