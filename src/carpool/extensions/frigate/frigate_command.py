"""Implements `carpool frigate`: the socket of Frigate's zmq detector, in front of a running server."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from carpool.cli import verb_options as o
from carpool.errors import CarpoolError, ConfigError

if TYPE_CHECKING:
    from carpool.types import Array

_EVERY_S = 10.0  # so often a failure is reported


@dataclass(frozen=True, kw_only=True)
class FrigateVerb(o.AsksServer):
    """Answer Frigate's zmq detector with a model of a running server.

    Beside the server, for a Frigate on any machine of the network:

        carpool frigate --listen tcp://0.0.0.0:5555 --model nanodet --labelmap labelmap.txt

    While the server cannot answer within --timeout-ms, Frigate gets an answer without objects.
    """

    url: o.ServerUrl = o.DEFAULT_URL
    listen: str = o.option("tcp://127.0.0.1:5555", "Address of the socket.", metavar="ADDRESS")
    model: str = o.option("", "Model to use. Default: the server's first for boxes.", metavar="NAME")
    labelmap: Path | None = o.option(
        None, "Frigate's labelmap, by which classes get their numbers.", metavar="FILE"
    )
    score: float = o.option(0.4, "Lowest score of an object.", min=0.0, max=1.0)
    timeout_ms: float = o.option(
        180.0, "Time for an answer, in ms: less than Frigate's request_timeout_ms.", min=1.0, max=60_000.0
    )

    def run(self) -> int:
        if find_spec("zmq") is None:
            raise ConfigError("pyzmq is needed: pip install 'carpool[frigate]'")
        from carpool.extensions.frigate.zmq_bridge import read_labelmap

        numbers = {} if self.labelmap is None else read_labelmap(self.labelmap.read_text("utf-8"))
        with self.client("url", self.url, 0.0, 1) as client:

            def detect(pixels: Array) -> Sequence[Mapping[str, Any]]:
                asked = {"model": self.model, "deadline_ms": self.timeout_ms, "score": self.score}
                found = client.detect(_bmp(pixels), **asked)  # type: ignore[arg-type]
                listed: Sequence[Mapping[str, Any]] = found.things
                return listed

            _serve(self.listen, detect, numbers, as_json=self.as_json)
        return 0


def _bmp(pixels: Array) -> bytes:
    """Returns a file that loses nothing and takes no time to make."""
    import io

    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "BMP")
    return file.getvalue()


def _serve(address: str, detect: Any, numbers: Mapping[str, int], *, as_json: bool) -> None:
    import zmq

    from carpool.extensions.frigate.zmq_bridge import nothing, reply

    report_at, failures = 0.0, 0
    with zmq.Context() as context, context.socket(zmq.REP) as socket:
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            raise ConfigError(f"cannot listen on {address}: {error}", field="listen") from None
        line = json.dumps({"listen": address}) if as_json else f"Answering Frigate at {address}"
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
        while True:
            frames = socket.recv_multipart()
            try:
                answer = reply(frames, detect, numbers)
            except CarpoolError as error:
                answer, failures = nothing(), failures + 1
                if monotonic() >= report_at:
                    report_at = monotonic() + _EVERY_S
                    sys.stderr.write(f"carpool: {failures} requests without an answer: {error.message}\n")
                    failures = 0
            socket.send(answer)
