"""docs/pictures.md shows answers that have the form of real ones, and names every option."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from carpool.config.model import Task
from carpool.config.toml import toml_config
from carpool.vision.mask_regions import from_run_lengths
from carpool.vision.tasks import kinds, options_of
from doc_pages import part_of
from vision.schemas import complaints

TEXT = part_of("pictures.md", "Tasks")
PARTS = dict(re.findall(r"^### (\w+)\n(.*?)(?=^### |\Z)", TEXT, re.MULTILINE | re.DOTALL))


def blocks(task: Task, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PARTS[task.value], re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("task", list(Task))
def test_every_answer_has_the_form_of_its_task(task: Task) -> None:
    (answer,) = blocks(task, "json")
    assert complaints(json.loads(answer), kinds()[task].schema()) == []


@pytest.mark.parametrize("task", [task for task in Task if task is not Task.RAW])
def test_every_example_of_settings_loads(task: Task) -> None:
    (text,) = blocks(task, "toml")
    config = toml_config(text, Path("models/m/model.toml"))
    assert config.task is task
    assert kinds()[task].table is None or getattr(config, task.value) is not None


@pytest.mark.parametrize("task", list(Task))
def test_every_option_is_listed_with_its_tasks(task: Task) -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| ([a-z_, ]+) \|", TEXT, re.MULTILINE))
    assert {name for name, tasks in rows.items() if task.value in tasks.split(", ")} == set(options_of(task))


def test_the_way_back_from_run_lengths() -> None:
    (code,) = blocks(Task.SEGMENT, "python")
    made: dict[str, object] = {}
    exec(code, made)
    assert np.array_equal(made["mask"], from_run_lengths([9, 2, 2, 2, 9], 4, 6))  # type: ignore[arg-type]
