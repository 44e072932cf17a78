"""The pipeline section: three ways from a JPEG to four classified things, in turns on one machine."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chip import serving
from chip.cores import placed
from chip.serving import Load, Running, drive, row
from chip.street import STREET, write_street

if TYPE_CHECKING:
    from gpu import Bench

SLO, SLOW = 0.25, 30.0  # on a GPU, and on a CPU, where only the way is tried
STREAMS = (3, 2)
CLIENT_THREADS = 24  # of each process: more only wait for its interpreter
_HERE = Path(__file__).parents[1]
_COUNTED = "carpool_pipeline_device_pictures_total{"


class Street:
    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._given = bench.given
        self._small = bench.given.device == "cpu"
        self._slo = SLOW if self._small else SLO
        self._folder = write_street(
            bench.given.out / f"street-{bench.network}",
            bench.network,
            slo_ms=self._slo * 1e3,
            device=bench.given.device,
            buckets=[1, 8] if self._small else bench.given.street_buckets,
            finder_buckets=[1, 4] if self._small else bench.given.finder_buckets,
            instances=bench.given.instances,
            compiled=not bench.given.eager,
        )

    def run(self) -> None:
        bench, given = self._bench, self._given
        log = given.out / f"street-{bench.network}.log"
        found: dict[str, list[dict[str, Any]]] = {"carpool": [], "alone": [], "tensor": [], "jpegs": []}
        with (
            serving.carpool(self._folder, log, bench.cores, frontends=given.frontends) as server,
            self._alone() as alone,  # not at the same time: the server measures while it loads
        ):
            bench.keep("street_ready_after_s", server.ready_after_s)
            _wait_ready(alone)
            for clients, streams in zip(given.street_clients, STREAMS, strict=False):
                load = Load(
                    bench.pictures(server.url, f"/models/{STREET}/predict"),
                    given.seconds,
                    given.processes,
                    concurrency=4 if self._small else clients,
                    slo=self._slo,
                )
                found["carpool"].append(bench.add(row("street", load, *drive(server, load))))
                found["alone"].append(_measured(alone, given.seconds, 1 if self._small else streams))
                for way in ("tensor", "jpegs"):
                    found[way].append(self._clients(server, way))
                self._keep(found, server)

    def _keep(self, found: dict[str, list[dict[str, Any]]], server: Running) -> None:
        """After every turn: a run may be cut off."""
        ours = max(one["goodput_rps"] for one in found["carpool"])
        alone = max(one["pictures_per_s"] for one in found["alone"])
        by_hand = {way: max(one["good_per_s"] for one in found[way]) for way in ("tensor", "jpegs")}
        best = max(by_hand.values())
        told = {
            "goodput": ours,
            "alone": alone,
            "client": by_hand,
            "of_alone": round(ours / alone, 3) if alone else None,
            "times_client": round(ours / best, 2) if best else None,
            "crops": counted(server.url),
            "turns": {name: turns for name, turns in found.items() if name != "carpool"},
        }
        self._bench.keep("street", told)
        print(
            f"  street: {ours:,.0f} pictures/s within {self._slo * 1e3:g} ms; one process without a network "
            f"{alone:,.0f}: {told['of_alone']} of it; a client that asks both {by_hand}: "
            f"{told['times_client']} times; {told['crops']}",
            flush=True,
        )

    @contextlib.contextmanager
    def _alone(self) -> Iterator[subprocess.Popen[str]]:
        """It waits to be told; nobody computes but in turns."""
        bench = self._bench
        command = [sys.executable, "-m", "chip.street_alone", str(self._folder), bench.network]
        command += [*map(str, bench.photos)]
        if self._small:
            command += ["--pictures", "2", "--crops", "16", "--threads", "1"]
        command += ["--eager"] if self._given.eager else []
        with (
            placed(bench.cores.everything),
            (self._given.out / "street-alone.log").open("wb") as log,
            subprocess.Popen(
                command, cwd=_HERE, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            ) as process,
        ):
            try:
                yield process
            finally:
                process.kill()

    def _clients(self, server: Running, way: str) -> dict[str, Any]:
        """As many processes as generate load otherwise, on the same cores."""
        given = self._given
        processes = 1 if self._small else given.processes
        command = [sys.executable, "-m", "chip.street_client", server.url, self._bench.network]
        command += [*map(str, self._bench.photos), "--way", way, "--seconds", f"{given.seconds:g}"]
        threads = 2 if self._small else CLIENT_THREADS
        command += ["--threads", str(threads), "--slo-ms", f"{self._slo * 1e3:g}"]
        started = [
            subprocess.Popen(command, cwd=_HERE, stdout=subprocess.PIPE, text=True) for _ in range(processes)
        ]
        told = [json.loads(process.communicate(timeout=60)[0]) for process in started]
        found = {
            "way": way,
            "good_per_s": round(sum(one["good"] for one in told) / given.seconds, 1),
            "answered_per_s": round(sum(one["answered"] for one in told) / given.seconds, 1),
            "failed": sum(one["failed"] for one in told),
            "p50_ms": told[0]["p50_ms"],
            "p99_ms": max(one["p99_ms"] or 0.0 for one in told),
        }
        print(f"  a client that asks both, {way}: {found}", flush=True)
        return found


def _wait_ready(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    if process.stdout.readline().strip() != "ready":
        raise RuntimeError("the process without a network did not come up: see street-alone.log")


def _measured(process: subprocess.Popen[str], seconds: float, threads: int) -> dict[str, Any]:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{seconds:g} {threads}\n")
    process.stdin.flush()
    line = process.stdout.readline()
    if not line:
        raise RuntimeError("the process without a network ended: see street-alone.log")
    print(f"  one process without a network: {line.strip()}", flush=True)
    found: dict[str, Any] = json.loads(line)
    return found


def counted(url: str) -> dict[str, float]:
    """Where the crops were cut."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=5) as answer:
        lines: Sequence[str] = answer.read().decode().splitlines()
    found: dict[str, float] = {}
    for line in lines:
        if line.startswith(_COUNTED):
            where = line.partition('crops="')[2].partition('"')[0]
            found[where] = found.get(where, 0.0) + float(line.rpartition(" ")[2])
    return found
