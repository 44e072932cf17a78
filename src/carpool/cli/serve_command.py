"""`carpool serve`: models behind HTTP and gRPC, until a signal says stop."""

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
Host = Annotated[
    str | None,
    typer.Option(
        help="Address to listen on; 0.0.0.0 lets other machines in.", show_default="localhost: this machine"
    ),
]
AllowedHosts = Annotated[
    list[str] | None,
    typer.Option(
        "--allowed-host",
        metavar="NAME",
        help="A name besides localhost by which a proxy on this machine calls the server.",
        show_default=False,
    ),
]
ApiKeyFile = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="Keys for inference, 'name key' a line.", show_default=False),
]
AdminKeyFile = Annotated[
    str | None,
    typer.Option(
        metavar="FILE", help="Keys for loading models and changing settings, likewise.", show_default=False
    ),
]
MetricsKey = Annotated[
    bool | None,
    typer.Option("--metrics-key", help="The metrics need a key, too: any of them.", show_default=False),
]
HttpRestrictedApi = Annotated[
    list[str] | None,
    typer.Option(
        "--http-restricted-api",
        metavar="APIS:HEADER=VALUE",
        help="As in Triton: these APIs take this header. Others see it here: prefer key files.",
        show_default=False,
    ),
]
GrpcRestrictedProtocol = Annotated[
    list[str] | None,
    typer.Option(
        "--grpc-restricted-protocol",
        metavar="APIS:HEADER=VALUE",
        help="The same over gRPC, with triton-grpc-protocol- before the header's name.",
        show_default=False,
    ),
]
TlsCert = Annotated[
    str | None,
    typer.Option(
        metavar="FILE", help="Certificate, with its chain, for TLS on all ports.", show_default=False
    ),
]
TlsKey = Annotated[
    str | None, typer.Option(metavar="FILE", help="Private key of the certificate.", show_default=False)
]
TlsClientCa = Annotated[
    str | None,
    typer.Option(
        metavar="FILE", help="Let in only clients with a certificate of this authority.", show_default=False
    ),
]
HttpPort = Annotated[int | None, typer.Option(help="Port of HTTP; 0 takes a free one.", show_default="8000")]
GrpcPort = Annotated[int | None, typer.Option(help="Port of gRPC; 0 takes a free one.", show_default="8001")]
MetricsPort = Annotated[
    int | None, typer.Option(help="Port of the metrics page; 0 takes a free one.", show_default="8002")
]
Frontends = Annotated[
    int | None,
    typer.Option(
        help="Front-end processes for HTTP; 0 keeps everything in one process.",
        show_default="one for every 4 cores, 1 to 4",
    ),
]
GrpcFrontends = Annotated[
    int | None, typer.Option(help="Front-end processes for gRPC; 0 serves no gRPC.", show_default="1")
]
DrainS = Annotated[
    float | None, typer.Option(help="Seconds to finish what was accepted when stopping.", show_default="30")
]
WatchdogS = Annotated[
    float | None,
    typer.Option(
        help="Seconds without a sign of life after which a process is killed and started again; 0: never.",
        show_default="10",
    ),
]
ModelControlMode = Annotated[
    str | None,
    typer.Option(
        help="none: models stay as they are; explicit: load and unload by request; poll: follow the folders.",
        show_default="none",
    ),
]
LoadModels = Annotated[
    list[str] | None,
    typer.Option("--load-model", help="With explicit: a model to start with; * for all.", show_default=False),
]
PollS = Annotated[
    float | None,
    typer.Option(
        "--repository-poll-secs", help="Seconds between two looks at the model folders.", show_default="15"
    ),
]
AllowClientShm = Annotated[
    bool | None,
    typer.Option(
        "--allow-client-shm",
        help="Let clients on this machine pass tensors in shared memory.",
        show_default=False,
    ),
]
ServerName = Annotated[
    str | None,
    typer.Option(help="The name in the server's metadata; some clients want triton.", show_default="carpool"),
]
MetricsConfig = Annotated[
    list[str] | None,
    typer.Option(
        "--metrics-config",
        metavar="KEY=VALUE",
        help="As in Triton: histogram_latencies=true, counter_latencies=false.",
        show_default=False,
    ),
]
DeviceMemoryGb = Annotated[
    float | None,
    typer.Option(
        help="Gigabytes of each GPU that models may take; without, 0.9 of what is free.", show_default=False
    ),
]
TraceFile = Annotated[
    str | None, typer.Option(help="File for traces of single requests; none without.", show_default=False)
]
Record = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="Write when each request came, for carpool simulate --arrivals trace:FILE.",
        show_default=False,
    ),
]
RecordLimitMb = Annotated[
    float | None, typer.Option(help="Stop recording when the file is so large.", show_default="256")
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
    grpc_port: GrpcPort = None
    metrics_port: MetricsPort = None
    frontends: Frontends = None
    grpc_frontends: GrpcFrontends = None
    drain_s: DrainS = None
    watchdog_s: WatchdogS = None
    model_control_mode: ModelControlMode = None
    load_models: LoadModels = None
    poll_s: PollS = None
    allow_client_shm: AllowClientShm = None
    allowed_hosts: AllowedHosts = None
    api_key_file: ApiKeyFile = None
    admin_key_file: AdminKeyFile = None
    metrics_key: MetricsKey = None
    http_restricted_api: HttpRestrictedApi = None
    grpc_restricted_protocol: GrpcRestrictedProtocol = None
    tls_cert: TlsCert = None
    tls_key: TlsKey = None
    tls_client_ca: TlsClientCa = None
    server_name: ServerName = None
    metrics_config: MetricsConfig = None
    device_memory_gb: DeviceMemoryGb = None
    trace_file: TraceFile = None
    record: Record = None
    record_limit_mb: RecordLimitMb = None
    log_format: LogFormat = None
    log_level: LogLevel = None

    def run(self) -> None:
        from carpool.cli.serve_run import run

        code = run(self)
        if code:
            raise typer.Exit(code)
