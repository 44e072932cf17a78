"""Triton's own client examples, as they are, against servers that are started here under the name `triton`.

None of their code is part of this project: give the folder `src/python/examples` of a checkout of
triton-inference-server/client.

    make conformance ARGS='--examples PATH'
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from carpool.demo import pictures
from conformance.example_models import GRPC_NAMES, HTTP_NAMES, write_models, write_stateful
from live.server import Live, start

EXAMPLE_S = 120.0
_PATTERNS = (
    *("simple_*.py", "grpc_client.py", "grpc_explicit_*.py", "reuse_infer_objects_client.py"),
    "grpc_image_client.py",  # its twin for HTTP needs a package that does not import on today's Python
)
_NAMED_TRITON = {"CARPOOL_SERVER_NAME": "triton"}
_SERVES = {**_NAMED_TRITON, "CARPOOL_ALLOW_CLIENT_SHM": "true"}
_CONTROLLED = {**_NAMED_TRITON, "CARPOOL_MODEL_CONTROL_MODE": "explicit"}
_NO_CUDA = "No module named 'cuda'"
_SHOWN = 110


@dataclass(frozen=True)
class ExampleRow:
    """What came of one example. `expected` are words of the documented refusal; none: it runs to the end."""

    name: str
    expected: str
    good: bool
    said: str


EXAMPLE_HEADS = ("example", "should", "so", "what came of it")


def example_cells(row: ExampleRow) -> list[str]:
    should = f"refused: {row.expected}" if row.expected else "runs to the end"
    said = row.said if len(row.said) <= _SHOWN or not row.good else row.said[: _SHOWN - 1] + "…"
    return [row.name, should, "yes" if row.good else "NO", said]


def expected_refusal(name: str) -> str:
    if "cudashm" in name:
        return "CUDA shared memory is not offered"
    return ""


def find(folder: Path) -> list[Path]:
    found = sorted({path for pattern in _PATTERNS for path in folder.glob(pattern)})
    if not found:
        raise SystemExit(f"conformance: there are no examples like simple_*.py in {folder}")
    return found


def run_examples(examples: Sequence[Path], folder: Path, give_up: float) -> Iterator[ExampleRow]:
    """One after the other. Examples of model control get servers of their own: they count the models."""
    with _server(folder / "serves", GRPC_NAMES, _SERVES) as server:
        for example in examples:
            if "model_control" in example.name:
                names = GRPC_NAMES if "grpc" in example.name else HTTP_NAMES
                with _server(folder / example.stem, names, _CONTROLLED) as own:
                    yield _run(example, own, give_up)
            elif not _is_stateful(example):
                yield _run(example, server, give_up)
    with _server(folder / "stateful", 0, _SERVES) as server:
        for example in filter(_is_stateful, examples):
            yield _run(example, server, give_up)
            if "sequence" in example.name:  # its other models keep sums, and see the id
                yield _run(example, server, give_up, "--dyna")


def _is_stateful(example: Path) -> bool:
    return "sequence" in example.name or "repeat" in example.name


@contextlib.contextmanager
def _server(folder: Path, names: int, environment: Mapping[str, str]) -> Iterator[Live]:
    folder.mkdir(parents=True)
    models = write_models(folder / "models", names) if names else write_stateful(folder / "models")
    server = start(models, frontends=1, grpc=1, folder=folder, environment=environment)
    try:
        server.until_ready()
        yield server
    finally:
        server.end()


def _run(example: Path, server: Live, give_up: float, *options: str) -> ExampleRow:
    name = " ".join((example.name, *options))
    expected = expected_refusal(example.name)
    left = min(EXAMPLE_S, give_up - time.monotonic())
    port = server.grpc_port if "grpc" in example.name else server.port
    command = [sys.executable, str(example), "-u", f"127.0.0.1:{port}", *options]
    if "image_client" in example.name:
        command += ["-m", "densenet_onnx", "-c", "3", "-s", "INCEPTION", str(pictures()[0])]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=max(left, 1.0), check=False)
    except subprocess.TimeoutExpired:
        return ExampleRow(name, expected, False, "it did not end in time")
    return judged(name, expected, ended.returncode, ended.stdout + ended.stderr)


def judged(name: str, expected: str, code: int, output: str) -> ExampleRow:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    last = next((line for line in reversed(lines) if any(map(str.isalnum, line))), "")
    if not expected:
        return ExampleRow(name, expected, code == 0, last or "ended" if code == 0 else f"exit {code}: {last}")
    refusals = [line for line in lines if expected in line]
    if refusals:
        return ExampleRow(name, expected, True, refusals[-1])
    if _NO_CUDA in output:
        return ExampleRow(name, expected, True, f"not run: the client needs CUDA itself ({last})")
    return ExampleRow(name, expected, False, f"exit {code}: {last}")
