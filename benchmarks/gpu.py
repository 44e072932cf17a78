"""JPEG bytes to answers at the speed of the chip: one GPU, one server, everything measured in one run.

Needs a CUDA device, torch and torchvision; nothing is fetched. For ResNet-50 and then ViT-B/16 in fp16 with
random weights: Carpool over HTTP with 640×480 JPEGs, with uint8 tensors, and with tensors in shared memory,
light load, starts from nothing and from artifacts, a promise of 50 ms at 0.9 of capacity and beyond it, one
of them flooded beside the other, a detector before it that finds four things in each picture (against one
process without a network, and against a client that asks both models itself), what one process does without a
network (decode, resize, model, top-5, on two or three streams), ONNX files as PyTorch networks against
onnxruntime on the CPU, what a team writes with FastAPI, and a time line of the device. What matters most
comes first, and everything is written at once: a run may be cut off.

    python benchmarks/gpu.py --out /tmp/gpu            # everything: under ten minutes
    python benchmarks/gpu.py --sections jpeg,tensor    # only these
    python benchmarks/gpu.py --sections pipeline --networks tiny --device cpu --eager    # a try without a GPU
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
from collections.abc import Callable, Collection, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from carpool.lab.load.aim import Aim
from carpool.lab.load.messages import Filling
from chip import serving
from chip.cores import Cores, CoreUse, divide, first_siblings, placed
from chip.isolation import flooded
from chip.repository import write_model, write_photos
from chip.serving import Load, Running, drive, row
from chip.showing import shown
from chip.starting import Starting
from chip.street_bench import Street
from load.program import run_program

INPUTS = ("jpeg", "tensor", "shared")
SERVED = (*INPUTS, "light")
SECTIONS = (*SERVED, "start", "promise", "onnx", "isolation", "pipeline", "ceiling", "fastapi", "timeline")
BUCKETS = [1, 8, 32, 64, 96, 128]
FIRST = ("serve", "start", "promise", "onnx", "isolation", "pipeline", "ceiling", "fastapi")
CLOSE = 0.02  # of an output's largest value: fp16 against onnxruntime on the CPU
FEW_BUCKETS = [1, 32, 64]  # for all networks but the first: preparing each takes its time
SHARED_PROCESSES = 6  # that generate load where they have no cores of their own
OTHERS = 3  # of the server's cores that are not for its front ends
FRONTENDS = 6  # where it has no cores of its own
HERE = Path(__file__).parent


class Bench:
    """One network; what was found is written after every step, so that an early end loses nothing."""

    def __init__(
        self, given: argparse.Namespace, network: str, cores: Cores, results: dict[str, Any]
    ) -> None:
        self.given = given
        self.network = network
        self.cores = cores
        self.found: dict[str, Any] = results.setdefault(network, {"rows": [], "machine": []})
        self._results = results
        first = network == given.networks.split(",")[0]
        self.buckets = given.buckets if first else FEW_BUCKETS
        self.clients = given.clients if first else given.clients[:1]
        self.photos = write_photos(given.out / "photos")
        self.repository = write_model(
            given.out / f"models-{network}",
            network,
            slo_ms=100,
            device=given.device,
            buckets=self.buckets,
            instances=given.instances,
            compiled=not given.eager,
        )

    # ---- what is sent

    def pictures(self, url: str, path: str | None = None) -> Aim:
        where = path or f"/models/{self.network}/predict"
        return Aim(url + where, pictures=tuple(self.photos), connections=self.given.connections)

    def tensors(self, url: str, *, shared: bool = False, network: str = "") -> Aim:
        return Aim(
            url,
            network or self.network,
            filling=Filling("random", {}, 1, 16),
            connections=self.given.connections,
            shared_memory=shared,
        )

    def aims(self, url: str) -> dict[str, Aim]:
        return {
            "jpeg": self.pictures(url),
            "tensor": self.tensors(url),
            "shared": self.tensors(url, shared=True),
        }

    # ---- keeping

    def keep(self, key: str, value: Any) -> None:
        self.found[key] = value
        self.write()

    def add(self, entry: dict[str, Any]) -> dict[str, Any]:
        self.found["rows"].append(entry)
        self.write()
        print(shown(entry), flush=True)
        return entry

    def write(self) -> None:
        """In one piece: whoever cuts this off finds the file whole."""
        whole = self.given.out / "gpu.json"
        part = whole.with_suffix(".part")
        part.write_text(json.dumps(self._results, indent=1))
        part.replace(whole)

    def attempt(self, what: str, step: Callable[[], object]) -> None:
        """One section that fails must not take the others with it. The machine's row tells who disturbed."""
        began, use = time.monotonic(), CoreUse(self.cores)
        print(f"== {self.network}: {what}", flush=True)
        try:
            step()
        except Exception as error:
            self._results.setdefault("errors", {})[f"{self.network}: {what}"] = (
                f"{type(error).__name__}: {error}"
            )
            traceback.print_exc()
        seconds, used = round(time.monotonic() - began, 1), use.read()
        self.found["machine"].append({"section": what, "seconds": seconds, **used})
        self.write()
        told = ", ".join(f"{name.replace('_', ' ')} {share:.2f}" for name, share in used.items())
        print(f"   {what}: {seconds:.0f} s; of the cores: {told}", flush=True)

    # ---- sections

    def ceiling(self) -> None:
        """One process without a network."""
        command = ["chip.ceiling", self.network, *map(str, self.photos)]
        command += ["--seconds", f"{self.given.seconds / 2:g}"] + ["--eager"] * self.given.eager
        listed = json.loads(self._module(command))
        for what in ("jpeg", "tensor"):
            best = max((one for one in listed if one["what"] == what), key=lambda one: one["images_per_s"])
            print(f"  one process, {what}: {best['images_per_s']:,} images/s ({best['threads']} streams)")
            self.found[f"{what}_ceiling"] = best["images_per_s"]
        self.keep("ceilings", listed)

    def _module(self, command: list[str]) -> str:
        """In a process of its own, which has all cores: nobody else needs many meanwhile."""
        with placed(self.cores.everything):
            done = subprocess.run(
                [sys.executable, "-m", *command], cwd=HERE, capture_output=True, text=True, timeout=300
            )
        if done.returncode:
            raise RuntimeError(done.stderr[-2000:])
        return done.stdout

    def saturate(self, server: Running, what: str, aim: Aim) -> None:
        """Closed loops of growing size: the most images per second with the p99 that was promised."""
        best = 0.0
        for clients in self.clients:
            load = Load(aim, self.given.seconds, self.given.processes, concurrency=clients, slo=0.1)
            entry = self.add(row(what, load, *drive(server, load)))
            if (entry["p99_ms"] or 1e9) <= 100:
                best = max(best, entry["images_per_s"])
        self.keep(f"{what}_images_per_s", best)

    def light(self, server: Running) -> None:
        """One client at a time."""
        for what in ("tensor", "jpeg"):
            load = Load(self.aims(server.url)[what], self.given.seconds / 2, 1, concurrency=1, slo=0.1)
            entry = self.add(row(f"light {what}", load, *drive(server, load)))
            self.keep(f"light_{what}_p50_ms", entry["p50_ms"])
        port = server.url.rpartition(":")[2]
        lone = json.loads(self._module(["chip.lone_client", port, self.network, str(self.photos[0])]))
        print(f"  one blocking client: {lone}", flush=True)
        self.keep("lone_client", lone)

    def serve(self, sections: Collection[str]) -> None:
        """Everything that needs the server with the long promise."""
        log = self.given.out / f"serve-{self.network}.log"
        with serving.carpool(self.repository, log, self.cores, frontends=self.given.frontends) as server:
            self.keep("ready_after_s", server.ready_after_s)
            self.keep("choices", choices(server.url))
            for what, aim in self.aims(server.url).items():
                if what in sections:
                    self.attempt(what, partial(self.saturate, server, what, aim))
            if "light" in sections:
                self.attempt("light", partial(self.light, server))

    def promise(self, sections: Collection[str]) -> None:
        """50 ms, at 0.9 of what is answered within them, and as far beyond it as the generator goes; only of
        the inputs that are asked for, where any is."""
        log = self.given.out / f"promise-{self.network}.log"
        with serving.carpool(
            self.repository, log, self.cores, frontends=self.given.frontends, slo_ms=50
        ) as server:
            for what, aim in self.aims(server.url).items():
                if what in sections or not {*sections} & {*INPUTS}:
                    self.attempt(f"promise {what}", partial(self.promise_of, server, what, aim))

    def promise_of(self, server: Running, what: str, aim: Aim) -> None:
        """What is answered in time of so much: capacity is the best that a closed loop gets within 50 ms."""
        capacity = 0.0
        for clients in self.given.promise_clients:
            load = Load(aim, self.given.seconds, self.given.processes, concurrency=clients, slo=0.05)
            entry = self.add(row(f"within 50 ms, {what}", load, *drive(server, load)))
            capacity = max(capacity, entry["goodput_rps"])
        self.keep(f"{what}_within_50_ms", capacity)
        if not capacity:
            raise RuntimeError(f"nothing was answered within 50 ms: there is no capacity to offer {what} at")
        for factor in self.given.factors:
            load = Load(aim, self.given.seconds, self.given.processes, rate=factor * capacity, slo=0.05)
            entry = row(f"promise {what} x{factor:g}", load, *drive(server, load))
            entry["goodput_of_capacity"] = round(entry["goodput_rps"] / capacity, 3)
            self.add(entry)

    def start(self) -> None:
        """First answers, full speed and what is answered meanwhile: cold, with artifacts, after kill -9."""
        Starting(self, tuple(self.given.networks.split(",")[:2]), FEW_BUCKETS).run()

    def isolation(self) -> None:
        """Both networks in one server, promised 50 ms each: one is flooded, the other asked for little."""
        others = [network for network in self.given.networks.split(",") if network != self.network]
        if not others:
            raise RuntimeError("this needs two networks")
        pair = (self.network, others[0])
        folder = self.given.out / f"models-{'-'.join(pair)}"
        for network in pair:
            write_model(
                folder,
                network,
                slo_ms=50,
                device=self.given.device,
                buckets=FEW_BUCKETS,
                instances=self.given.instances,
                compiled=not self.given.eager,
            )
        log = self.given.out / f"isolation-{self.network}.log"
        with serving.carpool(folder, log, self.cores, frontends=self.given.frontends) as server:
            for flood, behaved in (pair, pair[::-1]):
                self.beside(server, flood, behaved)

    def beside(self, server: Running, flood: str, behaved: str) -> None:
        """What the one that behaves has, alone, during the flood, and alone again."""
        given = self.given
        aim = self.tensors(server.url, network=behaved)
        load = Load(aim, given.seconds, 1, rate=given.behaved_rate, slo=0.05)
        self.add(row(f"{behaved} alone", load, *drive(server, load)))
        seconds = load.warmup + given.seconds + 2.0  # it is there before, and still there afterwards
        target = self.tensors(server.url, network=flood)
        # Who behaves has generator's cores apart: it must not be late for the flood's sake.
        apart, rest = self.cores.generator_apart()
        processes = max(1, min(given.processes - 1, len(rest)))
        with flooded(target, given.flood_rate, seconds, processes, rest) as found, placed(apart):
            time.sleep(1.0)
            entry = row(f"{behaved} beside {flood}", load, *drive(server, load))
        kept = ("offered_rps", "answered_rps", "goodput_rps", "refused")
        entry["flood"] = {name: found.report.get(name) for name in kept}
        self.add(entry)
        self.keep(f"{behaved}_beside_{flood}", entry["attainment"])
        self.add(row(f"{behaved} alone again", load, *drive(server, load)))

    def pipeline(self) -> None:
        """Detector, four crops each, classifier: the pipeline, one process without a network, and a client
        that asks both models itself, in turns."""
        Street(self).run()

    def onnx(self) -> None:
        """Exports of zoo.py as PyTorch networks: their answers against onnxruntime's on the CPU, and how fast
        ResNet-50 is against the network that it was made of."""
        listed = json.loads(self._module(["chip.onnx_files", "--device", self.given.device]).splitlines()[-1])
        compared, rates = listed["compared"], listed["rates"]
        print(
            f"  {listed['right']} of {len(compared)} exports answer as onnxruntime does on the CPU, in fp16"
        )
        for one in compared:
            if one["error"] is None or one["error"] > CLOSE:
                told = f"error {one['error']}, the network itself {one['own']} {one['why']}"
                print(f"    {one['export']} ({one['axes']}): {told}")
        share = rates["onnx"] / rates["native"]
        print(
            f"  ResNet-50 as ONNX: {rates['onnx']:,} of {rates['native']:,} images/s, {share:.3f}", flush=True
        )
        self.keep("onnx", listed)

    def fastapi(self) -> None:
        """The same pictures through an asyncio batcher, with one worker and with several."""
        for workers in self.given.workers:
            log = self.given.out / f"fastapi-{self.network}-{workers}.log"
            with serving.fastapi(self.network, log, self.cores, workers=workers, max_batch=32) as server:
                aim = self.pictures(server.url, "/predict")
                load = Load(aim, self.given.seconds, min(4, self.given.processes), concurrency=64 * workers)
                entry = self.add(row(f"fastapi x{workers}", load, *drive(server, load)))
                self.keep(f"fastapi_{workers}_images_per_s", entry["images_per_s"])

    def timeline(self) -> None:
        """A second of the device, drawn, with the same backends in one process."""
        command = ["chip.timeline", str(self.repository / self.network)]
        command += [str(self.given.out / f"timeline-{self.network}.png"), *map(str, self.photos)]
        self.keep("timeline", json.loads(self._module(command).splitlines()[-1]))


