"""`carpool predict`: pictures to a running server, answers in a table."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from carpool.cli import running_server as t
from carpool.cli import shared_options as o


class Wanted(StrEnum):
    """What to ask for."""

    detect = "detect"
    classify = "classify"
    segment = "segment"
    embed = "embed"


Pictures = Annotated[
    list[str],
    typer.Argument(metavar="IMAGE…", help="Pictures, patterns like 'in/*.jpg', or folders of pictures."),
]
Url = Annotated[str, typer.Option(help="Where the server is.")]
Task = Annotated[
    Wanted | None,
    typer.Option(help="What to ask for; without it, what the server's first model does.", show_default=False),
]
Model = Annotated[str | None, typer.Option(help="Which model is to answer.", show_default=False)]
Fraction = typer.Option(min=0.0, max=1.0, show_default=False, help="Lowest score that counts.")
Iou = Annotated[
    float | None,
    typer.Option(min=0.0, max=1.0, show_default=False, help="Overlap above which the weaker box goes."),
]
TopK = Annotated[
    int | None, typer.Option(min=1, max=1000, show_default=False, help="How many classes to answer.")
]
Save = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR", help="Write the pictures with the answers drawn in here.", show_default=False
    ),
]
AtOnce = Annotated[int, typer.Option(min=1, max=64, help="How many pictures to have under way.")]


@dataclass(frozen=True, kw_only=True)
class Predict:
    """Send pictures to a running server.

    What is in them, from whatever model the server has:

        carpool predict holiday/*.jpg

    People and things with at least 0.6, drawn into copies of the pictures:

        carpool predict street.jpg --task detect --score 0.6 --save drawn
    """

    images: Pictures
    url: Url = "http://localhost:8000"
    task: Task = None
    model: Model = None
    score: Annotated[float | None, Fraction] = None
    iou: Iou = None
    top_k: TopK = None
    save: Save = None
    at_once: AtOnce = 4
    as_json: o.Json = False
    api_key_file: t.ApiKeyFile = None
    ca: t.Ca = None
    insecure: t.Insecure = False

    def run(self) -> None:
        from carpool.cli.predict_run import run

        if not run(self):
            raise typer.Exit(1)
