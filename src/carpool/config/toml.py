"""model.toml → ModelConfig. Every key is known, typed and in range, or the error names it."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from carpool.config import rules
from carpool.config.backend_kinds import kinds
from carpool.config.model import (
    AllVersions,
    ClassifySettings,
    DepthSettings,
    DetectSettings,
    EmbedSettings,
    FakeSettings,
    ImageSettings,
    InstanceGroup,
    Kind,
    LatestVersions,
    Mode,
    ModelConfig,
    ObbSettings,
    OnnxruntimeSettings,
    PoseSettings,
    PytorchSettings,
    SegmentSettings,
    SpecificVersions,
    TensorConfig,
    VersionPolicy,
    eager_policy,
    task_names,
)
from carpool.config.table import Table
from carpool.core.policy import Knobs, Promise, QueueLimits, TimeoutAction
from carpool.errors import ConfigError
from carpool.types import DATATYPES

Section = TypeVar("Section")

MAX_VERSION = 10**18
RESIZES = ("letterbox", "stretch", "crop")
KERNELS = ("auto", "area", "bilinear", "bicubic")
ANCHORS = ("center", "top_left")
CHANNELS = ("rgb", "bgr")
LAYOUTS = ("nchw", "nhwc")
WHERE = ("auto", "cpu", "device")
HEAD_FORMATS = ("yolov5", "yolov8", "end2end")
DETECT_FORMATS = (*HEAD_FORMATS, "boxes_scores", "boxes_labels_scores", "detr", "rtdetr")
SEGMENT_FORMATS = (*HEAD_FORMATS, "maps")
BOX_FORMS = ("corners", "centers", "corners_yx")
MAX_KEYPOINTS = 1024
MAX_DETECTIONS = 1000
CLASS_ACTIVATIONS = ("softmax", "sigmoid", "none")
MAP_ACTIVATIONS = (*CLASS_ACTIVATIONS, "minmax")
MAX_CLASSES = 1 << 15
MAX_SIDE = 16384
MAX_THREADS = 1024

_NUMBER = r"\d{1,9}(?:\.\d{1,9})?"
_CURVE = re.compile(
    rf"\s*{_NUMBER}\s*\+\s*{_NUMBER}\s*|\s*\d{{1,5}}:{_NUMBER}(?:\s*,\s*\d{{1,5}}:{_NUMBER})*\s*"
)
PRECISIONS = ("fp32", "tf32", "fp16", "bf16")
COMPILE_MODES = ("default", "max-autotune")
_DEVICE = re.compile(r"auto|cpu|cuda(:\d{1,4})?")
_MODULE = re.compile(r"(?P<file>[^:]+\.py)(?::(?P<function>[A-Za-z_]\w*))?")
BUILD = "build"  # the function that a module file has, where none is named


def read_toml(path: Path, name: str | None = None) -> ModelConfig:
    """The settings in one model.toml; `name` is for a file that gives none, by default its folder's."""
    return toml_config(rules.read_settings(path), path, name)


def toml_config(text: str, path: Path, name: str | None = None) -> ModelConfig:
    """The same from text; `path` names the file in messages and its folder is the model's."""
    try:
        data = tomllib.loads(text)
    except RecursionError:
        raise ConfigError(f"{path}: nested too deep") from None
    except ValueError as error:  # also what int() says about thousands of digits
        raise ConfigError(f"{path}: {error}") from None
    return _model(Table.checked(str(path), "", "", data), path, name or path.parent.name)


def _model(top: Table, path: Path, name: str) -> ModelConfig:
    max_batch = top.integer("max_batch", 0, rules.MAX_BATCH)
    mode, policy = _policy(top)
    timeout_ms = top.number("execution_timeout_ms", 0)
    task = top.text("task", task_names()) if top.has("task") else None
    config = ModelConfig(
        name=rules.check_name(top.text("name") or name, top.where("name")),
        path=path.parent,
        backend=_backend(top),
        task=next((known for known in task_names() if known == task), None),
        inputs=_tensors(top, "input", max_batch),
        outputs=_tensors(top, "output", max_batch),
        mode=mode,
        policy=policy,
        slo_may_grow=_may_grow(top, mode),
        instances=_instances(top),
        versions=_versions(top),
        file=_inside(top, "file"),
        labels=_inside(top, "labels"),
        execution_timeout=None if timeout_ms is None else timeout_ms / 1e3,
        response_cache=top.flag("response_cache"),
        device_weight=_weight(top),
        parameters=_parameters(top),
        onnxruntime=_section(top, "onnxruntime", _onnxruntime) or OnnxruntimeSettings(),
        pytorch=_section(top, "pytorch", _pytorch) or PytorchSettings(),
        image=_section(top, "image", _image),
        detect=_section(top, "detect", _detect),
        classify=_section(top, "classify", _classify),
        segment=_section(top, "segment", _segment),
        pose=_section(top, "pose", _pose),
        obb=_section(top, "obb", _obb),
        depth=_section(top, "depth", _depth),
        embed=_section(top, "embed", _embed),
        fake=_section(top, "fake", _fake),
    )
    if max_batch is None:
        return config
    return rules.with_max_batch(config, max_batch, top.where("batching"))


