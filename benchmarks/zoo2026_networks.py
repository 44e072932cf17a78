"""Rows of zoo2026.py from other people's libraries: networks with random weights or, where a wheel has them,
real ones; each with the library's own processor and its own code for outputs. What is not installed is
named."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from carpool.demo import pictures
from carpool.types import Array
from zoo2026_compare import Thing
from zoo2026_heads import lay_beside
from zoo2026_row import Own, Processor, Row

_LEAST = 0.3
CELLS_SIDE = 64  # of inputs of detectors: each of their cells is a query


def networks() -> tuple[list[Row], list[str]]:
    """All that can be made here, and in words what cannot."""
    rows, missing = list[Row](), list[str]()
    for library in (_rfdetr, _transformers, _timm, _open_clip, _rapidocr):
        try:
            rows += library()
        except (ImportError, RuntimeError, AttributeError, OSError) as error:
            missing.append(f"{library.__name__[1:]}: {' '.join(str(error).split())[:200]}")
    return rows, missing


def import_torchvision() -> Any:
    """One that was built for GPUs lacks its operators beside a PyTorch for CPUs; they are declared then."""
    try:
        import torchvision
    except RuntimeError:
        declared = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            declared.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        import_torchvision.kept = declared  # type: ignore[attr-defined]  # the operators go with it
        import torchvision
    return torchvision


def lively(network: nn.Module, seen: Tensor, small: Sequence[str] = (), seed: int = 0) -> nn.Module:
    """Draws weights with which every layer's output has a spread of 1 for the picture that is `seen`. Usual
    random weights let signals fade to 1e-7, which the next normalisation blows up again: a rounding error
    decides which queries are chosen, and no two runtimes agree. Layers called as in `small` spread half as
    far."""
    random, done, hooks = torch.Generator().manual_seed(seed), set[int](), []

    def drawn(name: str) -> Callable[[nn.Module, tuple[Any, ...], Tensor], Tensor | None]:
        def hook(layer: nn.Module, inputs: tuple[Any, ...], _output: Tensor) -> Tensor | None:
            if id(layer) in done:
                return None
            done.add(id(layer))
            weight = layer.weight
            weight.data = torch.randn(weight.shape, generator=random) / weight[0].numel() ** 0.5
            if layer.bias is not None:
                layer.bias.data = torch.zeros_like(layer.bias)
            spread = float(layer.forward(inputs[0]).std())
            wanted = 0.5 if any(part in name for part in small) else 1.0
            weight.data *= wanted / spread if spread > 0 else 1.0
            again: Tensor = layer.forward(inputs[0])
            return again

        return hook

    for name, layer in network.named_modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            hooks.append(layer.register_forward_hook(drawn(name)))
    with torch.no_grad():
        network.eval()(seen)
    for one in hooks:
        one.remove()
    return network


class Outputs(nn.Module):
    """Some outputs of a network that answers an object."""

    def __init__(self, network: nn.Module, names: Sequence[str], call: str = "") -> None:
        super().__init__()
        self.network, self.names, self.call = network, names, call

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        answer = getattr(self.network, self.call)(x) if self.call else self.network(x)
        if isinstance(answer, Tensor):
            return answer
        found = tuple(answer[name] for name in self.names)
        return found if len(found) > 1 else found[0]


def export(
    network: nn.Module, file: Path, shape: Sequence[int], outputs: Sequence[str], *, name: str, dynamic: bool
) -> Path:
    """`dynamic`: all four dimensions of the picture have a symbol, as optimum writes them. DINOv3's turned
    positions are beyond the older exporter."""
    axes = {}
    if dynamic:
        symbols = ("batch_size", "num_channels", "height", "width")
        axes = {name: dict(enumerate(symbols)), **{one: {0: "batch_size"} for one in outputs}}
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            network.eval(),
            (torch.rand(1, *shape),),
            str(file),
            input_names=[name],
            output_names=list(outputs),
            dynamic_axes=axes,
            **({"dynamo": True, "external_data": False} if "DINOv3" in _kind(network) else _OLDER),
        )
    return file


_OLDER: Mapping[str, Any] = {"dynamo": False, "opset_version": 17}


def _kind(network: nn.Module) -> str:
    return type(getattr(network, "network", network)).__name__


# ---- RF-DETR


def _rfdetr() -> list[Row]:
    import_torchvision()
    import rfdetr
    from rfdetr.models.postprocess import PostProcess

    def write(kind: str, names: int, **how: Any) -> Callable[[Path], Path]:
        def make(folder: Path) -> Path:
            torch.manual_seed(7)
            more = {"num_classes": names} if names else {}
            model = getattr(rfdetr, kind)(pretrain_weights=None, device="cpu", **more)
            head = model.model.model.class_embed
            head.bias.data[:] = torch.linspace(-4, 1, len(head.bias))
            model.export(output_dir=str(folder), verbose=False, **how)
            file = next(folder.glob("*.onnx")).rename(folder / "net.onnx")
            if names:
                lay_beside(folder, {"names.txt": [f"thing {number}" for number in range(names)]})
            return file

        return make

    def own(names: int) -> Own:
        def decode(outputs: Mapping[str, Array], size: tuple[int, int], _: tuple[int, int]) -> list[Thing]:
            logits = torch.from_numpy(outputs["labels"])[None]
            raw = {"pred_logits": logits[:, :, :names] if names else logits}
            raw["pred_boxes"] = torch.from_numpy(outputs["dets"])[None]
            if "masks" in outputs:
                raw["pred_masks"] = torch.from_numpy(outputs["masks"])[None]
            [found] = PostProcess(num_select=len(outputs["dets"]))(raw, torch.tensor([size[::-1]]))
            masks = found["masks"][:, 0].numpy() if "masks" in found else [None] * len(found["scores"])
            each = zip(found["labels"], found["scores"], found["boxes"], masks, strict=True)
            return [
                Thing(int(label), float(score), box.tolist(), mask)
                for label, score, box, mask in each
                if score >= _LEAST
            ]

        return decode

    def pixels(photo: Image.Image, height: int, width: int) -> Array:
        from torchvision.transforms import functional

        resized = functional.resize(functional.to_tensor(photo), [height, width], antialias=False)
        return np.asarray(functional.normalize(resized, [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]))

    return [
        Row(1, "RF-DETR Nano, COCO", "its export", write("RFDETRNano", 0), "detect", pixels, own(0)),
        Row(
            2,
            "RF-DETR Nano, 2 classes",
            "its export, labels",
            write("RFDETRNano", 2),
            "detect",
            pixels,
            own(2),
        ),
        Row(3, "RF-DETR Seg Nano", "its export", write("RFDETRSegNano", 0), "segment", pixels, own(0)),
        Row(
            45,
            "RF-DETR Nano, batches",
            "its export, dynamic_batch=True",
            write("RFDETRNano", 0, dynamic_batch=True),
            "detect",
            pixels,
            own(0),
        ),
    ]


# ---- transformers


def _beside(network: Any, processor: Any) -> dict[str, object]:
    document = {**network.config.to_dict(), "architectures": [type(network).__name__]}
    found: dict[str, object] = {"config.json": json.loads(json.dumps(document, default=str))}
    if processor is not None:
        found["preprocessor_config.json"] = json.loads(json.dumps(processor.to_dict(), default=str))
    return found


def _pixels(processor: Any, **more: Any) -> Processor:
    def make(photo: Image.Image, _height: int, _width: int) -> Array:
        return np.asarray(processor(photo, return_tensors="np", **more)["pixel_values"][0], np.float64)

    return make


def of_hf(
    network: nn.Module,
    processor: Any,
    outputs: Sequence[str],
    shape: Sequence[int],
    *,
    dynamic: bool = False,
    bare: bool = False,
    call: str = "",
    names: Sequence[str] = (),
) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        if not bare:
            lay_beside(folder, _beside(network, processor))
        wrapped = Outputs(network, outputs, call)
        called = list(names or outputs)
        return export(wrapped, folder / "net.onnx", shape, called, name="pixel_values", dynamic=dynamic)

    return write


def _transformers() -> list[Row]:
    import_torchvision()
    import transformers as hf

    torch.manual_seed(7)
    return [*_queries(hf), *_vectors(hf), *_maps(hf), *_rest(hf)]


def detectors(hf: Any) -> Mapping[str, nn.Module]:
    """RT-DETRv2 and D-FINE, each with as many queries as cells: none is chosen by its rank."""
    stages = {"embedding_size": 16, "hidden_sizes": [16, 24, 32, 48], "depths": [1, 1, 1, 1]}
    stages |= {"out_features": ["stage2", "stage3", "stage4"]}
    blocks = {"stage_in_channels": [16, 16, 24, 32], "stage_mid_channels": [8] * 4}
    blocks |= {"stage_out_channels": [16, 24, 32, 48], "stage_num_blocks": [1] * 4}
    blocks |= {"stage_numb_of_layers": [2] * 4, "stem_channels": [3, 16, 16]}
    cells = sum((CELLS_SIDE // stride) ** 2 for stride in (8, 16, 32))
    common = {"encoder_in_channels": [24, 32, 48], "feat_strides": [8, 16, 32], "encoder_hidden_dim": 32}
    common |= {"encoder_ffn_dim": 64, "d_model": 32, "decoder_in_channels": [32] * 3, "decoder_ffn_dim": 64}
    common |= {"num_queries": cells, "decoder_layers": 2, "encoder_attention_heads": 4}
    common |= {"decoder_attention_heads": 4, "num_labels": 5, "anchor_image_size": None}
    residual = hf.RTDetrResNetConfig(layer_type="basic", **stages)
    two = hf.RTDetrV2ForObjectDetection(hf.RTDetrV2Config(backbone_config=residual, **common))
    fine = hf.DFineForObjectDetection(
        hf.DFineConfig(backbone_config=hf.HGNetV2Config(**stages, **blocks), **common)
    )
    seen = torch.stack([_of_photo(file) for file in pictures()[:2]])
    calm = ("sampling_offsets", "bbox_embed", "enc_bbox")
    return {
        "RT-DETRv2": _sure_of_few(lively(two, seen, calm), seen),
        "D-FINE": _sure_of_few(lively(fine, seen, calm), seen),
    }


def _of_photo(file: Path) -> Tensor:
    with Image.open(file) as opened:
        small = opened.convert("RGB").resize((CELLS_SIDE, CELLS_SIDE), Image.Resampling.BILINEAR)
    return torch.from_numpy(np.asarray(small).copy()).permute(2, 0, 1) / 255


def _sure_of_few(network: nn.Module, seen: Tensor) -> nn.Module:
    """Moves all classes' biases so that a tenth of the scores of each photo count, or more."""
    with torch.no_grad():
        tops = network(seen).logits.flatten(1).quantile(0.9, dim=1)
    move = math.log(_LEAST / (1 - _LEAST)) - float(tops.min())
    tied = {
        id(one): one
        for name, one in network.named_parameters()
        if name.endswith(".bias") and "class_embed" in name
    }
    for bias in tied.values():
        bias.data += move
    return network


