"""The exports that zoo.py inspects: small networks of our own with the heads of well-known models."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import cv2
import numpy as np
import onnx
import torch
from PIL import Image
from torch import Tensor, nn

SIDE = 320  # of pictures for detectors
STATIC, DYNAMIC = "static", "dynamic"
LAYERS = "layers"
COCO = [f"thing {number}" for number in range(80)]
Network = Callable[[], nn.Module]


Reference = Callable[[Image.Image, int, int], np.ndarray]
"""Takes a photo, and the input's height and width; returns [3, height, width] as the network gets it."""


def letterboxed(photo: Image.Image, height: int, width: int) -> np.ndarray:
    """Ultralytics' detectors: OpenCV's bilinear, grey 114 around, values from 0 to 1."""
    pixels = np.asarray(photo)
    scale = min(height / pixels.shape[0], width / pixels.shape[1])
    across, down = round(pixels.shape[1] * scale), round(pixels.shape[0] * scale)
    canvas = np.full((height, width, 3), 114, np.uint8)
    left, top = round((width - across) / 2 - 0.1), round((height - down) / 2 - 0.1)
    resized = cv2.resize(pixels, (across, down), interpolation=cv2.INTER_LINEAR)
    canvas[top : top + down, left : left + across] = resized
    return canvas.transpose(2, 0, 1) / 255


def cropped(
    share: float, kernel: Image.Resampling, mean: Sequence[float] = (0.0,), std: Sequence[float] = (1.0,)
) -> Reference:
    """The shorter side resized, the middle cut out, values from 0 to 1 and then normalised."""

    def make(photo: Image.Image, height: int, width: int) -> np.ndarray:
        scale = int(height / share + 1e-6) / min(photo.size)
        sides = int(photo.width * scale), int(photo.height * scale)
        left, top = round((sides[0] - width) / 2), round((sides[1] - height) / 2)
        middle = photo.resize(sides, kernel).crop((left, top, left + width, top + height))
        return _normalised(middle, mean, std)

    return make


def stretched(
    kernel: Image.Resampling, mean: Sequence[float] = (0.0,), std: Sequence[float] = (1.0,)
) -> Reference:
    return lambda photo, height, width: _normalised(photo.resize((width, height), kernel), mean, std)


def _normalised(photo: Image.Image, mean: Sequence[float], std: Sequence[float]) -> np.ndarray:
    return ((np.asarray(photo) / 255 - np.array(mean)) / np.array(std)).transpose(2, 0, 1)


