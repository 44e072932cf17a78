"""`carpool profile`: how long batches take here, and which a promise allows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from carpool.cli import running_server as t
from carpool.cli import shared_options as o

Model = Annotated[
    str,
    typer.Argument(
        help="A model file, a model folder, or a repository with --name; or the URL of a running server.",
        show_default=False,
    ),
]
Name = Annotated[
    str | None, typer.Option(help="Which model of a repository or a server.", show_default=False)
]
Sizes = Annotated[
    str | None,
    typer.Option(help="Batch sizes to measure, like 1,2,4,8. Default: powers of two.", show_default=False),
]
SloMs = Annotated[str, typer.Option(help="Promises to weigh, in ms, like 30,50,100.")]
Repeats = Annotated[int, typer.Option(help="Runs of each size, at least, after the warm-up.")]
Instances = Annotated[
    int | None,
    typer.Option(help="Instances that run at the same time. Default: as the server would choose."),
]
Threads = Annotated[
    int | None, typer.Option(help="Threads of each instance. Default: as the server would choose.")
]
Backend = Annotated[str | None, typer.Option(help="onnxruntime, python or fake. Default: as the file says.")]
Plot = Annotated[
    Path | None,
    typer.Option(metavar="FILE.png", help="Draw the points, the line, the knee and the promises."),
]


@dataclass(frozen=True, kw_only=True)
class ProfileVerb:
    """Measure how long batches take here, and say which of them a promise allows.

    Which promise could this model keep?

        carpool profile resnet50.onnx --slo-ms 30,50,100

    Two instances with one thread each, against one with two:

        carpool profile resnet50.onnx --instances 2 --threads 1
        carpool profile resnet50.onnx --instances 1 --threads 2

    What does a running server believe of a model, and where does it work?

        carpool profile http://localhost:8000 --name detector
    """

    model: Model
    name: Name = None
    sizes: Sizes = None
    slo_ms: SloMs = "30,50,100"
    repeats: Repeats = 10
    instances: Instances = None
    threads: Threads = None
    backend: Backend = None
    plot: Plot = None
    as_json: o.Json = False
    api_key_file: t.ApiKeyFile = None
    ca: t.Ca = None
    insecure: t.Insecure = False

    def run(self) -> None:
        if "://" in self.model:
            from carpool.cli.profile_url import run as ask

            if not ask(self):
                raise typer.Exit(1)
            return
        from carpool.cli.profile_run import run

        run(self)