def _backend(top: Table) -> str | None:
    """As it is named, or as the table of one tells: [fake] and [pytorch] say things that no other runs."""
    backend = top.text("backend", kinds())
    for name in (kind.name for kind in kinds().values() if kind.table and top.has(kind.name)):
        if backend not in (None, name):
            raise ConfigError(
                f'{top.file}: [{name}] and backend = "{backend}" contradict each other; remove one'
            )
        backend = name
    return backend


def _weight(top: Table) -> float:
    weight = top.number("device_weight", 0, above=True)
    if weight is not None and not 0.001 <= weight <= 1000:
        raise top.error("device_weight", "must be between 0.001 and 1000: twice another's is twice its time")
    return 1.0 if weight is None else weight


def _inside(table: Table, key: str) -> str | None:
    name = table.text(key)
    return None if name is None else rules.check_inside(name, table.where(key))


def _policy(top: Table) -> tuple[Mode, Promise | Knobs]:
    slo_ms = top.number("slo_ms", 0, above=True)
    batching = top.table("batching")
    if slo_ms is not None and batching is not None:
        raise ConfigError(
            f"{top.file}: slo_ms and [batching] are two ways to run a model; keep slo_ms for a promise, "
            "or [batching] to set the knobs yourself"
        )
    if slo_ms is not None:
        return Mode.PROMISE, Promise(slo=slo_ms / 1e3, max_batch=1)
    if batching is not None:
        return Mode.KNOBS, _knobs(batching)
    return Mode.EAGER, eager_policy()


def _may_grow(top: Table, mode: Mode) -> bool:
    grows = top.flag("slo_may_grow")
    if grows and mode is not Mode.PROMISE:
        raise top.error("slo_may_grow", "needs slo_ms: without a promise nothing can grow")
    return grows


def _knobs(batching: Table) -> Knobs:
    priorities = batching.table("priorities")
    levels, default = 0, 0
    if priorities is not None:
        levels = priorities.integer("levels", 1, rules.MAX_PRIORITY_LEVELS) or 0
        default = priorities.integer("default", 1, rules.MAX_PRIORITY_LEVELS) or 0
        if not levels or not default:
            raise batching.error("priorities", "needs both levels and default")
    knobs = Knobs(
        max_batch=1,
        preferred=tuple(sorted(set(batching.integers("preferred", 1, rules.MAX_BATCH) or ()))),
        max_delay=(batching.number("max_delay_ms", 0) or 0.0) / 1e3,
        priority_levels=levels,
        default_priority=default,
        limits=_limits(batching),
        level_limits=_level_limits(batching),
        preserve_ordering=batching.flag("preserve_ordering"),
    )
    return rules.check_knobs(knobs, f"{batching.file}: {batching.path}")


def _limits(table: Table) -> QueueLimits:
    action = table.text("timeout_action", [action.value for action in TimeoutAction])
    return QueueLimits(
        max_size=table.integer("max_queue_size", 0, 2**32 - 1) or 0,
        timeout=(table.number("timeout_ms", 0) or 0.0) / 1e3,
        allow_override=table.flag("allow_timeout_override"),
        action=TimeoutAction(action) if action else TimeoutAction.REJECT,
    )


def _level_limits(batching: Table) -> dict[int, QueueLimits]:
    """[batching.level.N]: N is the level, so these keys are numbers and not names."""
    levels = batching.data.get("level", {})
    if not isinstance(levels, dict):
        raise batching.error("level", "holds one table per priority level, like [batching.level.1]")
    limits = {}
    for key, data in levels.items():
        if not key.isascii() or not key.isdigit() or len(key) > 5:
            raise batching.error("level", f"holds one table per priority level, not {rules.shown(key)}")
        path = f"{batching.name('level')}.{key}"
        limits[int(key)] = _limits(Table.checked(batching.file, path, "batching.level", data))
    return limits


def _instances(top: Table) -> tuple[InstanceGroup, ...]:
    if isinstance(top.data.get("instances"), list):
        groups = tuple(_instance(table) for table in top.tables("instances"))
        if not groups:
            raise top.error("instances", "must name at least one group")
        return groups
    count = top.integer("instances", 1, rules.MAX_INSTANCES)
    return (InstanceGroup(given=False) if count is None else InstanceGroup(count),)