@dataclass(frozen=True)
class Export:
    name: str
    network: Network
    expected: Mapping[str, object]  # of its task, its settings and how many labels; empty: nothing reads it
    outputs: Sequence[str] = ("output0",)
    axes: str = STATIC
    side: tuple[int, int] = (SIDE, SIDE)
    setting: str = ""  # the line of model.toml without which nobody can know
    metadata: Mapping[str, str] = field(default_factory=dict)
    beside: Mapping[str, object] = field(default_factory=dict)  # JSON files, or lists of labels
    rows: bool = False  # outputs do not begin with the batch
    script: bool = False  # TorchScript instead of ONNX
    quantised: str = ""  # in 8 bits, by onnxruntime's own tools: its layers, or everything
    quick: bool = False
    reference: Reference | None = None  # the library's own way from a photo to the input
    fit: str = ""  # the lines of model.toml that say how pictures come into the input, and no more
    preset: str = ""  # the one setting that makes pixels right, where nothing says it
    make: Callable[[Path], Path] | None = None  # writes it, where no network of torch does
    refusal: str = ""  # the option that a refusal names
    again: Callable[[Path], Path] | None = None  # the same export with that option

    def fits(self, found: Mapping[str, object]) -> bool:
        if not self.expected:
            return found["task"] is None
        return all(found.get(key) == value for key, value in self.expected.items())

    @property
    def own_way(self) -> Reference | None:
        """Of exports with Ultralytics' metadata it is known."""
        if self.reference is not None or ("task" not in self.metadata and "names" not in self.metadata):
            return self.reference
        if self.metadata.get("task") == "classify":
            return cropped(1.0, Image.Resampling.BILINEAR)
        return letterboxed

    def write(self, folder: Path) -> Path:
        if self.make is not None:
            return self.make(folder)
        torch.manual_seed(7)
        network = self.network().eval()
        example = torch.rand(1, 3, *self.side)
        for name, content in self.beside.items():
            lines = isinstance(content, list)
            text = (
                "".join(f"{line}\n" for line in content) if isinstance(content, list) else json.dumps(content)
            )
            (folder / name).write_text(text)
            if lines:
                (folder / "model.toml").write_text(f'file = "net.onnx"\nlabels = "{name}"\n')
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            if self.script:
                return self._script(network, example, folder / "net.pt")
            file = self._onnx(network, example, folder / "net.onnx")
            return in_8_bits(file, self.quantised) if self.quantised else file

    def _script(self, network: nn.Module, example: Tensor, file: Path) -> Path:
        extra = {"config.txt": json.dumps(dict(self.metadata))}
        torch.jit.save(torch.jit.trace(network, example), str(file), _extra_files=extra)
        return file

    def _onnx(self, network: nn.Module, example: Tensor, file: Path) -> Path:
        axes = {"images": {0: "batch", 2: "height", 3: "width"}} if self.axes == DYNAMIC else {}
        if self.axes == DYNAMIC or self.rows:
            answered = network(example)
            answered = answered if isinstance(answered, tuple) else (answered,)
            for name, tensor in zip(self.outputs, answered, strict=True):
                varying = range(len(tensor.shape)) if self.axes == DYNAMIC else (0,)
                axes[name] = {axis: f"{name}_{axis}" for axis in varying}
        if self.axes == "batch":
            axes = {name: {0: "batch"} for name in ("images", *self.outputs)}
        torch.onnx.export(
            network,
            (example,),
            str(file),
            input_names=["images"],
            output_names=list(self.outputs),
            dynamic_axes=axes,
            dynamo=False,
        )
        if self.metadata:
            model = onnx.load(file)
            for key, value in self.metadata.items():
                entry = model.metadata_props.add()
                entry.key, entry.value = key, value
            onnx.save(model, file)
        return file


def in_8_bits(file: Path, what: str) -> Path:
    """Weights and activations, calibrated with noise: numbers change a little, names and shapes do not."""
    import logging

    import numpy as np
    import onnxruntime.quantization as tools

    class Noise(tools.CalibrationDataReader):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            model = onnx.load(file)
            sides = [axis.dim_value or 1 for axis in model.graph.input[0].type.tensor_type.shape.dim]
            random = np.random.default_rng(7)
            self._left = [{"images": random.random(sides, np.float32)} for _ in range(4)]

        def get_next(self) -> dict[str, np.ndarray] | None:
            return self._left.pop() if self._left else None

    small = file.with_name("small.onnx")
    logging.disable(logging.WARNING)  # its advice
    tools.quantize_static(
        str(file),
        str(small),
        Noise(),
        quant_format=tools.QuantFormat.QDQ,
        op_types_to_quantize=["Conv", "Gemm", "MatMul"] if what == LAYERS else None,
    )
    logging.disable(logging.NOTSET)
    return small.rename(file)


# ---- heads


