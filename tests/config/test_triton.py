"""config.pbtxt as Triton users have it: every field that is used, and the rules between them."""

from __future__ import annotations

from pathlib import Path

import pytest

from absent import needs
from carpool.config.model import (
    AllVersions,
    InstanceGroup,
    InstanceKind,
    LatestVersions,
    Mode,
    ModelConfig,
    SpecificVersions,
    TensorConfig,
)
from carpool.config.triton import pbtxt_config
from carpool.core.objectives import FixedBatching, QueueLimits, TimeoutAction
from carpool.errors import ConfigError
from carpool.extensions.cache.settings import CacheSettings

PATH = Path("models/m/config.pbtxt")

RESNET = """
name: "resnet50_trt"
platform: "tensorrt_plan"
max_batch_size: 32  # the most that runs at once
input [ { name: "input" data_type: TYPE_FP16 dims: [3, 224, 224] } ]
output [ { name: "logits" data_type: TYPE_FP16 dims: [1000] } ]
dynamic_batching {  # gather requests
  preferred_batch_size: [ 8, 16, 32 ]
  max_queue_delay_microseconds: 5000
}
instance_group [
  { count: 2 kind: KIND_GPU }
]
"""

YOLO = """
name: "yolov8_detector"
backend: "tensorrt"
max_batch_size: 64
input [{ name: "images" data_type: TYPE_FP32 dims: [3, 640, 640] }]
output [{ name: "output0" data_type: TYPE_FP32 dims: [-1, 8400] }]
dynamic_batching {
  preferred_batch_size: [8, 16, 32, 64]
  max_queue_delay_microseconds: 5000
}
instance_group [{ kind: KIND_GPU count: 2 }]
"""

IO = 'input { name: "i" data_type: TYPE_FP32 dims: 4 } output { name: "o" data_type: TYPE_FP32 dims: 2 }\n'


def read(text: str) -> ModelConfig:
    return pbtxt_config(text, PATH)[0]


def fixed(text: str) -> FixedBatching:
    config = read("max_batch_size: 32 dynamic_batching {" + text + "}")
    assert config.mode is Mode.FIXED
    assert isinstance(config.policy, FixedBatching)
    return config.policy


def refused(text: str) -> str:
    with pytest.raises(ConfigError) as error:
        read(text)
    return str(error.value)


@needs("torch")
def test_a_classifier_for_tensorrt() -> None:
    config, warnings = pbtxt_config(RESNET, PATH)
    assert warnings == []
    assert (config.name, config.backend, config.max_batch) == ("resnet50_trt", "tensorrt", 32)
    assert config.inputs == (TensorConfig("input", "FP16", (3, 224, 224)),)
    assert config.outputs == (TensorConfig("logits", "FP16", (1000,)),)
    assert config.policy == FixedBatching(
        max_batch=32, preferred=(8, 16, 32), max_delay=0.005, level_limits={}
    )
    assert config.instances == (InstanceGroup(2, InstanceKind.GPU),)


def test_a_detector_for_tensorrt() -> None:
    config, warnings = pbtxt_config(YOLO, PATH)
    assert warnings == []
    assert (config.name, config.backend, config.max_batch) == ("yolov8_detector", "tensorrt", 64)
    assert config.outputs == (TensorConfig("output0", "FP32", (-1, 8400)),)
    assert isinstance(config.policy, FixedBatching)
    assert config.policy.preferred == (8, 16, 32, 64)


def test_an_empty_file_leaves_everything_to_the_model() -> None:
    config = read("")
    assert (config.name, config.path, config.backend, config.max_batch) == ("m", PATH.parent, None, None)
    assert config.mode is Mode.EAGER
    assert config.versions == LatestVersions(1)


@pytest.mark.parametrize(
    ("text", "max_batch"),
    [
        ("", None),
        ("max_batch_size: 0", None),
        (IO, 0),
        (IO + "max_batch_size: 0", 0),
        ("max_batch_size: 1", 1),
    ],
)
def test_max_batch_size(text: str, max_batch: int | None) -> None:
    config = read(text)
    assert config.max_batch == max_batch
    assert config.policy.max_batch == 1


