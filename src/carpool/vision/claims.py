"""Reads what a model's own metadata claims: its task, classes, size and pixel values.

Five writers are understood: Ultralytics and PP-OCR (in the file), transformers, timm and open_clip (JSON
beside it). Their texts are read as literals within bounds, never evaluated. A claim is believed only where
the outputs fit it. Where none of them says anything of pixels, the names of tensors may (family_pixels.py).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from carpool.config.file_metadata import FileMetadata
from carpool.config.first_layers import BYTES, FRACTIONS, SYMMETRIC
from carpool.config.model import MAX_CLASSES, MAX_KEYPOINTS, PILLOW
from carpool.config.presets import VALUES, preset_fields, same_values
from carpool.config.python_source import read_expression
from carpool.vision.output_facts import NO_CLAIMS, Claims
from carpool.vision.processor_config import read_processor, sides_of, values_of

_LONGEST = 1 << 20  # characters of a literal
_DEEPEST = 4
_LONGEST_LABEL = 200
_TASKS = {  # Ultralytics' names of tasks, and ours
    **{task: task for task in ("detect", "segment", "classify", "pose", "obb", "depth")},
    "semantic": "segment",
}
_ARCHITECTURES = {  # what names of transformers' classes have in them
    "ForImageClassification": "classify",
    "ForObjectDetection": "detect",
    "ForSemanticSegmentation": "segment",
    "ForDepthEstimation": "depth",
    "ForPoseEstimation": "pose",
    "ForImageSuperResolution": "restore",
    "VisionModelWithProjection": "embed",
}
_FOR = re.compile(r"[a-z0-9]For[A-Z]")  # a network with a head, of a kind that no task reads
_SOFTMAX_DETECTORS = ("Detr", "Yolos", "TableTransformer")  # with a last class for nothing; others: sigmoids
_FINDS_TEXT = re.compile(r"(?i).{0,60}(?:pp-?ocr|text)[a-z0-9._-]{0,20}[_-]det(?:[_-].{0,60})?")
_PPOCR: Mapping[str, Any] = {"channels": "bgr", "scale": 1 / 255, "mean": (0.5,), "std": (0.5,)}
_PPOCR_TEXT: Mapping[str, Any] = {"resize": "line", "pad": 128, "kernel": "bilinear", **_PPOCR}
_PPOCR_LINE, _PPOCR_PAGE, _PPOCR_CHIP = (48, 640), (960, 960), (48, 192)
_TURNS_TEXT = re.compile(r"(?i).{0,60}pp-?ocr[a-z0-9._-]{0,40}[_-]cls(?:[_-].{0,60})?")
_KERNELS_BY_NAME = {name.removeprefix("pil-"): name for name in PILLOW}
_CROP_MODES = {"squash": "stretch", "border": "letterbox"}  # timm's, beside its center
_RESIZE_MODES: Mapping[str, Mapping[str, Any]] = {  # open_clip's
    "shortest": {"resize": "crop", "crop": 1.0},
    "squash": {"resize": "stretch"},
    "longest": {"resize": "letterbox", "pad": 0},
}


_TAKES: Mapping[str, Mapping[str, Any]] = {
    BYTES: {"scale": 1.0, "mean": (0.0,), "std": (1.0,)},
    FRACTIONS: {"scale": 1 / 255, "mean": (0.0,), "std": (1.0,)},
    SYMMETRIC: {"scale": 1 / 127.5, "mean": (1.0,), "std": (1.0,)},
}


def read_claims(metadata: FileMetadata) -> Claims:
    """Returns an empty one where nothing is claimed. What the file's own layers do to pixels counts
    before what is said about the values that they were trained with; where both differ, that is a doubt."""
    claims = _claimed(metadata)
    claims = replace(claims, size=claims.size or _config_size(metadata), channels=_channels(metadata))
    claims = claims if claims.image else _of_family(claims, metadata)
    layers = metadata.start.layers
    if layers is None:
        return claims
    takes = _TAKES[layers.takes]
    image = {**({"channels": "rgb"} if layers.in_order else {}), **claims.image, **takes}
    claimed = any(name in claims.image for name in VALUES)
    differs = claimed and not same_values(claims.image, takes)
    doubts = (*claims.doubts, "mean", "std") if differs else claims.doubts
    return replace(claims, image=image, lines=(*claims.lines, layers.words), layers=takes, doubts=doubts)


def _of_family(claims: Claims, metadata: FileMetadata) -> Claims:
    """Adds the pixels of the family that the file's tensors are named and shaped as."""
    if len(metadata.outputs) < 2:
        return claims  # of many families
    from carpool.vision.family_pixels import family_pixels  # which a model of tensors does not need

    family = family_pixels(metadata.inputs, metadata.outputs)
    if family is None:
        return claims
    words = f'its tensors are {family.words}: preset "{family.preset}"'
    words += f", of which {' and '.join(family.doubts)} may be others" if family.doubts else ""
    image = preset_fields(family.preset)
    return replace(claims, image=image, lines=(*claims.lines, words), doubts=(*claims.doubts, *family.doubts))