def _queries(hf: Any) -> list[Row]:
    processor = hf.RTDetrImageProcessor(size={"height": CELLS_SIDE, "width": CELLS_SIDE})

    def own(outputs: Mapping[str, Array], size: tuple[int, int], _: tuple[int, int]) -> list[Thing]:
        from types import SimpleNamespace

        raw = SimpleNamespace(
            logits=torch.from_numpy(outputs["logits"])[None],
            pred_boxes=torch.from_numpy(outputs["pred_boxes"])[None],
        )
        [found] = processor.post_process_object_detection(raw, _LEAST, torch.tensor([size[::-1]]))
        each = zip(found["labels"], found["scores"], found["boxes"], strict=True)
        ends = np.array([*size, *size], np.float64)
        return [Thing(int(label), float(score), np.clip(box, 0, ends).tolist()) for label, score, box in each]

    both = ("logits", "pred_boxes")
    rows = []
    for number, (family, network) in zip((4, 6), detectors(hf).items(), strict=True):
        said = {"processor": _pixels(processor), "own": own}
        fixed = of_hf(network, processor, both, (3, CELLS_SIDE, CELLS_SIDE))
        rows.append(Row(number, family, "by hand, with both JSON files", fixed, "detect", **said))
        if number == 4:
            axes = of_hf(network, processor, both, (3, CELLS_SIDE, CELLS_SIDE), dynamic=True)
            rows.append(Row(5, family, "optimum's axes", axes, "detect", **said))
    return rows


