"""Answers what front ends ask of the engine besides inference: clients' memory, profiles, loading,
unloading."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import os
import resource
import time
from collections.abc import Mapping
from dataclasses import replace
from itertools import count
from pathlib import Path
from time import monotonic
from typing import Any

from carpool.config.server import ServerSettings
from carpool.core.shares import OF_THE_REST
from carpool.engine.engine import StartProgress
from carpool.engine.engine_host import EngineHost, hide_paths
from carpool.engine.loading.loadable import remove_abandoned
from carpool.errors import CarpoolError, InvalidInput, Unavailable, Unsupported
from carpool.link.catalog import LoadingStep
from carpool.memory.client_files import EXTENSION, NOT_ALLOWED, OpenRegion, Region, open_file, region_key
from carpool.observe.columns import RESTARTS
from carpool.observe.logs import logger

MAX_REGIONS = 1024
_MAX_NAME_CHARS = 256
_SEEN_WITHIN_S = 5.0  # a front end that takes longer is stuck: its requests that name it then fail

_log = logger("memory")


class ClientRegions:
    """Answers "register-memory" and "unregister-memory". A region belongs to the key that it was registered
    with, and those without a key to all who have none."""

    def __init__(self, host: EngineHost, *, allowed: bool) -> None:
        self._host = host
        self._allowed = allowed
        self._regions: dict[str, Region] = {}
        # Every front end has a descriptor of each region, and needs others for its connections.
        self._most = min(MAX_REGIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        # An engine that follows this one must not use the same numbers: front ends know regions by them.
        self._numbers = count(time.monotonic_ns())
        if allowed:
            host.add_extension(EXTENSION)
        host.on_question("register-memory", self.register)
        host.on_question("unregister-memory", self.unregister)

    async def register(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        if not self._allowed:
            raise Unsupported(NOT_ALLOWED)
        name = _text(arguments, "name")
        owner = str(arguments.get("by", ""))
        if region_key(owner, name) in self._regions:
            raise InvalidInput(
                f"shared memory region '{name}' already in manager; unregister it first", field="name"
            )
        if len(self._regions) >= self._most:
            raise Unavailable(f"{self._most} regions are registered, which is the limit")
        own = sum(1 for region in self._regions.values() if region.owner == owner)
        if own >= OF_THE_REST * (self._most - len(self._regions)):
            raise Unavailable(
                f"this client has {own} regions, its share of the {self._most} that may be registered"
            )
        region = replace(_checked(next(self._numbers), name, arguments), owner=owner)
        self._host.regions[region.number] = OpenRegion(region)
        self._regions[region_key(owner, name)] = region
        self._publish()
        _log.info("region-registered", region=name, key=region.key, bytes=region.byte_size)
        return {}

    async def unregister(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Lets one region go, or without a name all of this client's. One that is not there is no error, as
        in Triton."""
        name, owner = str(arguments.get("name", "")), str(arguments.get("by", ""))
        mine = [known for known, region in self._regions.items() if region.owner == owner]
        gone = [known for known in mine if name in ("", self._regions[known].name)]
        numbers = [self._regions.pop(known).number for known in gone]
        if gone:
            self._publish()
            with contextlib.suppress(TimeoutError):  # until then requests may come that lie in them
                await asyncio.wait_for(self._host.everyone_saw(), _SEEN_WITHIN_S)
            for number in numbers:
                del self._host.regions[number]
            _log.info("regions-unregistered", regions=len(gone))
        return {}

    def _publish(self) -> None:
        self._host.region_names = dict(self._regions)
        self._host.publish()


def _checked(number: int, name: str, arguments: Mapping[str, Any]) -> Region:
    key, offset, byte_size = (
        _text(arguments, "key"),
        _size(arguments, "offset"),
        _size(arguments, "byte_size"),
    )
    if not byte_size:
        raise InvalidInput("byte_size must be at least 1", field="byte_size")
    if not key.strip("/"):
        raise InvalidInput(
            f"cannot register shared memory region '{name}' - invalid shm key '{key}'", field="key"
        )
    fd = open_file(key)
    try:
        file = os.fstat(fd)
    finally:
        os.close(fd)
    if offset + byte_size > file.st_size:
        raise InvalidInput(
            f"failed to register shared memory region '{name}': invalid args; '{key}' has {file.st_size}"
            f" bytes, but offset {offset} and byte_size {byte_size} need {offset + byte_size}",
            field="byte_size",
        )
    return Region(number, name, key, offset, byte_size, file.st_ino)


