"""What the protocols of other tools take beside `/detect`: the same photo, the same model, one at a time.

The demo detector is asked over one connection in each protocol in turn, and each time `/detect` first. For
Roboflow's clients that is two requests: they ask for the list of models before every image. The ratio is the
median of those of all rounds, each against the `/detect` of its own round.

    python benchmarks/apis.py            # 200 rounds, a few minutes
    python benchmarks/apis.py --quick    # 40 rounds
    python benchmarks/apis.py --json
"""

from __future__ import annotations

import argparse
import base64
import http.client
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from urllib.parse import urlsplit

import carpool.demo
from load.burst import LoadError
from load.carpool_server import carpool_server
from load.program import run_program

PHOTO = Path(carpool.demo.__file__).parent / "pictures" / "astronaut.jpg"
MODEL = "nanodet"
BOUND = 1.15  # of Roboflow's two requests
_JSON = {"Content-Type": "application/json"}
_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Sent:
    """One request."""

    path: str
    body: bytes | None = None  # none: GET
    fields: Mapping[str, str] = field(default_factory=dict)


def ways(photo: bytes) -> dict[str, Sequence[Sent]]:
    """Returns the requests of each protocol for one image, `/detect` first."""
    text = base64.b64encode(photo).decode()
    image = {"type": "base64", "value": text}
    head = b'--f00\r\nContent-Disposition: form-data; name="image"; filename="image"\r\n\r\n'
    named = {"x-nuclio-function-name": MODEL}
    return {
        "detect": [Sent(f"/detect?model={MODEL}", photo, {"Content-Type": "image/jpeg"})],
        "roboflow": [
            Sent("/roboflow/model/registry?api_key=any"),
            _json("/roboflow/infer/object_detection", {"model_id": MODEL, "image": image}),
        ],
        "doods": [_json("/doods/detect", {"detector_name": MODEL, "data": text, "detect": {"*": 40}})],
        "cvat": [_json("/api/function_invocations", {"image": text}, named)],
        "frigate": [
            Sent(
                f"/v1/vision/custom/{MODEL}",
                head + photo + b"\r\n--f00--\r\n",
                {"Content-Type": "multipart/form-data; boundary=f00"},
            )
        ],
    }


def _json(path: str, document: object, fields: Mapping[str, str] | None = None) -> Sent:
    return Sent(path, json.dumps(document).encode(), {**_JSON, **(fields or {})})


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="40 rounds")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--json", action="store_true", help="print objects for machines")
    given = parser.parse_args()
    asked = ways(PHOTO.read_bytes())
    settings = {"CARPOOL_API": ",".join(name for name in asked if name != "detect")}
    with carpool_server(carpool.demo.bundled_models() / MODEL, settings=settings) as server:
        took = measured(server.url, asked, 40 if given.quick else given.rounds)
    rows = [
        {
            "protocol": name,
            "requests": len(asked[name]),
            "median_ms": 1e3 * median(found),
            "ratio": median(one / plain for one, plain in zip(found, took["detect"], strict=True)),
        }
        for name, found in took.items()
    ]
    if given.json:
        print(json.dumps(rows, indent=1))
    else:
        print("protocol  requests  median ms  of /detect")
        for row in rows:
            print(f"{row['protocol']:9} {row['requests']:8}  {row['median_ms']:9.1f}  {row['ratio']:10.3f}")
    [roboflow] = [row for row in rows if row["protocol"] == "roboflow"]
    return int(not given.quick and float(str(roboflow["ratio"])) > BOUND)  # 40 rounds are a look


def measured(url: str, asked: Mapping[str, Sequence[Sent]], rounds: int) -> dict[str, list[float]]:
    """Returns the seconds of each round, by protocol. A few rounds before those do not count."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=_TIMEOUT_S)
    took: dict[str, list[float]] = {name: [] for name in asked}
    for number in range(-5, rounds):
        for name, requests in asked.items():
            begun = time.perf_counter()
            for one in requests:
                send(connection, one)
            if number >= 0:
                took[name].append(time.perf_counter() - begun)
    connection.close()
    return took


def send(connection: http.client.HTTPConnection, one: Sent) -> None:
    connection.request("GET" if one.body is None else "POST", one.path, one.body, dict(one.fields))
    answer = connection.getresponse()
    said = answer.read()
    if answer.status != 200:
        raise LoadError(f"{one.path} was answered with {answer.status}: {said[:200]!r}")


if __name__ == "__main__":
    run_program(main, "benchmarks/apis.py", LoadError)