def _vectors(hf: Any) -> list[Row]:
    small = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 64}
    two = hf.Dinov2Model(hf.Dinov2Config(hidden_size=48, num_hidden_layers=2, num_attention_heads=3))
    three = hf.DINOv3ViTModel(hf.DINOv3ViTConfig(**small))
    sigs = hf.SiglipVisionModel(hf.SiglipVisionConfig(**small))
    vit = hf.ViTForImageClassification(hf.ViTConfig(num_labels=9, **small))
    bits = hf.BitImageProcessor(size={"shortest_edge": 256}, crop_size={"height": 224, "width": 224})
    bits.image_mean, bits.image_std = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    square = {"height": 224, "width": 224}
    pooled, logits = ("pooler_output",), ("logits",)

    def vector(name: str) -> Own:
        return lambda outputs, *_: outputs[name]

    def scores(outputs: Mapping[str, Array], *_: Any) -> list[tuple[int, float]]:
        shares = torch.from_numpy(outputs["logits"]).softmax(-1).numpy()
        order = np.argsort(-shares)[:5]
        return [(int(at), float(shares[at])) for at in order]

    both = hf.SiglipModel(hf.SiglipConfig(text_config={**small, "vocab_size": 99}, vision_config=dict(small)))
    rows = []
    for family, network, processor in (
        ("DINOv2", two, bits),
        ("DINOv3", three, hf.DINOv3ViTImageProcessor(size=square)),
        ("SigLIP 2 vision", sigs, hf.SiglipImageProcessor(size=square)),
    ):
        write = of_hf(network, processor, pooled, (3, 224, 224))
        pixels = _pixels(processor)
        rows.append(
            Row(18, family, "by hand, with both JSON files", write, "embed", pixels, vector("pooler_output"))
        )
    axes = {"dynamic": True}
    sig = hf.SiglipImageProcessor(size=square)
    rows += [
        Row(
            19,
            "ViT",
            "optimum's axes",
            of_hf(vit, hf.ViTImageProcessor(), logits, (3, 224, 224), **axes),
            "classify",
            _pixels(hf.ViTImageProcessor()),
            scores,
        ),
        Row(
            19,
            "SigLIP vision",
            "optimum's axes",
            of_hf(sigs, sig, pooled, (3, 224, 224), **axes),
            "embed",
            _pixels(sig),
            vector("pooler_output"),
        ),
        Row(
            21,
            "SigLIP 2 vision",
            "by hand, nothing beside it",
            of_hf(sigs, None, pooled, (3, 224, 224), bare=True),
            "embed",
            _pixels(sig),
            vector("pooler_output"),
        ),
        Row(
            26,
            "SigLIP get_image_features",
            "by hand, with both JSON files",
            of_hf(both, sig, pooled, (3, 224, 224), call="get_image_features", names=("image_embeds",)),
            "embed",
            _pixels(sig),
            vector("image_embeds"),
        ),
    ]
    return rows


