"""Describes the routes for pictures of pipelines, for /openapi.json."""

from __future__ import annotations

from carpool.extensions.pipelines.pipeline_pictures import EXPLAIN, EXPLAIN_OPTION
from carpool.frontend.http.openapi import Document, MoreOfPictures

_STEPS: Document = {
    "type": "array",
    "description": "with `explain`, of a pipeline: where the time went, in the order of its steps",
    "items": {
        "type": "object",
        "properties": {
            "step": {"type": "string"},
            "images": {"type": "integer", "description": "images that it got"},
            "cut_ms": {"type": "number", "description": "to cut them out, if a front end does it"},
            "queue_ms": {"type": "number", "description": "waiting for a batch"},
            "infer_ms": {"type": "number", "description": "in the batch"},
            "batch": {"type": "integer", "description": "images in the batch, of all requests"},
        },
        "required": ["step", "images", "cut_ms", "queue_ms", "infer_ms", "batch"],
    },
}

PICTURES = MoreOfPictures(
    parameters=[
        (
            EXPLAIN,
            f"{EXPLAIN_OPTION.description} For pipelines; other models reject it.",
            dict(EXPLAIN_OPTION.schema),
        )
    ],
    properties={"steps": _STEPS},
)