def _config_size(metadata: FileMetadata) -> tuple[int, int] | None:
    """Returns the size that transformers' config.json has for the network itself."""
    return sides_of(metadata.config.get("image_size"))


def _channels(metadata: FileMetadata) -> int | None:
    """Returns those of the picture, for an export that names its dimension and gives it no number: what the
    first convolution takes, or what the files beside it say."""
    found = metadata.start.channels
    if found is None and metadata.start.symbol in ("num_channels", "channels"):
        means = metadata.preprocessor.get("image_mean")
        found = metadata.config.get("num_channels", len(means) if isinstance(means, list) else None)
    return found if isinstance(found, int) and found > 0 else None


def _claimed(metadata: FileMetadata) -> Claims:
    entries, config = metadata.entries, metadata.config
    if "names" in entries or ("task" in entries and "stride" in entries):
        return _ultralytics(entries)
    if "character" in entries or isinstance(metadata.meta.get("charset"), list):
        return _reader(entries, metadata.meta)
    if _FINDS_TEXT.fullmatch(metadata.name):
        return _text_finder(metadata.name)
    if _TURNS_TEXT.fullmatch(metadata.name):
        return _text_turner(metadata.name)
    wraps_timm = isinstance(config.get("architecture"), str) and "pretrained_cfg" in config
    if isinstance(config.get("architectures"), list) and not wraps_timm:
        return _transformers(config, metadata.preprocessor)
    if isinstance(config.get("architecture"), str):
        return _timm(config)
    if isinstance(metadata.open_clip.get("preprocess_cfg"), dict):
        return _open_clip(metadata.open_clip)
    return NO_CLAIMS


def literal(text: str) -> object:
    """A number, text, list, tuple or dict as Python writes it; None for what is too long, too deep or not."""
    if len(text) > _LONGEST or _depth(text) > _DEEPEST:
        return None
    try:
        value: object = ast.literal_eval(read_expression(text))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
    return value


def _depth(text: str) -> int:
    """Returns the depth of brackets, also of those in texts: a bound needs no more."""
    deepest = depth = 0
    for letter in text:
        if letter in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif letter in ")]}":
            depth -= 1
    return deepest


def _names(value: object) -> tuple[str, ...]:
    """Returns the names of classes: a list of them, or numbers from 0 with names; anything else is none."""
    if isinstance(value, Mapping):
        numbered = {_number(key): name for key, name in list(value.items())[:MAX_CLASSES]}
        if not numbered or sorted(numbered) != list(range(len(numbered))):
            return ()
        value = [numbered[number] for number in range(len(numbered))]
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) > MAX_CLASSES:
        return ()
    return tuple(str(name)[:_LONGEST_LABEL] for name in value)


def _number(key: object) -> int:
    text = str(key)
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 6 else -1


# ---- Ultralytics: YOLO and RT-DETR exports


def _ultralytics(entries: Mapping[str, str]) -> Claims:
    task = entries.get("task", "detect")  # YOLOv5 writes names and stride alone
    labels = _names(literal(entries.get("names", "")))
    size = sides_of(literal(entries.get("imgsz", "")))
    shape = literal(entries.get("kpt_shape", ""))
    keypoints = None
    if isinstance(shape, list | tuple) and len(shape) == 2 and shape[1] in (2, 3):
        keypoints = (shape[0], shape[1]) if shape[0] in range(1, MAX_KEYPOINTS + 1) else None
    told = {"task": entries.get("task"), "names": f"{len(labels)} of them" if labels else None}
    told |= {"imgsz": entries.get("imgsz"), "kpt_shape": entries.get("kpt_shape")}
    words = ", ".join(f"{key} {' '.join(value.split())[:60]}" for key, value in told.items() if value)
    known = _TASKS.get(task)
    image = preset_fields("ultralytics", known)
    if "rtdetr" in entries.get("description", "").lower().replace("-", ""):
        image["resize"] = "stretch"
    return Claims(
        source="Ultralytics",
        task=known,
        form=task if task in ("semantic", "obb", "depth") else "",
        unread="" if known else f'task "{" ".join(task.split())[:60]}"',
        labels=labels,
        size=size,
        image=image,
        keypoints=keypoints,
        lines=(f"metadata of Ultralytics in the file: {words}",) if words else (),
    )


# ---- transformers and timm: JSON beside the file


