"""What the tasks answer: the exact JSON, field by field, and its schema for the OpenAPI document."""

from __future__ import annotations

from typing import Annotated, Any, NotRequired, TypedDict, get_args, get_origin, get_type_hints, is_typeddict

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


_PLAIN = {str: "string", int: "integer", float: "number", bool: "boolean"}


def schema_of(form: Any) -> dict[str, Any]:
    """JSON schema of a TypedDict, or of what stands in one."""
    origin = get_origin(form)
    if origin is NotRequired:
        return schema_of(get_args(form)[0])
    if origin is Annotated:
        inner, description = get_args(form)[:2]
        return {**schema_of(inner), "description": description}
    if origin is list:
        return {"type": "array", "items": schema_of(get_args(form)[0])}
    if is_typeddict(form):
        fields = get_type_hints(form, include_extras=True)
        return {
            "type": "object",
            "properties": {name: schema_of(field) for name, field in fields.items()},
            "required": [name for name, field in fields.items() if get_origin(field) is not NotRequired],
        }
    return {"type": _PLAIN[form]} if form in _PLAIN else {}
