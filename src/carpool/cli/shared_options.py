"""How a verb declares its options, and those that several verbs share: name, type and meaning."""

from __future__ import annotations

from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

MODEL, TRAFFIC, DEVICE, RUN, _SERVER = "The model", "Traffic", "The device", "The run", "The server"
"""Panels of the help."""
KEY_VARIABLE = "CARPOOL_API_KEY"

Value = TypeVar("Value")


def option(
    default: Value, words: str, panel: str | None = None, *, name: str | None = None, **more: Any
) -> Value:
    """A field of a verb's dataclass: its default, and what the help says of it."""
    return field(default=default, metadata={"option": _shared(panel, words, name, **more)})


def _shared(panel: str | None, words: str, name: str | None = None, **more: Any) -> Any:
    names = () if name is None else (name,)
    return typer.Option(*names, help=words, rich_help_panel=panel, **more)


Curve = Annotated[
    str,
    _shared(
        MODEL,
        "How long a batch takes: 4+1 (ms fixed + ms per image), or points 1:6.2,4:9.1,16:21 (batch:ms).",
    ),
]
SloMs = Annotated[float, _shared(MODEL, "The promise: every answer within so many ms.")]
MaxBatch = Annotated[int | None, _shared(MODEL, "Largest batch. Default: the curve's last point, or 64.")]
Buckets = Annotated[
    str | None, _shared(MODEL, "Batch sizes the engine is built for, 1,4,16,64: others are padded.")
]

BurstFactor = Annotated[float, _shared(TRAFFIC, "bursty: a surge is so many times the rate around it.")]
BurstSeconds = Annotated[float, _shared(TRAFFIC, "bursty: length of a surge.")]
BurstPeriod = Annotated[float, _shared(TRAFFIC, "bursty: seconds from one surge to the next.")]
CameraCount = Annotated[int | None, _shared(TRAFFIC, "cameras: how many.", "--cameras")]
Fps = Annotated[float | None, _shared(TRAFFIC, "cameras: frames per second of each. Default: 10.")]
Aligned = Annotated[bool, _shared(TRAFFIC, "cameras: all send at the same moment.", "--aligned")]

Noise = Annotated[float, _shared(DEVICE, "Spread of batch times: sigma of a lognormal factor.")]
Seed = Annotated[int, _shared(RUN, "The same seed gives the same run.")]
Json = Annotated[bool, _shared(RUN, "Print one JSON object.", "--json")]

ServerUrl = Annotated[str, typer.Option(help="Where the server is.")]
_KEY_WORDS = f"File with the key for the server; without it, {KEY_VARIABLE} of the environment."
ApiKeyFile = Annotated[Path | None, _shared(_SERVER, _KEY_WORDS, metavar="FILE", show_default=False)]
_CA_WORDS = "Certificate of whoever signed the server's, for https://."
Ca = Annotated[Path | None, _shared(_SERVER, _CA_WORDS, metavar="FILE", show_default=False)]
Insecure = Annotated[bool, _shared(_SERVER, "Believe any certificate: for trying out.", "--insecure")]
