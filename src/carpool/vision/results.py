"""What the tasks answer: the exact JSON, field by field, and its schema for the OpenAPI document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, NotRequired, TypedDict, get_args, get_origin, get_type_hints, is_typeddict

from carpool.config.model import Task

Box = Annotated[
    list[float], "x1, y1, x2, y2 in pixels of the picture as it is seen, from its top left corner; edges"
]
Label = Annotated[str, "the class's line in the labels file, or its number where there is none"]
ClassId = Annotated[int, "the class's place in the model's output, from 0"]
Score = Annotated[float, "from 0 to 1"]


class Size(TypedDict):
    width: Annotated[int, "pixels of the upright picture"]
    height: Annotated[int, "pixels of the upright picture"]


class Who(TypedDict):
    """The front end puts this before what a task answers."""

    model: Annotated[str, "which model answered"]
    version: Annotated[str, "which version of it"]


class Answer(TypedDict):
    """What every task's answer has."""

    image: Annotated[Size, "the picture, after its orientation was applied"]


class Class(TypedDict):
    label: Label
    class_id: ClassId
    score: Score


class Detection(TypedDict):
    label: Label
    class_id: ClassId
    score: Score
    box: Box


class RunLengths(TypedDict):
    size: Annotated[list[int], "height, width"]
    counts: Annotated[list[int], "lengths of runs down the columns, from left to right, outside first"]


class Mask(TypedDict):
    label: Label
    class_id: ClassId
    score: Annotated[float, "the mean probability inside the mask, from 0 to 1"]
    box: Annotated[list[float], "the smallest box around the mask: x1, y1, x2, y2"]
    png: NotRequired[Annotated[str, "base64 of an 8-bit PNG of the picture's size, 255 inside, 0 outside"]]
    rle: NotRequired[Annotated[RunLengths, "COCO's uncompressed run lengths"]]


class Output(TypedDict):
    name: Annotated[str, "the output's name"]
    datatype: Annotated[str, "its datatype in the v2 protocol"]
    shape: Annotated[list[int], "without the batch"]
    data: Annotated[list[Any], "nested lists, outermost dimension first; null where a number is not finite"]


class Classes(Answer):
    classes: Annotated[list[Class], "the best first"]


class Detections(Answer):
    detections: Annotated[list[Detection], "the best first"]


class Masks(Answer):
    masks: Annotated[list[Mask], "the best first"]


class Embedding(Answer):
    embedding: Annotated[list[float], "the picture as a vector"]


class Outputs(Answer):
    outputs: Annotated[list[Output], "every output of the model as it is"]


_FORMS: Mapping[Task, type] = {
    Task.CLASSIFY: Classes,
    Task.DETECT: Detections,
    Task.SEGMENT: Masks,
    Task.EMBED: Embedding,
    Task.RAW: Outputs,
}
_TITLES = {
    Task.CLASSIFY: "What the picture shows",
    Task.DETECT: "Objects and where they are",
    Task.SEGMENT: "Which pixels belong to what",
    Task.EMBED: "The picture as a vector",
    Task.RAW: "The model's outputs as they are",
}
_IMAGE = {"width": 640, "height": 427}
_WHO = {"model": "m", "version": "1", "image": _IMAGE}
EXAMPLES: Mapping[Task, Mapping[str, Any]] = {
    Task.CLASSIFY: {
        **_WHO,
        "classes": [
            {"label": "espresso", "class_id": 967, "score": 0.951204},
            {"label": "cup", "class_id": 968, "score": 0.018331},
        ],
    },
    Task.DETECT: {
        **_WHO,
        "detections": [
            {"label": "dog", "class_id": 16, "score": 0.66112, "box": [131.2, 120.5, 310.4, 402.0]}
        ],
    },
    Task.SEGMENT: {
        **_WHO,
        "masks": [
            {
                "label": "foreground",
                "class_id": 0,
                "score": 0.9731,
                "box": [2.0, 1.0, 4.0, 3.0],
                "rle": {"size": [4, 6], "counts": [9, 2, 2, 2, 9]},
            }
        ],
    },
    Task.EMBED: {**_WHO, "embedding": [0.6, -0.8, 0.0]},
    Task.RAW: {
        **_WHO,
        "outputs": [{"name": "logits", "datatype": "FP32", "shape": [2], "data": [0.25, -1.5]}],
    },
}


def schema(kind: Task) -> dict[str, Any]:
    """JSON schema of a task's answer, with descriptions and an example."""
    who, answer = _schema(Who), _schema(_FORMS[kind])
    return {
        "title": _TITLES[kind],
        "type": "object",
        "properties": {**who["properties"], **answer["properties"]},
        "required": [*who["required"], *answer["required"]],
        "examples": [EXAMPLES[kind]],
    }


_PLAIN = {str: "string", int: "integer", float: "number", bool: "boolean"}


def _schema(form: Any) -> dict[str, Any]:
    origin = get_origin(form)
    if origin is NotRequired:
        return _schema(get_args(form)[0])
    if origin is Annotated:
        inner, description = get_args(form)[:2]
        return {**_schema(inner), "description": description}
    if origin is list:
        return {"type": "array", "items": _schema(get_args(form)[0])}
    if is_typeddict(form):
        fields = get_type_hints(form, include_extras=True)
        return {
            "type": "object",
            "properties": {name: _schema(field) for name, field in fields.items()},
            "required": [name for name, field in fields.items() if get_origin(field) is not NotRequired],
        }
    return {"type": _PLAIN[form]} if form in _PLAIN else {}
