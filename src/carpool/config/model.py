"""Describes what is known about one model before its file is opened. Plain data; durations are seconds."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from carpool.config.backend_kinds import kind_of
from carpool.core.objectives import FixedBatching, Promise
from carpool.extensions import installed

DEFAULT_MAX_BATCH = 32  # for a model that can batch, where no setting says how far
BATCH_HELP = (
    "export it with a batch axis (Ultralytics: dynamic=True, RF-DETR: dynamic_batch=True) or one tower; "
    "max_batch = 1 accepts it"
)
"""What helps a model whose requests never share a batch."""
DYNAMIC = -1  # a dimension that differs from request to request


class Mode(enum.StrEnum):
    """Names who decides when a batch leaves."""

    PROMISE = "promise"
    FIXED = "knobs"
    EAGER = "eager"  # neither was asked for: whatever waits runs at once


TASK_GROUP = "carpool.tasks"
"""Entry points of packages that bring more."""


class Task(enum.StrEnum):
    """Names the tasks of this package."""

    CLASSIFY = "classify"
    DETECT = "detect"
    SEGMENT = "segment"
    POSE = "pose"
    OBB = "obb"
    DEPTH = "depth"
    EMBED = "embed"
    TEXT_REGIONS = "text_regions"
    READ = "read"
    CAPTION = "caption"
    ANOMALY = "anomaly"
    RESTORE = "restore"
    RAW = "raw"

    @property
    def route(self) -> str:
        """Returns where any model of the task can be asked; none: only by the model's name."""
        return "" if self is Task.RAW else f"/{self}"


@cache
def task_names() -> tuple[str, ...]:
    """Returns the names of all that there are; nothing of another package is imported to know them."""
    return (*Task, *(point.name for point in entry_points(group=TASK_GROUP)))


class InstanceKind(enum.StrEnum):
    """Names where an instance runs; `model` leaves it to the backend."""

    AUTO = "auto"
    CPU = "cpu"
    GPU = "gpu"
    MODEL = "model"


@dataclass(frozen=True, slots=True)
class TensorConfig:
    """One input or output as clients see it; `dims` leaves the batch out."""

    name: str
    datatype: str
    dims: tuple[int, ...]
    reshape: tuple[int, ...] | None = None  # the shape the model itself wants, where it differs
    labels: str | None = None  # file name inside the model's folder
    optional: bool = False
    layout: str | None = None  # "nchw" or "nhwc"


@dataclass(frozen=True, slots=True)
class InstanceGroup:
    """`count` instances; on GPUs, that many on each GPU listed (none listed: on each GPU there is)."""

    count: int = 1
    kind: InstanceKind = InstanceKind.AUTO
    gpus: tuple[int, ...] = ()
    name: str = ""
    given: bool = True  # False: not set, so that another number may be measured to be better


@dataclass(frozen=True, slots=True)
class LatestVersions:
    count: int = 1


@dataclass(frozen=True, slots=True)
class AllVersions:
    pass


@dataclass(frozen=True, slots=True)
class SpecificVersions:
    versions: tuple[int, ...]


VersionPolicy = LatestVersions | AllVersions | SpecificVersions


# ---- tables of model.toml, as they are there: each field is a key. What may stand there follows from its
# type and from what `key` says; declared_keys.py reads them so.


def key(default: Any, *choices: str, **said: Any) -> Any:
    """Declares a key, with `within`: the least, which `above` leaves out itself, and the most; `resize`: the
    only ways to resize that it goes with; `pattern` and `form`: of a text, and how a message names that."""
    return field(default=default, metadata={"choices": choices, **said})