def _maps(hf: Any) -> list[Row]:
    seg = hf.SegformerForSemanticSegmentation(hf.SegformerConfig(num_labels=150, depths=[1] * 4))
    few = hf.SegformerForSemanticSegmentation(hf.SegformerConfig(num_labels=6, depths=[1] * 4))
    shown = hf.SegformerImageProcessor(size={"height": 128, "width": 128})
    back = {"hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 3, "image_size": 70}
    back |= {"out_indices": [1, 2, 3, 4], "reshape_hidden_states": False, "apply_layernorm": True}
    any_ = hf.DepthAnythingForDepthEstimation(
        hf.DepthAnythingConfig(
            backbone_config=hf.Dinov2Config(**back),
            reassemble_hidden_size=48,
            neck_hidden_sizes=[16, 16, 16, 16],
            fusion_hidden_size=16,
            head_hidden_size=8,
        )
    )
    dpt = hf.DPTImageProcessor(
        size={"height": 518, "width": 518}, keep_aspect_ratio=True, ensure_multiple_of=14, resample=3
    )

    def classes(outputs: Mapping[str, Array], size: tuple[int, int], _: tuple[int, int]) -> Array:
        logits = torch.from_numpy(outputs["logits"])[None]
        large = nn.functional.interpolate(logits, size=size[::-1], mode="bilinear", align_corners=False)
        return np.asarray(large.argmax(1)[0])

    logits, depth = ("logits",), ("predicted_depth",)
    whole = (3, 128, 128)
    return [
        Row(
            20,
            "SegFormer, 150 classes",
            "by hand, with both JSON files",
            of_hf(seg, shown, logits, whole),
            "segment",
            _pixels(shown),
            classes,
        ),
        Row(
            19,
            "SegFormer",
            "optimum's axes",
            of_hf(few, shown, logits, whole, dynamic=True),
            "segment",
            _pixels(shown),
            classes,
        ),
        Row(
            21,
            "SegFormer, 150 classes",
            "by hand, nothing beside it",
            of_hf(seg, None, logits, whole, bare=True),
            "segment",
            _pixels(shown),
            classes,
        ),
        Row(
            22,
            "Depth Anything V2",
            "by hand, with both JSON files",
            of_hf(any_, dpt, depth, (3, 518, 518)),
            "depth",
            _pixels(dpt),
        ),
    ]


def _rest(hf: Any) -> list[Row]:
    small = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 64}
    texts = {"hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 64}
    pose = hf.VitPoseForPoseEstimation(
        hf.VitPoseConfig(
            backbone_config=hf.VitPoseBackboneConfig(
                hidden_size=48,
                num_hidden_layers=1,
                num_attention_heads=3,
                intermediate_size=64,
                image_size=[256, 192],
            ),
            num_labels=17,
        )
    )
    cropper = hf.VitPoseImageProcessor()

    def person(photo: Image.Image, _height: int, _width: int) -> Array:
        box = [[0.0, 0.0, float(photo.width), float(photo.height)]]
        return np.asarray(cropper(photo, boxes=[box], return_tensors="np")["pixel_values"][0], np.float64)

    swin = hf.Swin2SRForImageSuperResolution(
        hf.Swin2SRConfig(embed_dim=24, depths=[1], num_heads=[2], image_size=64, upscale=2, window_size=8)
    )
    towers = hf.CLIPModel(
        hf.CLIPConfig(
            text_config={**texts, "vocab_size": 99, "max_position_embeddings": 16, "eos_token_id": 98},
            vision_config={**small, "image_size": 64, "patch_size": 16},
            projection_dim=32,
        )
    )
    owl = hf.Owlv2ForObjectDetection(
        hf.Owlv2Config(
            text_config={**texts, "vocab_size": 99, "max_position_embeddings": 16},
            vision_config={**small, "image_size": 96, "patch_size": 16},
            projection_dim=48,
        )
    )
    video = hf.VideoMAEForVideoClassification(
        hf.VideoMAEConfig(**small, image_size=64, num_frames=4, num_labels=5)
    )
    return [
        Row(
            28,
            "ViTPose",
            "by hand, with both JSON files",
            of_hf(pose, cropper, ("heatmaps",), (3, 256, 192)),
            "pose",
            person,
        ),
        Row(
            35,
            "Swin2SR",
            "optimum's axes",
            of_hf(swin, hf.Swin2SRImageProcessor(), ("reconstruction",), (3, 64, 64), dynamic=True),
            "restore",
        ),
        Row(24, "CLIP, both towers", "optimum's axes", _towers(towers, 64), None, says="[inputs."),
        Row(25, "OWLv2, both towers", "optimum's axes", _towers(owl, 96), None, says="[inputs."),
        Row(
            33,
            "VideoMAE",
            "by hand, with config.json",
            of_hf(video, None, ("logits",), (4, 3, 64, 64)),
            None,
            says="video",
        ),
        Row(
            41,
            "TrOCR",
            "optimum's folder: encoder_model.onnx, decoder_model.onnx",
            _folder,
            None,
            says="holds 2 models",
        ),
    ]


class _Towers(nn.Module):
    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, input_ids: Tensor, pixel_values: Tensor, attention_mask: Tensor) -> tuple[Tensor, ...]:
        found = self.network(input_ids=input_ids, pixel_values=pixel_values, attention_mask=attention_mask)
        if "logits_per_image" in found:
            return found["logits_per_image"], found["logits_per_text"]
        return found["logits"], found["pred_boxes"]