def in_order(networks: Sequence[str], wanted: set[str]) -> list[tuple[str, str]]:
    """Networks and what is done for them, most important first, since the last may be cut off. "serve" is for
    all sections that share a server."""
    first, *others = networks
    steps = [(first, what) for what in FIRST]
    steps += [(network, what) for network in others for what in ("serve", "ceiling")]
    steps += [(first, "timeline")]
    steps += [(network, "promise") for network in others]
    asked = wanted if wanted.isdisjoint(SERVED) else wanted | {"serve"}
    return [(network, what) for network, what in steps if what in asked]


def choices(url: str) -> list[str]:
    """What the server chose at loading, and why."""
    with urlopen(f"{url}/console/live", timeout=60) as answer:
        models = json.load(answer)["models"]
    return [why for model in models for why in model.get("choices", ())]


def machine(given: argparse.Namespace) -> dict[str, Any]:
    import torch

    torchvision = __import__("torchvision") if find_spec("torchvision") else None
    cores: Cores = given.cores
    return {
        "device": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "torchvision": None if torchvision is None else torchvision.__version__,
        "cores": len(cores.everything),
        "server_cores": sorted(cores.server) if cores.divided else 0,
        "generator_cores": sorted(cores.generator) if cores.divided else 0,
        "front_ends": given.frontends,
        "generating_processes": given.processes,
        "python": sys.version.split()[0],
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(sys.argv),
    }