class Yolo(nn.Module):
    """[fields, anchors] with one anchor per cell, or [anchors, fields] with three."""

    def __init__(self, classes: int, form: str = "yolov8", more: str = "") -> None:
        super().__init__()
        self.classes, self.form, self.more = classes, form, more
        self.before = 4 if form != "yolov5" else 5
        fields = self.before + classes + {"": 0, "pose": 51, "obb": 1, "flat": 1, "seg": 32}[more]
        self.fields = fields
        each = 3 if form == "yolov5" else 1
        self.heads = nn.ModuleList(nn.Conv2d(3, each * fields, side, side) for side in (8, 16, 32))
        self.prototypes = nn.Conv2d(3, 32, 4, 4)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        n = x.shape[0]
        maps = [head(x) for head in self.heads]
        if self.form == "yolov5":
            raw = torch.cat([m.reshape(n, 3, self.fields, -1).transpose(2, 3).flatten(1, 2) for m in maps], 1)
            raw = raw.transpose(1, 2)
        else:
            raw = torch.cat([m.flatten(2) for m in maps], 2)
        found = torch.cat((self._boxes(raw), *self._rest(raw)), 1)
        if self.form == "end2end":
            found = self._chosen(found)
        elif self.form in ("yolov5", "rtdetr"):
            found = found.transpose(1, 2)
        if self.form == "rtdetr":
            found = found[:, :300] / torch.tensor([SIDE] * 4 + [1.0] * self.classes)
        return (found, self.prototypes(x)) if self.more == "seg" else found

    def _boxes(self, raw: Tensor) -> Tensor:
        return torch.sigmoid(4 * raw[:, :4]) * SIDE

    def _rest(self, raw: Tensor) -> Iterator[Tensor]:
        last = self.before + self.classes
        yield torch.sigmoid(4 * raw[:, 4:last])
        rest = raw[:, last:]
        if self.more == "pose":
            points = torch.sigmoid(4 * rest.unflatten(1, (17, 3)))
            yield (points * torch.tensor([SIDE, SIDE, 1.0])[:, None]).flatten(1, 2)
        elif self.more == "obb":
            yield (torch.sigmoid(8 * rest) - 0.25) * math.pi
        elif self.more == "flat":  # as an untrained one: every angle is near a quarter of π
            yield (torch.sigmoid(0.01 * rest) - 0.25) * math.pi
        elif self.more:
            yield rest

    def _chosen(self, found: Tensor) -> Tensor:
        rows = found.transpose(1, 2)
        scores, classes = rows[:, :, 4 : 4 + self.classes].max(2)
        best = scores.topk(100, dim=1)[1]
        rows = rows.gather(1, best[:, :, None].expand(-1, -1, rows.shape[2]))
        half = rows[:, :, 2:4] / 2
        corners = torch.cat((rows[:, :, :2] - half, rows[:, :, :2] + half), 2)
        if self.more == "obb":
            corners = rows[:, :, :4]
        told = torch.stack((scores.gather(1, best), classes.gather(1, best).to(corners.dtype)), 2)
        return torch.cat((corners, told, rows[:, :, 4 + self.classes :]), 2)


class Queries(nn.Module):
    """DETR and its kin, or an SSD's boxes and softmax."""

    def __init__(self, columns: int, *, ssd: bool = False) -> None:
        super().__init__()
        self.columns, self.ssd = columns, ssd
        self.scores, self.boxes = nn.Conv2d(3, columns, 32, 32), nn.Conv2d(3, 4, 32, 32)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = 8 * self.scores(x).flatten(2).transpose(1, 2)
        boxes = torch.sigmoid(4 * self.boxes(x)).flatten(2).transpose(1, 2)
        if self.ssd:
            return torch.cat((boxes[:, :, :2] / 2, 0.5 + boxes[:, :, 2:] / 2), 2), scores.softmax(2)
        return scores, boxes


