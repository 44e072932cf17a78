"""The schema describes the answers: its own examples, and what the tasks really answer."""

from __future__ import annotations

import json

import pytest

from carpool.config.model import Task
from carpool.vision.tasks import kinds
from vision.schemas import complaints


@pytest.mark.parametrize("task", list(Task))
def test_every_example_fits_its_schema(task: Task) -> None:
    described = kinds()[task].schema()
    assert complaints(kinds()[task].examples(), described) == []
    assert described["examples"] == [kinds()[task].examples()]
    json.dumps(described)


@pytest.mark.parametrize("task", list(Task))
def test_every_field_is_described(task: Task) -> None:
    def check(part: dict[str, object]) -> None:
        properties = part.get("properties", {})
        assert isinstance(properties, dict)
        for name, field in properties.items():
            assert field["description"], name
            check(field)
            check(field.get("items", {}))

    check(kinds()[task].schema())


def test_the_schema_refuses_what_is_wrong() -> None:
    wrong = {**kinds()[Task.DETECT].examples(), "detections": [{"label": 5}]}
    found = complaints(wrong, kinds()[Task.DETECT].schema())
    assert "detections[0].label is not a string" in found
    assert "detections[0].box is missing" in found
    assert complaints({}, kinds()[Task.RAW].schema())[:2] == ["model is missing", "version is missing"]
