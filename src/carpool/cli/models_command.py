"""Implements `carpool models`: what a running server has, and to load and unload."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from urllib.parse import quote

from carpool.cli import show
from carpool.cli import verb_options as o
from carpool.errors import InvalidInput

_LOADING_S = 3600.0  # a large model takes its time, and a user can stop waiting
Action = StrEnum("Action", ["list", "load", "unload"])


@dataclass(frozen=True, kw_only=True)
class ModelsVerb(o.AsksServer):
    """List, load and unload the models of a running server.

    Show the models, and why one failed:

        carpool models list

    Load a model, or reload it after its files changed. Requests are answered meanwhile. The server
    must have been started with --model-control-mode explicit.

        carpool models load resnet50
    """

    action: Action = o.argument("The action.", metavar="list|load|unload")
    name: str | None = o.argument("The model. Default for list: all.", default=None)
    url: o.ServerUrl = o.DEFAULT_URL
    config: Path | None = o.option(
        None, "load: file with settings that replace the model's own, in Triton's JSON format."
    )

    def run(self) -> int:
        from carpool.config.rules import read_settings
        from carpool.lab.load.facts import RunningServer

        if self.action is not Action.list and not self.name:
            raise InvalidInput(f"{self.action} needs the name of a model: carpool models {self.action} NAME")
        if self.config is not None and self.action is not Action.load:
            raise InvalidInput(f"--config goes with load, not with {self.action}")
        server = RunningServer(self.url, self.trust())
        if self.action is not Action.list:
            settings = {} if self.config is None else {"parameters": {"config": read_settings(self.config)}}
            path = f"/v2/repository/models/{quote(self.name or '', safe='')}/{self.action}"
            server.send(path, settings, _LOADING_S)
        lines = server.send("/v2/repository/index", {})
        shown = [line for line in lines if self.name in (None, line["name"])]
        if self.as_json:
            print(json.dumps(shown, indent=2))
        elif self.name and not shown:
            print(f"carpool: the server has no model {self.name}", file=sys.stderr)
        else:
            titles = ("model", "version", "state", "reason")
            keys = {"name": "", "version": "", "state": "not loaded", "reason": ""}
            rows = [[line.get(key) or nothing for key, nothing in keys.items()] for line in shown]
            show.table(titles, rows, left=titles)
        return 1 if self.name and not shown else 0
