"""Reads transformers' preprocessor_config.json: how its processor makes tensors of pictures.

Each processor has rules of its own. What is not understood is a doubt: the name of the setting that it would
change, or the field itself. Nothing of the file is passed over in silence.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from carpool.config.model import MAX_SIDE
from carpool.vision.output_facts import FIELD_OF

_KERNELS = {0: "pil-nearest", 1: "pil-lanczos", 2: "pil-bilinear", 3: "pil-bicubic"}
_FLIPS = "MobileViT"  # a processor that turns RGB into BGR unless its file says otherwise
_NEVER_NORMALISE = (_FLIPS, "GLPN")  # without mean and std, which their files may name all the same
_WARPED = 384  # pixels from which on ConvNeXt's processor does not crop
_LEAST_SHARE = 0.01  # of a picture that a crop leaves
_MOST_DOUBTS = 8
_KIND = re.compile(r"(\w{1,60}?)(?:ImageProcessor|FeatureExtractor)(?:Fast|Pil)?")
_PADS_A_BATCH = (
    *("Detr", "ConditionalDetr", "DeformableDetr", "RTDetr", "RfDetr", "GroundingDino", "Yolos"),
    *("MaskFormer", "Mask2Former"),
)
"""Processors whose `do_pad` makes the pictures of a batch equally large, and changes none that is alone."""
_TO_SHORTEST = ("Bit", "CLIP", "ChineseCLIP", "ConvNext", "MobileNetV1", "MobileNetV2", _FLIPS)
_TO_SQUARES = ("ViT", "DeiT", "Beit", "Blip", "DINOv3ViT", "DPT", "EfficientNet", "Pvt", "OwlViT")
_FOLLOWED = (*_TO_SHORTEST, *_TO_SQUARES, *_PADS_A_BATCH, "Segformer", "Siglip", "GLPN", "")
"""Processors that fit pictures as their fields say."""
_READ = """
    image_processor_type feature_extractor_type size crop_size do_resize do_center_crop crop_pct
    resample do_flip_channel_order do_rescale rescale_factor rescale_offset do_normalize image_mean
    image_std do_pad pad_size size_divisor keep_aspect_ratio ensure_multiple_of max_size
    default_to_square
"""
_NOT_PIXELS = """
    processor_class auto_map do_convert_rgb do_reduce_labels reduce_labels return_tensors data_format
    input_data_format device disable_grouping format num_labels ignore_index do_convert_annotations
    return_segmentation_masks masks_path _valid_processor_keys image_seq_length use_fast
"""
_KNOWN = frozenset((*_READ.split(), *_NOT_PIXELS.split()))

Settings = Mapping[str, Any]


class Processor(NamedTuple):
    """`image` are fields of ImageSettings, `doubts` what of them the file leaves open, as `assumed` names
    it."""

    size: tuple[int, int] | None  # height, width
    image: dict[str, Any]
    doubts: tuple[str, ...]


def read_processor(settings: Settings) -> Processor:
    size, image = _fitted(settings)
    doubts = list(_doubts(settings, size, image))
    number = settings.get("resample")
    if isinstance(number, int) and number in _KERNELS:
        image["kernel"] = _KERNELS[number]
    elif number is not None:
        doubts.append("kernel")
    flips = settings.get("do_flip_channel_order", _kind(settings) == _FLIPS)
    image["channels"] = "bgr" if flips else "rgb"
    image |= values_of(settings)
    return Processor(size, image, tuple(dict.fromkeys(doubts))[:_MOST_DOUBTS])


def _kind(settings: Settings) -> str:
    """Returns ViT of a ViTImageProcessor; nothing where the file has no name of one."""
    name = str(settings.get("image_processor_type", settings.get("feature_extractor_type", "")))
    found = _KIND.fullmatch(name)
    return name[:80] if found is None else found.group(1)


def _doubts(settings: Settings, size: tuple[int, int] | None, image: Settings) -> Iterator[str]:
    if image.get("resize") == "letterbox":
        yield "kernel"  # it blurs with a Gauss filter of its own before it resizes
    elif "resize" in image and not _follows(settings, size or (0, 0)):
        yield "resize"
    for name, value in settings.items():
        if name not in _KNOWN and value not in (None, False) and re.fullmatch(r"\w{1,40}", name, re.ASCII):
            yield FIELD_OF + name


def _follows(settings: Settings, size: tuple[int, int]) -> bool:
    """Returns whether pictures come into the input as stretch and crop do it."""
    kind = _kind(settings)
    multiple, divisor = (settings.get(name) or 1 for name in ("ensure_multiple_of", "size_divisor"))
    pads = settings.get("do_pad") and (kind not in _PADS_A_BATCH or settings.get("pad_size"))
    return (
        kind in _FOLLOWED
        and settings.get("do_resize", True) is not False
        and not settings.get("keep_aspect_ratio")
        and not pads
        and not any(isinstance(by, int) and any(side % by for side in size) for by in (multiple, divisor))
        and not _squeezes_before_crop(settings)
    )


def _squeezes_before_crop(settings: Settings) -> bool:
    """Returns whether the processor stretches a picture to one size and then cuts out the middle."""
    whole, cut = sides_of(settings.get("size")), sides_of(settings.get("crop_size"))
    return bool(settings.get("do_center_crop")) and not _to_shortest(settings) and whole != cut


def _to_shortest(settings: Settings) -> bool:
    """Returns whether `size` is the shorter side, so that pictures keep their proportions."""
    size = settings.get("size")
    if isinstance(size, Mapping):
        return "shortest_edge" in size
    square = settings.get("default_to_square")
    if isinstance(square, bool):
        return not square
    return "max_size" in settings or _kind(settings) in (*_TO_SHORTEST, *_PADS_A_BATCH)


def _pads_to_square(settings: Settings, size: tuple[int, int]) -> bool:
    """Returns whether pictures get black at the right or below until they are square, as OWLv2's do."""
    asked = settings.get("do_pad", True) and settings.get("do_resize", True)
    return _kind(settings) == "Owlv2" and asked is True and size[0] == size[1]


