"""Every option of the command line, once: its name, its type and what it means."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Mode(StrEnum):
    """How the scheduler is run."""

    promise = "promise"
    knobs = "knobs"


class Timeout(StrEnum):
    """What happens to a request that waited longer than its queue timeout."""

    reject = "reject"
    delay = "delay"


_MODEL, _TRAFFIC, _KNOBS, _DEVICE, _RUN = "The model", "Traffic", "Knobs mode", "The device", "The run"

Curve = Annotated[
    str,
    typer.Option(
        help="How long a batch takes: 4+1 (ms fixed + ms per image), or points 1:6.2,4:9.1,16:21 (batch:ms).",
        rich_help_panel=_MODEL,
    ),
]
SloMs = Annotated[
    float, typer.Option(help="The promise: every answer within so many ms.", rich_help_panel=_MODEL)
]
MaxBatch = Annotated[
    int | None,
    typer.Option(help="Largest batch. Default: the curve's last point, or 64.", rich_help_panel=_MODEL),
]
Buckets = Annotated[
    str | None,
    typer.Option(
        help="Batch sizes the engine is built for, 1,4,16,64: others are padded.", rich_help_panel=_MODEL
    ),
]
Instances = Annotated[int, typer.Option(help="Devices behind the one queue.", rich_help_panel=_MODEL)]

Load = Annotated[
    float | None,
    typer.Option(
        help="Traffic as a multiple of the SLO capacity: max B/t(B) with 2·t(B) ≤ SLO. Default: 1.",
        rich_help_panel=_TRAFFIC,
    ),
]
Rate = Annotated[
    float | None,
    typer.Option(help="Traffic in images per second, instead of --load.", rich_help_panel=_TRAFFIC),
]
Arrivals = Annotated[
    str,
    typer.Option(
        help="poisson, bursty, cameras, or trace:FILE (JSON lines: time, if known model, images, source).",
        rich_help_panel=_TRAFFIC,
    ),
]
TraceModel = Annotated[
    str,
    typer.Option(
        "--model", help="trace: whose arrivals, if there are several models in it.", rich_help_panel=_TRAFFIC
    ),
]
BurstFactor = Annotated[
    float, typer.Option(help="bursty: a surge is so many times the rate around it.", rich_help_panel=_TRAFFIC)
]
BurstSeconds = Annotated[float, typer.Option(help="bursty: length of a surge.", rich_help_panel=_TRAFFIC)]
BurstPeriod = Annotated[
    float, typer.Option(help="bursty: seconds from one surge to the next.", rich_help_panel=_TRAFFIC)
]
CameraCount = Annotated[
    int | None, typer.Option("--cameras", help="cameras: how many.", rich_help_panel=_TRAFFIC)
]
Fps = Annotated[
    float | None,
    typer.Option(help="cameras: frames per second of each. Default: 10.", rich_help_panel=_TRAFFIC),
]
Aligned = Annotated[
    bool,
    typer.Option("--aligned", help="cameras: all send at the same moment.", rich_help_panel=_TRAFFIC),
]
Latest = Annotated[
    bool,
    typer.Option(
        "--latest",
        help="A newer frame of a source takes the place of one that waits; each camera is a source.",
        rich_help_panel=_TRAFFIC,
    ),
]
PerSource = Annotated[
    bool,
    typer.Option(
        "--per-source",
        help="Cameras, or the sources of a trace, each get a fair share. Without it they are one source.",
        rich_help_panel=_TRAFFIC,
    ),
]

ModeOption = Annotated[
    Mode,
    typer.Option("--mode", help="Keep a promise, or obey Triton's batching knobs.", rich_help_panel=_KNOBS),
]
MaxDelayMs = Annotated[
    float, typer.Option(help="Wait so long for a fuller batch; 0 is eager.", rich_help_panel=_KNOBS)
]
Preferred = Annotated[
    str | None, typer.Option(help="Preferred batch sizes, like 4,8.", rich_help_panel=_KNOBS)
]
MaxQueue = Annotated[int, typer.Option(help="Requests that may wait; 0 is no limit.", rich_help_panel=_KNOBS)]
QueueTimeoutMs = Annotated[
    float, typer.Option(help="How long a request may wait; 0 is no limit.", rich_help_panel=_KNOBS)
]
TimeoutAction = Annotated[
    Timeout,
    typer.Option(help="After the queue timeout: reject, or delay behind the others.", rich_help_panel=_KNOBS),
]

Noise = Annotated[
    float, typer.Option(help="Spread of batch times: sigma of a lognormal factor.", rich_help_panel=_DEVICE)
]
StallShare = Annotated[float, typer.Option(help="Share of batches that stall.", rich_help_panel=_DEVICE)]
StallFactor = Annotated[
    float, typer.Option(help="How much longer a stalled batch takes.", rich_help_panel=_DEVICE)
]
ProfileError = Annotated[
    float,
    typer.Option(
        help="The device is so many times slower than --curve says; 1.3 is 30 %.", rich_help_panel=_DEVICE
    ),
]

Seconds = Annotated[
    float | None,
    typer.Option(help="Simulated time. Default: 60, or all of a trace.", rich_help_panel=_RUN),
]
Seed = Annotated[int, typer.Option(help="The same seed gives the same run.", rich_help_panel=_RUN)]
Seeds = Annotated[int, typer.Option(help="Mean over so many seeds.", rich_help_panel=_RUN)]
Compare = Annotated[
    bool,
    typer.Option(
        "--compare", help="Promise beside these knobs, eager batching and batch 1.", rich_help_panel=_RUN
    ),
]
Plot = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.png",
        help="Draw goodput and latency over 0.1–3× load; with --compare, of all four.",
        rich_help_panel=_RUN,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.", rich_help_panel=_RUN)]

PlanRate = Annotated[
    float, typer.Option("--rate", help="Images per second, on average.", rich_help_panel=_TRAFFIC)
]
SurgeFactor = Annotated[
    float, typer.Option("--surge", help="Surges multiply the rate by this.", rich_help_panel=_TRAFFIC)
]
SurgeSeconds = Annotated[float, typer.Option(help="How long a surge lasts.", rich_help_panel=_TRAFFIC)]
Cores = Annotated[
    float | None,
    typer.Option(
        help="Cores that each replica has for everything: its part of a machine. Default: enough.",
        rich_help_panel="The cores",
        show_default=False,
    ),
]
ReplicaInstances = Annotated[
    int,
    typer.Option(
        help="Instances of a replica, side by side; the curve is of one while all are busy.",
        rich_help_panel=_MODEL,
    ),
]
InferCores = Annotated[
    float,
    typer.Option(
        help="Cores that batches keep busy, one on each instance: those of a CPU model, as profile tells.",
        rich_help_panel="The cores",
    ),
]
DecodeMs = Annotated[
    float,
    typer.Option(
        help="What decoding one picture takes of a core, in ms.",
        rich_help_panel="The cores",
    ),
]
ProtocolMs = Annotated[
    float,
    typer.Option(
        help="What one request takes of a core in front end and engine, in ms.", rich_help_panel="The cores"
    ),
]
PricePerHour = Annotated[
    float | None, typer.Option(help="What a replica costs, in any currency.", rich_help_panel="The fleet")
]
Redundancy = Annotated[
    int, typer.Option(help="Replicas that may be gone while the promise holds.", rich_help_panel="The fleet")
]
