"""Implements `carpool registry`: what an address of a registry means, and its files."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from carpool.cli import show
from carpool.cli import verb_options as o
from carpool.errors import InvalidInput

if TYPE_CHECKING:
    from carpool.extensions.registry.followed_model import FollowedModel, Registries
    from carpool.extensions.registry.source import Pin

Action = StrEnum("Action", ["resolve", "pull", "status"])


@dataclass(frozen=True, kw_only=True)
class RegistryVerb:
    """Resolve an address in a model registry (MLflow), and fetch its model.

    Show the version and files that an address resolves to:

        carpool registry resolve models:/detector@champion --registry https://mlflow.example

    Fetch it, to serve it while the registry cannot be reached:

        carpool registry pull models:/detector@champion

    Show what was fetched, and whether the address still resolves to it:

        carpool registry status models:/detector@champion

    The registry's address and key may also be set by MLFLOW_TRACKING_URI, MLFLOW_TRACKING_TOKEN,
    MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD.
    """

    action: Action = o.argument("The action.", metavar="resolve|pull|status")
    address: str = o.argument(
        "models:/NAME@ALIAS or models:/NAME/VERSION, or a model's folder with a table [registry].",
        metavar="URI|FOLDER",
    )
    registry: str | None = o.option(
        None, "The MLflow server. Default: CARPOOL_REGISTRY or MLFLOW_TRACKING_URI.", metavar="URL"
    )
    as_json: o.Json = False

    def run(self) -> int:
        """`status` exits with 1 when what was fetched is not what the address means now."""
        from carpool.config.server import server_settings
        from carpool.extensions.registry.followed_model import Registries
        from carpool.extensions.registry.settings import is_address

        settings, _ = server_settings({"registry": self.registry})
        registries = Registries(settings.option("registry"), settings.cache_dir)
        if self.action is Action.resolve and is_address(self.address):
            return self._resolve(registries)
        path = registries.folder_of(self.address) if is_address(self.address) else Path(self.address)
        model = registries.follow(path)
        if model is None:
            raise InvalidInput(f"{path} has no model.toml with a table [registry]", field="address")
        if self.action is Action.pull:
            state = model.prepare()
            assert state.pointed is not None
            self._show(_pinned(state.pointed.stable) | {"folder": str(model.folder)})
            return 0
        return self._status(model)

    def _resolve(self, registries: Registries) -> int:
        from carpool.extensions.registry.mlflow_source import MlflowSource

        self._show(_pinned(MlflowSource(registries.server(), self.address).resolve()))
        return 0

    def _status(self, model: FollowedModel) -> int:
        """Shows the state of a model's folder: `resolve` shows what its addresses mean now, too."""
        before = model.state
        pointed = model.look()
        fresh = before.serve[:1] == (pointed.stable.version,)
        self._show(
            {
                "model": model.name,
                "stable": pointed.stable.version,
                "candidate": None if pointed.candidate is None else pointed.candidate.version,
                "serves": list(before.serve),
                "resolved_at": before.resolved_at or None,
                "fresh": fresh,
                "folder": str(model.folder),
            }
        )
        return 0 if fresh or self.action is Action.resolve else 1

    def _show(self, document: dict[str, Any]) -> None:
        if self.as_json:
            print(json.dumps(document, indent=2))
            return
        rows = [(key, _in_words(value)) for key, value in document.items() if key != "files"]
        show.table(("", " "), rows, left=("", " "))
        files = [(one["path"], f"{one['size']:,}") for one in document.get("files", ())]
        if files:
            show.table(("file", "bytes"), files, left=("file",))


def _in_words(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "nothing yet"
    return "none" if value is None else str(value)


def _pinned(pin: Pin) -> dict[str, Any]:
    return {
        "address": pin.address,
        "version": pin.version,
        "digest": pin.digest,
        "bytes": pin.bytes,
        "files": [{"path": file.path, "size": file.size} for file in pin.files],
    }
