"""`carpool load`: traffic for a running server, and what it made of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from carpool.cli import running_server as t
from carpool.cli import shared_options as o

_TRAFFIC, _REQUESTS, _RUN = "Traffic", "Requests", "The run"

Url = Annotated[
    str,
    typer.Argument(
        metavar="URL",
        help="http://HOST:PORT, grpc://HOST:PORT, or with --image the route, like http://HOST:PORT/detect.",
        show_default=False,
    ),
]
Rate = Annotated[
    str | None,
    typer.Option(
        help="Open loop: requests per second, 800; or steps of rate:seconds, 800:20,2400:20,800:20.",
        rich_help_panel=_TRAFFIC,
    ),
]
Arrivals = Annotated[
    str,
    typer.Option(
        help="Open loop: poisson, constant, bursty, cameras, or trace:FILE.", rich_help_panel=_TRAFFIC
    ),
]
Duration = Annotated[
    float | None,
    typer.Option(
        help="Seconds. Default: 10, the sum of the steps, or all of a trace.", rich_help_panel=_TRAFFIC
    ),
]
Concurrency = Annotated[
    int | None,
    typer.Option(help="Closed loop: so many clients that each wait for an answer.", rich_help_panel=_TRAFFIC),
]
Requests = Annotated[
    int | None, typer.Option(help="Closed loop: stop after so many.", rich_help_panel=_TRAFFIC)
]
ThinkMs = Annotated[
    float, typer.Option(help="Closed loop: from an answer to the next request.", rich_help_panel=_TRAFFIC)
]
Warmup = Annotated[
    float, typer.Option(help="Seconds of the same traffic before it counts.", rich_help_panel=_TRAFFIC)
]
Model = Annotated[
    str, typer.Option(help="The model. Not needed if the server has one.", rich_help_panel=_REQUESTS)
]
Version = Annotated[
    str, typer.Option("--model-version", help="Its version. Default: the newest.", rich_help_panel=_REQUESTS)
]
Images = Annotated[
    list[Path] | None,
    typer.Option("--image", help="Upload this picture; again for more.", rich_help_panel=_REQUESTS),
]
Data = Annotated[
    str,
    typer.Option(help="Tensors: random, zeros, or a .npy, .npz or .json file.", rich_help_panel=_REQUESTS),
]
Shapes = Annotated[
    list[str] | None,
    typer.Option(
        "--shape", help="Lengths the model leaves open, name:1,3,224,224.", rich_help_panel=_REQUESTS
    ),
]
Batch = Annotated[int, typer.Option(help="Images in a request.", rich_help_panel=_REQUESTS)]
SharedMemory = Annotated[
    bool,
    typer.Option(
        "--shared-memory",
        help="Tensors lie in system shared memory; requests only say where. Same machine.",
        rich_help_panel=_REQUESTS,
    ),
]
Distinct = Annotated[
    int, typer.Option(help="Different random requests that take turns.", rich_help_panel=_REQUESTS)
]
Headers = Annotated[
    list[str] | None,
    typer.Option(
        "--header", help="'Name: value', on every request; again for more.", rich_help_panel=_REQUESTS
    ),
]
Sources = Annotated[
    list[str] | None,
    typer.Option(
        "--source", help="Who asks, NAME or NAME:WEIGHT; again for more.", rich_help_panel=_REQUESTS
    ),
]
Latest = Annotated[
    bool,
    typer.Option(
        "--latest",
        help="A newer request of a source takes the place of one that waits.",
        rich_help_panel=_REQUESTS,
    ),
]
Priorities = Annotated[
    list[str] | None,
    typer.Option(
        "--priority", help="How urgent, N or N:WEIGHT, 1 is first; again for more.", rich_help_panel=_REQUESTS
    ),
]
DeadlineMs = Annotated[
    float | None, typer.Option(help="The deadline that requests tell the server.", rich_help_panel=_REQUESTS)
]
SloMs = Annotated[
    float | None, typer.Option(help="Count what is answered within so many ms.", rich_help_panel=_RUN)
]
Timeout = Annotated[
    float, typer.Option(help="Seconds after which a request is given up.", rich_help_panel=_RUN)
]
Drain = Annotated[
    float, typer.Option(help="Seconds to wait at the end for what is open.", rich_help_panel=_RUN)
]
Connections = Annotated[
    int | None,
    typer.Option(help="At most so many. Default: 256; 4 for gRPC, where calls share.", rich_help_panel=_RUN),
]
Processes = Annotated[
    int, typer.Option(help="Generate with so many, if a core is not enough.", rich_help_panel=_RUN)
]
Save = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Every single request, as .jsonl or .csv.",
        rich_help_panel=_RUN,
        show_default=False,
    ),
]


@dataclass(frozen=True, kw_only=True)
class Load:
    """Send traffic to a running server and measure what comes back.

    Open loop, 500 requests a second whatever the server does, and how many were answered within 50 ms:

        carpool load http://localhost:8000 --rate 500 --slo-ms 50

    A surge, with the numbers of each step:

        carpool load http://localhost:8000 --rate 800:20,2400:20,800:20 --slo-ms 50

    Closed loop, 32 clients that each wait for an answer:

        carpool load grpc://localhost:8001 --concurrency 32
    """

    url: Url
    rate: Rate = None
    arrivals: Arrivals = "poisson"
    burst_factor: o.BurstFactor = 3.0
    burst_seconds: o.BurstSeconds = 0.5
    burst_period: o.BurstPeriod = 2.5
    cameras: o.CameraCount = None
    fps: o.Fps = None
    aligned: o.Aligned = False
    duration: Duration = None
    concurrency: Concurrency = None
    requests: Requests = None
    think_ms: ThinkMs = 0.0
    warmup: Warmup = 0.0
    seed: o.Seed = 1
    model: Model = ""
    model_version: Version = ""
    images: Images = None
    data: Data = "random"
    shapes: Shapes = None
    batch: Batch = 1
    distinct: Distinct = 8
    shared_memory: SharedMemory = False
    headers: Headers = None
    sources: Sources = None
    latest: Latest = False
    priorities: Priorities = None
    deadline_ms: DeadlineMs = None
    slo_ms: SloMs = None
    timeout: Timeout = 10.0
    drain: Drain = 10.0
    connections: Connections = None
    processes: Processes = 1
    save: Save = None
    as_json: o.Json = False
    api_key_file: t.ApiKeyFile = None
    ca: t.Ca = None
    insecure: t.Insecure = False

    def run(self) -> None:
        from carpool.cli.load_run import run

        if not run(self):
            raise typer.Exit(1)
