"""What lies in the cache is whole or is built again, whoever else is at it and whatever went wrong before."""

from __future__ import annotations

import errno
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from carpool.demo import cache
from carpool.demo.cache import is_whole, prepare
from carpool.demo.recipes import RECIPES, Recipe
from carpool.demo.sources import Source
from carpool.errors import InvalidInput, Unavailable


class Kitchen:
    """A recipe that needs no package, and how often it was followed."""

    def __init__(self, folder: Path) -> None:
        self.cache = folder / "cache"
        self.built = 0
        self.told: list[str] = []
        self._weights = folder / "weights"
        self._weights.write_text("numbers")
        self._licence = folder / "LICENSE"
        self._licence.write_text("terms")
        self.recipe: Recipe = replace(RECIPES[0], onnx=Path.read_bytes)

    def find_source(self, recipe: Recipe, scratch: Path) -> Source:
        self.built += 1
        return Source(self._weights, (self._licence,))

    def prepare(self) -> Path:
        return prepare(self.recipe, self.cache, self.told.append)


@pytest.fixture
def kitchen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kitchen]:
    made = Kitchen(tmp_path)
    monkeypatch.setattr(cache, "find_source", made.find_source)
    monkeypatch.setattr(cache, "require_extra", lambda recipe: None)
    yield made
    left = {path.name for path in made.cache.iterdir()} if made.cache.is_dir() else set()
    assert left <= {".lock", made.recipe.name}, "nothing is left lying about"


def test_a_model_is_built_once(kitchen: Kitchen) -> None:
    folder = kitchen.prepare()
    assert (folder / "1" / "model.onnx").read_text() == "numbers"
    assert (folder / "LICENSE").read_text() == "terms"
    assert {"model.toml", "README.md", "imagenet_labels.txt"} <= {path.name for path in folder.iterdir()}
    before = {path: path.stat().st_mtime_ns for path in kitchen.cache.rglob("*")}
    assert kitchen.prepare() == folder
    assert {path: path.stat().st_mtime_ns for path in kitchen.cache.rglob("*")} == before
    assert kitchen.built == len(kitchen.told) == 1


@pytest.mark.parametrize(
    "damage", ["cut", "changed", "gone", "record", "record-shape", "empty", "file", "link"]
)
def test_what_is_damaged_is_built_again(kitchen: Kitchen, damage: str) -> None:
    folder = kitchen.prepare()
    model, record = folder / "1" / "model.onnx", folder / "digests.json"
    if damage == "cut":
        model.write_text("num")
    elif damage == "changed":
        (folder / "model.toml").write_text("slo_ms = 1\n")
    elif damage == "gone":
        (folder / "imagenet_labels.txt").unlink()
    elif damage == "record":
        record.write_text("{")
    elif damage == "record-shape":
        record.write_text("[1]")
    elif damage == "empty":
        record.write_text(json.dumps({"recipe": kitchen.recipe.fingerprint(), "files": {}}))
    else:
        folder.rename(kitchen.cache.parent / "moved")
        folder.write_text("") if damage == "file" else folder.symlink_to("nowhere")
    assert not is_whole(kitchen.recipe, folder)
    assert is_whole(kitchen.recipe, kitchen.prepare())
    assert kitchen.built == 2


def test_another_recipe_builds_again(kitchen: Kitchen, monkeypatch: pytest.MonkeyPatch) -> None:
    kitchen.prepare()
    monkeypatch.setattr("carpool.demo.recipes.EDITION", 999)
    kitchen.prepare()
    assert kitchen.built == 2
    kitchen.recipe = replace(kitchen.recipe, sha256="0" * 64)
    kitchen.prepare()
    assert kitchen.built == 3


@pytest.mark.parametrize("damaged_before", [False, True])
@pytest.mark.parametrize("renames", [None, 0, 1])
def test_a_build_that_breaks_leaves_nothing_half_done(
    kitchen: Kitchen, monkeypatch: pytest.MonkeyPatch, renames: int | None, damaged_before: bool
) -> None:
    """It may break while it writes, or after none or one of its renames."""
    folder = kitchen.cache / kitchen.recipe.name
    if damaged_before:
        (kitchen.prepare() / "LICENSE").write_text("damaged")
    real, left = Path.rename, [renames]

    def rename(path: Path, target: Path) -> Path:
        if left[0] == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        left[0] = (left[0] or 0) - 1
        return real(path, target)

    def fails(path: Path) -> bytes:
        raise InvalidInput("damaged weights")

    good = kitchen.recipe
    with monkeypatch.context() as breaking, suppress(OSError, InvalidInput):
        if renames is None:
            kitchen.recipe = replace(good, onnx=fails)
        else:
            breaking.setattr(Path, "rename", rename)
        kitchen.prepare()
    kitchen.recipe = good
    if folder.exists():
        assert is_whole(good, folder) or (folder / "LICENSE").read_text() == "damaged"
    assert is_whole(good, kitchen.prepare())


def test_what_a_killed_builder_left_is_swept_away(kitchen: Kitchen) -> None:
    left = kitchen.cache / ".building-killed" / "new"
    left.mkdir(parents=True)
    (left / "half").write_text("a model")
    kitchen.prepare()
    assert not left.exists()


def test_of_many_at_once_one_builds(kitchen: Kitchen) -> None:
    start = threading.Barrier(6)

    def one() -> Path:
        start.wait(30)
        return kitchen.prepare()

    with ThreadPoolExecutor(6) as pool:
        folders = {done.result(30) for done in [pool.submit(one) for _ in range(6)]}
    assert kitchen.built == 1
    assert folders == {kitchen.cache / kitchen.recipe.name}


def test_nobody_waits_forever(kitchen: Kitchen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_LOCK_SECONDS", 0)
    kitchen.cache.mkdir()
    with cache._alone(kitchen.cache), pytest.raises(Unavailable, match="for too long"):
        kitchen.prepare()
