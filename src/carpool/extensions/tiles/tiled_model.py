"""Represents a model whose images are cut into tiles: how an image becomes parts, and what is found in each
becomes one answer. Called in threads, but for what is made once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import orjson

from carpool.config.model import SegmentSettings, Task
from carpool.extensions.tiles.merging import Found, by_class, cut_out, mask_of, merged
from carpool.extensions.tiles.settings import OPTIONS, TileSettings
from carpool.extensions.tiles.tile_grid import Part, parts_of
from carpool.frontend.pictures.sent_pictures import PictureModel
from carpool.types import Array, RequestedOutput, Tensor
from carpool.vision import draw
from carpool.vision.crops import crop
from carpool.vision.decode import Decoded, decode
from carpool.vision.geometry import Geometry
from carpool.vision.heads import Buffer, PictureHead
from carpool.vision.mask_regions import from_run_lengths, png_text, run_lengths
from carpool.vision.picture_answers import DEFAULT, Options
from carpool.wire.v2 import RequestHead

ANSWER = "answer"
_LISTS = {Task.DETECT: "detections", Task.POSE: "detections", Task.SEGMENT: "masks"}
_MAPS = (None, "maps", "class_map")
"""Formats of segmentation without objects: each pixel has a class."""
_BOX_DIGITS, _SCORE_DIGITS = 2, 6


class WholePictureModel(PictureModel):
    """A model whose settings ask for tiles, for requests that want none."""

    def read_options(self, given: Mapping[str, object]) -> Options:
        return super().read_options({name: value for name, value in given.items() if name not in OPTIONS})


class TiledModel(PictureModel):
    def __init__(self, plain: PictureModel, settings: TileSettings) -> None:
        super().__init__(plain.entry)
        self.plain = plain
        self.keeps_pixels = True
        self.patient = True  # each tile has the SLO of an image
        self.head = plain.head  # the same object: by that the link knows it again
        table = self.settings.table
        self.maps = isinstance(table, SegmentSettings) and table.format in _MAPS
        self.tiles = replace(settings, whole=settings.whole and not self.maps)
        self._list = _LISTS[Task(self.task)]
        self._score = float(getattr(table, "score", None) or 0.0)
        self._batched = False  # one picture, one answer
        self.encoded = False  # its pixels are needed here
        self.quick = True  # the answer is made on the way
        self.options = {**self.options, **OPTIONS}
        self.outputs = (RequestedOutput(ANSWER, binary=True),)
        self.most = max(1, plain.entry.signature.max_batch)  # images of one request
        self._heads = {1: plain.head}

    def heads(self, images: int) -> RequestHead:
        """Returns what goes to the engine for so many parts: always the same object."""
        found = self._heads.get(images)
        if found is None:
            found = self._heads[images] = self.plain.head_of(images, self.plain.outputs)
        return found

    def sees_as(self, other: PictureModel) -> bool:
        return other is self

    def read_options(self, given: Mapping[str, object]) -> Options:
        """Returns the options of the task. The settings of the tiles distinguish the request from others."""
        options = super().read_options({name: value for name, value in given.items() if name not in OPTIONS})
        return replace(options, extra={**options.extra, **asdict(self.settings_for(options))})

    def settings_for(self, options: Options) -> TileSettings:
        return self.tiles.settled(self._score if options.score is None else options.score)

    def parts_of(self, width: int, height: int) -> list[Part]:
        return parts_of(width, height, self.tiles)

    # ── before the model ──

    def prepare(
        self,
        data: Buffer,
        memory: memoryview | bytearray,
        keep: list[Decoded] | None = None,
        head: PictureHead | None = None,
    ) -> Geometry:
        """Decodes all of it once, and writes the first part as the model's input."""
        picture = decode(data, head=head)
        if keep is not None:
            keep.append(picture)
        self.write(picture, self.parts_of(picture.width, picture.height)[:1], memory)
        return self.transform.geometry(picture.width, picture.height)

    def write(self, picture: Decoded, parts: Sequence[Part], memory: memoryview | bytearray) -> None:
        """Cuts out the parts and writes them one behind the other."""
        for place, part in enumerate(parts):
            piece = crop(picture, part.left, part.top, part.right, part.bottom)
            into: Array = np.ndarray(
                self.transform.shape, self.transform.dtype, memory, offset=place * self.bytes
            )
            self.transform.prepare(piece, into)

    # ── after it ──

    def found(self, outputs: Sequence[Tensor], parts: Sequence[Part], options: Options) -> list[Found]:
        """Returns what the model has found in these parts, where it is in the whole image."""
        options = replace(options, extra={}, overlay=False, max_detections=None, format="rle")
        found: list[Found] = []
        for number, part in enumerate(parts):
            geometry = self.transform.geometry(part.width, part.height)
            answer = self.plain.answers.answer(self.plain.of_one(outputs, number), geometry, options)
            for said in answer[self._list]:
                one = self._placed(part, said)
                if one is not None:
                    found.append(one)
        return found

    def _placed(self, part: Part, said: dict[str, Any]) -> Found | None:
        """Returns what was said of an object in a part; None: nothing of its mask is there."""
        score, class_id, (x1, y1, x2, y2) = said.pop("score"), said["class_id"], said.pop("box")
        box = x1 + part.left, y1 + part.top, x2 + part.left, y2 + part.top
        if "keypoints" in said:
            said["keypoints"] = [[x + part.left, y + part.top, *sure] for x, y, *sure in said["keypoints"]]
        if "rle" not in said:
            return Found(box, score, class_id, said)
        mask = from_run_lengths(said.pop("rle")["counts"], part.height, part.width)
        if self.maps:
            left, top, right, bottom = part.own
            mask = mask.copy()
            mask[: top - part.top] = mask[bottom - part.top :] = 0
            mask[:, : left - part.left] = mask[:, right - part.left :] = 0
        piece = cut_out(mask)
        if piece is None:
            return None if self.maps else Found(box, score, class_id, said)
        left, top, pixels = piece
        left, top = left + part.left, top + part.top
        if self.maps:
            rows, columns = pixels.shape
            box = float(left), float(top), float(left + columns), float(top + rows)
        return Found(box, score, class_id, said, [(left, top, pixels)])

    def merged(
        self, found: Sequence[Found], parts: Sequence[Part], size: tuple[int, int], options: Options
    ) -> bytes:
        """Returns the one answer to the image of this width and height."""
        settings = self.settings_for(options)
        left = by_class(found) if self.maps else merged(found, settings)
        left = left[: options.max_detections]
        tiles = len(parts) - (1 if settings.whole and len(parts) > 1 else 0)
        document: dict[str, Any] = {
            "model": self.entry.name,
            "version": self.entry.version,
            **self.assumed,
            "image": {"width": size[0], "height": size[1]},
            self._list: [self._written(one, size, options) for one in left],
            "tiles": {"count": tiles, **asdict(settings), "whole": tiles < len(parts)},
        }
        return orjson.dumps(document)

    def _written(self, one: Found, size: tuple[int, int], options: Options) -> dict[str, Any]:
        """Returns what is answered about an object, in the order of the plain answer."""
        said = dict(one.said)
        written = {"label": said.pop("label"), "class_id": said.pop("class_id")}
        written["score"] = round(one.score, _SCORE_DIGITS)
        written["box"] = [round(side, _BOX_DIGITS) for side in one.box]
        for point in said.get("keypoints", ()):
            point[:2] = [round(side, _BOX_DIGITS) for side in point[:2]]
        if self._list == "masks":
            mask = mask_of(one, *size)
            if options.format == "rle" or options.overlay:
                said["rle"] = {"size": list(mask.shape), "counts": run_lengths(mask)}
            else:
                said["png"] = png_text(mask)
        return {**written, **said}

    # ── in the place of a model ──

    def document(
        self, outputs: Sequence[Tensor], _number: int, _geometry: Geometry, _options: Options
    ) -> bytes:
        found = outputs[0].data.reshape(-1)[0]
        assert isinstance(found, bytes)
        return found

    def drawn(
        self,
        data: Buffer,
        outputs: Mapping[str, Array],
        geometry: Geometry,
        options: Options = DEFAULT,
        format: str = "jpeg",  # noqa: A002
    ) -> bytes:
        answer = orjson.loads(outputs[ANSWER].reshape(-1)[0])
        picture = decode(data)
        size, found = (picture.width, picture.height), answer[self._list]
        if self.task == Task.SEGMENT:
            objects = ((one, from_run_lengths(one["rle"]["counts"], size[1], size[0])) for one in found)
            return draw.encode(draw.objects(picture.pixels, objects, size), format)
        drawing = draw.poses if self.task == Task.POSE else draw.detections
        return draw.encode(drawing(picture.pixels, found, size), format)
