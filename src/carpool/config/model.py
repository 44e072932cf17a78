"""Describes what is known about one model before its file is opened. Plain data; durations are seconds."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from carpool.config.backend_kinds import kind_of
from carpool.config.cache_settings import CacheSettings
from carpool.config.drift_settings import DriftSettings
from carpool.config.pipeline_settings import PipelineSettings
from carpool.config.registry_settings import RegistrySettings
from carpool.config.rollout_settings import RolloutSettings
from carpool.config.sequence_settings import SequenceSettings
from carpool.core.objectives import Knobs, Promise

DEFAULT_MAX_BATCH = 32  # for a model that can batch when nobody said how far
BATCH_HELP = (
    "export it with a batch axis (Ultralytics: dynamic=True, RF-DETR: dynamic_batch=True) or one tower; "
    "max_batch = 1 accepts it"
)
"""What helps a model whose requests never share a batch."""
DYNAMIC = -1  # a dimension that differs from request to request


class Mode(enum.StrEnum):
    """Names who decides when a batch leaves."""

    PROMISE = "promise"
    KNOBS = "knobs"
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
    RAW = "raw"


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
    given: bool = True  # False: nobody said, so that another number may be measured to be better


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
# type and from what `_key` says; toml.py reads them so.


def _key(default: Any, *choices: str, **said: Any) -> Any:
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
_THREADS = (1, 1024)
_NUMBER = r"\d{1,9}(?:\.\d{1,9})?"
_CURVE = rf"\s*{_NUMBER}\s*\+\s*{_NUMBER}\s*|\s*\d{{1,5}}:{_NUMBER}(?:\s*,\s*\d{{1,5}}:{_NUMBER})*\s*"


@dataclass(frozen=True, slots=True)
class ImageSettings:
    """Describes how a picture becomes the model's input: (pixel × scale − mean) ÷ std."""

    size: tuple[int, int] | None = _key(
        None, within=(1, MAX_SIDE)
    )  # height, width; None: as the model's input
    resize: str = _key("letterbox", "letterbox", "line", "stretch", "crop")
    mean: tuple[float, ...] = _key((0.0,), within=(-INFINITY, INFINITY))
    std: tuple[float, ...] = _key((1.0,), within=(0, INFINITY), above=True)
    # None: 1, or 1/255 for a float input when mean and std are left alone too
    scale: float | None = _key(None, within=(0, INFINITY), above=True)
    channels: str = _key("rgb", "rgb", "bgr")
    layout: str | None = _key(None, *LAYOUTS)
    kernel: str = _key("auto", *KERNELS)
    pad: int = _key(114, within=(0, 255), resize=("letterbox", "line"))  # grey level of what a picture leaves
    anchor: str = _key("center", "center", "top_left", resize=("letterbox",))  # where such a picture lies
    # The most times larger that a small picture becomes; None: as large as the input
    enlarge: float | None = _key(None, within=(0, INFINITY), above=True, resize=("letterbox",))
    crop: float = _key(1.0, within=(0, 1), above=True, resize=("crop",))  # share of the shorter side to keep
    decode: str = _key("auto", *_WHERE)  # where pictures are decoded: auto is the device, on a GPU