def _fitted(settings: Settings) -> tuple[tuple[int, int] | None, dict[str, Any]]:
    """Returns the input's size, and how pictures come into it. A processor that keeps their proportions and
    cuts nothing off makes inputs of many sizes, which says nothing of a model that takes one."""
    size = sides_of(settings.get("size"))
    if size and _pads_to_square(settings, size):
        return size, {"resize": "letterbox", "anchor": "top_left", "pad": 0}
    if settings.get("do_center_crop"):
        cut = sides_of(settings.get("crop_size"))
        if size and cut == size and not _to_shortest(settings):
            return size, {"resize": "stretch"}
        crop = min(cut) / min(size) if cut and size else 1.0
        return cut or size, {"resize": "crop", "crop": crop} if crop <= 1 else {}  # else it pads
    share = settings.get("crop_pct")
    if size and isinstance(share, float) and _LEAST_SHARE <= share <= 1:  # ConvNeXt's
        crop = size[0] / int(size[0] / share)
        return size, {"resize": "crop", "crop": crop} if size[0] < _WARPED else {"resize": "stretch"}
    return size, {} if _to_shortest(settings) or not size else {"resize": "stretch"}


def sides_of(value: object) -> tuple[int, int] | None:
    """Returns height and width: of a number, a pair, timm's channels, height and width, or a dict of them."""
    if isinstance(value, Mapping):
        if "shortest_edge" in value:
            side = value["shortest_edge"]
            return None if isinstance(side, Mapping) else sides_of(side)
        return sides_of([value.get("height"), value.get("width")])
    found = [value, value] if isinstance(value, int) else value
    if not isinstance(found, list | tuple) or len(found) not in (2, 3):
        return None
    height, width = found[-2:]
    good = all(isinstance(side, int) and 0 < side <= MAX_SIDE for side in (height, width))
    return (height, width) if good else None


def values_of(settings: Settings) -> dict[str, Any]:
    """Returns scale, mean and deviation, as (pixel × scale − mean) ÷ std; nothing where one of them is
    missing, or whether they count: each processor has its own defaults."""
    scale = settings.get("rescale_factor", 1 / 255) if settings.get("do_rescale", True) else 1.0
    if not isinstance(scale, float) or not 0 < scale <= 1:
        return {}
    shift = 1.0 if settings.get("rescale_offset") else 0.0  # taken away before the rest
    normalises = settings.get("do_normalize")
    if normalises is None and _kind(settings) in _NEVER_NORMALISE:
        normalises = False
    if normalises is False:
        return {"scale": scale, "mean": (shift,)}
    mean, std = _numbers(settings.get("image_mean")), _numbers(settings.get("image_std"))
    if normalises is not True or not mean or not std or min(std) <= 0:
        return {}
    return {"scale": scale, "mean": tuple(number + shift for number in mean), "std": std}


def _numbers(value: object) -> tuple[float, ...] | None:
    if not isinstance(value, list | tuple) or len(value) not in (1, 3):
        return None
    good = all(isinstance(one, int | float) and abs(one) < 1e6 for one in value)
    return tuple(map(float, value)) if good else None
