"""What clients and folders may do to the models while the server runs: the three modes of model control."""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Mapping
from typing import Any

from carpool.config.server import ServerSettings
from carpool.engine.engine_host import EngineHost
from carpool.engine.models.control import Progress
from carpool.engine.models.uploads import remove_abandoned
from carpool.engine.outward import hide_paths
from carpool.errors import CarpoolError, InvalidInput, Unavailable
from carpool.observe.columns import RESTARTS
from carpool.observe.logs import logger

log = logger("engine")

EXTENSION = "model_repository(unload_dependents)"
_LONGEST_SHOWN = 80

_NOT_EXPLICIT = "explicit model load / unload is not allowed if polling is enabled"  # Triton's, in both modes
_REFUSALS = {
    "none": "here models are loaded when the server starts, and stay",
    "poll": "this server follows its model folders by itself",
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
        host.teach("load", self._load)
        host.teach("unload", self._unload)
        host.at_end(self.close)
        if self._mode == "explicit":
            host.extra["extensions"] = (*host.extra.get("extensions", ()), EXTENSION)

    async def open(self, progress: Progress) -> None:
        """Load what is to be there from the start.

        An engine that was restarted takes what it can get, where models can be mended without a restart.
        """
        abandoned = await asyncio.to_thread(remove_abandoned)
        if abandoned:
            log.info("uploads-removed", folders=abandoned)
        table = self._engine.table
        again = table.server()[RESTARTS["engine"]] > 0
        only = self._settings.models_at_start
        if again and self._mode == "explicit":
            # The counters outlive an engine, and with them the names of what it had loaded.
            only = {name for name, _ in table.directory.live().values()}
        patient = again and self._mode != "none"
        await self._engine.start(progress, only=only, some=self._settings.needs_models, patient=patient)
        if again:
            self._tidy()
        if self._mode != "none":
            self._looking = asyncio.get_running_loop().create_task(self._look_in_time())

    def _tidy(self) -> None:
        """Counters of what the engine before had, and this one has not."""
        served = {(served.name, served.version) for served in self._engine.served.values()}
        for model, version in self._engine.table.directory.live().values():
            if (model, version) not in served:
                self._engine.table.directory.retire(model, version)

    def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()

    async def look(self) -> None:
        """Follow the folders, or just list what is in them, so that the index knows what could be loaded."""
        try:
            if self._mode == "poll":
                await self._engine.control.look()
            else:
                await self._engine.control.find()
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
        name = str(arguments["model"])
        try:
            await self._engine.load(name, config=config, files=files)
        except CarpoolError as error:
            raise _in_tritons_words(name, hide_paths(error, self._folders)) from None
        return {}

    async def _unload(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """No model depends on another here, so that `dependents` are always unloaded too."""
        self._check_mode()
        await self._engine.unload(str(arguments["model"]))
        return {}

    def _check_mode(self) -> None:
        if self._mode != "explicit":
            raise Unavailable(
                f"{_NOT_EXPLICIT}; {_REFUSALS[self._mode]}; to load and unload by request, start it with "
                "--model-control-mode explicit",
                reason="model-control",
            )


def _in_tritons_words(name: str, error: CarpoolError) -> CarpoolError:
    """Clients match on how the sentence begins: whether it was read at all, or read and not loaded."""
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
