"""JPEG bytes to answers at the speed of the chip: one GPU, one server, everything measured in one run.

Needs a CUDA device, torch and torchvision; nothing is fetched. In this order, for ResNet-50 and then ViT-B/16
in fp16 with random weights: what one process does without a network (decode, resize, model, top-5, on two or
three streams), Carpool over HTTP with 640×480 JPEGs, with uint8 tensors, and with tensors in shared memory,
light load, a promise of 50 ms at 0.9 of capacity and beyond it, what a team writes with FastAPI, and a time
line of the device.

    python benchmarks/gpu.py --out /tmp/gpu            # everything: under ten minutes
    python benchmarks/gpu.py --sections jpeg,tensor    # only these
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from carpool.lab.load.aim import Aim
from carpool.lab.load.inputs import Filling
from chip import serving
from chip.repository import write_model, write_photos
from chip.serving import Load, Running, drive, row

SECTIONS = ("ceiling", "jpeg", "tensor", "shared", "light", "promise", "fastapi", "timeline")
BUCKETS = [1, 8, 32, 64, 96, 128]
HERE = Path(__file__).parent


class Bench:
    """One network; what was found is written after every step, so that an early end loses nothing."""

    def __init__(self, given: argparse.Namespace, network: str, results: dict[str, Any]) -> None:
        self.given = given
        self.network = network
        self.found: dict[str, Any] = results.setdefault(network, {"rows": []})
        self._results = results
        self.photos = write_photos(given.out / "photos")
        self.repository = write_model(
            given.out / f"models-{network}",
            network,
            slo_ms=100,
            device=given.device,
            buckets=given.buckets,
            instances=given.instances,
            compiled=not given.eager,
        )

    # ---- what is sent

    def pictures(self, url: str, path: str | None = None) -> Aim:
        where = path or f"/models/{self.network}/predict"
        return Aim(url + where, pictures=tuple(self.photos), connections=self.given.connections)

    def tensors(self, url: str, *, shared: bool = False) -> Aim:
        return Aim(
            url,
            self.network,
            filling=Filling("random", {}, 1, 16),
            connections=self.given.connections,
            shared_memory=shared,
        )

    # ---- keeping

    def keep(self, key: str, value: Any) -> None:
        self.found[key] = value
        self.write()

    def add(self, entry: dict[str, Any]) -> dict[str, Any]:
        self.found["rows"].append(entry)
        self.write()
        show(entry)
        return entry

    def write(self) -> None:
        (self.given.out / "gpu.json").write_text(json.dumps(self._results, indent=1))

    # ---- sections

    def ceiling(self) -> None:
        """One process without a network."""
        command = [sys.executable, "-m", "chip.ceiling", self.network, *map(str, self.photos)]
        command += ["--seconds", f"{self.given.seconds / 2:g}"] + ["--eager"] * self.given.eager
        done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, timeout=300)
        if done.returncode:
            raise RuntimeError(done.stderr[-2000:])
        listed = json.loads(done.stdout)
        for what in ("jpeg", "tensor"):
            best = max((one for one in listed if one["what"] == what), key=lambda one: one["images_per_s"])
            print(f"  one process, {what}: {best['images_per_s']:,} images/s ({best['threads']} streams)")
            self.found[f"{what}_ceiling"] = best["images_per_s"]
        self.keep("ceilings", listed)

    def saturate(self, server: Running, what: str, aim: Aim) -> dict[str, Any]:
        """Closed loops of growing size: the most images per second with the p99 that was promised."""
        best: dict[str, Any] = {"images_per_s": 0.0}
        for clients in self.given.clients:
            load = Load(aim, self.given.seconds, self.given.processes, concurrency=clients, slo=0.1)
            entry = self.add(row(what, load, *drive(server, load)))
            if entry["images_per_s"] > best["images_per_s"] and (entry["p99_ms"] or 1e9) <= 100:
                best = entry
        self.keep(f"{what}_images_per_s", best["images_per_s"])
        return best

    def serve(self, sections: set[str]) -> None:
        """Everything that needs the server with the long promise."""
        log = self.given.out / f"serve-{self.network}.log"
        with serving.carpool(self.repository, log, frontends=self.given.frontends) as server:
            self.keep("ready_after_s", server.ready_after_s)
            self.keep("choices", choices(log))
            if "light" in sections:
                for what, aim in (("tensor", self.tensors(server.url)), ("jpeg", self.pictures(server.url))):
                    load = Load(aim, self.given.seconds / 2, 1, concurrency=1, slo=0.1)
                    entry = self.add(row(f"light {what}", load, *drive(server, load)))
                    self.keep(f"light_{what}_p50_ms", entry["p50_ms"])
            if "jpeg" in sections:
                self.saturate(server, "jpeg", self.pictures(server.url))
            if "tensor" in sections:
                self.saturate(server, "tensor", self.tensors(server.url))
            if "shared" in sections:
                self.saturate(server, "shared", self.tensors(server.url, shared=True))

    def promise(self) -> None:
        """50 ms, at 0.9 of what is answered within them, and as far beyond it as the generator goes."""
        log = self.given.out / f"promise-{self.network}.log"
        with serving.carpool(self.repository, log, frontends=self.given.frontends, slo_ms=50) as server:
            for what, aim in (("jpeg", self.pictures(server.url)), ("tensor", self.tensors(server.url))):
                load = Load(aim, self.given.seconds, self.given.processes, concurrency=256, slo=0.05)
                capacity = self.add(row(f"within 50 ms, {what}", load, *drive(server, load)))["goodput_rps"]
                self.keep(f"{what}_within_50_ms", capacity)
                for factor in self.given.factors:
                    load = Load(
                        aim, self.given.seconds, self.given.processes, rate=factor * capacity, slo=0.05
                    )
                    entry = row(f"promise {what} x{factor:g}", load, *drive(server, load))
                    entry["goodput_of_capacity"] = round(entry["goodput_rps"] / capacity, 3)
                    self.add(entry)

    def fastapi(self) -> None:
        """The same pictures through an asyncio batcher, with one worker and with several."""
        for workers in self.given.workers:
            log = self.given.out / f"fastapi-{self.network}-{workers}.log"
            with serving.fastapi(self.network, log, workers=workers, max_batch=32) as server:
                aim = self.pictures(server.url, "/predict")
                load = Load(aim, self.given.seconds, min(4, self.given.processes), concurrency=64 * workers)
                entry = self.add(row(f"fastapi x{workers}", load, *drive(server, load)))
                self.keep(f"fastapi_{workers}_images_per_s", entry["images_per_s"])

    def timeline(self) -> None:
        """A second of the device, drawn, with the same backends in one process."""
        command = [sys.executable, "-m", "chip.timeline", str(self.repository / self.network)]
        command += [str(self.given.out / f"timeline-{self.network}.png"), *map(str, self.photos)]
        done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, timeout=300)
        if done.returncode:
            raise RuntimeError(done.stderr[-2000:])
        self.keep("timeline", json.loads(done.stdout.splitlines()[-1]))


def choices(log: Path) -> list[str]:
    """What the server said it chose, and why."""
    lines = log.read_text(errors="replace").splitlines()
    return [json.loads(line).get("why", "") for line in lines if line.startswith("{") and '"choice"' in line]


def show(entry: dict[str, Any]) -> None:
    asked = f"{entry['concurrency']} clients" if entry["concurrency"] else f"{entry['rate']:,.0f}/s offered"
    print(
        f"  {entry['what']:<22} {asked:>16}  {entry['images_per_s']:>9,.0f} images/s  "
        f"p50 {entry['p50_ms'] or 0:6.2f}  p99 {entry['p99_ms'] or 0:6.2f} ms  "
        f"batch {entry['batch_mean'] or 0:5.1f}  in time {entry['attainment']:.4f}  "
        f"loop {entry['engine_loop_us_per_request']} µs  gpu {entry['device'].get('busy')}  "
        f"threads {entry['engine_threads']}" + ("  (generator late)" if entry["generator_late"] else ""),
        flush=True,
    )


def attempt(what: str, step: Callable[[], None], results: dict[str, Any]) -> None:
    """One section that fails must not take the others with it."""
    began = time.monotonic()
    print(f"== {what}", flush=True)
    try:
        step()
    except Exception as error:
        results.setdefault("errors", {})[what] = f"{type(error).__name__}: {error}"
        traceback.print_exc()
    print(f"   {time.monotonic() - began:.0f} s", flush=True)


def machine() -> dict[str, Any]:
    import torch
    import torchvision

    return {
        "device": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "cores": len(os.sched_getaffinity(0)),
        "python": sys.version.split()[0],
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(sys.argv),
    }


def read() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="folder for the results; default: a temporary one")
    parser.add_argument("--sections", default=",".join(SECTIONS), help="which parts to run")
    parser.add_argument("--networks", default="resnet50,vit_b_16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=4.0, help="of every measurement")
    parser.add_argument("--frontends", type=int, default=4)
    parser.add_argument("--processes", type=int, default=5, help="that generate load")
    parser.add_argument("--instances", type=int, default=0, help="0: as measurement says")
    parser.add_argument("--clients", default="384,640", help="closed loops to try")
    parser.add_argument("--factors", default="0.9,1.5", help="of capacity, for the promise")
    parser.add_argument("--workers", default="1,4", help="of FastAPI")
    parser.add_argument("--buckets", default=",".join(map(str, BUCKETS)))
    parser.add_argument("--connections", type=int, default=1024)
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.add_argument("--quick", action="store_true", help="within a minute")
    given = parser.parse_args()
    for name, kind in (("clients", int), ("factors", float), ("workers", int), ("buckets", int)):
        setattr(given, name, [kind(part) for part in getattr(given, name).split(",")])
    if given.quick:
        given.sections, given.networks, given.seconds = "jpeg,tensor", "resnet50", 2.0
        given.clients, given.eager, given.buckets = [256], True, [1, 32, 64]
    given.out = given.out or Path(tempfile.mkdtemp(prefix="carpool-gpu-"))
    given.out.mkdir(parents=True, exist_ok=True)
    return given


def main() -> None:
    given = read()
    try:
        import torch
        import torchvision  # noqa: F401
    except ImportError as missing:
        print(f"gpu.py needs {missing.name}, which is not installed here: nothing was measured")
        return
    if given.device == "cuda" and not torch.cuda.is_available():
        print("gpu.py needs a CUDA device, and there is none here: nothing was measured")
        return
    results: dict[str, Any] = {"machine": machine()}
    wanted = set(given.sections.split(","))
    for network in given.networks.split(","):
        print(f"==== {network}", flush=True)
        bench = Bench(given, network, results)
        served = wanted & {"jpeg", "tensor", "shared", "light"}
        if "ceiling" in wanted:
            attempt("one process without a network", bench.ceiling, results)
        if served:
            attempt("carpool", partial(bench.serve, served), results)
        if "promise" in wanted:
            attempt("a promise of 50 ms", bench.promise, results)
        if "fastapi" in wanted and network == "resnet50":
            attempt("FastAPI", bench.fastapi, results)
        if "timeline" in wanted and network == "resnet50":
            attempt("time line", bench.timeline, results)
        bench.write()
    if given.json:
        print(json.dumps(results))
    print(f"results: {given.out / 'gpu.json'}")


if __name__ == "__main__":
    main()
