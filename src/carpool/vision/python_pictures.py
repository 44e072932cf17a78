"""Pictures as Python programs have them, and answers as they want them: arrays beside the routes' own JSON.

Importing this takes numpy alone; what reads and writes files comes when it is needed.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from carpool.errors import ConfigError, InvalidInput
from carpool.types import DATATYPES, Array

if TYPE_CHECKING:
    from PIL.Image import Image

Picture: TypeAlias = "bytes | bytearray | memoryview | str | Path | Image | Array"
"""A file's bytes, the path of a file, an image of Pillow, or pixels [h, w] or [h, w, 3] of RGB bytes."""

_LARGEST = 1 << 30  # bytes: no picture is
_VISIBLE = 2  # of a keypoint, in COCO's words


def picture_file(picture: Picture) -> bytes | bytearray | memoryview:
    """The bytes of the picture's file; pixels become a PNG, which loses nothing."""
    if isinstance(picture, bytes | bytearray | memoryview):
        return picture
    if isinstance(picture, str | Path):
        return _read(Path(picture))
    if hasattr(picture, "convert"):  # one of Pillow's: its pixels as it shows them
        picture = np.asarray(picture.convert("RGB"))
    if not isinstance(picture, np.ndarray):
        raise InvalidInput(
            f"an image must be bytes, a path, a Pillow image or an array, not {type(picture).__name__}",
            field="picture",
        )
    grey, colour = picture.ndim == 2, picture.ndim == 3 and picture.shape[2] == 3
    if picture.dtype != np.uint8 or not (grey or colour) or not picture.size:
        raise InvalidInput(
            f"pixels are an array [h, w] or [h, w, 3] of uint8, not {list(picture.shape)} of {picture.dtype}",
            field="picture",
        )
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(picture)).save(file, "PNG", compress_level=1)
    return file.getbuffer()


def _read(path: Path) -> bytes:
    try:
        if path.stat().st_size > _LARGEST:
            raise InvalidInput(
                f"{path}: larger than {_LARGEST} bytes, too large for an image", field="picture"
            )
        return path.read_bytes()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise InvalidInput(f"{path}: cannot be read: {why}", field="picture") from None


# ---- answers


class Answer(dict[str, Any]):
    """Holds what an image route answers, as it stands in the JSON; what is in it as arrays, in its
    properties."""

    @property
    def model(self) -> str:
        """Returns which one answered."""
        return str(self.get("model", ""))

    @property
    def version(self) -> str:
        return str(self.get("version", ""))

    @property
    def assumed(self) -> list[str]:
        """Returns the settings of [image] that nothing says: where there are any, set the model's preset."""
        return list(self.get("assumed", ()))

    @property
    def width(self) -> int:
        """Returns the width of the upright picture."""
        return int(self["image"]["width"])

    @property
    def height(self) -> int:
        return int(self["image"]["height"])


class Found(Answer):
    """Holds an answer that is a list, the best first: classes, boxes or masks."""

    key = ""

    @property
    def things(self) -> list[dict[str, Any]]:
        """Returns the things as they stand in the JSON."""
        listed: list[dict[str, Any]] = self[self.key]
        return listed

    @property
    def labels(self) -> list[str]:
        return [thing["label"] for thing in self.things]

    @property
    def scores(self) -> Array:
        """Returns scores [n] from 0 to 1."""
        return np.array([thing["score"] for thing in self.things], np.float32)

    @property
    def class_ids(self) -> Array:
        """Returns [n], the place of each in the model's output."""
        return np.array([thing["class_id"] for thing in self.things], np.int64)

    def to_supervision(self) -> Any:
        """Returns the same as an object of the package supervision: `Detections`, `KeyPoints` or
        `Classifications`."""
        try:
            import supervision
        except ImportError:
            raise ConfigError("supervision is needed: pip install 'supervision>=0.29'") from None
        return self._in_supervision(supervision)

    def _in_supervision(self, package: Any) -> Any:
        raise NotImplementedError


