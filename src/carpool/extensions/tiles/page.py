"""Describes tiles on the routes for images, for /openapi.json."""

from __future__ import annotations

from carpool.extensions.tiles.settings import OPTIONS, TASKS
from carpool.frontend.http.openapi import Document, MoreOfPictures

_TILES: Document = {
    "type": "object",
    "description": "of an image that was cut into tiles: how",
    "properties": {
        "count": {"type": "integer", "description": "tiles"},
        "size": {"type": "integer", "description": "of each side of a tile, in pixels"},
        "overlap": {"type": "number", "description": "of neighbours, as a share of a side"},
        "merge": {"type": "string", "description": "nmm: boxes that match are joined; nms: the best stays"},
        "metric": {"type": "string", "description": "ios or iou, by which boxes match"},
        "match": {"type": "number", "description": "from which number on they do"},
        "per_class": {"type": "boolean", "description": "only boxes of one class match"},
        "whole": {"type": "boolean", "description": "the model also saw the whole image"},
    },
    "required": ["count", "size", "overlap", "merge", "metric", "match", "per_class", "whole"],
}

PICTURES = MoreOfPictures(
    parameters=[(name, option.description, dict(option.schema)) for name, option in OPTIONS.items()],
    properties={"tiles": _TILES},
    tasks=TASKS,
)
