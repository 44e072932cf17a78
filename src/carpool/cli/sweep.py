"""`carpool sweep`: rates × settings, and a report with the operating curve."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from carpool.cli import options as o
from carpool.cli import trust_options as t

_SETTINGS, _TRAFFIC, _RUN = "Settings", "Traffic", "The run"


class SweepMode(StrEnum):
    """What the sweep's own servers are started with."""

    promise = "promise"
    knobs = "knobs"
    both = "both"


Target = Annotated[
    str,
    typer.Argument(
        metavar="[MODEL|URL]",
        help="A model file, folder or repository; a demo model's name; or a server that runs, "
        "http://HOST:PORT or grpc://HOST:PORT. Default: the demo detector.",
        show_default=False,
    ),
]
Name = Annotated[str, typer.Option(help="Which model of a repository, or of the server.", show_default=False)]
Mode = Annotated[
    SweepMode,
    typer.Option(help="Servers that keep a promise, that obey knobs, or both.", rich_help_panel=_SETTINGS),
]
SloMs = Annotated[
    float | None,
    typer.Option(
        help="The promise, and what counts as in time. Default: the model's own, or 100.",
        rich_help_panel=_SETTINGS,
    ),
]
MaxDelayMs = Annotated[
    str, typer.Option(help="Knobs: delays to try, in ms, like 0,5,20.", rich_help_panel=_SETTINGS)
]
MaxBatch = Annotated[
    str | None,
    typer.Option(
        help="Knobs: largest batches to try, like 8,32. Default: the model's.", rich_help_panel=_SETTINGS
    ),
]
Rates = Annotated[
    str | None,
    typer.Option(help="Requests per second, like 10,20,40, instead of --loads.", rich_help_panel=_TRAFFIC),
]
Loads = Annotated[
    str, typer.Option(help="Rates as multiples of the planned capacity.", rich_help_panel=_TRAFFIC)
]
Images = Annotated[
    list[Path] | None,
    typer.Option(
        "--image",
        help="Upload this picture; again for more. Default: the demo's, if the model takes pictures.",
        rich_help_panel=_TRAFFIC,
    ),
]
Shapes = Annotated[
    list[str] | None,
    typer.Option(
        "--shape",
        help="Send tensors with these lengths, name:1,3,224,224, where the model leaves them open.",
        rich_help_panel=_TRAFFIC,
    ),
]
Curve = Annotated[
    str | None,
    typer.Option(
        help="How long a batch takes, as in plan. Default: what the server measured.",
        rich_help_panel=_TRAFFIC,
    ),
]
Instances = Annotated[
    int, typer.Option(help="With --curve: instances that run at the same time.", rich_help_panel=_TRAFFIC)
]
Seconds = Annotated[float, typer.Option(help="Length of a run.", rich_help_panel=_RUN)]
Warmup = Annotated[
    float, typer.Option(help="Seconds of the same traffic before it counts.", rich_help_panel=_RUN)
]
Repeats = Annotated[int, typer.Option(help="Runs of every point: two show the noise.", rich_help_panel=_RUN)]
Out = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Where the report goes; one with the same sweep in it is gone on with.",
        rich_help_panel=_RUN,
        show_default="./carpool-sweep-MODEL-TIME",
    ),
]


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Measure a model at many rates and settings, and draw its operating curve.

    The demo detector, under a promise and under fixed knobs; the report opens in a browser:

        carpool sweep

    Which delay and largest batch would be best for this model, and does a promise beat them?

        carpool sweep resnet50.onnx --slo-ms 50 --max-delay-ms 0,5,20 --max-batch 8,32

    A server that runs, as it is:

        carpool sweep http://localhost:8000 --name detector --rates 10,20,40,80

    Ctrl-C keeps what is done. The same command with the same --out goes on from there.
    """

    target: Target = ""
    name: Name = ""
    mode: Mode = SweepMode.both
    slo_ms: SloMs = None
    max_delay_ms: MaxDelayMs = "0,10"
    max_batch: MaxBatch = None
    rates: Rates = None
    loads: Loads = "0.3,0.6,0.9,1.1,1.5"
    images: Images = None
    shapes: Shapes = None
    curve: Curve = None
    instances: Instances = 1
    seconds: Seconds = 6.0
    warmup: Warmup = 1.0
    repeats: Repeats = 2
    seed: o.Seed = 1
    out: Out = None
    api_key_file: t.ApiKeyFile = None
    ca: t.Ca = None
    insecure: t.Insecure = False
    as_json: o.Json = False

    def run(self) -> None:
        from carpool.cli.sweep_run import run

        code = run(self)
        if code:
            raise typer.Exit(code)
