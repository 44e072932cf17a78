"""The log of real processes stays a log, whatever libraries write and whoever crashes."""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import orjson
import pytest
from PIL import Image

from engine import repositories
from live.server import Live, infer_path, json_request, outputs_of, serving
from waiting import until

MODEL = """
backend = "fake"
task = "classify"
[fake]
curve = "1+1"
[image]
size = 32
layout = "nchw"
[[input]]
name = "x"
datatype = "FP32"
shape = [3, 32, 32]
[[output]]
name = "y"
datatype = "FP32"
shape = [10]
"""


PRINTS = """
import sys
def predict(x):
    if x.any():  # not when it is measured
        print("plainly", flush=True)
        print("in anger", file=sys.stderr, flush=True)
    return x
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("lines")
    (folder / "models" / "m").mkdir(parents=True)
    (folder / "models" / "m" / "model.toml").write_text(MODEL)
    repositories.python(folder / "models", PRINTS, name="loud")
    with serving(folder / "models", folder=folder) as running:
        yield running


def lines(server: Live) -> list[dict[str, Any]]:
    """Every one of them must be JSON, but for what the supervisor tells people on its standard output."""
    text = [line for line in server.log().splitlines() if line and not line.startswith((" ", "Loading "))]
    return [orjson.loads(line) for line in text]


def damaged_tiff(seed: int) -> bytes:
    random = Random(seed)
    file = io.BytesIO()
    Image.frombytes("RGB", (64, 64), random.randbytes(64 * 64 * 3)).save(file, "TIFF", compression="tiff_lzw")
    data = bytearray(file.getvalue())
    for _ in range(20):
        data[random.randrange(8, len(data))] = random.randrange(256)
    return bytes(data)


def test_damaged_pictures_do_not_flood_the_log(server: Live) -> None:
    with server.connect() as connection:
        for seed in range(200):
            connection.post("/models/m/predict", damaged_tiff(seed), b"Content-Type: image/tiff\r\n")
    until(lambda: server.events("library-output"), "a line of libtiff")
    assert {line["library"] for line in server.events("library-output")} == {"libtiff"}
    assert len(lines(server)) < 150  # libtiff writes about a line for each picture


def check_levels(server: Live) -> None:
    with server.connect() as client:
        outputs_of(client.post(infer_path("loud"), json_request([1, 2], (1, 2))))
    until(lambda: {line["text"] for line in server.events("output")} >= {"plainly", "in anger"}, "said")
    levels = {line["text"]: line["level"] for line in server.events("output")}
    assert (levels["plainly"], levels["in anger"]) == ("info", "warning")


def test_what_a_model_prints_keeps_its_level(server: Live) -> None:
    check_levels(server)


@pytest.mark.conformance
def test_what_a_model_prints_keeps_its_level_in_one_process(tmp_path: Path) -> None:
    repositories.python(tmp_path / "models", PRINTS, name="loud")
    with serving(tmp_path / "models", frontends=0, folder=tmp_path) as alone:
        check_levels(alone)


def test_the_last_words_of_a_crash_are_in_the_log(server: Live) -> None:
    engine = server.engine_pid
    os.kill(engine, signal.SIGSEGV)

    def heard() -> list[dict[str, Any]]:
        return [
            line for line in lines(server) if line.get("text") == "Fatal Python error: Segmentation fault"
        ]

    until(heard, "its last words")
    [line] = heard()
    assert (line["process"], line["child"]) == ("engine", engine)
    server.until_ready()