class Labelled(nn.Module):
    """Boxes, labels and scores without a batch, as torchvision's detectors answer."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Conv2d(3, 5, 32, 32)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        found = torch.sigmoid(self.head(x)).flatten(2)[0].transpose(0, 1)
        kept = found[found[:, 4] > 0.2]
        corners = torch.cat((kept[:, :2] * 100, 150 + kept[:, 2:4] * 100), 1)
        return corners, (kept[:, 4] * 90).long() + 1, kept[:, 4]


class Maps(nn.Module):
    """So many maps, so many times smaller than the picture."""

    def __init__(self, maps: int, stride: int = 1, copies: int = 1, *, flat: bool = False) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Conv2d(3, maps, stride, stride) for _ in range(copies))
        self.flat = flat

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        made = tuple(3 * head(x) for head in self.heads)
        return made if len(made) > 1 else made[0][:, 0] if self.flat else made[0]


class Vector(nn.Module):
    def __init__(self, length: int, end: str = "") -> None:
        super().__init__()
        self.head, self.end = nn.Conv2d(3, length, 16, 16), end

    def forward(self, x: Tensor) -> Tensor:
        made = 5 * self.head(x).mean((2, 3))
        if self.end == "unit":
            return nn.functional.normalize(made, dim=1)
        return made.softmax(1) if self.end == "softmax" else made.sigmoid() if self.end == "sigmoid" else made


# ---- the list


def ultralytics(task: str, names: Sequence[str], size: int = SIDE, **more: str) -> dict[str, str]:
    named = str(dict(enumerate(names)))
    said = {
        "description": "a model",
        "task": task,
        "stride": "32",
        "batch": "1",
        "imgsz": f"[{size}, {size}]",
    }
    return {**said, "names": named, **more}


def _yolo() -> Iterator[Export]:
    coco = {"task": "detect", "format": "yolov8", "labels": 80}
    two = ["plane", "ship"]
    said = ultralytics("detect", COCO)
    yield Export("YOLOv8/11, Ultralytics", lambda: Yolo(80), coco, metadata=said, quick=True)
    yield Export("YOLOv8/11, Ultralytics", lambda: Yolo(80), coco, axes=DYNAMIC, metadata=said, quick=True)
    small = "YOLOv8/11, Ultralytics, INT8"
    yield Export(small, lambda: Yolo(80), coco, metadata=said, quantised=LAYERS)
    # One scale for pixels and scores alike: every score is 0 then, and nobody can tell what it was.
    yield Export(f"{small} with its head", lambda: Yolo(80), {}, metadata=said, quantised="everything")
    yield Export("YOLOv8/11, Ultralytics, TorchScript", lambda: Yolo(80), coco, metadata=said, script=True)
    plain = {"task": "detect", "format": "yolov8", "labels": 0}
    yield Export("YOLOv8/11, 80 classes, no metadata", lambda: Yolo(80), plain)
    size = f"[image]\nsize = {SIDE}"
    yield Export("YOLOv8/11, 80 classes, no metadata", lambda: Yolo(80), plain, axes=DYNAMIC, setting=size)
    task = 'task = "detect"'
    yield Export("YOLOv8/11, 3 classes, no metadata", lambda: Yolo(3), plain, setting=task, quick=True)
    three = {**plain, "labels": 3}
    yield Export(
        "YOLOv8/11, 3 classes, labels", lambda: Yolo(3), three, beside={"names.txt": ["a", "b", "c"]}
    )
    fives = {"task": "detect", "format": "yolov5", "labels": 80}
    old = {"stride": "32", "names": str(COCO)}
    yield Export("YOLOv5", lambda: Yolo(80, "yolov5"), fives, metadata=old, quick=True)
    yield Export("YOLOv5", lambda: Yolo(80, "yolov5"), fives, axes=DYNAMIC, metadata=old, setting=size)
    yield Export("YOLOv5, no metadata", lambda: Yolo(80, "yolov5"), {**fives, "labels": 0})
    final = {"task": "detect", "format": "end2end"}
    yield Export("YOLOv10/26, end to end", lambda: Yolo(80, "end2end"), final, metadata=said, quick=True)
    yield Export("YOLOv10/26, end to end", lambda: Yolo(80, "end2end"), final, axes=DYNAMIC, metadata=said)
    yield Export("YOLOv10/26, end to end, no metadata", lambda: Yolo(80, "end2end"), final)
    cells = {"task": "detect", "format": "yolox"}
    yield Export("YOLOX, not decoded", lambda: _Turned(Yolo(80, "yolox")), cells, quick=True)
    for task, more, classes, names in (
        ("segment", "seg", 80, COCO),
        ("pose", "pose", 1, ["person"]),
        ("obb", "obb", 2, two),
    ):
        yield from _with_more(task, more, classes, names)
    flat = {"task": "obb", "format": "yolov8"}
    asked = 'task = "obb"'
    yield Export("YOLO -obb, untrained, no metadata", lambda: Yolo(2, more="flat"), flat, setting=asked)


def _with_more(task: str, more: str, classes: int, names: Sequence[str]) -> Iterator[Export]:
    outputs = ("output0", "output1") if more == "seg" else ("output0",)
    points = {"kpt_shape": "[17, 3]"} if more == "pose" else {}
    said = ultralytics(task, names, **points)
    told: dict[str, object] = {"task": task, "format": "yolov8", "labels": len(names)}
    if more == "pose":
        told["keypoints"] = [17, 3]
    name = f"YOLO -{more}"
    yield Export(
        f"{name}, Ultralytics", lambda: Yolo(classes, more=more), told, outputs, metadata=said, quick=True
    )
    yield Export(
        f"{name}, Ultralytics", lambda: Yolo(classes, more=more), told, outputs, DYNAMIC, metadata=said
    )
    yield Export(f"{name}, no metadata", lambda: Yolo(classes, more=more), {**told, "labels": 0}, outputs)
    final = {**told, "format": "end2end"}
    network = lambda: Yolo(classes, "end2end", more)  # noqa: E731
    yield Export(f"{name}, end to end", network, final, outputs, metadata=said)


class _Turned(nn.Module):
    """[anchors, fields] with one anchor per cell, and numbers that a grid has yet to be added to."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.network(x).transpose(1, 2)
        return torch.cat((found[:, :, :4] / SIDE - 0.5, found[:, :, 4:5], found[:, :, 4:]), 2)


