"""Models whose answers say which file they came from, and that load, run and die when the test says so."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from carpool.config.model import ModelConfig, ModelSignature
from carpool.config.repository import ModelVersion
from carpool.engine.engine import Engine
from carpool.errors import ModelError
from carpool.types import Array

T = TypeVar("T")
PATIENCE_S = 30.0
_SECONDS = itertools.count(1_000_000_000)


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    async def bounded() -> T:
        return await asyncio.wait_for(coroutine, 60)

    return asyncio.run(bounded())


def model(folder: Path, name: str = "m", policy: str = '"all"', **versions: float) -> Path:
    """A model with the input `x` and the output `y`; `v2=7.0` is a version 2 that answers 7."""
    (folder / name).mkdir(parents=True, exist_ok=True)
    settings(folder, name, policy)
    for version, value in versions.items():
        weights(folder, name, int(version.removeprefix("v")), value)
    return folder / name


def settings(folder: Path, name: str = "m", policy: str = '"all"', head: str = "") -> None:
    file = folder / name / "model.toml"
    file.write_text(
        f'backend = "fake"\nversions = {policy}\nmax_batch = 4\n{head}\n'
        '[[input]]\nname = "x"\ndatatype = "FP32"\nshape = [1]\n'
        '[[output]]\nname = "y"\ndatatype = "FP32"\nshape = [1]\n'
    )
    _at_a_time_of_its_own(file)


def weights(folder: Path, name: str, version: int, value: object) -> Path:
    """The whole file at once, under a new inode."""
    file = folder / name / str(version) / "weights"
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(".part")
    part.write_text(str(value))
    _at_a_time_of_its_own(part)
    part.rename(file)
    return file


def _at_a_time_of_its_own(file: Path) -> None:
    """A file system's clock ticks every few milliseconds, and tests write faster than that."""
    written = next(_SECONDS) * 10**9
    os.utime(file, ns=(written, written))


@dataclass(eq=False)
class ScriptedBackend:
    stage: Stage
    model: str
    value: float
    signature: ModelSignature = field(default_factory=ModelSignature)
    alive: bool = True
    closed: bool = False

    def run(self, inputs: Mapping[str, Array], wanted: Sequence[str]) -> Mapping[str, Array]:
        x = inputs["x"]
        if (x == 13).any():
            assert self.stage.dying.wait(PATIENCE_S)
            self.alive = False
            raise ModelError("it died")
        if (x == 1).any():
            assert self.stage.riding.wait(PATIENCE_S)
        return {"y": np.full(x.shape, self.value, np.float32)}

    def abort(self) -> None:
        self.alive = False

    def close(self) -> None:
        assert not self.closed, "closed twice"
        self.closed = True
        self.alive = False


@dataclass
class Stage:
    """An input of 1 rides until `riding` is set, 13 kills its instance once `dying` is.

    Loading waits for `loading`.
    """

    kind: type[ScriptedBackend] = ScriptedBackend  # a class of its own, since protocols remember classes
    loads: list[tuple[str, float]] = field(default_factory=list)
    backends: list[ScriptedBackend] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)  # models whose load waits
    loading: threading.Event = field(default_factory=threading.Event)
    riding: threading.Event = field(default_factory=threading.Event)
    dying: threading.Event = field(default_factory=threading.Event)
    at_once: int = 0
    most_at_once: int = 0

    def __post_init__(self) -> None:
        self.loading.set()
        self.dying.set()

    def load(self, config: ModelConfig, version: ModelVersion, *_: object) -> ScriptedBackend:
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            if not self.loading.is_set():
                self.waiting.append(config.name)
                assert self.loading.wait(PATIENCE_S)
            text = (config.path / str(version.number) / "weights").read_text()
            if text == "broken":
                raise ModelError(f"{config.name}: broken weights")
            backend = self.kind(self, config.name, float(text))
        finally:
            self.at_once -= 1
        self.loads.append((config.name, backend.value))
        self.backends.append(backend)
        return backend

    @property
    def open(self) -> list[float]:
        """What the instances that are not closed answer."""
        return sorted(backend.value for backend in self.backends if not backend.closed)

    def hold_loads(self) -> None:
        self.loading.clear()


@pytest.fixture(name="stage")
def scripted_stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    stage = Stage()
    monkeypatch.setattr("carpool.backends.load", stage.load)
    yield stage
    for event in (stage.loading, stage.riding, stage.dying):  # no thread waits when the test is over
        event.set()


async def ask(engine: Engine, name: str = "m", version: str = "", x: float = 0.0) -> float:
    answer = await engine.infer(name, np.array([x], np.float32), version=version)
    return float(answer["y"][0])


def states(engine: Engine, name: str = "m") -> dict[str, str]:
    """By version, in words: READY, or UNAVAILABLE: the reason."""
    lines = [line for line in engine.index() if line.name == name]
    assert len({line.version for line in lines}) == len(lines), "two lines for one version"
    return {line.version: f"{line.state}: {line.reason}" if line.reason else line.state for line in lines}