def _towers(network: nn.Module, side: int) -> Callable[[Path], Path]:
    clip = "CLIP" in type(network).__name__
    outputs = ["logits_per_image", "logits_per_text"] if clip else ["logits", "pred_boxes"]
    axes: dict[str, dict[int, str]] = {
        "input_ids": {0: "text_batch_size", 1: "sequence_length"},
        "pixel_values": {0: "image_batch_size", 1: "num_channels", 2: "height", 3: "width"},
        "attention_mask": {0: "text_batch_size", 1: "sequence_length"},
    }
    axes |= {"logits_per_image": {0: "image_batch_size", 1: "text_batch_size"}} if clip else {}
    axes |= {"logits_per_text": {0: "text_batch_size", 1: "image_batch_size"}} if clip else {}
    axes |= {} if clip else {"logits": {0: "image_batch_size"}, "pred_boxes": {0: "image_batch_size"}}

    def write(folder: Path) -> Path:
        lay_beside(folder, _beside(network, None))
        ids = torch.randint(1, 98, (2, 16))
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                _Towers(network).eval(),
                (ids, torch.rand(1, 3, side, side), torch.ones_like(ids)),
                str(folder / "net.onnx"),
                input_names=["input_ids", "pixel_values", "attention_mask"],
                output_names=outputs,
                dynamic_axes=axes,
                opset_version=17,
                dynamo=False,
            )
        return folder / "net.onnx"

    return write