def _queries() -> Iterator[Export]:
    detr = {"task": "detect", "format": "detr"}
    names = ("logits", "pred_boxes")
    sigmoid, softmax = {**detr, "activation": "sigmoid"}, {**detr, "activation": "softmax"}
    yield Export("RT-DETR, 80 classes", lambda: Queries(80), sigmoid, names, quick=True)
    config = {"architectures": ["RTDetrForObjectDetection"], "id2label": {str(n): f"c{n}" for n in range(5)}}
    shown = {"do_normalize": False, "do_rescale": True, "rescale_factor": 1 / 255, "do_resize": True}
    shown |= {"size": {"height": SIDE, "width": SIDE}, "resample": 2}
    beside = {"config.json": config, "preprocessor_config.json": shown}
    five = {**sigmoid, "labels": 5, "resize": "stretch"}
    plain = stretched(Image.Resampling.BILINEAR)
    yield Export(
        "RT-DETR, transformers", lambda: Queries(5), five, names, DYNAMIC, beside=beside, reference=plain
    )
    yield Export("DETR, COCO", lambda: Queries(92), softmax, names, quick=True)
    four = {"config.json": {"architectures": ["DetrForObjectDetection"], "id2label": {"0": "a", "1": "b"}}}
    yield Export(
        "DETR, 2 classes, transformers", lambda: Queries(3), {**softmax, "labels": 2}, names, beside=four
    )
    asked = '[detect]\nactivation = "sigmoid"'
    yield Export("DETR or kin, 4 classes, no metadata", lambda: Queries(4), sigmoid, names, setting=asked)
    said = ultralytics("detect", COCO)
    rows = {"task": "detect", "format": "rtdetr", "labels": 80}
    yield Export("RT-DETR, Ultralytics", lambda: Yolo(80, "rtdetr"), rows, metadata=said)
    ssd = {"task": "detect", "format": "boxes_scores", "normalized": True, "background": 0}
    asked = "[detect]\nbackground = 0"
    pair = ("boxes", "scores")
    yield Export("SSD, boxes and softmax", lambda: Queries(3, ssd=True), ssd, pair, setting=asked, quick=True)
    found = {"task": "detect", "format": "boxes_labels_scores", "normalized": False}
    three = ("boxes", "labels", "scores")
    yield Export("torchvision's detectors", Labelled, found, three, rows=True, quick=True)
    yield Export("torchvision's detectors", Labelled, found, three, "batch", setting="max_batch = 0")