INFINITY = float("inf")
LAYOUTS = ("nchw", "nhwc")
PILLOW = ("pil-bilinear", "pil-bicubic", "pil-lanczos", "pil-nearest")
"""Kernels that see every pixel and place the picture to a fraction of one: what Pillow computes, and so
torchvision, timm and transformers. The others are OpenCV's."""
KERNELS = ("auto", "area", "bilinear", "bicubic", *PILLOW)
MAX_SIDE = 16384
MAX_DETECTIONS = 1000
MAX_REGIONS = 1000
MAX_CLASSES = 1 << 15
MAX_KEYPOINTS = 1024
_WHERE = ("auto", "cpu", "device")
_ACTIVATIONS = ("softmax", "sigmoid", "none")
_HEADS = ("yolov5", "yolov8", "end2end")
_BOXES = ("boxes_scores", "boxes_labels_scores", "detr", "rtdetr", "yolox", "dets_labels", "scrfd")
_THREADS = (1, 1024)
_NUMBER = r"\d{1,9}(?:\.\d{1,9})?"
_CURVE = rf"\s*{_NUMBER}\s*\+\s*{_NUMBER}\s*|\s*\d{{1,5}}:{_NUMBER}(?:\s*,\s*\d{{1,5}}:{_NUMBER})*\s*"


@dataclass(frozen=True, slots=True)
class ImageSettings:
    """Describes how a picture becomes the model's input: (pixel × scale − mean) ÷ std."""

    size: tuple[int, int] | None = key(
        None, within=(1, MAX_SIDE)
    )  # height, width; None: as the model's input
    resize: str = key("letterbox", "letterbox", "line", "stretch", "crop")
    mean: tuple[float, ...] = key((0.0,), within=(-INFINITY, INFINITY))
    std: tuple[float, ...] = key((1.0,), within=(0, INFINITY), above=True)
    # None: 1, or 1/255 for a float input when mean and std are left alone too
    scale: float | None = key(None, within=(0, INFINITY), above=True)
    channels: str = key("rgb", "rgb", "bgr")
    layout: str | None = key(None, *LAYOUTS)
    kernel: str = key("auto", *KERNELS)
    pad: int = key(114, within=(0, 255), resize=("letterbox", "line"))  # grey level of what a picture leaves
    anchor: str = key("center", "center", "top_left", resize=("letterbox",))  # where such a picture lies
    # The most times larger that a small picture becomes; None: as large as the input
    enlarge: float | None = key(None, within=(0, INFINITY), above=True, resize=("letterbox",))
    crop: float = key(1.0, within=(0, 1), above=True, resize=("crop",))  # share of the shorter side to keep
    decode: str = key("auto", *_WHERE)  # where pictures are decoded: auto is the device, on a GPU


