"""`carpool models`: what a running server has, and to load and unload."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from carpool.cli import running_server as t
from carpool.cli import shared_options as o


class Action(StrEnum):
    """What to do."""

    list = "list"
    load = "load"
    unload = "unload"


What = Annotated[Action, typer.Argument(metavar="list|load|unload", help="What to do.", show_default=False)]
Name = Annotated[str | None, typer.Argument(help="The model; list shows all without it.", show_default=False)]
Url = Annotated[str, typer.Option(help="Where the server is.")]
Config = Annotated[
    Path | None,
    typer.Option(
        help="load: settings to use instead of the model's own, a file in Triton's JSON form.",
        show_default=False,
    ),
]


@dataclass(frozen=True, kw_only=True)
class ModelsVerb:
    """List, load and unload the models of a running server.

    What is there, and why something is not:

        carpool models list

    Load a model, or load it again after its files changed. Requests are answered all the while. The server
    must have been started with --model-control-mode explicit.

        carpool models load resnet50
    """

    action: What
    name: Name = None
    url: Url = "http://localhost:8000"
    config: Config = None
    as_json: o.Json = False
    api_key_file: t.ApiKeyFile = None
    ca: t.Ca = None
    insecure: t.Insecure = False

    def run(self) -> None:
        from carpool.cli.models_run import run

        if not run(self):
            raise typer.Exit(1)