def test_every_batching_field() -> None:
    policy = fixed("""
      preferred_batch_size: 16 preferred_batch_size: 8
      max_queue_delay_microseconds: 250
      priority_levels: 3 default_priority_level: 2
      default_queue_policy {
        max_queue_size: 5 default_timeout_microseconds: 1000 allow_timeout_override: true
      }
      priority_queue_policy { key: 1 value { timeout_action: DELAY default_timeout_microseconds: 500000 } }
      priority_queue_policy [ { key: 3, value: { max_queue_size: 1 } } ]
    """)
    assert policy == FixedBatching(
        max_batch=32,
        preferred=(8, 16),
        max_delay=0.00025,
        priority_levels=3,
        default_priority=2,
        limits=QueueLimits(5, 0.001, True),
        level_limits={1: QueueLimits(timeout=0.5, action=TimeoutAction.DELAY), 3: QueueLimits(1)},
    )
    assert fixed("preserve_ordering: true").preserve_ordering


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("preferred_batch_size: 64", "preferred batch 64 is larger"),
        ("preferred_batch_size: 0", "1 or more"),
        ("priority_levels: 2", "default priority must be 1 to 2, not 0"),
        ("priority_levels: 2 default_priority_level: 3", "default priority"),
        (
            "priority_levels: 18446744073709551616 default_priority_level: 1",
            "takes a whole number from 0 to 18446744073709551615",
        ),
        (
            "priority_levels: 2 default_priority_level: 1 priority_queue_policy { key: 3 value {} }",
            "priority level 3",
        ),
        ("priority_levels: 2 default_priority_level: 1 preserve_ordering: true", "one priority level"),
        (
            "preserve_ordering: true "
            "default_queue_policy { timeout_action: DELAY default_timeout_microseconds: 1 }",
            "DELAY",
        ),
    ],
)
def test_batching_rules(text: str, words: str) -> None:
    assert words in refused("max_batch_size: 32 dynamic_batching {" + text + "}")


def test_limits_of_levels_without_levels_have_no_effect() -> None:
    config, warnings = pbtxt_config("dynamic_batching { priority_queue_policy { key: 9 value {} } }", PATH)
    assert isinstance(config.policy, FixedBatching)
    assert config.policy.level_limits == {}
    assert warnings == [f"{PATH}: no effect here: dynamic_batching.priority_queue_policy"]