KEPT = "kept"
"""The format of boxes that the model's device has chosen: rows of x1, y1, x2, y2, score and class."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxSettings:
    """Decides which of the boxes that a model finds are answered."""

    score: float = _key(0.25, within=(0, 1))
    iou: float = _key(0.45, within=(0, 1))
    per_class: bool = True
    max_detections: int = _key(300, within=(1, MAX_DETECTIONS))


@dataclass(frozen=True, slots=True)
class DetectSettings(BoxSettings):
    """How raw detector outputs become boxes; what is None is told from the model."""

    format: str | None = _key(
        None, *_HEADS, "boxes_scores", "boxes_labels_scores", "detr", "rtdetr", "yolox", "dets_labels"
    )
    normalized: bool | None = None  # boxes from 0 to 1 instead of in pixels of the input
    # how one is written; in corners_yx y comes first
    boxes: str | None = _key(None, "corners", "centers", "corners_yx")
    activation: str | None = _key(None, *_ACTIVATIONS)  # of the scores; None: they are probabilities
    background: int | None = _key(None, within=(0, MAX_CLASSES - 1))  # a class that is no object
    nms: str = _key("auto", *_WHERE)  # where boxes are suppressed: auto is the device, on a GPU


@dataclass(frozen=True, slots=True)
class ClassifySettings:
    """How raw values become scores: "softmax", "sigmoid" or "none"; None is told from the model."""

    activation: str | None = _key(None, *_ACTIVATIONS)


@dataclass(frozen=True, slots=True)
class SegmentSettings(BoxSettings):
    """How outputs become masks: maps by an activation as in classify, or "minmax"; or, in the formats of
    detectors, boxes with the parts of prototype masks that make up each."""

    activation: str | None = _key(None, *_ACTIVATIONS, "minmax")
    threshold: float = _key(0.5, within=(0, 1))
    # a class that gets no mask; None: the one labelled background, if any
    background: int | None = _key(None, within=(0, MAX_CLASSES - 1))
    # "class_map": one map of the classes' numbers
    format: str | None = _key(None, *_HEADS, "maps", "class_map")


@dataclass(frozen=True, slots=True)
class PoseSettings(BoxSettings):
    """Describes boxes with keypoints, each x, y and how sure that is (3 numbers), or x and y alone (2)."""

    format: str | None = _key(None, *_HEADS)
    # how many, and how many numbers each
    keypoints: tuple[int, int] | None = _key(None, within=(1, MAX_KEYPOINTS))


@dataclass(frozen=True, slots=True)
class ObbSettings(BoxSettings):
    """Describes boxes with an angle."""

    format: str | None = _key(None, *_HEADS)


@dataclass(frozen=True, slots=True)
class DepthSettings:
    inverse: bool | None = None  # larger numbers are nearer; None: unless the output's name says depth
    # The middles of the map's outermost pixels lie on those of the picture's, as Ultralytics has it
    align_corners: bool | None = None


@dataclass(frozen=True, slots=True)
class EmbedSettings:
    normalize: bool = True  # to length 1


@dataclass(frozen=True, slots=True)
class TextRegionsSettings:
    """Describes how maps of text become quadrilaterals. Format "db": one map of probabilities, whose regions
    are smaller than the text. Format "lines": the middle of each line, and how far its top and its bottom
    are."""

    format: str | None = _key(None, "db", "lines")
    threshold: float = _key(0.3, within=(0, 1))  # of a pixel
    score: float = _key(0.5, within=(0, 1))  # of a region: the mean of its pixels
    unclip: float = _key(1.6, within=(0, 10))  # db: grows by so much of area ÷ circumference on all sides
    margin: float = _key(0.0, within=(0, 1))  # lines: grows by so much of its height on all sides
    max_regions: int = _key(300, within=(1, MAX_REGIONS))


@dataclass(frozen=True, slots=True)
class ReadSettings:
    """Describes how a row of character values becomes text (CTC)."""

    alphabet: str | None = _key(None)  # the characters in order; None: the labels, or what the file says
    blank: str = _key("first", "first", "last")  # where the class stands that is no character
    activation: str | None = _key(None, "softmax", "none")


@dataclass(frozen=True, slots=True)
class FakeSettings:
    """A model that only takes time: `16+4` is ms per batch + ms per image, `1:6.2,8:11` measured points. One
    that writes has a second curve, of its steps by the slots that they have."""

    curve: str = _key(
        "4+1", pattern=_CURVE, form='ms per batch + ms per image, like "16+4", or batch:ms points'
    )
    step_curve: str = _key(
        "1+0.01", pattern=_CURVE, form='ms per step + ms per slot, like "1+0.01", or slots:ms points'
    )
    device: str = _key("")  # models that name the same one take turns on it


MAX_TOKENS = 4096
MAX_SLOTS = 1024


@dataclass(frozen=True, slots=True)
class GenerateSettings:
    """Describes a model that writes its answer token by token, many answers at once, each in a slot of its
    own."""

    family: str | None = _key(None, "line_reader", "trocr")  # None: told from the files
    max_tokens: int = _key(128, within=(1, MAX_TOKENS))  # of an answer; a request may ask for fewer
    slots: int | None = _key(None, within=(1, MAX_SLOTS))  # answers at once; None: what the promise allows


MAX_POOL = 64
_DEVICE = r"auto|cpu|cuda(:\d{1,4})?"
_DEVICE_FORM = '"auto", "cpu", "cuda" or like "cuda:1"'


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """Describes the decoders of a model that writes, apart from its encoders."""

    instances: int = _key(1, within=(1, MAX_POOL))
    device: str = _key("auto", pattern=_DEVICE, form=_DEVICE_FORM)  # "auto": the model's


@dataclass(frozen=True, slots=True)
class EncoderSettings(PoolSettings):
    """Describes the same of its encoders."""

    own_process: bool = _key(False)  # true is refused: processes of their own were removed


@dataclass(frozen=True, slots=True)
class OnnxruntimeSettings:
    providers: tuple[str, ...] = ()  # none: the backend chooses for the device
    intra_op_threads: int | None = _key(None, within=_THREADS)
    inter_op_threads: int | None = _key(None, within=_THREADS)


@dataclass(frozen=True, slots=True)
class PytorchSettings:
    """Describes how a PyTorch model runs. After `backends.describe` nothing is left to "auto" or None."""

    # "cuda" is every GPU, "cuda:1" one
    device: str = _key("auto", pattern=_DEVICE, form=_DEVICE_FORM)
    precision: str = _key("fp32", "fp32", "tf32", "fp16", "bf16")
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
class EnsembleStep:
    """Represents one model of an ensemble. `inputs` and `outputs` are pairs: the model's own name, and the
    tensor of the ensemble that it is read from or written to."""

    model: str
    version: int  # -1: the newest
    inputs: tuple[tuple[str, str], ...]
    outputs: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class EnsembleSettings:
    steps: tuple[EnsembleStep, ...]
    max_inflight: int = 0  # requests at the same time; 0 is no limit


def eager_policy() -> Knobs:
    """Work-conserving batches with no gate and a bounded queue; the deadlines of clients still hold."""
    return Knobs(max_batch=1, across_shapes=True, max_queue=4096)


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
    policy: Promise | Knobs = field(default_factory=eager_policy)
    slo_may_grow: bool = False  # promise what can be kept here, where that is more
    instances: tuple[InstanceGroup, ...] = (InstanceGroup(given=False),)
    versions: VersionPolicy = LatestVersions()
    file: str | None = None
    labels: str | None = None
    execution_timeout: float | None = None
    decoupled: bool = False  # it gives any number of answers to a request
    max_open: int = 0  # requests that an instance of such a model has under way at once; 0: as usual
    response_cache: bool = False  # Triton's word for a cache, which keeps every answer as Triton's does
    cache: CacheSettings | None = None
    device_weight: float = 1.0  # its part of a device that several models share
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
    embed: EmbedSettings | None = None
    text_regions: TextRegionsSettings | None = None
    read: ReadSettings | None = None
    generate: GenerateSettings | None = None  # it writes its answers token by token
    encoder: EncoderSettings | None = None  # of a model that writes: absent, both: one instance does both
    decoder: PoolSettings | None = None
    ttft: float | None = None  # seconds: the first token is promised within these
    per_token: float | None = None  # and each further one
    fake: FakeSettings | None = None
    drift: DriftSettings | None = None  # None: nothing of the traffic is looked at
    registry: RegistrySettings | None = None
    rollout: RolloutSettings | None = None
    ensemble: EnsembleSettings | None = None  # it runs nothing itself: other models are its steps
    pipeline: PipelineSettings | None = None  # so is this
    sequences: SequenceSettings | None = None  # its requests belong together; None: each stands alone

    @property
    def needs(self) -> tuple[str, ...]:
        """Returns the models that are its steps, in their order."""
        steps = self.ensemble or self.pipeline
        return () if steps is None else tuple(step.model for step in steps.steps)

    @property
    def apart(self) -> bool:
        """Its encoders and decoders are."""
        return not (self.encoder is None and self.decoder is None)

    @property
    def caching(self) -> CacheSettings | None:
        """Which answers are kept; None: none."""
        kept = self.cache or (CacheSettings(min_uses=1) if self.response_cache else None)
        return kept if kept is not None and (kept.exact or kept.similar) else None


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