class Classes(Found):
    key = "classes"

    def _in_supervision(self, package: Any) -> Any:
        return package.Classifications(class_id=self.class_ids, confidence=self.scores)


class Detections(Found):
    key = "detections"

    @property
    def boxes(self) -> Array:
        """Returns [n, 4]: x1, y1, x2, y2 in pixels of the picture."""
        return np.array([thing["box"] for thing in self.things], np.float32).reshape(-1, 4)

    def to_coco(self, image_id: int = 0, categories: Mapping[str, int] | None = None) -> list[dict[str, Any]]:
        """Returns results as COCO's evaluation reads them. Categories are the model's class numbers, or those
        given for labels; what has none is left out."""
        known = [one for one in self.things if categories is None or one["label"] in categories]
        return [
            {
                "image_id": image_id,
                "category_id": one["class_id"] if categories is None else categories[one["label"]],
                "score": one["score"],
                **self._coco_part(one),
            }
            for one in known
        ]

    def _coco_part(self, thing: Mapping[str, Any]) -> dict[str, Any]:
        left, top, right, bottom = thing["box"]
        return {"bbox": [left, top, right - left, bottom - top]}

    def _in_supervision(self, package: Any) -> Any:
        given = {"xyxy": self.boxes, "confidence": self.scores, "class_id": self.class_ids}
        return package.Detections(**given, **self._more(), data=self._named())

    def _more(self) -> dict[str, Any]:
        return {}

    def _named(self) -> dict[str, Any]:
        """Returns what supervision has of each by a name."""
        return {"class_name": np.array(self.labels, np.str_)}


class Poses(Detections):
    @property
    def keypoints(self) -> Array:
        """Returns [n, points, 2 or 3]: x and y in pixels of the picture, and how sure each is, where that is
        reported."""
        listed = [thing["keypoints"] for thing in self.things]
        return np.array(listed, np.float32) if listed else np.zeros((0, 0, 2), np.float32)

    def _coco_part(self, thing: Mapping[str, Any]) -> dict[str, Any]:
        flat = [number for point in thing["keypoints"] for number in (*point[:2], _VISIBLE)]
        return {**super()._coco_part(thing), "keypoints": flat}

    def _in_supervision(self, package: Any) -> Any:
        points = self.keypoints
        sure = points[..., 2] if points.shape[-1] > 2 else None
        confidences = {"keypoint_confidence": sure, "detection_confidence": self.scores}
        given = {"xy": points[..., :2], "class_id": self.class_ids, **confidences}
        return package.KeyPoints(**given, data=self._named())


class RotatedBoxes(Detections):
    @property
    def corners(self) -> Array:
        """Returns [n, 4, 2]: of the turned boxes, x and y in pixels of the picture; `boxes` lie around
        them."""
        return np.array([thing["corners"] for thing in self.things], np.float32).reshape(-1, 4, 2)

    @property
    def angles(self) -> Array:
        """Returns angles [n], in radians, of the side along the width."""
        return np.array([thing["angle"] for thing in self.things], np.float32)

    def _coco_part(self, thing: Mapping[str, Any]) -> dict[str, Any]:
        outline = [side for point in thing["corners"] for side in point]
        return {**super()._coco_part(thing), "segmentation": [outline]}

    def _named(self) -> dict[str, Any]:
        return {**super()._named(), "xyxyxyxy": self.corners}


