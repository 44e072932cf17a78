"""Roboflow's documents: what a request asks for, and answers with boxes by their centres.

Pure functions. Numbers that are wrong are errors; fields that ask for nothing that is done here, such as
`disable_active_learning`, are passed over.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import parse_qsl

from carpool.config.rules import shown
from carpool.errors import InvalidInput
from carpool.frontend.http.image_reading import MAX_PICTURES
from carpool.frontend.pictures.sent_pictures import from_base64
from carpool.wire.head import load_object

TASKS: Mapping[str, str] = {
    "detect": "object-detection",
    "classify": "classification",
    "segment": "instance-segmentation",
    "pose": "keypoint-detection",
}
ROUTES: Mapping[str, str] = {
    "object_detection": "detect",
    "classification": "classify",
    "instance_segmentation": "segment",
    "keypoints_detection": "pose",
}
DEFAULT_SCORE = "0.4"  # where a request has none
_MOST_CLASSES = 1000
_FEWEST_CORNERS = 3


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: its images, the id of its model, and what is left out of the answer."""

    model_id: str = ""
    pictures: list[bytes] = field(default_factory=list)
    url: str = ""
    several: bool = False
    options: Mapping[str, str] = field(default_factory=dict)
    classes: frozenset[str] = frozenset()  # that are answered; empty: all
    output: str = ""  # of a workflow


def read_inference(body: bytes | bytearray) -> Asked:
    """Reads what is sent to `/infer/…`."""
    document = load_object(body, "request", tensors=False)
    asked = read_images(document.get("image"), "image")
    wanted = document.get("class_filter")
    return replace(
        asked,
        model_id=_text(document.get("model_id"), "model_id"),
        options=_options(document),
        classes=_classes(wanted),
    )


def read_images(given: object, name: str) -> Asked:
    """Reads one image, or a list of them."""
    listed = given if isinstance(given, list) else [given]
    if not 1 <= len(listed) <= MAX_PICTURES:
        raise InvalidInput(f"{name} must be one image, or a list of 1 to {MAX_PICTURES}", field=name)
    pictures, url = _read_images(listed, name)
    return Asked(pictures=pictures, url=url, several=isinstance(given, list))


def read_id(body: bytes | bytearray) -> str:
    """Reads what is sent to `/model/add` and `/model/remove`."""
    return _text(load_object(body, "request", tensors=False).get("model_id"), "model_id")


def read_old(body: bytes | bytearray, query: str) -> Asked:
    """Reads a request of the first version of this protocol: the body is an image in base64, or as it is."""
    given = dict(parse_qsl(query[:8192], keep_blank_values=True, errors="replace"))
    wanted = given.get("classes") or given.get("class_filter")
    url = given.get("image", "")
    plain = bytes(body)
    if plain[:1] in _FIRST_BYTES or not plain.isascii():
        picture = plain
    else:
        picture = from_base64(plain.decode("ascii"), "body")
    pictures = [] if url else [picture]
    return Asked(
        pictures=pictures,
        url=url,
        options=_options(given),
        classes=_classes(wanted.split(",") if wanted else None),
    )


_FIRST_BYTES = (b"\xff", b"\x89", b"")
"""Of images as they are."""


def read_workflow(body: bytes | bytearray) -> Asked:
    """Reads a workflow's inputs: one image, or a list that is answered one by one."""
    document = load_object(body, "request", tensors=False)
    inputs = document.get("inputs")
    if not isinstance(inputs, dict):
        raise InvalidInput("inputs must be an object with an image", field="inputs")
    images = {name: one for name, one in inputs.items() if _is_image(one)}
    if len(images) != 1:
        raise InvalidInput("inputs must have exactly one image", field="inputs")
    [(_, given)] = images.items()
    listed = given if isinstance(given, list) else [given]
    pictures, url = _read_images(listed)
    more = {name: value for name, value in inputs.items() if isinstance(value, int | float)}
    return Asked(pictures=pictures, url=url, several=not url, options=_options(more))


def _is_image(given: object) -> bool:
    if isinstance(given, list):
        return 1 <= len(given) <= MAX_PICTURES and all(_is_image(one) for one in given)
    return isinstance(given, dict) and "type" in given and "value" in given


def _read_images(listed: list[Any], name: str = "image") -> tuple[list[bytes], str]:
    """Returns the images, or the address of the one image."""
    pictures: list[bytes] = []
    for number, one in enumerate(listed):
        where = f"{name}[{number}]" if len(listed) > 1 else name
        kind, value = (one.get("type"), one.get("value")) if isinstance(one, dict) else (None, None)
        if not isinstance(value, str) or kind not in ("base64", "url"):
            raise InvalidInput(
                f'{where} must be {{"type": "base64", "value": …}}; type may also be url', field=where
            )
        if kind == "base64":
            pictures.append(from_base64(value, where))
        elif len(listed) == 1:
            return [], value
        else:
            raise InvalidInput(f"{where}: several images must be in base64", field=where)
    return pictures, ""


