"""model.toml: every key is read, and every mistake names the file and the key."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.config.model import (
    AllVersions,
    ClassifySettings,
    DetectSettings,
    EmbedSettings,
    FakeSettings,
    ImageSettings,
    InstanceGroup,
    InstanceKind,
    LatestVersions,
    Mode,
    ModelConfig,
    OnnxruntimeSettings,
    SegmentSettings,
    SpecificVersions,
    Task,
    TensorConfig,
)
from carpool.config.table import every_key
from carpool.config.toml import read_toml, toml_config
from carpool.core.objectives import FixedBatching, Promise, QueueLimits, TimeoutAction
from carpool.errors import ConfigError
from carpool.extensions.cache.settings import CacheSettings, cache_settings
from later import many

PATH = Path("models/m/model.toml")

FULL = """
backend = "onnxruntime"
task = "detect"
slo_ms = 50
max_batch = 16
instances = 2
labels = "coco_labels.txt"
file = "net.onnx"
versions = [2, 1]
execution_timeout_ms = 1500
response_cache = true

[image]
size = [480, 640]
resize = "crop"
crop = 0.875
kernel = "bicubic"
mean = [1, 2.5, 3]
std = 58.0
scale = 0.5
channels = "bgr"
layout = "nhwc"

[detect]
format = "yolov8"
score = 0
iou = 0.6
per_class = false
normalized = true
max_detections = 10

[onnxruntime]
providers = ["CPUExecutionProvider"]
intra_op_threads = 2

[parameters]
a = "x"
b = 3
c = true

[[input]]
name = "images"
datatype = "FP32"
shape = [3, -1, -1]
layout = "nchw"

[[input]]
name = "more"
datatype = "INT64"
shape = [2, 3]
reshape = [6]
optional = true

