"""Engine parts of extensions: begun when something needs them, ended with the server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from carpool.config.fingerprint import Fingerprint
from carpool.config.model import ModelConfig, SpecificVersions
from carpool.engine import engine_parts
from carpool.engine.engine_parts import EnginePart, LoadedParts
from carpool.engine.fleet.control import LoadListener
from carpool.engine.fleet.model_state import ModelState
from carpool.engine.loading.loadable import Pin


class Sample:
    """An extension whose part counts how often it is made, run and closed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        extension = SimpleNamespace(name="sample", engine="engine:engine", part=lambda _place: self.make)
        silent = SimpleNamespace(name="silent", engine="")
        monkeypatch.setattr(engine_parts, "installed", lambda: {"sample": extension, "silent": silent})
        self.parts = LoadedParts(lambda name: SimpleNamespace(name=name))  # type: ignore[arg-type, return-value]

    def make(self, server: Any) -> EnginePart:
        self.events.append(f"made {server.name}")
        entry: Callable[[Any], Any] = lambda served: {"version": served} if served else None  # noqa: E731
        return EnginePart(
            entry=entry,
            questions={"echo": self.echo},
            tasks=(self.run,),
            close=lambda: self.events.append("closed"),
        )

    async def echo(self, arguments: Any) -> Any:
        return arguments

    async def run(self) -> None:
        self.events.append("runs")
        try:
            await asyncio.Event().wait()
        finally:
            self.events.append("cancelled")


def test_a_part_is_made_once_when_a_version_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> list[str]:
        sample = Sample(monkeypatch)
        assert sample.parts.entry("1", ()) == {}
        assert sample.events == []
        assert sample.parts.entry("1", ("silent", "sample", "unknown")) == {"sample": {"version": "1"}}
        assert sample.parts.entry("", ("sample",)) == {}
        await asyncio.sleep(0)
        sample.parts.close()
        await asyncio.sleep(0)
        return sample.events

    assert asyncio.run(main()) == ["made sample", "runs", "closed", "cancelled"]


def test_a_question_finds_its_part_also_if_no_version_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        sample = Sample(monkeypatch)
        assert await sample.parts.question("echo") is None
        assert await sample.parts.question("silent/echo") is None
        assert await sample.parts.question("sample/other") is None
        echo, again = await asyncio.gather(*(sample.parts.question("sample/echo") for _ in range(2)))
        assert echo is not None
        assert await echo({"a": 1}) == {"a": 1}
        assert again == echo
        assert sample.events.count("made sample") == 1
        sample.parts.close()

    asyncio.run(main())


class Loads(LoadListener):
    """Notes what it hears, and has version 2 loaded of every model."""

    def __init__(self, heard: list[str]) -> None:
        self.heard = heard

    async def prepare(self, model: ModelState) -> None:
        self.heard.append(f"prepares {model.name}")

    def pin(self, model: ModelState, files: Fingerprint) -> Pin | None:
        return lambda config, _folder: replace(config, versions=SpecificVersions((2,)))

    def loaded(self, model: ModelState) -> None:
        self.heard.append(f"loaded {model.name}")


def test_a_model_folder_loads_a_part_which_chooses_its_versions(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also the models that were loaded before are told to it."""
    heard: list[str] = []

    async def refresh() -> None:
        heard.append("refreshes")

    def make(_server: Any) -> EnginePart:
        return EnginePart(loads=Loads(heard), refresh=refresh, state="its state")

    extension = SimpleNamespace(name="sample", engine="engine:engine", part=lambda _place: make)
    monkeypatch.setattr(engine_parts, "installed", lambda: {"sample": extension})
    asked = {tmp_path / "new": {"sample"}}
    monkeypatch.setattr(
        engine_parts,
        "asked_in_folders",
        lambda folders: set().union(*(asked.get(one, ()) for one in folders)),
    )
    served: Any = object()
    before, new = (
        ModelState("before", (tmp_path / "before",), {1: served}),
        ModelState("new", (tmp_path / "new",)),
    )
    config = ModelConfig(name="new", path=tmp_path, backend="fake")

    async def main() -> None:
        parts = LoadedParts(lambda _name: SimpleNamespace(), lambda: [before, new])  # type: ignore[arg-type, return-value]
        await parts.refresh()
        await parts.prepare(before)
        assert parts.pin(before, Fingerprint()) is None
        assert heard == []
        await parts.prepare(new)
        assert heard == ["loaded before", "prepares new"]
        pin = parts.pin(new, Fingerprint())
        assert pin is not None
        assert pin(config, tmp_path).versions == SpecificVersions((2,))
        parts.loaded(new)
        await parts.refresh()
        assert heard[2:] == ["loaded new", "refreshes"]
        assert parts.needed("sample") == "its state"
        assert parts.needed("absent") is None
        parts.close()

    asyncio.run(main())
