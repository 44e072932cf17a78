"""A flood from a process of its own, while something else is measured."""

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

from carpool.lab.load.aim import Aim
from chip.cores import placed

_LOAD = "import sys; from carpool.cli.main import main; sys.argv[0] = 'carpool'; main()"
_END_S = 20.0  # for what is still open, and to tell


@dataclass
class Flood:
    """What its generator found is in `report` after the block."""

    report: dict[str, Any] = field(default_factory=dict)


def command(aim: Aim, rate: float, seconds: float, processes: int) -> list[str]:
    words = [sys.executable, "-P", "-c", _LOAD, "load", aim.url, "--model", aim.model, "--json"]
    words += ["--rate", f"{rate:g}", "--duration", f"{seconds:g}", "--processes", str(processes)]
    words += ["--timeout", "5", "--drain", "5"]
    return words if aim.connections is None else [*words, "--connections", str(aim.connections)]


@contextlib.contextmanager
def flooded(aim: Aim, rate: float, seconds: float, processes: int, cores: Collection[int]) -> Iterator[Flood]:
    """On these cores. It ends by itself after so many seconds, and at the latest with the block."""
    flood = Flood()
    with tempfile.TemporaryFile() as said:
        with placed(cores):
            process = subprocess.Popen(
                command(aim, rate, seconds, processes),
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.DEVNULL,
            )
        try:
            yield flood
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(seconds + _END_S)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
        said.seek(0)
        with contextlib.suppress(ValueError):
            flood.report = json.loads(said.read())