KEPT = "kept"
"""The format of boxes that the model's device has chosen: rows of x1, y1, x2, y2, score and class."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxSettings:
    """Decides which of the boxes that a model finds are answered."""

    score: float = key(0.25, within=(0, 1))
    iou: float = key(0.45, within=(0, 1))
    per_class: bool = True
    max_detections: int = key(300, within=(1, MAX_DETECTIONS))


@dataclass(frozen=True, slots=True)
class DetectSettings(BoxSettings):
    """How raw detector outputs become boxes; what is None is derived from the model."""

    format: str | None = key(
        None,
        *_HEADS,
        "boxes_scores",
        "boxes_labels_scores",
        "detr",
        "rtdetr",
        "yolox",
        "dets_labels",
        "scrfd",
    )
    normalized: bool | None = None  # boxes from 0 to 1 instead of in pixels of the input
    # how one is written; in corners_yx y comes first
    boxes: str | None = key(None, "corners", "centers", "corners_yx")
    activation: str | None = key(None, *_ACTIVATIONS)  # of the scores; None: they are probabilities
    background: int | None = key(None, within=(0, MAX_CLASSES - 1))  # a class that is no object
    nms: str = key("auto", *_WHERE)  # where boxes are suppressed: auto is the device, on a GPU


@dataclass(frozen=True, slots=True)
class ClassifySettings:
    """How raw values become scores: "softmax", "sigmoid" or "none"; None is derived from the model."""

    activation: str | None = key(None, *_ACTIVATIONS)


@dataclass(frozen=True, slots=True)
class SegmentSettings(BoxSettings):
    """How outputs become masks: maps by an activation as in classify, or "minmax"; or, in the formats of
    detectors, boxes with the parts of prototype masks that make up each."""

    activation: str | None = key(None, *_ACTIVATIONS, "minmax")
    threshold: float = key(0.5, within=(0, 1))
    # a class that gets no mask; None: the one labelled background, if any
    background: int | None = key(None, within=(0, MAX_CLASSES - 1))
    # "class_map": one map of the classes' numbers; "queries": boxes, logits and a mask for each of them
    format: str | None = key(None, *_HEADS, "maps", "class_map", "queries")


@dataclass(frozen=True, slots=True)
class PoseSettings(BoxSettings):
    """Describes boxes with keypoints, each x, y and how sure that is (3 numbers), or x and y alone (2).
    In the formats "simcc" and "heatmaps" the image is what has them, and the only box."""

    format: str | None = key(None, *_HEADS, "scrfd", "simcc", "heatmaps")
    # how many, and how many numbers each
    keypoints: tuple[int, int] | None = key(None, within=(1, MAX_KEYPOINTS))


@dataclass(frozen=True, slots=True)
class ObbSettings(BoxSettings):
    """Describes boxes with an angle."""

    format: str | None = key(None, *_HEADS)


@dataclass(frozen=True, slots=True)
class DepthSettings:
    inverse: bool | None = None  # larger numbers are nearer; None: unless the output's name says depth
    # The middles of the map's outermost pixels lie on those of the picture's, as Ultralytics has it
    align_corners: bool | None = None


@dataclass(frozen=True, slots=True)
class AnomalySettings:
    """From which score on an image is anomalous, of a model that answers no label."""

    threshold: float = key(0.5, within=(0, INFINITY))


@dataclass(frozen=True, slots=True)
class EmbedSettings:
    normalize: bool = True  # to length 1


@dataclass(frozen=True, slots=True)
class TextRegionsSettings:
    """Describes how maps of text become quadrilaterals. Format "db": one map of probabilities, whose regions
    are smaller than the text. Format "lines": the middle of each line, and how far its top and its bottom
    are."""

    format: str | None = key(None, "db", "lines")
    threshold: float = key(0.3, within=(0, 1))  # of a pixel
    score: float = key(0.5, within=(0, 1))  # of a region: the mean of its pixels
    unclip: float = key(1.6, within=(0, 10))  # db: grows by so much of area ÷ circumference on all sides
    margin: float = key(0.0, within=(0, 1))  # lines: grows by so much of its height on all sides
    max_regions: int = key(300, within=(1, MAX_REGIONS))


@dataclass(frozen=True, slots=True)
class ReadSettings:
    """Describes how a row of character values becomes text (CTC)."""

    alphabet: str | None = key(None)  # the characters in order; None: the labels, or what the file says
    blank: str = key("first", "first", "last")  # where the class stands that is no character
    activation: str | None = key(None, "softmax", "none")


@dataclass(frozen=True, slots=True)
class FakeSettings:
    """A model that only takes time: `16+4` is ms per batch + ms per image, `1:6.2,8:11` measured points. One
    that writes has a second curve, of its steps by the slots that they have."""

    curve: str = key(
        "4+1", pattern=_CURVE, form='ms per batch + ms per image, like "16+4", or batch:ms points'
    )
    step_curve: str = key(
        "1+0.01", pattern=_CURVE, form='ms per step + ms per slot, like "1+0.01", or slots:ms points'
    )
    device: str = key("")  # models that name the same one take turns on it


DEVICE = r"auto|cpu|cuda(:\d{1,4})?"
DEVICE_FORM = '"auto", "cpu", "cuda" or like "cuda:1"'


@dataclass(frozen=True, slots=True)
class OnnxruntimeSettings:
    providers: tuple[str, ...] = ()  # none: the backend chooses for the device
    intra_op_threads: int | None = key(None, within=_THREADS)
    inter_op_threads: int | None = key(None, within=_THREADS)


@dataclass(frozen=True, slots=True)
class PytorchSettings:
    """Describes how a PyTorch model runs. After `backends.describe` nothing is left to "auto" or None."""

    # "cuda" is every GPU, "cuda:1" one
    device: str = key("auto", pattern=DEVICE, form=DEVICE_FORM)
    precision: str = key("fp32", "fp32", "tf32", "fp16", "bf16")
    channels_last: bool | None = None  # None: on a GPU in half precision
    compile: str = "off"  # or "default", "max-autotune": while it serves; "before-ready": when it is loaded
    graphs: bool | None = None  # None: on a GPU
    buckets: tuple[int, ...] = ()  # the batch sizes that really run; none: powers of two where any are needed
    module: str | None = None  # file.py:function that builds the network which the weights are for
    weights: str | None = None  # file in the version's folder

    @property
    def compiles_behind(self) -> bool:
        """It is to be compiled while it serves."""
        return self.compile in ("default", "max-autotune")


@dataclass(frozen=True, slots=True)
class ModelStep:
    """Represents another model that a model needs: it is loaded before it."""

    model: str
    version: int  # -1: the newest
    at: str  # where the settings name it, for messages


def eager_policy() -> FixedBatching:
    """Work-conserving batches with no gate and a bounded queue; the deadlines of clients still hold."""
    return FixedBatching(max_batch=1, across_shapes=True, max_queue=4096)


def _kind_of_extra(name: str) -> type[object]:
    """Returns the type of an extension's settings, by which they are read when another process sends them."""
    extension = installed()[name]
    if not extension.settings:
        raise ValueError(f"the extension {name} has no settings")
    kind: type[object] = extension.part(extension.settings).kind
    return kind


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Holds the settings of one model, whichever file they came from.

    `max_batch` None means that the model has not been read yet, and 0 that its tensors have no batch
    dimension. `policy.max_batch` follows it and is 1 for both.
    """

    name: str
    path: Path
    backend: str | None = None  # as declared, until the repository has found the file
    task: str | None = None
    inputs: tuple[TensorConfig, ...] = ()
    outputs: tuple[TensorConfig, ...] = ()
    max_batch: int | None = None
    mode: Mode = Mode.EAGER
    policy: Promise | FixedBatching = field(default_factory=eager_policy)
    slo_may_grow: bool = False  # promise what can be kept here, where that is more
    instances: tuple[InstanceGroup, ...] = (InstanceGroup(given=False),)
    versions: VersionPolicy = LatestVersions()
    file: str | None = None
    labels: str | None = None
    execution_timeout: float | None = None
    decoupled: bool = False  # it gives any number of answers to a request
    max_open: int = 0  # requests that an instance of such a model has under way at once; 0: as usual
    device_weight: float = 1.0  # its part of a device that several models share
    fixed_batch: int = 0  # rows that its file insists on, to which smaller batches are filled up; 0: any
    unbatched: str = ""  # why its requests never share a batch, where no setting says so
    parameters: Mapping[str, str] = field(default_factory=dict)
    onnxruntime: OnnxruntimeSettings = OnnxruntimeSettings()
    accelerators: tuple[str, ...] = ()  # providers of onnxruntime to take where they are there
    pytorch: PytorchSettings = PytorchSettings()
    preset: str | None = None  # whose pixels it was trained with; `image` has its values already
    image: ImageSettings | None = None
    image_keys: tuple[str, ...] | None = None  # what `image` says; None: whatever is not as usual
    strict_pixels: bool = False  # refuse it where nothing says how it sees pixels
    detect: DetectSettings | None = None
    classify: ClassifySettings | None = None
    segment: SegmentSettings | None = None
    pose: PoseSettings | None = None
    obb: ObbSettings | None = None
    depth: DepthSettings | None = None
    anomaly: AnomalySettings | None = None
    embed: EmbedSettings | None = None
    text_regions: TextRegionsSettings | None = None
    read: ReadSettings | None = None
    fake: FakeSettings | None = None
    steps: tuple[ModelStep, ...] = ()  # it runs nothing itself: these other models do
    extra: Mapping[str, object] = field(default_factory=dict, metadata={"kinds": _kind_of_extra})
    """The settings of extensions, by the extension's name."""

    def asks(self, what: str) -> bool:
        """Returns whether an extension is asked for, as "registry", or one of its settings, as
        "registry.candidate"."""
        name, _, key = what.partition(".")
        settings = self.extra.get(name)
        return settings is not None and (not key or bool(getattr(settings, key)))

    @property
    def needs(self) -> tuple[str, ...]:
        """Returns the models that are its steps, in their order."""
        return tuple(step.model for step in self.steps)


