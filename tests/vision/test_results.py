"""The schema describes the answers: its own examples, and what the tasks really answer."""

from __future__ import annotations

import json

import pytest

from carpool.config.model import Task
from carpool.vision.results import EXAMPLES, schema
from vision.schemas import complaints


@pytest.mark.parametrize("task", list(Task))
def test_every_example_fits_its_schema(task: Task) -> None:
    described = schema(task)
    assert complaints(dict(EXAMPLES[task]), described) == []
    assert described["examples"] == [EXAMPLES[task]]
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

    check(schema(task))


def test_the_schema_refuses_what_is_wrong() -> None:
    wrong = {**EXAMPLES[Task.DETECT], "detections": [{"label": 5}]}
    found = complaints(wrong, schema(Task.DETECT))
    assert "detections[0].label is not a string" in found
    assert "detections[0].box is missing" in found
    assert complaints({}, schema(Task.RAW))[:2] == ["model is missing", "version is missing"]
