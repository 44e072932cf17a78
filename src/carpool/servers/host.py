"""The engine as front ends know it: a catalogue, inference by key, and answers to questions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from carpool.config.model import ModelConfig
from carpool.config.triton_json import config_document
from carpool.core.job import Reason
from carpool.core.policy import Promise
from carpool.engine.engine import Engine
from carpool.engine.served import Served, State
from carpool.engine.work import Work
from carpool.errors import NotFound, Unsupported
from carpool.observe.logs import logger
from carpool.observe.statistics import model_statistics, statistics
from carpool.servers.advice import WriteGate, publish
from carpool.servers.door import Catalog, IndexEntry, ModelEntry

log = logger("engine")

_LARGEST_LABELS_FILE = 4 << 20

Question = Callable[[Mapping[str, Any]], Awaitable[Any]]
"""JSON in and out; errors are `CarpoolError`s."""


class EngineHost:
    """Wraps an engine for the doors. `listen` is told whenever the catalogue changes."""

    def __init__(self, engine: Engine, write_gate: WriteGate = lambda *_: None) -> None:
        self.engine = engine
        self._write_gate = write_gate
        self._listeners: list[Callable[[Catalog], None]] = []
        self._labels: dict[int, Mapping[str, Sequence[str]]] = {}
        self._ready = False
        self._catalog = Catalog()
        self.extra: dict[str, Any] = {}  # fields of the catalogue that are not about models
        self._questions: dict[str, Question] = {
            "refused": self._count_refused,
            "statistics": self._statistics,
        }
        engine.changed = self.publish

    @property
    def catalog(self) -> Catalog:
        return self._catalog

    def listen(self, listener: Callable[[Catalog], None]) -> None:
        self._listeners.append(listener)

    def set_ready(self, ready: bool) -> None:
        """Ready only when every model is; not ready as soon as we mean to stop."""
        self._ready = ready
        self.publish()

    def publish(self) -> None:
        entries = {
            (served.name, served.version): self._entry(key, served)
            for key, served in self.engine.served.items()
            if served.state is State.READY
        }
        newest: dict[str, ModelEntry] = {}
        for entry in entries.values():
            known = newest.get(entry.name)
            if known is None or int(entry.version) > int(known.version):
                newest[entry.name] = entry
        index = [
            IndexEntry(served.name, served.version, served.state.value, served.reason)
            for served in self.engine.served.values()
        ]
        self._catalog = Catalog(self._catalog.number + 1, self._ready, entries, newest, index, **self.extra)
        for listener in self._listeners:
            listener(self._catalog)

    def _entry(self, key: int, served: Served) -> ModelEntry:
        config = served.config
        if key not in self._labels:
            self._labels[key] = read_labels(config)
        served.gate = partial(publish, self._write_gate, key)
        document = config_document(config)
        return ModelEntry(
            key=key,
            name=served.name,
            version=served.version,
            signature=served.signature,
            platform=str(document["platform"] or document["backend"]),
            mode=config.mode.value,
            slo=config.policy.slo if isinstance(config.policy, Promise) else None,
            config=document,
            labels=self._labels[key],
            row=(served.slot.row, served.slot.generation),
        )

    # ---- inference and questions ------------------------------------------------------------------------

    def submit(self, key: int, work: Work) -> None:
        self.engine.submit(key, work)

    def cancel(self, work: Work) -> None:
        self.engine.cancel(work)

    def teach(self, what: str, answer: Question) -> None:
        """Answer a question of front ends with this function from now on."""
        self._questions[what] = answer

    async def ask(self, what: str, arguments: Mapping[str, Any]) -> Any:
        answer = self._questions.get(what)
        if answer is None:
            raise Unsupported(f"the engine knows no question {what!r}")
        return await answer(arguments)

    async def _count_refused(self, arguments: Mapping[str, Any]) -> None:
        """What front ends refused on the gate's advice: [[key, reason, how many], …]."""
        for key, reason, count in arguments["refused"]:
            served = self.engine.served.get(key)
            if served is not None:
                served.refused_elsewhere(count, Reason(reason))

    async def _statistics(self, arguments: Mapping[str, Any]) -> Any:
        name, version = str(arguments.get("name", "")), str(arguments.get("version", ""))
        rows = {(cells.model, cells.version): cells for cells in self.engine.table.models()}
        asked = [
            served
            for served in self.engine.served.values()
            if name in ("", served.name) and version in ("", served.version)
        ]
        if name and not asked:
            raise NotFound(f"there is no model {name} {version}".strip())
        found = [(rows.get((served.name, served.version)), served) for served in asked]
        return statistics(model_statistics(cells, served.batches) for cells, served in found if cells)

    async def drain(self, timeout: float) -> None:
        """Finish what was accepted, then free the models."""
        self.set_ready(False)
        await self.engine.stop(timeout)


def read_labels(config: ModelConfig) -> Mapping[str, Sequence[str]]:
    """Class names by output: the output's own file, else the model's, which is for its first output."""
    labels: dict[str, Sequence[str]] = {}
    for index, output in enumerate(config.outputs):
        name = output.labels or (config.labels if index == 0 else None)
        if name is None:
            continue
        folder = config.path if config.path.is_dir() else config.path.parent
        lines = _lines(folder, name)
        if lines is None:
            log.warning("labels-not-found", model=config.name, file=name)
        else:
            labels[output.name] = lines
    return labels


def _lines(folder: Path, name: str) -> list[str] | None:
    file = (folder / name).resolve()
    if not file.is_relative_to(folder.resolve()) or not file.is_file():
        return None
    with file.open(encoding="utf-8", errors="replace") as text:
        return text.read(_LARGEST_LABELS_FILE).splitlines()