def _text(arguments: Mapping[str, Any], field: str) -> str:
    value = arguments.get(field)
    if type(value) is not str or not 0 < len(value) <= _MAX_NAME_CHARS or not value.isprintable():
        raise InvalidInput(f"{field} must be a text of 1 to {_MAX_NAME_CHARS} characters", field=field)
    return value


def _size(arguments: Mapping[str, Any], field: str) -> int:
    value = arguments.get(field, 0)
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise InvalidInput(f"{field} must be an integer of 0 or more", field=field)
    return value


def answer_profile_questions(host: EngineHost) -> None:
    """The question `profile`: {"name": …, "version": …} → `Runtime.document`."""

    async def answer(arguments: Mapping[str, Any]) -> Any:
        name, version = str(arguments.get("name", "")), str(arguments.get("version", ""))
        return host.engine.find(name, version).runtime.document(monotonic())

    host.on_question("profile", answer)


log = logger("engine")

UNLOAD_EXTENSION = "model_repository(unload_dependents)"
_LONGEST_SHOWN = 80
_TOLD_EVERY_S = 0.25

_NOT_EXPLICIT = "explicit model load / unload is not allowed if polling is enabled"  # Triton's, in both modes
_REFUSALS = {
    "none": "models of this server are loaded at its start",
    "poll": "this server follows its model folders",
}