def _folder(folder: Path) -> Path:
    place = folder / "trocr"
    place.mkdir()
    for name in ("encoder_model", "decoder_model"):
        export(
            nn.Flatten(),
            place / f"{name}.onnx",
            (3, 8, 8),
            ("last_hidden_state",),
            name="pixel_values",
            dynamic=False,
        )
    return place


# ---- timm, open_clip, rapidocr


def _timm() -> list[Row]:
    import_torchvision()
    import timm

    rows = []
    for name in ("mobilenetv4_conv_small", "convnext_atto", "efficientvit_b0"):
        network = timm.create_model(name, pretrained=False)
        data = timm.data.resolve_data_config({}, model=network)
        transform = timm.data.create_transform(**data)
        plain = (int, float, str, tuple)
        cfg = {key: value for key, value in network.pretrained_cfg.items() if isinstance(value, plain)}
        config = {"architecture": name, "num_classes": 1000, "pretrained_cfg": cfg}
        side = tuple(data["input_size"])

        def write(folder: Path, network: Any = network, config: Any = config, side: Any = side) -> Path:
            lay_beside(folder, {"config.json": config})
            return export(network, folder / "net.onnx", side, ("output",), name="input", dynamic=False)

        def pixels(photo: Image.Image, _height: int, _width: int, transform: Any = transform) -> Array:
            return np.asarray(transform(photo))

        def own(outputs: Mapping[str, Array], *_: Any) -> list[tuple[int, float]]:
            shares = torch.from_numpy(outputs["output"]).softmax(-1).numpy()
            return [(int(at), float(shares[at])) for at in np.argsort(-shares)[:5]]

        rows.append(Row(23, f"{name}, timm", "by hand, with config.json", write, "classify", pixels, own))
    return rows