class Masks(Detections):
    key = "masks"

    @property
    def masks(self) -> Array:
        """Returns [n, height, width], true inside."""
        found = np.zeros((len(self.things), self.height, self.width), np.bool_)
        for number in range(len(found)):
            found[number] = self.mask(number)
        return found

    def mask(self, number: int) -> Array:
        """Returns one of them, [height, width]."""
        thing = self.things[number]
        if "rle" in thing:
            from carpool.vision.mask_regions import from_run_lengths

            return from_run_lengths(thing["rle"]["counts"], self.height, self.width).astype(np.bool_)
        from PIL import Image

        with Image.open(io.BytesIO(base64.b64decode(thing["png"])), formats=("PNG",)) as image:
            if image.size != (self.width, self.height):
                raise InvalidInput(f"a mask has {image.size} pixels, its image has others", field="png")
            return np.asarray(image.convert("L")) > 127

    def _coco_part(self, thing: Mapping[str, Any]) -> dict[str, Any]:
        if "rle" in thing:
            runs = thing["rle"]
        else:
            from carpool.vision.mask_regions import run_lengths

            number = next(number for number, one in enumerate(self.things) if one is thing)
            pixels = self.mask(number).astype(np.uint8)
            runs = {"size": list(pixels.shape), "counts": run_lengths(pixels)}
        return {**super()._coco_part(thing), "segmentation": runs}

    def _more(self) -> dict[str, Any]:
        return {"mask": self.masks}


class Embedding(Answer):
    @property
    def vector(self) -> Array:
        """Returns the picture as a vector."""
        return np.array(self["embedding"], np.float32)


class Reading(Answer):
    """Holds what a page or a line says."""

    @property
    def text(self) -> str:
        """Returns all of it: rows in the order of reading, one below the other."""
        return str(self["text"])

    @property
    def finish_reason(self) -> str:
        """Returns the reason of a model that writes: stop, or length where it was cut off; empty for
        others."""
        return str(self.get("finish_reason", ""))

    @property
    def lines(self) -> list[dict[str, Any]]:
        """Returns the lines of a page, as they stand in the JSON; a model for single lines gives none."""
        listed: list[dict[str, Any]] = self.get("lines", [])
        return listed

    @property
    def texts(self) -> list[str]:
        """Returns the text of each line."""
        return [line["text"] for line in self.lines]

    @property
    def scores(self) -> Array:
        """Returns [n]: the mean probability of a line's characters, from 0 to 1."""
        return np.array([line["score"] for line in self.lines], np.float32)

    @property
    def polygons(self) -> Array:
        """Returns [n, 4, 2]: corners of each line, x and y in pixels of the picture, from where reading
        begins."""
        return np.array([line["polygon"] for line in self.lines], np.float32).reshape(-1, 4, 2)

    @property
    def boxes(self) -> Array:
        """Returns [n, 4]: x1, y1, x2, y2 around each line, in pixels of the picture."""
        return np.array([line["box"] for line in self.lines], np.float32).reshape(-1, 4)


class Outputs(Answer):
    @property
    def arrays(self) -> dict[str, Array]:
        """Returns every output of the model by its name; nan where a number was not finite."""
        return {one["name"]: _array(one) for one in self["outputs"]}


def _array(output: dict[str, Any]) -> Array:
    dtype = DATATYPES[output["datatype"]].dtype
    values: Array = np.array(output["data"], np.float64 if dtype.kind == "f" else dtype)  # null becomes nan
    return values.astype(dtype).reshape(output["shape"])


_KINDS: dict[str, type[Answer]] = {
    "detections": Detections,
    "classes": Classes,
    "masks": Masks,
    "embedding": Embedding,
    "outputs": Outputs,
    "text": Reading,
}


_PARTS: dict[str, type[Detections]] = {"keypoints": Poses, "corners": RotatedBoxes}
"""What a detection has beyond its box."""


def typed(document: dict[str, Any], wanted: type[Answer] = Answer) -> Answer:
    """Returns an answer by what is in it; where nothing was found, as it was `wanted`. An answer of a task
    from another package stays a plain one."""
    kind = next((kind for key, kind in _KINDS.items() if key in document), Answer)
    if kind is Detections:
        things = document["detections"]
        parts = things[0] if things else {}
        kind = next((kind for key, kind in _PARTS.items() if key in parts), kind)
        if not things and issubclass(wanted, Detections) and wanted.key == Detections.key:
            kind = wanted
    return kind(document)