def _instance(table: Table) -> InstanceGroup:
    kind = Kind(table.text("kind", list(Kind)) or Kind.AUTO)
    gpus = table.integers("gpus", 0, 1023) or ()
    if gpus and kind in (Kind.CPU, Kind.MODEL):
        raise table.error("gpus", f'does not go with kind = "{kind}"')
    return InstanceGroup(table.integer("count", 1, rules.MAX_INSTANCES) or 1, kind, gpus)


def _versions(top: Table) -> VersionPolicy:
    value = top.data.get("versions")
    if value is None:
        return LatestVersions()
    if value == "all":
        return AllVersions()
    if isinstance(value, list):
        versions = top.integers("versions", 1, MAX_VERSION) or ()
        if versions:
            return SpecificVersions(tuple(sorted(set(versions))))
    if isinstance(value, dict):
        table = Table.checked(top.file, "versions", "versions", value)
        latest = table.integer("latest", 1, MAX_VERSION)
        if latest:
            return LatestVersions(latest)
    raise top.error("versions", 'must be "all", a list like [1, 3], or { latest = 2 }')


def _parameters(top: Table) -> dict[str, str]:
    """Free names for the model's own use, so only the types are checked; numbers are passed on as written."""
    data = top.data.get("parameters", {})
    if not isinstance(data, dict):
        raise top.error("parameters", "must be a table")
    for key, value in data.items():
        if not isinstance(value, str | int | float):
            raise top.error(f"parameters.{key[:64]}", "must be a string, a number, true or false")
    return {key: str(value).lower() if isinstance(value, bool) else str(value) for key, value in data.items()}


def _tensors(top: Table, key: str, max_batch: int | None) -> tuple[TensorConfig, ...]:
    tensors = [_tensor(table, max_batch) for table in top.tables(key)]
    return rules.check_distinct(tensors, f"{top.file}: {key}")


def _tensor(table: Table, max_batch: int | None) -> TensorConfig:
    name, datatype = table.text("name"), table.text("datatype", DATATYPES)
    shape = table.integers("shape", -1, 2**62)
    if not name or not datatype or shape is None:
        raise ConfigError(f"{table.file}: {table.path} needs name, datatype and shape")
    reshape = table.integers("reshape", -1, 2**62)
    tensor = TensorConfig(
        name=name,
        datatype=datatype,
        dims=rules.check_dims(shape, table.where("shape")),
        reshape=None if reshape is None else rules.check_dims(reshape, table.where("reshape")),
        labels=_inside(table, "labels"),
        optional=table.flag("optional"),
        layout=table.text("layout", LAYOUTS),
    )
    return rules.check_tensor(tensor, f"{table.file}: {table.path}", max_batch)


# ---- tables that describe pictures and runtimes ------------------------------------------------------------


def _section(top: Table, key: str, read: Callable[[Table], Section]) -> Section | None:
    table = top.table(key)
    return None if table is None else read(table)


def _given(settings: Callable[..., Section], **values: object) -> Section:
    """What is said; the rest is as the settings have it by themselves."""
    return settings(**{name: value for name, value in values.items() if value is not None})


def _image(table: Table) -> ImageSettings:
    resize = table.text("resize", RESIZES) or ImageSettings().resize
    _check_only_for(table, resize, {"pad": "letterbox", "anchor": "letterbox", "crop": "crop"})
    return _given(
        ImageSettings,
        size=_size(table),
        resize=resize,
        mean=_per_channel(table, "mean", table.numbers("mean", float("-inf"))),
        std=_per_channel(table, "std", table.numbers("std", 0, above=True)),
        scale=table.number("scale", 0, above=True),
        channels=table.text("channels", CHANNELS),
        layout=table.text("layout", LAYOUTS),
        kernel=table.text("kernel", KERNELS),
        pad=table.integer("pad", 0, 255),
        anchor=table.text("anchor", ANCHORS),
        crop=table.number("crop", 0, 1, above=True),
        decode=table.text("decode", WHERE),
    )


def _check_only_for(table: Table, resize: str, needs: Mapping[str, str]) -> None:
    """A key that another way to resize would ignore is a mistake."""
    for key, needed in needs.items():
        if table.has(key) and resize != needed:
            raise table.error(key, f'goes with resize = "{needed}", not with "{resize}"')


