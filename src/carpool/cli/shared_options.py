"""Options that several verbs share, each once: its name, its type and what it means."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

# An option in one of these panels of the help.
model_option = partial(typer.Option, rich_help_panel="The model")
traffic_option = partial(typer.Option, rich_help_panel="Traffic")
knobs_option = partial(typer.Option, rich_help_panel="Knobs mode")
device_option = partial(typer.Option, rich_help_panel="The device")
run_option = partial(typer.Option, rich_help_panel="The run")
server_option = partial(typer.Option, rich_help_panel="The server", show_default=False)

KEY_VARIABLE = "CARPOOL_API_KEY"

Curve = Annotated[
    str,
    model_option(
        help="How long a batch takes: 4+1 (ms fixed + ms per image), or points 1:6.2,4:9.1,16:21 (batch:ms)."
    ),
]
SloMs = Annotated[float, model_option(help="The promise: every answer within so many ms.")]
MaxBatch = Annotated[int | None, model_option(help="Largest batch. Default: the curve's last point, or 64.")]
Buckets = Annotated[
    str | None, model_option(help="Batch sizes the engine is built for, 1,4,16,64: others are padded.")
]

BurstFactor = Annotated[float, traffic_option(help="bursty: a surge is so many times the rate around it.")]
BurstSeconds = Annotated[float, traffic_option(help="bursty: length of a surge.")]
BurstPeriod = Annotated[float, traffic_option(help="bursty: seconds from one surge to the next.")]
CameraCount = Annotated[int | None, traffic_option("--cameras", help="cameras: how many.")]
Fps = Annotated[float | None, traffic_option(help="cameras: frames per second of each. Default: 10.")]
Aligned = Annotated[bool, traffic_option("--aligned", help="cameras: all send at the same moment.")]

Noise = Annotated[float, device_option(help="Spread of batch times: sigma of a lognormal factor.")]
Seed = Annotated[int, run_option(help="The same seed gives the same run.")]
Json = Annotated[bool, run_option("--json", help="Print one JSON object.")]

ServerUrl = Annotated[str, typer.Option(help="Where the server is.")]
ApiKeyFile = Annotated[
    Path | None,
    server_option(
        metavar="FILE",
        help=f"File with the key for the server; without it, {KEY_VARIABLE} of the environment.",
    ),
]
Ca = Annotated[
    Path | None,
    server_option(metavar="FILE", help="Certificate of whoever signed the server's, for https://."),
]
Insecure = Annotated[
    bool,
    typer.Option("--insecure", help="Believe any certificate: for trying out.", rich_help_panel="The server"),
]
