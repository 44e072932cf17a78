"""Engine parts of extensions: begun when something needs them, ended with the server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from carpool.engine import engine_parts
from carpool.engine.engine_parts import EnginePart, LoadedParts


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