def _maps() -> Iterator[Export]:
    segment = {"task": "segment", "format": "maps", "activation": "softmax"}
    yield Export(
        "DeepLab, VOC, with its helper", lambda: Maps(21, copies=2), segment, ("out", "aux"), quick=True
    )
    yield Export("SegFormer, ADE20K, a quarter", lambda: Maps(150, 4), segment, ("logits",), quick=True)
    config = {"architectures": ["SegformerForSemanticSegmentation"]}
    config |= {"id2label": {str(n): f"c{n}" for n in range(7)}}
    shown = {"size": {"height": 128, "width": 128}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    shown |= {"resample": 2, "do_normalize": True}
    halves = stretched(Image.Resampling.BILINEAR, (0.5,), (0.5,))
    beside = {"config.json": config, "preprocessor_config.json": shown}
    seven = {**segment, "labels": 7, "mean": [0.5] * 3}
    yield Export(
        "SegFormer, 7 classes, transformers",
        lambda: Maps(7, 4),
        seven,
        ("logits",),
        DYNAMIC,
        beside=beside,
        reference=halves,
    )
    plain = {"task": "segment", "format": "maps"}
    yield Export("Segmenter, 5 classes, no metadata", lambda: Maps(5, 4), plain, setting='task = "segment"')
    yield Export("Salient object", lambda: Maps(1), plain, ("mask",))
    depth = {"task": "depth"}
    yield Export("Depth", lambda: Maps(1, flat=True), depth, ("predicted_depth",), quick=True)
    yield Export("Depth, output without a name", lambda: Maps(1, flat=True), depth, setting='task = "depth"')
    yield Export("Heatmaps of 17 keypoints", lambda: Maps(17, 4), {}, side=(256, 192), quick=True)
    yield Export("Picture to picture", lambda: Maps(3), {}, quick=True)
    yield Export("Features", lambda: Maps(64, 16), {})


def _vectors() -> Iterator[Export]:
    side = (224, 224)
    softmax = {"task": "classify", "activation": "softmax"}
    plain = {"task": "classify", "activation": "none"}
    yield Export("Classifier, ImageNet", lambda: Vector(1000), softmax, side=side, quick=True)
    yield Export("Classifier, ImageNet", lambda: Vector(1000), softmax, axes="batch", side=side)
    yield Export("Classifier, ImageNet, INT8", lambda: Vector(1000), softmax, side=side, quantised=LAYERS)
    ask = 'task = "classify"'
    yield Export("Classifier, 10 classes", lambda: Vector(10), softmax, side=side, setting=ask, quick=True)
    yield Export(
        "Classifier, 10 classes, logits by name", lambda: Vector(10), softmax, ("logits",), side=side
    )
    yield Export(
        "Classifier, 10 classes, softmax inside", lambda: Vector(10, "softmax"), plain, side=side, quick=True
    )
    said = ultralytics("classify", ["a", "b", "c"], 224)
    cut = {**plain, "labels": 3, "resize": "crop"}
    yield Export("YOLO -cls, Ultralytics", lambda: Vector(3, "softmax"), cut, side=side, metadata=said)
    labels = {"names.txt": ["sun", "sea", "sand", "snow"]}
    several = {**plain, "labels": 4}
    yield Export(
        "Multi-label, sigmoid inside, labels", lambda: Vector(4, "sigmoid"), several, side=side, beside=labels
    )
    config = {"architectures": ["ViTForImageClassification"], "problem_type": "multi_label_classification"}
    config |= {"id2label": {str(n): f"c{n}" for n in range(4)}}
    shown = {"size": {"height": 224, "width": 224}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    shown |= {"resample": 2, "do_normalize": True}
    halves = stretched(Image.Resampling.BILINEAR, (0.5,), (0.5,))
    beside = {"config.json": config, "preprocessor_config.json": shown}
    several = {"task": "classify", "activation": "sigmoid", "labels": 4, "std": [0.5] * 3}
    yield Export(
        "Multi-label, transformers",
        lambda: Vector(4),
        several,
        ("logits",),
        DYNAMIC,
        side,
        beside=beside,
        reference=halves,
    )
    cfg = {
        "mean": [0.485, 0.456, 0.406],
        "std": [0.229, 0.224, 0.225],
        "crop_pct": 0.95,
        "interpolation": "bicubic",
    }
    config = {
        "architecture": "convnext_nano",
        "num_classes": 37,
        "pretrained_cfg": {**cfg, "input_size": [3, 224, 224]},
    }
    named = {**softmax, "resize": "crop", "kernel": "pil-bicubic"}
    as_timm = cropped(0.95, Image.Resampling.BICUBIC, cfg["mean"], cfg["std"])
    yield Export(
        "Classifier, 37 classes, timm",
        lambda: Vector(37),
        named,
        axes=DYNAMIC,
        side=side,
        beside={"config.json": config},
        reference=as_timm,
    )
    embed = {"task": "embed"}
    yield Export("Embedding by name", lambda: Vector(512), embed, ("image_embeds",), side=side, quick=True)
    yield Export("Embedding of length 1", lambda: Vector(512, "unit"), embed, side=side)


def exports(*, quick: bool) -> tuple[list[Export], list[str]]:
    """All of them, and in words what could not be made here."""
    made = [*_yolo(), *_queries(), *_maps(), *_vectors()]
    if quick:
        return [one for one in made if one.quick], []
    from zoo_libraries import libraries

    found, missing = libraries()
    return [*made, *found], missing