def _open_clip() -> list[Row]:
    import_torchvision()
    import open_clip

    vision = {"image_size": 64, "layers": 1, "width": 64, "patch_size": 16}
    text = {"context_length": 8, "vocab_size": 99, "width": 64, "heads": 2, "layers": 1}
    network = open_clip.CLIP(32, vision, text)
    mean, std = open_clip.OPENAI_DATASET_MEAN, open_clip.OPENAI_DATASET_STD
    transform = open_clip.image_transform(64, is_train=False, mean=mean, std=std)
    said = {"mean": list(mean), "std": list(std), "interpolation": "bicubic", "resize_mode": "shortest"}
    config = {"model_cfg": {"embed_dim": 32, "vision_cfg": vision, "text_cfg": text}, "preprocess_cfg": said}

    def write(folder: Path) -> Path:
        lay_beside(folder, {"open_clip_config.json": config})
        wrapped = Outputs(network, (), "encode_image")
        return export(wrapped, folder / "net.onnx", (3, 64, 64), ("output",), name="image", dynamic=False)

    def pixels(photo: Image.Image, _height: int, _width: int) -> Array:
        return np.asarray(transform(photo))

    row = Row(
        27,
        "open_clip, image tower",
        "by hand, with open_clip_config.json",
        write,
        "embed",
        pixels,
        lambda outputs, *_: outputs["output"],
    )
    return [row]


def _rapidocr() -> list[Row]:
    import rapidocr

    models = Path(rapidocr.__file__).parent / "models"
    found = {part: next(models.glob(f"*_{part}_*.onnx")) for part in ("det", "rec", "cls")}

    def copied(part: str) -> Callable[[Path], Path]:
        def write(folder: Path) -> Path:
            target = folder / found[part].name
            target.write_bytes(found[part].read_bytes())
            return target

        return write

    def text(outputs: Mapping[str, Array], *_: Any) -> tuple[str, float]:
        import onnxruntime
        from rapidocr.ch_ppocr_rec.utils import CTCLabelDecode

        session = onnxruntime.InferenceSession(str(found["rec"]))
        listed = session.get_modelmeta().custom_metadata_map["character"].splitlines()
        [values] = outputs.values()
        lines = CTCLabelDecode(character=listed)(values[None], return_word_box=False)[0]
        return str(lines[0][0]), float(lines[0][1])

    def regions(outputs: Mapping[str, Array], size: tuple[int, int], _: tuple[int, int]) -> Any:
        from rapidocr.ch_ppocr_det.utils import DBPostProcess

        [values] = outputs.values()
        done = DBPostProcess(thresh=0.3, box_thresh=0.5, max_candidates=1000, unclip_ratio=1.6)
        boxes, _scores = done(values.reshape(1, 1, *values.shape[-2:]), size[::-1])
        return [np.asarray(box, np.float32) for box in boxes]

    def line(photo: Image.Image, height: int, width: int) -> Array:
        """As rapidocr's recognition resizes a line: BGR, (value ÷ 255 − 0.5) ÷ 0.5, nothing behind it."""
        pixels = np.asarray(photo)[:, :, ::-1]
        across = min(width, int(np.ceil(height * photo.width / photo.height)))
        resized = cv2.resize(pixels, (across, height)).astype(np.float32).transpose(2, 0, 1) / 255
        canvas = np.zeros((3, height, width), np.float32)
        canvas[:, :, :across] = (resized - 0.5) / 0.5
        return canvas

    return [
        Row(
            36,
            "PP-OCRv6 detection",
            "rapidocr's wheel, real weights",
            copied("det"),
            "text_regions",
            None,
            regions,
        ),
        Row(37, "PP-OCRv6 recognition", "rapidocr's wheel, real weights", copied("rec"), "read", line, text),
        Row(38, "PP-OCR text direction", "rapidocr's wheel, real weights", copied("cls"), "classify"),
    ]