def missing(device: str, networks: str = "") -> list[str]:
    """What this machine lacks."""
    needed = ("torch",) if networks == "tiny" else ("torch", "torchvision")
    lacking = [name for name in needed if find_spec(name) is None]
    if device != "cpu" and "torch" not in lacking:
        import torch

        if not torch.cuda.is_available():
            lacking.append("a CUDA device")
    return lacking


def read(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="folder for the results; default: a temporary one")
    parser.add_argument("--sections", default=",".join(SECTIONS), help="which parts to run")
    parser.add_argument("--networks", default="resnet50,vit_b_16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=4.0, help="of every measurement")
    parser.add_argument(
        "--frontends", type=int, default=0, help="of the server; 0: three less than its cores, at most eight"
    )
    parser.add_argument(
        "--server-cores",
        default="auto",
        help="that only the server runs on, and the generator on the others; 0: as the kernel puts them; "
        "default: five of eight, if there are eight",
    )
    parser.add_argument(
        "--processes", type=int, default=0, help="that generate load; 0: as many as the generator's cores"
    )
    parser.add_argument("--instances", type=int, default=0, help="0: as measurement says")
    parser.add_argument(
        "--clients", default="512,256,64", help="closed loops to try; the first for every network"
    )
    parser.add_argument(
        "--promise-clients", default="256,512", help="closed loops that say what capacity is for the promise"
    )
    parser.add_argument("--factors", default="0.9,1.5", help="of capacity, for the promise")
    parser.add_argument("--flood-rate", type=float, default=40_000.0, help="of one network, beside another")
    parser.add_argument("--behaved-rate", type=float, default=500.0, help="of that other one")
    parser.add_argument("--street-clients", default="512,384", help="closed loops of the pipeline, in turns")
    parser.add_argument("--workers", default="1,4", help="of FastAPI")
    parser.add_argument("--street-buckets", default="1,32,64,128", help="of the pipeline's classifier")
    parser.add_argument("--finder-buckets", default="1,16,64", help="of its detector")
    parser.add_argument(
        "--capacity", type=float, default=0.0, help="of the start section, as an earlier cold one found it"
    )
    parser.add_argument(
        "--starts",
        default="artifacts,loaded,two",
        help="of the start section, after the cold one, which --capacity replaces",
    )
    parser.add_argument("--buckets", default=",".join(map(str, BUCKETS)))
    parser.add_argument("--connections", type=int, default=1024)
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.add_argument("--quick", action="store_true", help="within a minute")
    given = parser.parse_args(arguments)
    lists = {
        "clients": int,
        "promise_clients": int,
        "factors": float,
        "workers": int,
        "buckets": int,
        "street_clients": int,
        "street_buckets": int,
        "finder_buckets": int,
        "starts": str,
    }
    for name, kind in lists.items():
        setattr(given, name, [kind(part) for part in getattr(given, name).split(",")])
    if given.quick:
        given.sections, given.networks, given.seconds = "jpeg,tensor", "resnet50", 2.0
        given.clients, given.eager, given.buckets = [256], True, [1, 32, 64]
    unknown = set(given.sections.split(",")) - set(SECTIONS)
    if unknown:
        parser.error(f"there are no sections {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    mine = os.sched_getaffinity(0)
    try:
        given.cores = divide(mine, given.server_cores, first_siblings(mine))
    except ValueError as error:
        parser.error(f"--server-cores: {error}")
    divided = given.cores.divided
    given.processes = given.processes or (len(given.cores.generator) if divided else SHARED_PROCESSES)
    own = min(8, len(given.cores.server) - OTHERS) if divided else FRONTENDS
    given.frontends = given.frontends or max(1, own)
    return given


def main() -> None:
    given = read()
    if lacking := missing(given.device, given.networks):
        print(
            "gpu.py needs a CUDA device, torch and torchvision. Missing here: "
            f"{' and '.join(lacking)}. Nothing was measured."
        )
        return
    cores: Cores = given.cores
    given.out = given.out or Path(tempfile.mkdtemp(prefix="carpool-gpu-"))
    given.out.mkdir(parents=True, exist_ok=True)
    print(f"{cores.said()}; {given.processes} processes generate load", flush=True)
    results: dict[str, Any] = {"machine": machine(given)}
    networks = given.networks.split(",")
    with placed(cores.generator):
        benches = {network: Bench(given, network, cores, results) for network in networks}
        for network, what in in_order(networks, set(given.sections.split(","))):
            bench = benches[network]
            steps: dict[str, Callable[[], None]] = {
                "serve": partial(bench.serve, given.sections.split(",")),
                "start": bench.start,
                "promise": partial(bench.promise, given.sections.split(",")),
                "onnx": bench.onnx,
                "isolation": bench.isolation,
                "pipeline": bench.pipeline,
                "ceiling": bench.ceiling,
                "fastapi": bench.fastapi,
                "timeline": bench.timeline,
            }
            bench.attempt(what, steps[what])
    if given.json:
        print(json.dumps(results))
    print(f"results: {given.out / 'gpu.json'}")


if __name__ == "__main__":
    run_program(main, "gpu")
