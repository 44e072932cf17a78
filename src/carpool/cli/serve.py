"""`carpool serve`: models behind HTTP, until a signal says stop."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

Paths = Annotated[
    list[Path] | None,
    typer.Argument(help="Model files, model folders or Triton repositories.", show_default=False),
]
SloMs = Annotated[
    float | None,
    typer.Option(help="Promise this latency for every model, whatever its own settings say.", min=0.001),
]
Host = Annotated[str | None, typer.Option(help="Address to listen on.", show_default="0.0.0.0")]
HttpPort = Annotated[int | None, typer.Option(help="Port of HTTP; 0 takes a free one.", show_default="8000")]
MetricsPort = Annotated[
    int | None, typer.Option(help="Port of the metrics page; 0 takes a free one.", show_default="8002")
]
Frontends = Annotated[
    int | None,
    typer.Option(help="Front-end processes; 0 keeps everything in one process.", show_default="1"),
]
DrainS = Annotated[
    float | None, typer.Option(help="Seconds to finish what was accepted when stopping.", show_default="30")
]
LogFormat = Annotated[str | None, typer.Option(help="text or json.", show_default="text")]
LogLevel = Annotated[str | None, typer.Option(help="debug, info, warning or error.", show_default="info")]


@dataclass(frozen=True, kw_only=True)
class Serve:
    """Serve models over the Triton / KServe v2 protocol.

    A Triton repository, as it is:

        carpool serve models/

    One ONNX file, with a promise: answer within 50 ms, or say no early.

        carpool serve resnet50.onnx --slo-ms 50

    Every option can also be given as an environment variable: CARPOOL_HTTP_PORT, CARPOOL_SLO_MS, …
    """

    paths: Paths = None
    slo_ms: SloMs = None
    host: Host = None
    http_port: HttpPort = None
    metrics_port: MetricsPort = None
    frontends: Frontends = None
    drain_s: DrainS = None
    log_format: LogFormat = None
    log_level: LogLevel = None

    def run(self) -> None:
        from carpool.cli.serve_run import run

        code = run(self)
        if code:
            raise typer.Exit(code)