def _text(value: object, name: str) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidInput(f"{name} must be the name of a model, like nanodet/1", field=name)
    return value


def _options(given: Mapping[str, Any]) -> dict[str, str]:
    """Returns the options of the model's task. Without a threshold, Roboflow's default is used."""
    found = {"score": DEFAULT_SCORE, "format": "rle"}
    for name, option in (("confidence", "score"), ("iou_threshold", "iou"), ("overlap", "iou")):
        value = given.get(name)
        if value not in (None, "", "best", "default"):
            found[option] = _fraction(value, name)
    most = given.get("max_detections")
    if most is not None:
        found["max_detections"] = found["top_k"] = _whole(most)
    return found


def _whole(value: object) -> str:
    text = str(value)
    if isinstance(value, bool) or not (text.isascii() and text.isdigit() and 1 <= len(text) <= 9):
        raise InvalidInput("max_detections must be a whole number", field="max_detections")
    return text


def _fraction(value: object, name: str) -> str:
    """Accepts percent, too, as Roboflow's hosted models do."""
    try:
        number = float(value) if isinstance(value, str | int | float) and len(str(value)) <= 32 else -1.0
    except ValueError:
        number = -1.0
    number = number / 100 if 1.0 < number <= 100.0 else number
    if isinstance(value, bool) or not 0.0 <= number <= 1.0:
        raise InvalidInput(f"{name} must be a number from 0 to 1, not {shown(str(value))}", field=name)
    return f"{number:.6f}"


def _classes(given: object) -> frozenset[str]:
    if given is None:
        return frozenset()
    if not isinstance(given, list) or len(given) > _MOST_CLASSES:
        raise InvalidInput("class_filter must be a list of labels", field="class_filter")
    if not all(isinstance(one, str) for one in given):
        raise InvalidInput("class_filter must be a list of labels", field="class_filter")
    return frozenset(given)


# ---- answers -----------------------------------------------------------------------------------------------


def told(answer: Mapping[str, Any], classes: Collection[str] = ()) -> dict[str, Any]:
    """Returns the answer to one image."""
    found: dict[str, Any] = {"time": 0.0, "image": answer["image"]}
    if "classes" in answer:
        listed = [_class(one) for one in answer["classes"] if not classes or one["label"] in classes]
        best = listed[0] if listed else {"class": "", "confidence": 0.0}
        return {**found, "predictions": listed, "top": best["class"], "confidence": best["confidence"]}
    things = answer.get("detections", answer.get("masks"))
    if things is None:
        raise InvalidInput(
            f"model '{answer['model']}' answers neither boxes, masks, keypoints nor classes: use another "
            "route of this server for it",
            reason="no-task",
            field="model_id",
        )
    kept = [_prediction(one) for one in things if not classes or one["label"] in classes]
    return {**found, "predictions": kept}


def _class(one: Mapping[str, Any]) -> dict[str, Any]:
    return {"class": one["label"], "class_id": one["class_id"], "confidence": one["score"]}


def _prediction(one: Mapping[str, Any]) -> dict[str, Any]:
    left, top, right, bottom = one["box"]
    found = {
        "x": (left + right) / 2,
        "y": (top + bottom) / 2,
        "width": right - left,
        "height": bottom - top,
        "confidence": one["score"],
        "class": one["label"],
        "class_id": one["class_id"],
    }
    if "keypoints" in one:
        found["keypoints"] = [_keypoint(number, point) for number, point in enumerate(one["keypoints"])]
    if "rle" in one:
        found["points"] = _outline(one)
    return found


def _keypoint(number: int, point: list[float]) -> dict[str, Any]:
    sure = point[2] if len(point) > 2 else 1.0
    return {"x": point[0], "y": point[1], "confidence": sure, "class_id": number, "class": str(number)}


def _outline(mask: Mapping[str, Any]) -> list[dict[str, float]]:
    """Returns the outline of the largest part of a mask; of one that is too small for that, its box."""
    import cv2

    from carpool.vision.mask_regions import from_run_lengths

    pixels = from_run_lengths(mask["rle"]["counts"], *mask["rle"]["size"])
    outlines, _ = cv2.findContours((pixels > 0).astype("uint8"), cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_SIMPLE)
    largest = max(outlines, key=cv2.contourArea, default=())
    if len(largest) >= _FEWEST_CORNERS:
        return [{"x": float(x), "y": float(y)} for [[x, y]] in largest]
    left, top, right, bottom = mask["box"]
    corners = ((left, top), (right, top), (right, bottom), (left, bottom))
    return [{"x": x, "y": y} for x, y in corners]


def words(status: int, error: Mapping[str, Any]) -> tuple[int, object]:
    """Returns an error as the SDK shows it."""
    return status, {"message": error["error"], "error_type": error.get("reason"), "field": error.get("field")}
