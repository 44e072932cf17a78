"""Exports of other people's libraries, with random weights, and each library's own preprocessing beside them.

What is not installed is left out, and named. A torchvision that was built for another PyTorch lacks operators
of its detectors; they are declared here, so that everything else of it can be used.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from zoo_exports import Export, Reference

_CLASSIFY = {"task": "classify", "activation": "softmax"}
_SIDE = (224, 224)
_ASK = 'task = "classify"'


def libraries() -> tuple[list[Export], list[str]]:
    """All that can be made here, and in words what cannot."""
    found: list[Export] = []
    missing: list[str] = []
    for library in (_torchvision, _timm, _transformers, _keras, _sklearn, _openvino, _own_layers):
        try:
            found += library()
        except (ImportError, RuntimeError, AttributeError, OSError) as error:
            missing.append(f"{library.__name__[1:]}: {' '.join(str(error).split())[:100]}")
    return found, missing


class _Outputs(nn.Module):
    """Some outputs of a network that answers a dict or an object."""

    def __init__(self, network: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.network, self.names = network, names

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        answer = self.network(x)
        found = tuple(answer[name] for name in self.names)
        return found if len(found) > 1 else found[0]


# ---- torchvision and timm


def _import_torchvision() -> Any:
    """`make engines` puts it into a folder that processes of models do not look into."""
    beside = str(Path(sys.prefix) / "beside")
    if beside not in sys.path:
        sys.path.append(beside)
    try:
        import torchvision
    except RuntimeError:
        declared = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            declared.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _import_torchvision.kept = declared  # type: ignore[attr-defined]  # the operators go with it
        import torchvision
    return torchvision


def _torchvision() -> list[Export]:
    torchvision = _import_torchvision()
    models, presets = torchvision.models, torchvision.transforms._presets
    told = f"torchvision {torchvision.__version__.partition('+')[0]}"
    own = _of_transform(presets.ImageClassification(crop_size=224))
    segment = {"task": "segment", "format": "maps", "activation": "softmax"}

    def classifier(name: str, **more: Any) -> Export:
        network = getattr(models, name)
        return Export(
            f"{name}, {told}", network, _CLASSIFY, side=_SIDE, reference=own, preset="torchvision", **more
        )

    made = [
        classifier(name)
        for name in ("resnet18", "mobilenet_v3_small", "efficientnet_b0", "shufflenet_v2_x0_5")
    ]
    made += [classifier("squeezenet1_1", axes="batch"), classifier("regnet_y_400mf", axes="batch")]
    made += [
        Export(
            f"mobilenet_v2, 10 classes, {told}",
            lambda: models.mobilenet_v2(num_classes=10),
            _CLASSIFY,
            side=_SIDE,
            setting=_ASK,
            reference=own,
            preset="torchvision",
        ),
        Export(
            f"resnet18, TorchScript, {told}",
            models.resnet18,
            _CLASSIFY,
            side=_SIDE,
            script=True,
            refusal="--size 224",
            again=_sized,
            reference=own,
            preset="torchvision",
        ),
        Export(
            f"lraspp_mobilenet_v3, VOC, {told}",
            lambda: _Outputs(
                models.segmentation.lraspp_mobilenet_v3_large(weights=None, weights_backbone=None), ["out"]
            ),
            segment,
            ("out",),
        ),
    ]
    return made


def _sized(folder: Path) -> Path:
    (folder / "model.toml").write_text('file = "net.pt"\n[image]\nsize = 224\n')
    return folder / "net.pt"


def _of_transform(transform: Callable[[Image.Image], Tensor]) -> Reference:
    return lambda photo, _height, _width: transform(photo).numpy()


def _timm() -> list[Export]:
    _import_torchvision()
    import timm

    names = (
        "resnet10t",
        "mobilenetv3_small_050",
        "vit_tiny_patch16_224",
        "tf_efficientnet_lite0",
        "mixer_s32_224",
    )
    return [_of_timm(timm, name, told=True) for name in names] + [_of_timm(timm, "resnet10t", told=False)]


def _of_timm(timm: Any, name: str, *, told: bool) -> Export:
    network = timm.create_model(name, pretrained=False)
    data = timm.data.resolve_data_config({}, model=network)
    own = _of_transform(timm.data.create_transform(**data))
    cfg = {
        key: value
        for key, value in network.pretrained_cfg.items()
        if isinstance(value, int | float | str | tuple)
    }
    config = {"architecture": name, "num_classes": 1000, "pretrained_cfg": cfg}
    side = tuple(data["input_size"][1:])
    beside = {"beside": {"config.json": config}} if told else {}
    end = "" if told else ", no config"
    return Export(
        f"{name}, timm {timm.__version__}{end}",
        lambda: network,
        _CLASSIFY,
        axes="batch",
        side=side,
        reference=own,
        preset="" if told else "timm",
        **beside,
    )


# ---- transformers


def _transformers() -> list[Export]:
    _import_torchvision()
    import transformers as hf

    told = f"transformers {hf.__version__}"
    small = {"hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 64}
    segment = {"task": "segment", "format": "maps", "activation": "softmax", "labels": 6}
    classify = {**_CLASSIFY, "labels": 9}
    detect = {"task": "detect", "format": "detr", "activation": "softmax", "labels": 7}
    logits, plain = ("logits",), {"size": {"height": 128, "width": 128}}
    vit = hf.ViTForImageClassification(hf.ViTConfig(num_labels=9, **small))
    convnext = hf.ConvNextForImageClassification(
        hf.ConvNextConfig(num_labels=9, hidden_sizes=[8, 8, 8, 8], depths=[1, 1, 1, 1])
    )
    mobilevit = hf.MobileNetV2ForImageClassification(
        hf.MobileNetV2Config(num_labels=9, depth_multiplier=0.35)
    )
    clip = hf.CLIPVisionConfig(projection_dim=32, image_size=64, patch_size=16, **small)
    yolos = hf.YolosConfig(num_labels=7, image_size=[128, 128], num_detection_tokens=20, **small)
    maps = hf.SegformerConfig(num_labels=6, depths=[1, 1, 1, 1])
    glpn = hf.GLPNForDepthEstimation(hf.GLPNConfig(depths=[1, 1, 1, 1]))
    crop = {"size": {"shortest_edge": 64}, "crop_size": {"height": 64, "width": 64}}
    flipped = hf.MobileViTImageProcessor(
        size={"shortest_edge": 256}, crop_size={"height": 224, "width": 224}, do_flip_channel_order=True
    )
    made = [
        _of_hf(f"ViT, {told}", vit, classify, 224, logits, hf.ViTImageProcessor()),
        _of_hf(f"ViT, without its processor, {told}", vit, classify, 224, logits, None),
        _of_hf(
            f"ConvNeXt, {told}",
            convnext,
            classify,
            224,
            logits,
            hf.ConvNextImageProcessor(size={"shortest_edge": 224}),
        ),
        _of_hf(f"MobileNetV2, {told}", mobilevit, classify, 224, logits, hf.MobileNetV2ImageProcessor()),
        _of_hf(f"A classifier of BGR, {told}", vit, classify, 224, logits, flipped),
        _of_hf(
            f"SegFormer, {told}",
            hf.SegformerForSemanticSegmentation(maps),
            segment,
            128,
            logits,
            hf.SegformerImageProcessor(**plain),
        ),
        _of_hf(
            f"CLIP, {told}",
            hf.CLIPVisionModelWithProjection(clip),
            {"task": "embed"},
            64,
            ("image_embeds",),
            hf.CLIPImageProcessor(**crop),
        ),
        _of_hf(
            f"YOLOS, {told}", hf.YolosForObjectDetection(yolos), detect, 128, ("logits", "pred_boxes"), None
        ),
        _of_hf(f"GLPN, {told}", glpn, {"task": "depth"}, 128, ("predicted_depth",), None),
    ]
    shown = hf.ViTImageProcessor()
    return [*made, _of_hf(f"ViT, a folder of {told}", vit, classify, 224, logits, shown, folder=True)]


def _of_hf(
    name: str,
    network: nn.Module,
    expected: Mapping[str, object],
    side: int,
    outputs: Sequence[str],
    processor: Any,
    *,
    folder: bool = False,
) -> Export:
    document = {**network.config.to_dict(), "architectures": [type(network).__name__]}
    beside: dict[str, object] = {"config.json": json.loads(json.dumps(document, default=str))}
    reference = None
    if processor is not None:
        said = json.loads(json.dumps(processor.to_dict(), default=str))
        beside["preprocessor_config.json"] = said

        def reference(photo: Image.Image, _height: int, _width: int) -> np.ndarray:
            return np.asarray(processor(photo, return_tensors="np")["pixel_values"][0], np.float64)

    def save(place: Path) -> Path:
        target = place / "network"
        network.save_pretrained(str(target))
        (target / "preprocessor_config.json").write_text(json.dumps(beside["preprocessor_config.json"]))
        return target

    return Export(
        name,
        lambda: _Outputs(network, outputs),
        expected,
        outputs,
        side=(side, side),
        beside=beside,
        reference=reference,
        make=save if folder else None,
    )


# ---- Keras, as TensorFlow's SavedModel and as TensorFlow Lite


def _keras() -> list[Export]:
    import os

    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import keras
    import tensorflow as tf

    told = f"Keras {keras.__version__}"
    made = []
    for name, preset, module in (
        ("MobileNet", "keras-tf", keras.applications.mobilenet),
        ("ResNet50", "keras-caffe", keras.applications.resnet50),
        ("MobileNetV3Small", "", keras.applications.mobilenet_v3),
    ):
        network = getattr(keras.applications, name)(weights=None, input_shape=(*_SIDE, 3))
        own = _of_keras(tf, module.preprocess_input)
        expected = {"task": "classify", "activation": "none"}
        for form, write in (("TensorFlow Lite", _tflite), ("SavedModel", _saved_model)):
            made.append(
                Export(
                    f"{name}, {form}, {told}",
                    nn.Identity,
                    expected,
                    side=_SIDE,
                    reference=own if preset else None,
                    preset=preset,
                    make=lambda folder, write=write, network=network: write(tf, network, folder),
                )
            )
    return made


def _of_keras(tf: Any, preprocess: Callable[[np.ndarray], np.ndarray]) -> Reference:
    def make(photo: Image.Image, height: int, width: int) -> np.ndarray:
        resized = tf.image.resize(np.asarray(photo), (height, width)).numpy()
        return preprocess(resized.astype(np.float32)).transpose(2, 0, 1)

    return make


def _tflite(tf: Any, network: Any, folder: Path) -> Path:
    file = folder / "net.tflite"
    file.write_bytes(tf.lite.TFLiteConverter.from_keras_model(network).convert())
    return file


def _saved_model(_tf: Any, network: Any, folder: Path) -> Path:
    network.export(str(folder / "net"), verbose=False)
    return folder / "net"


# ---- scikit-learn and OpenVINO


def _sklearn() -> list[Export]:
    import skl2onnx
    import sklearn
    from sklearn.datasets import load_digits
    from sklearn.linear_model import LogisticRegression

    digits = load_digits()
    fitted = LogisticRegression(max_iter=50).fit(digits.data, digits.target)
    kind = [("pixels", skl2onnx.common.data_types.FloatTensorType([None, 64]))]

    def write(folder: Path, options: Mapping[str, object] | None = None) -> Path:
        file = folder / "digits.onnx"
        file.write_bytes(skl2onnx.to_onnx(fitted, initial_types=kind, options=options).SerializeToString())
        return file

    return [
        Export(
            f"Digits, scikit-learn {sklearn.__version__}",
            nn.Identity,
            {},
            make=write,
            refusal='options={"zipmap": False}',
            again=lambda folder: write(folder, {"zipmap": False}),
        )
    ]


def _openvino() -> list[Export]:
    import openvino

    torchvision = _import_torchvision()
    own = _of_transform(torchvision.transforms._presets.ImageClassification(crop_size=224))

    def write(folder: Path) -> Path:
        torch.manual_seed(7)
        network = torchvision.models.resnet18().eval()
        converted = openvino.convert_model(network, example_input=torch.rand(1, 3, *_SIDE))
        openvino.save_model(converted, str(folder / "net.xml"))
        return folder / "net.xml"

    return [
        Export(
            f"resnet18, OpenVINO {openvino.__version__.partition('-')[0]}",
            nn.Identity,
            _CLASSIFY,
            side=_SIDE,
            reference=own,
            preset="torchvision",
            make=write,
            setting="[image]\nsize = 224",
        )
    ]


# ---- networks that normalise in their own first layers


class _Normalising(nn.Module):
    def __init__(self, network: nn.Module, scale: float) -> None:
        super().__init__()
        self.network, self.scale = network, scale
        self.register_buffer("mean", torch.tensor([0.485, 0.456, 0.406]).reshape(1, 3, 1, 1))
        self.register_buffer("std", torch.tensor([0.229, 0.224, 0.225]).reshape(1, 3, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.network((x.float() * self.scale - self.mean) / self.std)
        return made


def _own_layers() -> list[Export]:
    models = _import_torchvision().models

    def shown(scale: float) -> Reference:
        def make(photo: Image.Image, height: int, width: int) -> np.ndarray:
            short = int(height / 0.875) / min(photo.size)
            sides = int(photo.width * short), int(photo.height * short)
            left, top = round((sides[0] - width) / 2), round((sides[1] - height) / 2)
            cut = photo.resize(sides, Image.Resampling.BILINEAR).crop((left, top, left + width, top + height))
            return np.asarray(cut).transpose(2, 0, 1) * scale

        return make

    fit = '[image]\nresize = "crop"\ncrop = 0.875\nkernel = "pil-bilinear"'
    return [
        Export(
            f"resnet18, normalising inside, pixels {words}",
            lambda inside=inside: _Normalising(models.resnet18(), inside),
            _CLASSIFY,
            axes=axes,
            side=_SIDE,
            fit=fit,
            reference=shown(outside),
        )
        for words, inside, outside, axes in (
            ("from 0 to 255", 1 / 255, 1.0, "batch"),
            ("from 0 to 1", 1.0, 1 / 255, "batch"),
        )
    ]