def _size(table: Table) -> tuple[int, int] | None:
    """One number for a square, or height and width."""
    if not isinstance(table.data.get("size"), list):
        side = table.integer("size", 1, MAX_SIDE)
        return None if side is None else (side, side)
    sides = table.integers("size", 1, MAX_SIDE) or ()
    if len(sides) != 2:
        raise table.error("size", f"must be one number, or height and width, not {len(sides)} numbers")
    return sides[0], sides[1]


def _per_channel(table: Table, key: str, values: tuple[float, ...] | None) -> tuple[float, ...] | None:
    if values is not None and len(values) not in (1, 3):
        raise table.error(key, f"must be one number, or one per channel, not {len(values)} numbers")
    return values


def _chosen_boxes(table: Table) -> dict[str, object]:
    return {
        "score": table.number("score", 0, 1),
        "iou": table.number("iou", 0, 1),
        "per_class": table.switch("per_class"),
        "max_detections": table.integer("max_detections", 1, MAX_DETECTIONS),
    }


def _detect(table: Table) -> DetectSettings:
    return _given(
        DetectSettings,
        format=table.text("format", DETECT_FORMATS),
        normalized=table.switch("normalized"),
        boxes=table.text("boxes", BOX_FORMS),
        activation=table.text("activation", CLASS_ACTIVATIONS),
        background=table.integer("background", 0, MAX_CLASSES - 1),
        nms=table.text("nms", WHERE),
        **_chosen_boxes(table),
    )


def _classify(table: Table) -> ClassifySettings:
    return ClassifySettings(table.text("activation", CLASS_ACTIVATIONS))


def _segment(table: Table) -> SegmentSettings:
    return _given(
        SegmentSettings,
        activation=table.text("activation", MAP_ACTIVATIONS),
        threshold=table.number("threshold", 0, 1),
        background=table.integer("background", 0, MAX_CLASSES - 1),
        format=table.text("format", SEGMENT_FORMATS),
        **_chosen_boxes(table),
    )


def _pose(table: Table) -> PoseSettings:
    keypoints = table.integers("keypoints", 1, MAX_KEYPOINTS)
    if keypoints is not None and (len(keypoints) != 2 or keypoints[1] not in (2, 3)):
        raise table.error("keypoints", "must be how many there are, and 2 or 3 numbers each, like [17, 3]")
    return _given(
        PoseSettings,
        format=table.text("format", HEAD_FORMATS),
        keypoints=keypoints,
        **_chosen_boxes(table),
    )


def _obb(table: Table) -> ObbSettings:
    return _given(ObbSettings, format=table.text("format", HEAD_FORMATS), **_chosen_boxes(table))


def _depth(table: Table) -> DepthSettings:
    return DepthSettings(table.switch("inverse"))


def _embed(table: Table) -> EmbedSettings:
    return _given(EmbedSettings, normalize=table.switch("normalize"))


def _fake(table: Table) -> FakeSettings:
    curve = table.text("curve") or FakeSettings().curve
    if not _CURVE.fullmatch(curve):
        raise table.error(
            "curve",
            f'must be ms per batch + ms per image, like "16+4", or batch:ms points, not {rules.shown(curve)}',
        )
    return FakeSettings(curve, table.text("device") or "")


def _onnxruntime(table: Table) -> OnnxruntimeSettings:
    return OnnxruntimeSettings(
        providers=table.texts("providers"),
        intra_op_threads=table.integer("intra_op_threads", 1, MAX_THREADS),
        inter_op_threads=table.integer("inter_op_threads", 1, MAX_THREADS),
    )


def _pytorch(table: Table) -> PytorchSettings:
    device = table.text("device") or None
    if device is not None and not _DEVICE.fullmatch(device):
        raise table.error(
            "device", f'must be "auto", "cpu", "cuda" or like "cuda:1", not {rules.shown(device)}'
        )
    return _given(
        PytorchSettings,
        device=device,
        precision=table.text("precision", PRECISIONS),
        channels_last=table.switch("channels_last"),
        compile=_compile(table),
        graphs=table.switch("graphs"),
        buckets=tuple(sorted(set(table.integers("buckets", 1, rules.MAX_BATCH) or ()))),
        module=_module(table),
        weights=_inside(table, "weights"),
    )


def _compile(table: Table) -> str:
    if isinstance(table.data.get("compile"), str):
        return table.text("compile", COMPILE_MODES) or "off"
    return "default" if table.flag("compile") else "off"


def _module(table: Table) -> str | None:
    """A file of the version's folder and a function in it."""
    text = table.text("module")
    if text is None:
        return None
    found = _MODULE.fullmatch(text)
    if found is None:
        raise table.error(
            "module", f'must name a file and a function, like "model.py:build", not {rules.shown(text)}'
        )
    file = rules.check_inside(found["file"], table.where("module"))
    return f"{file}:{found['function'] or BUILD}"