class ControlDesk:
    """Starts the models that the mode asks for, answers `load` and `unload`, and looks at folders in time."""

    def __init__(self, host: EngineHost, settings: ServerSettings) -> None:
        self._host = host
        self._engine = host.engine
        self._settings = settings
        self._mode = settings.model_control_mode
        self._looking: asyncio.Task[None] | None = None
        self._complaint = ""
        self._folders = host.engine.folders
        self._on_demand = host.engine.on_demand
        self._looked_at: set[Path] = set()  # folders whose files were asked for their extensions
        host.on_question("load", self._load)
        host.on_question("unload", self._unload)
        host.on_question("demand", self._demand)
        host.on_stop(self.close)
        if self._mode == "explicit":
            host.add_extension(UNLOAD_EXTENSION)

    async def open(self, progress: StartProgress) -> None:
        """Loads the models that are to be there from the start; its caller then reports the server as ready.

        One model that does not load keeps no other from serving, unless the settings say so. Raises where
        no model would be served, and only a restart could change that.
        """
        abandoned = await asyncio.to_thread(remove_abandoned)
        if abandoned:
            log.info("uploads-removed", folders=abandoned)
        table = self._engine.table
        again = table.server()[RESTARTS["engine"]] > 0
        settings, only = self._settings, self._settings.models_at_start
        if again and self._mode == "explicit":
            # The counters outlive an engine, and with them the names of what it had loaded.
            there = await self._engine.control.find()
            only = {name for name, _ in table.directory.live().values() if name in there}
        if settings.strict_readiness == "false":
            self._host.needs_one = True
            self._host.set_ready(True)
        patient = not settings.exit_on_error or (again and self._mode != "none")
        failed = await self._engine.start(
            self._following(progress), only=only, some=settings.needs_models, patient=patient
        )
        if self._engine.control.closed:
            raise Unavailable("the server is stopping", reason="stopping")
        tasks = {} if self._on_demand is None else dict(self._on_demand.tasks)
        self._host.published = replace(self._host.published, loading="", on_demand=tasks)
        if self._on_demand is not None:
            failed = {}  # a request for one of them is answered with the reason
        if failed and settings.needs_models and not self._engine.served:
            await self._engine.stop(0.0)
            raise next(iter(failed.values()))
        self._host.needs_one = bool(failed)
        if failed and settings.strict_readiness == "all" and not again:
            # An engine that was started again belongs to a server that was ready: it keeps what it has.
            self._host.awaited = frozenset(failed)
            log.error("not-ready", models=sorted(failed), why="--strict-readiness=all, and they did not load")
        if again:
            self._tidy()
        if self._mode != "none":
            self._looking = asyncio.get_running_loop().create_task(self._look_in_time())
        await self._look_at_new()
        self._host.opened.set()

    async def _look_at_new(self) -> None:
        """Begins extensions that models' folders ask for, also those of models that are not loaded."""
        places = {place for model in self._engine.control.models.values() for place in model.places}
        new, self._looked_at = places - self._looked_at, places
        await self._host.parts.look_at(sorted(new))

    async def _demand(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """A front end has requests for a model that is not loaded."""
        if self._on_demand is None:
            raise Unsupported("models are not loaded on demand here")
        try:
            await self._on_demand.bring(str(arguments["model"]))
        except CarpoolError as error:
            raise hide_paths(error, self._folders) from None
        return {}

    def _following(self, progress: StartProgress) -> StartProgress:
        """Notifies the front ends, too: not of every step, since each of them reads the whole catalogue."""
        loop = asyncio.get_running_loop()
        planned: asyncio.TimerHandle | None = None

        def take_down(step: LoadingStep) -> None:
            nonlocal planned
            self._host.published = replace(self._host.published, loading=str(step))
            planned = planned or loop.call_later(_TOLD_EVERY_S, publish)

        def publish() -> None:
            nonlocal planned
            planned = None
            self._host.publish()

        def tell(step: LoadingStep) -> None:
            progress(step)
            loop.call_soon_threadsafe(take_down, step)

        return tell

    def _tidy(self) -> None:
        """Removes counters of what the engine before had, and this one has not."""
        served = {(served.name, served.version) for served in self._engine.served.values()}
        for model, version in self._engine.table.directory.live().values():
            if (model, version) not in served:
                self._engine.table.directory.retire(model, version)

    def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
        if self._on_demand is not None:
            self._on_demand.close()

    async def look(self) -> None:
        """Follow the folders, or just list what is in them, so that the index knows what could be loaded."""
        try:
            if self._mode == "poll":
                await self._host.parts.refresh()
                await self._engine.control.look()
            else:
                await self._engine.control.find()
            await self._look_at_new()
            self._complaint = ""
        except CarpoolError as error:
            if error.message != self._complaint:  # once is enough
                self._complaint = error.message
                log.warning("repository-not-read", error=error.message)
        except Exception:
            log.exception("look-failed")

    async def _look_in_time(self) -> None:
        while True:
            await asyncio.sleep(self._settings.poll_s)
            await self.look()

    # ---- what front ends ask ----------------------------------------------------------------------------

    async def _load(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        self._check_mode()
        files = await asyncio.to_thread(_decoded, arguments.get("files") or {})
        config = arguments.get("config")
        if config is not None and not isinstance(config, str):
            raise InvalidInput("config must be JSON in a string", field="config")
        name = _loadable(str(arguments["model"]))
        try:
            await self._engine.load(name, config=config, files=files)
        except CarpoolError as error:
            raise _in_tritons_words(name, hide_paths(error, self._folders)) from None
        return {}

    async def _unload(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Unloads a model; with `dependents`, the steps of an ensemble as well."""
        self._check_mode()
        dependents = arguments.get("dependents") is True
        await self._engine.unload(str(arguments["model"]), dependents=dependents)
        return {}

    def _check_mode(self) -> None:
        if self._mode != "explicit":
            raise Unavailable(
                f"{_NOT_EXPLICIT}; {_REFUSALS[self._mode]}; to load and unload by request, start it with "
                "--model-control-mode explicit",
                reason="model-control",
            )


def _loadable(name: str) -> str:
    """Raises `InvalidInput`, in Triton's words; which names a model may have is for its settings to check."""
    if not name.strip():
        raise InvalidInput("Model name cannot be empty. Please enter a valid name to deploy.", field="model")
    if "/" in name or name.strip() == "..":
        shown = name[:_LONGEST_SHOWN]
        raise InvalidInput(
            f"invalid model name '{shown}', model name must not contain path traversal characters",
            field="model",
        )
    return name


def _in_tritons_words(name: str, error: CarpoolError) -> CarpoolError:
    """Returns the error in Triton's words, since clients match on how the sentence begins: whether it was
    read at all, or read and not loaded."""
    shown = name[:_LONGEST_SHOWN]
    if error.while_loading:
        error.message = f"load failed for model '{shown}': {error.message}"
    else:
        error.message = f"failed to load '{shown}', failed to poll from model repository: {error.message}"
    return error


def _decoded(files: Mapping[str, Any]) -> dict[str, bytes]:
    decoded = {}
    for name, text in files.items():
        try:
            decoded[name] = base64.b64decode(text, validate=True)
        except (binascii.Error, TypeError, ValueError):
            raise InvalidInput(
                f"file:{name[:64]} must be the file's content in base64", field=f"file:{name[:64]}"
            ) from None
    return decoded