@dataclass(frozen=True, slots=True)
class TensorSignature:
    """A tensor as the model file has it: the whole shape, batch included, −1 where it varies. `symbols` are
    what the file calls the lengths that vary, by axis; empty where it does not name them."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    optional: bool = False
    symbols: tuple[str, ...] = ()

    @property
    def rows(self) -> str:
        """Returns what the file calls the length of the first axis. Empty: nothing, or an exporter has
        numbered it, as output0_0 of "output0", which does not say that two lengths differ."""
        named = self.symbols[0] if self.symbols else ""
        own = named.startswith(f"{self.name}_") and named.rpartition("_")[2].isdigit()
        return "" if own or _NUMBERED.fullmatch(named) else named


_NUMBERED = re.compile(r"unk_+\d+|DynamicDimension\.\d+|.*_dim_\d+|\?|None")
_POINTS_AT_ROW = re.compile(r"(?:.*_)?(?:image|img|batch|sample|frame)_?(?:index|indices|idx|inds?)")


@dataclass(frozen=True, slots=True)
class ModelSignature:
    """Holds what a backend could read from the file; both empty where the file does not say."""

    inputs: tuple[TensorSignature, ...] = ()
    outputs: tuple[TensorSignature, ...] = ()

    @property
    def can_batch(self) -> bool:
        """True when the first dimension of every tensor varies; what has a default does not count."""
        return all(t.shape[:1] == (DYNAMIC,) for t in self.inputs + self.outputs if not t.optional)

    def with_any_rows(self, rows: int) -> ModelSignature:
        """Returns it as of a file that does not insist on so many rows."""

        def of_any(tensor: TensorSignature) -> TensorSignature:
            return (
                replace(tensor, shape=(DYNAMIC, *tensor.shape[1:])) if tensor.shape[:1] == (rows,) else tensor
            )

        return ModelSignature(tuple(map(of_any, self.inputs)), tuple(map(of_any, self.outputs)))

    @property
    def why_not_rows(self) -> str:
        """Returns why the first axis is not that of a batch, as the file names its axes; empty: it may be
        one. A batch is the same length on every tensor's first axis, and on no other axis."""
        tensors = [tensor for tensor in self.inputs + self.outputs if not tensor.optional]
        first = {tensor.rows: tensor for tensor in reversed(tensors) if tensor.rows}
        if len(first) > 1:
            (one, owner), (other, of) = sorted(first.items())[:2]
            return f'in the file, the first axis of "{owner.name}" is "{one}" and of "{of.name}" "{other}"'
        for tensor in tensors:
            for axis, symbol in enumerate(tensor.symbols[1:], 1):
                if symbol in first:
                    return (
                        f'in the file, "{symbol}" is the first axis, and also axis {axis} of "{tensor.name}"'
                    )
        for tensor in self.inputs:
            if "INT" in tensor.datatype and _POINTS_AT_ROW.fullmatch(tensor.name.lower()):
                return f'the input "{tensor.name}" points at rows of the batch'
        return ""


def values_told(image: ImageSettings) -> bool:
    return image.scale is not None or set(image.mean) != {0.0} or set(image.std) != {1.0}


def values_on_device(config: ModelConfig) -> bool:
    """True for a PyTorch model whose input is declared as bytes although [image] makes other values of them:
    then pixels travel as bytes, and scale, mean and std are applied on the device. The tensors are known."""
    if not kind_of(config.backend).values_on_device or config.image is None or len(config.inputs) != 1:
        return False
    return config.inputs[0].datatype == "UINT8" and values_told(config.image)
