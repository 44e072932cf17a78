"""The start section: from `carpool serve` to the first answer and to full speed, and after `kill -9`.

Cold is with empty caches; artifacts are what an earlier start compiled, in one file, with the compiler's own
caches empty. Full speed is reached when every batch size is compiled; the largest one, which is most of the
throughput, is compiled before that and has a column of its own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chip import serving
from chip.lateness import Slices, told
from chip.repository import SIDE, write_model
from chip.serving import Load, Running, drive, row
from load.processes import command_line, tree_cpu

if TYPE_CHECKING:
    from gpu import Bench

ANSWER_S, COMPILED_S = 120.0, 240.0
SLO = 0.05
LOADED_S = 30.0  # with requests, while it compiles
KILLED_AFTER_S = 5.0
_RUNNER = "carpool.extensions.torch.runner_process"
_ARTIFACTS = "compiled"


class Starting:
    def __init__(self, bench: Bench, pair: tuple[str, ...], few: list[int]) -> None:
        """`pair` are the networks of the rows with two models, which have `few` batch sizes."""
        self._bench, self._pair, self._few = bench, pair, few
        self._given = bench.given
        self._cache = bench.given.out / "start-cache"

    def run(self) -> None:
        wanted = self._given.starts
        capacity = self._given.capacity or self._cold()
        if "artifacts" in wanted:
            self._with_artifacts()
        if "loaded" in wanted and capacity:
            self._under_load(capacity)
        if "two" in wanted and len(self._pair) > 1:
            self._two()

    # ---- starts

    @contextmanager
    def _server(self, folder: Path, name: str) -> Iterator[tuple[Running, Path, float]]:
        """The server, its log, and the moment at which it was started; ready or not."""
        log = self._given.out / f"start-{name}.log"
        began = time.monotonic()
        environment = {"CARPOOL_CACHE_DIR": str(self._cache)}
        frontends = self._given.frontends
        with serving.carpool(
            folder, log, self._bench.cores, frontends=frontends, environment=environment, compiled=False
        ) as server:
            yield server, log, began

    def _folder(self) -> Path:
        """With the SLO that is promised, from which the size follows that is compiled first."""
        given = self._given
        return write_model(
            given.out / "start-one",
            self._bench.network,
            slo_ms=SLO * 1e3,
            device=given.device,
            buckets=self._bench.buckets,
            instances=given.instances,
            compiled=not given.eager,
        )

    def _forget(self, *, artifacts: bool) -> None:
        """All caches, or all but the file of artifacts."""
        if artifacts:
            shutil.rmtree(self._cache, ignore_errors=True)
            return
        for path in self._cache.iterdir():
            if path.name != _ARTIFACTS:
                shutil.rmtree(path, ignore_errors=True)

    def _told(self, what: str, **said: Any) -> None:
        self._bench.found.setdefault("start", {})[what] = said
        self._bench.write()
        print(f"  {what}: " + ", ".join(f"{name} {value}" for name, value in said.items()), flush=True)

    def _cold(self) -> float:
        """Nothing cached; and then what it carries within 50 ms."""
        self._forget(artifacts=True)
        bench = self._bench
        with self._server(self._folder(), "cold") as (server, log, began):
            first = until_answered(server, bench.network) - began
            self._told("cold", first_answer_s=round(first, 1), **compiled_after(log, server, first))
            load = Load(
                bench.tensors(server.url),
                self._given.seconds,
                self._given.processes,
                concurrency=256,
                slo=SLO,
            )
            entry = bench.add(row("start: capacity when compiled", load, *drive(server, load)))
        return float(entry["goodput_rps"])

    def _with_artifacts(self) -> None:
        self._forget(artifacts=False)
        with self._server(self._folder(), "artifacts") as (server, log, began):
            first = until_answered(server, self._bench.network) - began
            self._told("artifacts", first_answer_s=round(first, 1), **compiled_after(log, server, first))

    def _under_load(self, capacity: float) -> None:
        """At half of the final capacity from the first second on, with nothing cached."""
        self._forget(artifacts=True)
        bench = self._bench
        with self._server(self._folder(), "loaded") as (server, log, began):
            first = until_answered(server, bench.network) - began
            load = Load(
                bench.tensors(server.url),
                LOADED_S,
                self._given.processes,
                rate=capacity / 2,
                slo=SLO,
                warmup=0.5,
            )
            slices = Slices()
            found = drive(server, load, slices)
            entry = bench.add(row("start: half of capacity while it compiles", load, *found))
            with urllib.request.urlopen(f"{server.url}/v2/history", timeout=10.0) as answer:
                (self._given.out / "start-loaded-history.json").write_bytes(answer.read())
            said = {"offered_rps": round(capacity / 2), "within_slo": entry["attainment"]}
            said |= compiled_after(log, server, first)
            blamed = told(slices.bins, log, self._given.out / "start-loaded-slices.json")
            self._told("under load", **said, blamed=blamed)

    def _two(self) -> None:
        """Two models: the first answers of both, cold; then with artifacts, and kill -9 of their runner."""
        folder = self._given.out / "start-two"
        for network in self._pair:
            write_model(
                folder,
                network,
                slo_ms=SLO * 1e3,
                device=self._given.device,
                buckets=self._few,
                instances=self._given.instances,
                compiled=not self._given.eager,
            )
        self._forget(artifacts=True)
        with self._server(folder, "two-cold") as (server, log, began):
            first = max(until_answered(server, network) for network in self._pair) - began
            self._told("two cold", first_answer_s=round(first, 1), **compiled_after(log, server, first, 2))
        with self._server(folder, "two-killed") as (server, log, began):
            first = max(until_answered(server, network) for network in self._pair) - began
            time.sleep(KILLED_AFTER_S)
            (runner,) = runners(server.pid)
            before = len(events(log, "model-compiled"))
            killed = time.monotonic()
            os.kill(runner, signal.SIGKILL)
            again = max(until_answered(server, network) for network in self._pair) - killed
            said = compiled_after(log, server, 0.0, before + 2, since=killed)
            self._told("killed", first_answer_s=round(first, 1), again_after_s=round(again, 1), **said)


def until_answered(server: Running, network: str) -> float:
    """When it answered a request well."""
    body, headers = _request()
    end = time.monotonic() + ANSWER_S
    while time.monotonic() < end:
        asked = urllib.request.Request(f"{server.url}/v2/models/{network}/infer", body, headers)
        with suppress(OSError), urllib.request.urlopen(asked, timeout=10.0) as answer:
            if answer.status == 200:
                return time.monotonic()
        time.sleep(0.05)
    raise RuntimeError(f"{network} did not answer within {ANSWER_S:g} s")


def _request() -> tuple[bytes, dict[str, str]]:
    size = 3 * SIDE * SIDE
    tensor = {"name": "image", "datatype": "UINT8", "shape": [1, 3, SIDE, SIDE]}
    head = json.dumps({"inputs": [{**tensor, "parameters": {"binary_data_size": size}}]}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head)), "Content-Type": "application/octet-stream"}
    return head + bytes(size), headers


def events(log: Path, name: str) -> list[Mapping[str, Any]]:
    found = []
    for line in log.read_text(errors="replace").splitlines():
        if line.startswith("{"):
            with suppress(ValueError):
                event = json.loads(line)
                if event["event"] == name:
                    found.append(event)
    return found


def compiled_after(
    log: Path, server: Running, first: float, models: int = 1, since: float | None = None
) -> dict[str, Any]:
    """Seconds from the start of the server, or `since`, to the first and the last compiled batch size."""
    end = time.monotonic() + COMPILED_S
    while len(events(log, "model-compiled")) < models and time.monotonic() < end:
        if not Path(f"/proc/{server.pid}").exists():
            raise RuntimeError("the server has ended")
        time.sleep(0.1)
    began = time.time() - (time.monotonic() - (server.began if since is None else since))
    times = sorted(
        (_seconds(event["time"]) - began, event["size"]) for event in events(log, "batch-size-compiled")
    )
    mine = [(at, size) for at, size in times if at > 0]
    whole = [_seconds(event["time"]) - began for event in events(log, "model-compiled")]
    ready = sorted(_seconds(event["time"]) - began for event in events(log, "runner-stands-by"))
    return {
        "largest_compiled_s": round(mine[0][0], 1) if mine else None,
        "all_compiled_s": round(mine[-1][0], 1) if mine else None,
        "complete_s": round(whole[-1], 1) if whole else None,
        "sizes": [size for _, size in mine],
        "standby_s": [round(at, 1) for at in ready if at > 0],
        "after_first_answer_s": round(mine[-1][0] - first, 1) if mine and first else None,
    }


def _seconds(text: str) -> float:
    from datetime import datetime

    return datetime.fromisoformat(text).timestamp()


def runners(pid: int) -> list[int]:
    """Those that serve: they have mapped the front ends' memory."""
    found = []
    for child in tree_cpu(pid):
        with suppress(OSError):
            serves = "carpool-slots" in Path(f"/proc/{child}/maps").read_text()
            if serves and _RUNNER in command_line(child):
                found.append(child)
    return found
