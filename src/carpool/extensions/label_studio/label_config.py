"""Reads a project's labelling configuration: the tags that models can answer, their images and labels."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from dataclasses import dataclass

from carpool.config.rules import shown
from carpool.errors import InvalidInput

TASKS: Mapping[str, tuple[str, ...]] = {
    "RectangleLabels": ("detect",),
    "BrushLabels": ("segment",),
    "KeyPointLabels": ("pose",),
    "Choices": ("classify",),
    "TextArea": ("read", "caption"),
}
"""Tasks of models by tag."""
_LONGEST = 256 * 1024
_MOST_LABELS = 10_000
_MARKUP = re.compile(r"<!(?:DOCTYPE|ENTITY)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Control:
    """Describes a tag with its labels. `labels` has the project's by the model's, in small letters."""

    tag: str
    name: str
    to_name: str
    data_key: str  # under which a task has the image
    labels: Mapping[str, str]
    listed: tuple[str, ...]  # the project's, in their order


def read_config(text: object) -> list[Control]:
    """Returns the tags that models can answer, in their order. Raises `InvalidInput` if there is none."""
    if not isinstance(text, str) or len(text) > _LONGEST or _MARKUP.search(text):
        raise InvalidInput("the labelling configuration must be XML without a DOCTYPE", field="label_config")
    try:
        root = ET.fromstring(text)
    except (ET.ParseError, ValueError, RecursionError) as error:
        raise InvalidInput(f"the labelling configuration is not XML: {error}", field="label_config") from None
    images = {one.get("name", ""): one.get("value", "") for one in root.iter("Image")}
    found = [_control(one, images) for one in root.iter() if one.tag in TASKS]
    controls = [one for one in found if one is not None]
    if not controls:
        tags = ", ".join(TASKS)
        raise InvalidInput(f"no tag for an Image can be answered: use one of {tags}", field="label_config")
    return controls


def _control(tag: ET.Element, images: Mapping[str, str]) -> Control | None:
    to_name = tag.get("toName", "").split(",")[0].strip()
    value = images.get(to_name, "")
    if not value.startswith("$"):
        return None
    labels: dict[str, str] = {}
    listed: list[str] = []
    for one in (*tag.iter("Label"), *tag.iter("Choice")):
        label = one.get("value", "")
        if not label or len(listed) >= _MOST_LABELS:
            continue
        listed.append(label)
        others = one.get("predicted_values", "").split(",")
        for known in (label, one.get("alias", ""), *others):
            if known.strip():
                labels.setdefault(known.strip().lower(), label)
    return Control(tag.tag, tag.get("name", ""), to_name, value[1:], labels, tuple(listed))


def image_of(task: object, control: Control, hostname: str) -> tuple[str, bool]:
    """Returns where the image of a task is, and whether that is at Label Studio itself."""
    data = task.get("data") if isinstance(task, dict) else None
    value = data.get(control.data_key) if isinstance(data, dict) else None
    if not isinstance(value, str) or not value:
        raise InvalidInput(f"a task has no image under {shown(control.data_key)}", field="tasks")
    if value.startswith("/"):
        if not hostname:
            raise InvalidInput(
                "an image lies at Label Studio, which has not said yet where it is: validate the connection "
                "in the project's settings",
                field="tasks",
            )
        return hostname.rstrip("/") + value, True
    own = bool(hostname) and value.startswith(f"{hostname.rstrip('/')}/")
    if not own and value[:5].lower() != "data:" and not value.startswith(("http://", "https://")):
        raise InvalidInput(f"images are addresses or data: URLs, not {shown(value[:80])}", field="tasks")
    return value, own