def _transformers(config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> Claims:
    architecture = str((config["architectures"] or [""])[0])[:100]
    task = next((task for part, task in _ARCHITECTURES.items() if part in architecture), None)
    activation = None
    if task == "detect":
        activation = "softmax" if architecture.startswith(_SOFTMAX_DETECTORS) else "sigmoid"
    elif task == "classify":
        several = config.get("problem_type") == "multi_label_classification"
        activation = "sigmoid" if several else "softmax"
    labels = _names(config.get("id2label"))
    claims = Claims(
        source="transformers",
        task=task,
        labels=labels,
        activation=activation,
        unread=architecture if task is None and _FOR.search(architecture) else "",
        lines=(f"config.json of transformers: {architecture}, {len(labels)} labels",),
    )
    return _with_preprocessor(claims, preprocessor)


def _with_preprocessor(claims: Claims, settings: Mapping[str, Any]) -> Claims:
    if not settings:
        return claims
    size, image, doubts = read_processor(settings)
    words = ", ".join(f"{key} {value}" for key, value in image.items())
    lines = [*claims.lines, f"preprocessor_config.json: size {size}, {words}"]
    lines += [f"preprocessor_config.json leaves open: {', '.join(doubts)}"] if doubts else []
    return replace(claims, size=size, image=image, lines=tuple(lines), doubts=doubts)


def _timm(config: Mapping[str, Any]) -> Claims:
    cfg = config.get("pretrained_cfg")
    cfg = cfg if isinstance(cfg, Mapping) else config
    classes = config.get("num_classes", cfg.get("num_classes"))
    image: dict[str, Any] = {}
    size, crop = sides_of(cfg.get("input_size")), cfg.get("crop_pct")
    kernel, mode = _KERNELS_BY_NAME.get(str(cfg.get("interpolation"))), str(cfg.get("crop_mode"))
    if mode in _CROP_MODES:
        image["resize"] = _CROP_MODES[mode]
    elif isinstance(crop, int | float) and 0 < crop <= 1 and size:
        image |= {"resize": "crop", "crop": min(size) / int(min(size) / crop)}
    if kernel:
        image["kernel"] = kernel
    image["channels"] = "rgb"
    image |= values_of({"image_mean": cfg.get("mean"), "image_std": cfg.get("std"), "do_normalize": True})
    words = ", ".join(f"{key} {value}" for key, value in image.items())
    architecture = str(config["architecture"])[:100]
    return Claims(
        source="timm",
        task="embed" if classes == 0 else "classify",
        labels=_names(config.get("label_names", cfg.get("label_names"))),
        size=size,
        image=image,
        activation="softmax",
        lines=(f"config.json of timm: {architecture}, {classes} classes; {words}",),
    )


def _open_clip(config: Mapping[str, Any]) -> Claims:
    """Reads the settings that its hub and its trainer write: the image tower makes embeddings."""
    said, network = config["preprocess_cfg"], config.get("model_cfg")
    vision = network.get("vision_cfg") if isinstance(network, Mapping) else None
    sides = vision.get("image_size") if isinstance(vision, Mapping) else None
    image: dict[str, Any] = dict(_RESIZE_MODES.get(str(said.get("resize_mode", "shortest")), {}))
    kernel = _KERNELS_BY_NAME.get(str(said.get("interpolation", "bicubic")))
    image |= {"kernel": kernel} if kernel else {}
    image["channels"] = "rgb"
    given = {"image_mean": said.get("mean"), "image_std": said.get("std"), "do_normalize": True}
    image |= values_of(given)
    words = ", ".join(f"{key} {value}" for key, value in image.items())
    line = f"open_clip_config.json: {words}"
    return Claims(source="open_clip", task="embed", size=sides_of(sides), image=image, lines=(line,))


# ---- PP-OCR: the alphabet of a reader stands in its file; a finder has nothing but its name


def _reader(entries: Mapping[str, str], meta: Mapping[str, Any]) -> Claims:
    """Returns a line for each character, or a list of them in a file beside it."""
    listed = entries["character"].split("\n") if "character" in entries else meta["charset"]
    if listed and listed[-1] == "":  # the last line ends, too
        listed = listed[:-1]
    if len(listed) > MAX_CLASSES:
        return NO_CLAIMS
    where = '"character" in the file' if "character" in entries else "meta.json"
    ours = "character" in entries
    return Claims(
        source="PP-OCR" if ours else "meta.json",
        task="read",
        labels=tuple(str(one)[:_LONGEST_LABEL].rstrip("\r") for one in listed),
        size=_PPOCR_LINE if ours else None,
        image=dict(_PPOCR_TEXT) if ours else {"resize": "line"},
        lines=(f"an alphabet of {len(listed)} characters: {where}",),
    )


def _text_finder(name: str) -> Claims:
    return Claims(
        source="PP-OCR",
        task="text_regions",
        size=_PPOCR_PAGE,
        image={"anchor": "top_left", **_PPOCR},
        lines=(f"its name {name[:60]} stands for text detection",),
    )


def _text_turner(name: str) -> Claims:
    """Returns which way up a line of text is."""
    return Claims(
        source="PP-OCR",
        task="classify",
        labels=("0", "180"),
        size=_PPOCR_CHIP,
        image=dict(_PPOCR_TEXT),
        lines=(f"its name {name[:60]} stands for the direction of text",),
    )