def test_tensor_fields() -> None:
    config = read("""
      input { name: "i" data_type: TYPE_UINT8 format: FORMAT_NHWC dims: [-1, -1, 3] optional: true }
      input { name: "s" data_type: TYPE_STRING dims: 1 reshape { shape: [] } }
      output { name: "o" data_type: 14 dims: [ 2, 3 ] reshape { shape: 6 } label_filename: "labels.txt" }
      max_batch_size: 4
    """)
    assert config.inputs == (
        TensorConfig("i", "UINT8", (-1, -1, 3), optional=True, layout="nhwc"),
        TensorConfig("s", "BYTES", (1,), reshape=()),
    )
    assert config.outputs == (TensorConfig("o", "BF16", (2, 3), reshape=(6,), labels="labels.txt"),)
    assert config.labels == "labels.txt"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("input { data_type: TYPE_FP32 dims: 1 }", "has no name"),
        ('input { name: "i" dims: 1 }', 'input "i" has no data_type'),
        ('input { name: "i" data_type: TYPE_FP32 }', "has no dims"),
        ('input { name: "i" data_type: TYPE_INVALID dims: 1 }', "has no data_type"),
        ('input { name: "i" data_type: TYPE_FP32 dims: [] }', "has no dims"),
        ('input { name: "i" data_type: TYPE_FP32 dims: 0 }', "dimension must be 1 or more"),
        ('input { name: "i" data_type: TYPE_FP32 dims: -2 }', "dimension must be 1 or more"),
        ('input { name: "i" data_type: FP32 dims: 1 }', 'did you mean "TYPE_FP32"?'),
        (
            'input { name: "i" data_type: TYPE_FP32 dims: 4 reshape { shape: [3] } }',
            "differ in their elements",
        ),
        (
            'input { name: "i" data_type: TYPE_FP32 dims: [2, -1, 3] reshape { shape: [3, -1, 2] } }',
            "differ in their elements",
        ),
        ('input { name: "i" data_type: TYPE_FP32 dims: 4 format: FORMAT_NCHW }', "needs 3 dims"),
        (IO + 'input { name: "j" data_type: TYPE_FP32 dims: 1 reshape {} }', "empty reshape"),
        ('input { name: "i" data_type: TYPE_FP32 dims: 1 } ' * 2, "declared twice"),
        (
            'output { name: "o" data_type: TYPE_FP32 dims: 1 label_filename: "../x" }',
            "inside the model's folder",
        ),
        ('input { name: "i" data_type: TYPE_FP32 dims: [' + "1," * 40 + "1] }", "41 dimensions"),
    ],
)
def test_tensor_rules(text: str, words: str) -> None:
    message = refused(text)
    assert words in message
    assert message.startswith("models/m/config.pbtxt:")


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("version_policy { latest { num_versions: 3 } }", LatestVersions(3)),
        ("version_policy: { all { } }", AllVersions()),
        ("version_policy { specific { versions: [3, 1] } }", SpecificVersions((1, 3))),
        ("version_policy { }", LatestVersions(1)),
    ],
)
def test_version_policy(text: str, policy: object) -> None:
    assert read(text).versions == policy


def test_instances() -> None:
    config = read("""
      instance_group { kind: KIND_CPU count: 3 name: "cpus" }
      instance_group { gpus: [0, 1] }
      instance_group { kind: KIND_MODEL }
    """)
    assert config.instances == (
        InstanceGroup(3, InstanceKind.CPU, name="cpus"),
        InstanceGroup(1, InstanceKind.AUTO, (0, 1)),
        InstanceGroup(1, InstanceKind.MODEL),
    )


def test_parameters_cache_and_file() -> None:
    config = read("""
      parameters { key: "intra_op_thread_count" value: { string_value: "2" } }
      parameters { key: "inter_op_thread_count" value: { string_value: "0" } }
      parameters { key: "mine" value { string_value: "x" "y" } }
      parameters { key: "empty" }
      response_cache { enable: true }
      default_model_filename: "net.onnx"
      model_transaction_policy { decoupled: false }
      batch_input []
    """)
    assert config.parameters["mine"] == "xy"
    assert config.parameters["empty"] == ""
    assert (config.onnxruntime.intra_op_threads, config.onnxruntime.inter_op_threads) == (2, None)
    assert config.extra == {"cache": CacheSettings(min_uses=1)}
    assert config.file == "net.onnx"


@pytest.mark.parametrize("levels", [65_536, 2**32, 2**64 - 1])
def test_as_many_priority_levels_as_triton_takes(levels: int) -> None:
    text = (
        f"max_batch_size: 4 dynamic_batching {{ priority_levels: {levels} default_priority_level: {levels} }}"
    )
    config, _ = pbtxt_config(text, Path("/m/config.pbtxt"))
    assert isinstance(config.policy, FixedBatching)
    assert (config.policy.priority_levels, config.policy.default_priority) == (levels, levels)


def test_a_preset_is_a_parameter_of_ours() -> None:
    text = 'parameters [ { key: "carpool_preset" value: { string_value: "%s" } } ]'
    config, warnings = pbtxt_config(text % "torchvision", PATH)
    assert (config.preset, warnings) == ("torchvision", [])
    assert config.image is not None
    assert config.image.resize == "crop"
    with pytest.raises(ConfigError, match='"carpool_preset" cannot be "torch"'):
        pbtxt_config(text % "torch", PATH)