[[output]]
name = "out"
datatype = "BYTES"
shape = [5]
labels = "out.txt"
"""


def read(text: str) -> ModelConfig:
    return toml_config(text, PATH)


def refused(text: str) -> str:
    with pytest.raises(ConfigError) as error:
        read(text)
    message = str(error.value)
    assert message.startswith("models/m/model.toml: ")
    return message


def test_everything_at_once() -> None:
    config = read(FULL)
    assert config == ModelConfig(
        name="m",
        image_keys=(*("size", "resize", "crop", "kernel", "mean", "std", "scale", "channels", "layout"),),
        path=Path("models/m"),
        backend="onnxruntime",
        task=Task.DETECT,
        inputs=(
            TensorConfig("images", "FP32", (3, -1, -1), layout="nchw"),
            TensorConfig("more", "INT64", (2, 3), reshape=(6,), optional=True),
        ),
        outputs=(TensorConfig("out", "BYTES", (5,), labels="out.txt"),),
        max_batch=16,
        mode=Mode.PROMISE,
        policy=Promise(slo=0.05, max_batch=16),
        instances=(InstanceGroup(2),),
        versions=SpecificVersions((1, 2)),
        file="net.onnx",
        labels="coco_labels.txt",
        execution_timeout=1.5,
        extra={"cache": CacheSettings(min_uses=1)},
        parameters={"a": "x", "b": "3", "c": "true"},
        onnxruntime=OnnxruntimeSettings(("CPUExecutionProvider",), 2, None),
        image=ImageSettings(
            (480, 640), "crop", (1, 2.5, 3), (58.0,), 0.5, "bgr", "nhwc", kernel="bicubic", crop=0.875
        ),
        detect=DetectSettings(
            "yolov8", normalized=True, score=0, iou=0.6, per_class=False, max_detections=10
        ),
    )
    assert pickle.loads(pickle.dumps(config)) == config


def test_an_empty_file_is_eager() -> None:
    config = read("")
    assert config == ModelConfig(name="m", path=Path("models/m"))
    assert config.mode is Mode.EAGER
    assert config.policy == FixedBatching(max_batch=1, across_shapes=True, max_queue=4096)
    assert pickle.loads(pickle.dumps(config)) == config


def test_empty_tables_take_the_defaults() -> None:
    config = read("[image]\n[detect]\n[fake]\n[batching]")
    assert (config.image, config.detect, config.fake) == (ImageSettings(), DetectSettings(), FakeSettings())
    assert config.backend == "fake"
    assert config.mode is Mode.FIXED


def test_tasks() -> None:
    config = read("""
    [classify]
    activation = "sigmoid"
    [segment]
    activation = "minmax"
    threshold = 0
    background = 0
    [embed]
    normalize = false
    """)
    assert config.classify == ClassifySettings("sigmoid")
    assert config.segment == SegmentSettings("minmax", 0.0, 0)
    assert config.embed == EmbedSettings(False)
    empty = read("[classify]\n[segment]\n[embed]")
    assert (empty.classify, empty.segment, empty.embed) == (
        ClassifySettings(),
        SegmentSettings(),
        EmbedSettings(),
    )


def test_a_letterbox() -> None:
    image = read('[image]\nresize = "letterbox"\npad = 0\nanchor = "top_left"').image
    assert image == ImageSettings(pad=0, anchor="top_left")
    assert (image.kernel, image.scale, image.crop) == ("auto", None, 1.0)


def test_batching() -> None:
    config = read("""
    max_batch = 32
    [batching]
    max_delay_ms = 2.5
    preferred = [16, 8]
    max_queue_size = 100
    timeout_ms = 200
    timeout_action = "delay"
    allow_timeout_override = true
    priorities = { levels = 3, default = 2 }
    [batching.level.1]
    timeout_ms = 10
    """)
    assert config.policy == FixedBatching(
        max_batch=32,
        preferred=(8, 16),
        max_delay=0.0025,
        priority_levels=3,
        default_priority=2,
        limits=QueueLimits(100, 0.2, True, TimeoutAction.DELAY),
        level_limits={1: QueueLimits(timeout=0.01)},
    )
    assert pickle.loads(pickle.dumps(config)) == config


def test_promise_and_fixed_must_be_chosen() -> None:
    assert "slo_ms and [batching] exclude each other" in refused("slo_ms = 50\n[batching]")


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ('versions = "all"', AllVersions()),
        ("versions = [3]", SpecificVersions((3,))),
        ("versions = { latest = 2 }", LatestVersions(2)),
    ],
)
def test_versions(text: str, policy: object) -> None:
    assert read(text).versions == policy


def test_instance_groups() -> None:
    config = read('[[instances]]\ncount = 2\nkind = "gpu"\ngpus = [0, 1]\n[[instances]]\nkind = "cpu"')
    assert config.instances == (
        InstanceGroup(2, InstanceKind.GPU, (0, 1)),
        InstanceGroup(1, InstanceKind.CPU),
    )


def test_curves() -> None:
    for curve in ("16+4", " 0.5 + 0 ", "1:6.2,4:9.1, 16:21"):
        assert read(f'[fake]\ncurve = "{curve}"').fake == FakeSettings(curve)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("slo_m = 5", 'unknown key "slo_m"; did you mean "slo_ms"?'),
        ("[batching]\nmax_delay = 5", 'unknown key "batching.max_delay"; did you mean "max_delay_ms"?'),
        ("max_delay_ms = 5", "it belongs in [batching]"),
        ("[image]\nslo_ms = 5", "it belongs at the top of the file"),
        ("zz = 5", "valid here: anomaly, backend, batching,"),
        ("[[input]]\ndtype = 1", 'unknown key "input[0].dtype"; did you mean "datatype"?'),
        ('backend = "onnxruntme"', 'backend cannot be "onnxruntme"; did you mean "onnxruntime"?'),
        ('task = "detection"', 'did you mean "detect"?'),
        ("task = 5", "task must be a string, not a whole number"),
        ("slo_ms = 0", "slo_ms must be above 0, not 0"),
        ("slo_ms = -5", "slo_ms must be above 0, not -5"),
        ("slo_ms = nan", "slo_ms must be above 0, not nan"),
        ("slo_ms = inf", "slo_ms must be above 0, not inf"),
        ('slo_ms = "50"', "slo_ms must be a number, not a string"),
        ("slo_ms = true", "slo_ms must be a number, not true"),
        ("slo_ms = 2020-01-01", "not a date or time"),
        ("max_batch = 1.5", "max_batch must be a whole number, not a number"),
        ("max_batch = -1", "max_batch must be 0 to 65536, not -1"),
        ("max_batch = true", "max_batch must be a whole number, not true"),
        ("instances = 0", "instances must be 1 to 1024"),
        ("instances = []", "at least one group"),
        ("instances = [5]", "instances[0] must be a table"),
        ('instances = [{kind = "cpu", gpus = [0]}]', 'does not go with kind = "cpu"'),
        ("versions = []", "versions must be"),
        ("versions = [0]", "versions must be 1 to"),
        ("versions = {}", "versions must be"),
        ('versions = "newest"', "versions must be"),
        ('labels = "../secret.txt"', "labels: "),
        ('file = "/abs.onnx"', "inside the model's folder"),
        (f'labels = "{"a" * 300}"', "inside the model's folder"),
        *(
            (f"name = {json.dumps(name)}", "cannot be a model's name")
            for name in (".hidden", "*", "m*", "$(id)", "-rf", "a/b", "a`b", "a;b", "a&b", " a", "a ", "a\nb")
        ),
        (f'name = "{"é" * 128}"', "cannot be a model's name"),
        ("execution_timeout_ms = -1", "execution_timeout_ms must be 0 or more"),
        ("response_cache = 1", "response_cache must be true or false, not a whole number"),
        ("image = 5", "image must be a table"),
        ("[image]\nsize = [1, 2, 3]", "image.size must be one number, or height and width"),
        ("[image]\nsize = 0", "image.size must be 1 to 16384"),
        ('[image]\nresize = "fit"', 'image.resize cannot be "fit"'),
        ('[image]\nkernel = "linear"', 'image.kernel cannot be "linear"; did you mean "bilinear"?'),
        ('[image]\nanchor = "left"', "image.anchor cannot be"),
        ("[image]\npad = 256", "image.pad must be 0 to 255, not 256"),
        ("[image]\npad = 0.5", "image.pad must be a whole number"),
        (
            '[image]\nresize = "stretch"\npad = 0',
            'image.pad goes with resize = "letterbox" or "line", not with "stretch"',
        ),
        ('[image]\nresize = "crop"\nanchor = "center"', "image.anchor goes with"),
        ("[image]\ncrop = 0.875", 'image.crop goes with resize = "crop", not with "letterbox"'),
        ('[image]\nresize = "crop"\ncrop = 0', "image.crop must be above 0 and at most 1, not 0"),
        ('[image]\nresize = "crop"\ncrop = 1.1', "image.crop must be above 0 and at most 1"),
        ("[image]\nmean = [1, 2]", "image.mean must be one number, or one per channel"),
        ("[image]\nmean = [true]", "image.mean must be a number, not true"),
        ("[image]\nmean = [nan]", "image.mean"),
        ("[image]\nstd = [1, 0, 1]", "image.std must be above 0, not 0"),
        ("[image]\nscale = 0", "image.scale must be above 0"),
        ('[image]\nchannels = "RGB"', "image.channels cannot be"),
        ('[image]\nlayout = "chw"', 'did you mean "nchw"?'),
        ('[detect]\nformat = "yolov9"', "detect.format cannot be"),
        ("[detect]\nscore = 1.1", "detect.score must be 0 or more and at most 1, not 1.1"),
        ('[detect]\nper_class = "no"', "detect.per_class must be true or false"),
        ("[detect]\nmax_detections = 0", "detect.max_detections must be 1 to 1000"),
        ('[classify]\nactivation = "minmax"', "classify.activation cannot be"),
        ('[segment]\nactivation = "minmx"', 'did you mean "minmax"?'),
        ("[segment]\nthreshold = 2", "segment.threshold must be 0 or more and at most 1, not 2"),
        ("[segment]\nbackground = -1", "segment.background must be 0 to"),
        ("[embed]\nnormalise = true", 'unknown key "embed.normalise"; did you mean "normalize"?'),
        ('[fake]\ncurve = "fast"', 'fake.curve must be ms per batch + ms per image, like "16+4"'),
        ('backend = "python"\n[fake]', "contradict each other"),
        ("[onnxruntime]\nproviders = [1]", "onnxruntime.providers must be a list of strings"),
        ('[onnxruntime]\nproviders = "CPU"', "onnxruntime.providers must be a list of strings, not a string"),
        ("[onnxruntime]\nintra_op_threads = 0", "onnxruntime.intra_op_threads must be 1 to 1024"),
        ("parameters = 5", "parameters must be a table"),
        ("[parameters]\nx = []", "parameters.x must be a string"),
        ("[[input]]\nname = 'i'", "input[0] needs name, datatype and shape"),
        ("[[input]]\nname='i'\ndatatype='fp32'\nshape=[1]", 'input[0].datatype cannot be "fp32"'),
        ("[[input]]\nname='i'\ndatatype='FP32'\nshape=[0]", "input[0].shape: a dimension must be"),
        ("[[input]]\nname='i'\ndatatype='FP32'\nshape=[4]\nreshape=[3]", "differ in their elements"),
        ("[[input]]\nname='i'\ndatatype='FP32'\nshape=[4]\n" * 2, '"i" is declared twice'),
        ("[[output]]\noptional = true", "it belongs in [input]"),
        ("[batching]\npreferred = 8", "batching.preferred must be a list of whole numbers"),
        ("max_batch = 4\n[batching]\npreferred = [8]", "preferred batch 8 is larger"),
        ("[batching]\nmax_delay_ms = -1", "batching.max_delay_ms must be 0 or more"),
        ('[batching]\ntimeout_action = "drop"', "batching.timeout_action cannot be"),
        ("[batching]\npriorities = 3", "batching.priorities must be a table"),
        ("[batching.priorities]\nlevels = 3", "batching.priorities needs both levels and default"),
        ("[batching.priorities]\nlevels = 2\ndefault = 3", "default priority must be 1 to 2, not 3"),
        ("[batching.level.1]\ntimeout_ms = 5", "priority level 1 has queue limits"),
        ("[batching.level.one]\ntimeout_ms = 5", 'one table per priority level, not "one"'),
        ("[batching]\nlevel = 1", "one table per priority level"),
        ("[batching.level.1]\nmax_delay_ms = 5", "it belongs in [batching]"),
        ("= 5", "Invalid"),
        ("slo_ms = " + "9" * 5000, ""),
    ],
)
def test_mistakes(text: str, words: str) -> None:
    assert words in refused(text)


def test_every_table_is_known_from_its_parent() -> None:
    for section in every_key():
        parent, _, key = section.rpartition(".")
        assert section == "" or key in every_key()[parent]


def test_files(tmp_path: Path) -> None:
    file = tmp_path / "model.toml"
    file.write_text("slo_ms = 5")
    assert read_toml(file).name == tmp_path.name
    assert read_toml(file, "other").name == "other"
    file.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="UTF-8"):
        read_toml(file)


VALUES = st.sampled_from(
    ["1", "-1", "0.5", "true", '"x"', "[]", "[1]", "{}", "[{}]", "nan", "1979-05-27", "{a = 1}"]
)


@settings(max_examples=many(100), deadline=None)
@given(st.dictionaries(st.sampled_from(every_key()[""]), VALUES, max_size=4))
def test_any_values_give_a_config_or_a_config_error(pairs: dict[str, str]) -> None:
    try:
        outcome = str(read("\n".join(f"{key} = {value}" for key, value in pairs.items())).path)
    except ConfigError as error:
        outcome = str(error)
    assert outcome.startswith("models/m")


def test_a_cache() -> None:
    config = read('[cache]\nsimilar = true\nsimilar_hash = "phash"\nsimilar_threshold = 4\nttl_s = 5\n')
    said = cache_settings(config)
    assert said == CacheSettings(similar=True, similar_hash="phash", similar_threshold=4, ttl_s=5.0)
    assert cache_settings(read("response_cache = true")) == CacheSettings(min_uses=1)
    assert read("[cache]\nexact = false").extra == {}


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("ttl_s = 0", "cache.ttl_s must be above 0 and at most 86400"),
        ("similar = 1", "cache.similar must be true or false"),
        ("similar_grey = 256", "cache.similar_grey must be 0 or more and at most 255"),
        ('similar_hash = "dhash"', 'cache.similar_hash cannot be "dhash"'),
        ("similar_threshold = 65", "cache.similar_threshold must be 0 to 64"),
        ('scope = "all"', 'cache.scope cannot be "all"'),
        ("audit = 1.5", "cache.audit must be 0 or more and at most 1"),
        ("entry_kb = 0", "cache.entry_kb must be 1 to 65536"),
        ("similiar = true", "did you mean"),
    ],
)
def test_a_cache_that_cannot_be(line: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(complaint)):
        toml_config(f"[cache]\n{line}", Path("m/model.toml"))
