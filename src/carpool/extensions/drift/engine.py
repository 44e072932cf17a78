"""Detects drift in the engine: the measurements of all front ends are collected and stored here.

Windows and references belong to a thread of their own, the only one that touches them: the engine's loop
passes on what it receives, and gets back what to publish.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any
from urllib.parse import quote

import orjson

from carpool.config.regular_file import read_regular
from carpool.engine.engine_parts import EnginePart, EngineServer
from carpool.engine.models.served import Served
from carpool.errors import InvalidInput, NotFound, Unavailable
from carpool.extensions.drift.kept_pictures import KeptPictures, write_whole
from carpool.extensions.drift.measures import family
from carpool.extensions.drift.model_drift import ModelDrift, SampledAnswer, read_reference
from carpool.extensions.drift.settings import MOST_HOURS, DriftSettings, drift_settings
from carpool.observe import columns
from carpool.observe.counters import Row
from carpool.observe.logs import logger
from carpool.observe.steady_time import steady_time

_LOOK_S = 2.0
_SAVE_S = 60.0  # a kill costs the samples of so long: a window has those of an hour
_STOPPING_S = 5.0
_FOLDER = "drift"
_PSI, _ALARM = columns.by_word("drift", "psi"), columns.by_word("drift", "alarm")
_KEPT = columns.single("drift", "kept")
_MOST_FILE_BYTES = 64 << 20

_log = logger("drift")


@dataclass(frozen=True, slots=True)
class WatchedVersion:
    """Describes a version that is served, as far as it matters here."""

    name: str
    version: str
    settings: DriftSettings
    folder: Path  # of the model
    labels: str  # a digest
    row: Row


def engine(server: EngineServer) -> EnginePart:
    """Returns what drift does in the engine."""
    return DriftDesk(server, server.settings.state_dir).part


class DriftDesk:
    """Answers the questions of drift and keeps what it hears.

    `clock` is of the day: windows go on after a restart. Without one it is steady, so that a machine whose
    clock is set ends no window. `state` is where they are kept; None keeps nothing.
    """

    def __init__(
        self, server: EngineServer, state: Path | None, clock: Callable[[], float] | None = None
    ) -> None:
        self._server = server
        self._clock = clock or steady_time()
        self._books = DriftBooks(None if state is None else state / _FOLDER)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="drift")
        self._stopped = False
        self._cameras: Mapping[str, Mapping[str, str]] = {}
        questions = {"status": self._tell, "learn": self._learn, "reset": self._reset}
        heard = {"samples": self._hear, "keep": self._keep}
        self.part = EnginePart(
            entry=_sampling, questions=questions | heard, tasks=(self._look_in_time,), close=self._stop
        )

    def _watched(self) -> dict[int, WatchedVersion]:
        served = self._server.served.items()
        return {key: found for key, one in served if (found := _watched(one)) is not None}

    def _stop(self) -> None:
        self._stopped = True
        self._thread.submit(self._books.save).result(_STOPPING_S)
        self._thread.shutdown(wait=False)

    async def _work(self, work: Callable[..., Any], *arguments: Any) -> Any:
        if self._stopped:
            raise Unavailable("the server is stopping", reason="stopping")
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    async def _look_in_time(self) -> None:
        saved = self._clock()
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                await self.look(self._clock())
                if not 0.0 <= self._clock() - saved < _SAVE_S:
                    saved = self._clock()
                    await self._work(self._books.save)
            except Exception:
                _log.exception("look-failed")

    async def look(self, now: float) -> None:
        cameras = await self._work(self._books.look, list(self._watched().values()), now)
        if cameras != self._cameras:
            self._cameras = cameras
            self._server.publish({"cameras": cameras})

    # ---- what front ends say and ask

    async def _hear(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        watched, now = self._watched(), self._clock()
        heard = [
            (watched[one["key"]], SampledAnswer(one["source"], one["values"], one["look"], one["black"]))
            for one in arguments["samples"]
            if one["key"] in watched
        ]
        await self._work(self._books.take, heard, now)
        keeping = {key: one for key, one in watched.items() if one.settings.uncertain.folder}
        room = {str(key): await self._work(self._books.room, one, now) for key, one in keeping.items()}
        return {"room": room}

    async def _keep(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        watched, now = self._watched().get(arguments["key"]), self._clock()
        if watched is None or not watched.settings.uncertain.folder:
            return {}
        try:
            picture = base64.b64decode(arguments["picture"], validate=True)
        except binascii.Error:
            raise InvalidInput("the image must be base64", field="picture") from None
        line = {"model": watched.name, "version": watched.version, **arguments["line"]}
        kept = await self._work(self._books.keep, watched, picture, str(arguments["form"]), line, now)
        if kept:
            watched.row.add(_KEPT)
        return {"room": {str(arguments["key"]): await self._work(self._books.room, watched, now)}}

    def _find(self, arguments: Mapping[str, Any]) -> WatchedVersion:
        name, version = str(arguments.get("name", "")), str(arguments.get("version", ""))
        served = self._server.find(name, version)
        found = _watched(served)
        if found is None:
            raise NotFound(f"model '{name}' is not watched: its model.toml has no [drift]", reason="no-drift")
        return found

    async def _tell(self, arguments: Mapping[str, Any]) -> Any:
        """With keys, each of their holders hears of the sources that it names itself, an admin of all."""
        document = await self._work(self._books.document, self._find(arguments), self._clock())
        by = arguments.get("by")
        open_to_all = by is None or bool(arguments.get("admin"))
        if not open_to_all:
            mine = [one for one in document["sources"] if one["source"].partition("/")[0] == by]
            document["sources"] = mine
        elif arguments.get("reference"):
            document["reference_file"] = await self._work(self._books.reference, self._find(arguments))
        return document

    async def _learn(self, arguments: Mapping[str, Any]) -> Any:
        hours = arguments.get("hours", 24.0)
        if isinstance(hours, bool) or not isinstance(hours, int | float) or not 0.0 < hours <= MOST_HOURS:
            raise InvalidInput(f"hours must be above 0 and at most {MOST_HOURS:g}", field="hours")
        watched, now = self._find(arguments), self._clock()
        file = watched.settings.reference_file
        if file:
            raise InvalidInput(f"its reference is the file {file}, set in its model.toml; change it there")
        await self._work(self._books.learn, watched, float(hours), now)
        return await self._tell(arguments)

    async def _reset(self, arguments: Mapping[str, Any]) -> Any:
        await self._work(self._books.reset, self._find(arguments))
        return await self._tell(arguments)


def _watched(served: Served) -> WatchedVersion | None:
    settings = drift_settings(served.config)
    if settings is None or served.vision is None:
        return None
    labels = blake2b("\n".join(served.vision.labels).encode(), digest_size=8).hexdigest()
    return WatchedVersion(
        served.name, served.version, settings, served.config.path, labels, served.counters.row
    )


def _sampling(served: Served) -> dict[str, Any] | None:
    """Returns what front ends need to know of a watched version."""
    settings = drift_settings(served.config)
    if settings is None:
        return None
    doubtful = settings.uncertain
    kept = {"score": list(doubtful.score), "margin": doubtful.margin} if doubtful.folder else None
    return {"sample": settings.sample, "uncertain": kept}


class DriftBooks:
    """Holds what is known of each model, and its files. Used in one thread."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._models: dict[str, ModelDrift] = {}
        self._kept: dict[str, KeptPictures] = {}  # by folder
        self._complaint = ""

    def look(self, watched: list[WatchedVersion], now: float) -> dict[str, dict[str, str]]:
        """Close windows, count alarms; how the cameras of each model are."""
        for gone in self._models.keys() - {one.name for one in watched}:
            self._save(gone)
            del self._models[gone]
        cameras: dict[str, dict[str, str]] = {}
        for first in {one.name: one for one in watched}.values():
            for event in self._model(first).look(now):
                tell = _log.warning if event.bad else _log.info
                tell(event.name, **event.facts)
        for one in watched:
            version = self._model(one).versions.get(one.version)
            if version is None:
                continue
            _publish(one.row, version.streams[""].psi, version.streams[""].alarms)
            sources = (source for source in version.streams if source)
            cameras.setdefault(one.name, {}).update(
                {source: version.states.get(source, "") for source in sources}
            )
        return cameras

    def take(self, heard: list[tuple[WatchedVersion, SampledAnswer]], now: float) -> None:
        for watched, seen in heard:
            self._model(watched).take(watched.version, watched.labels, seen, now)

    def document(self, watched: WatchedVersion, now: float) -> dict[str, Any]:
        return self._model(watched).document(watched.version, now)

    def reference(self, watched: WatchedVersion) -> dict[str, Any]:
        return self._model(watched).reference.written()

    def learn(self, watched: WatchedVersion, hours: float, now: float) -> None:
        self._model(watched).learn(hours, now)
        self._save(watched.name)

    def reset(self, watched: WatchedVersion) -> None:
        self._model(watched).reset()
        self._read_reference(self._model(watched), watched)
        self._save(watched.name)

    def room(self, watched: WatchedVersion, now: float) -> int:
        kept = self._pictures(watched)
        return 0 if kept is None else kept.room(now)

    def keep(
        self, watched: WatchedVersion, picture: bytes, form: str, line: Mapping[str, Any], now: float
    ) -> bool:
        kept = self._pictures(watched)
        try:
            return kept is not None and kept.keep(picture, form, line, now)
        except OSError as error:
            self._complain("pictures-not-kept", error)
            return False

    def save(self) -> None:
        for name in self._models:
            self._save(name)

    def _model(self, watched: WatchedVersion) -> ModelDrift:
        model = self._models.get(watched.name)
        if model is None:
            model = self._models[watched.name] = ModelDrift(watched.name, watched.settings)
            self._restore(model)
            self._read_reference(model, watched)
        elif model.settings != watched.settings:
            changed = model.settings.reference != watched.settings.reference
            model.settings = watched.settings
            if changed:
                model.reset()
                self._read_reference(model, watched)
        return model

    def _read_reference(self, model: ModelDrift, watched: WatchedVersion) -> None:
        name = model.settings.reference_file
        if not name:
            return
        try:
            document = orjson.loads(read_regular(watched.folder / name, _MOST_FILE_BYTES))
            model.reference = read_reference(document, fixed=True)
        except (OSError, ValueError) as error:
            model.trouble = f"its reference {name} cannot be read; nothing is judged"
            model.reference.fixed = True
            _log.warning("drift-reference", model=model.name, file=name, error=str(error))

    def _pictures(self, watched: WatchedVersion) -> KeptPictures | None:
        """A folder that is not absolute is in the state folder."""
        wanted = Path(watched.settings.uncertain.folder)
        folder = wanted if wanted.is_absolute() or self._folder is None else self._folder / "kept" / wanted
        if not folder.is_absolute():
            return None
        kept = self._kept.get(str(folder))
        if kept is None:
            try:
                kept = self._kept[str(folder)] = KeptPictures(folder, watched.settings.uncertain)
            except OSError as error:
                self._complain("pictures-not-kept", error)
        if kept is not None:
            kept.settings = watched.settings.uncertain
        return kept

    # ---- files

    def _path(self, name: str) -> Path | None:
        if self._folder is None:
            return None
        digest = blake2b(name.encode(), digest_size=4).hexdigest()
        return self._folder / f"{quote(name, safe='')[:80]}-{digest}.json"

    def _save(self, name: str) -> None:
        path = self._path(name)
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, orjson.dumps(self._models[name].written()))
            self._complaint = ""
        except OSError as error:
            self._complain("drift-not-kept", error)

    def _restore(self, model: ModelDrift) -> None:
        """What cannot be read is put aside: the server starts, and learns anew."""
        path = self._path(model.name)
        if path is None or not path.is_file():
            return
        try:
            model.restore(orjson.loads(read_regular(path, _MOST_FILE_BYTES)))
        except (OSError, ValueError) as error:
            aside = path.with_suffix(".unreadable")
            _log.error("drift-not-read", model=model.name, error=str(error), kept_as=str(aside))
            try:
                path.replace(aside)
            except OSError as second:
                self._complain("drift-not-kept", second)

    def _complain(self, event: str, error: OSError) -> None:
        if str(error) != self._complaint:  # once is enough
            self._complaint = str(error)
            _log.warning(event, error=str(error))


def _publish(row: Row, psi: Mapping[str, float], alarms: tuple[str, ...]) -> None:
    """A cell has one more than the page: 0 is for what is not known. Of an embedding's directions, the
    furthest."""
    for what, column in _PSI.items():
        found = [value for measure, value in psi.items() if family(measure) == what]
        row.set(column, 1.0 + max(found) if found else 0.0)
        row.set(_ALARM[what], 1.0 + any(family(one) == what for one in alarms) if found else 0.0)
