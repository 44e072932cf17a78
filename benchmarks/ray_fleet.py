"""A fleet on a real Ray cluster: four nodes on this machine, in a network and a process namespace of their
own, so that nothing of it can be reached from outside or stay behind.

A fake device answers 40 images/s in each replica (40 ms a batch, 20 ms an image, promise 400 ms), so that a
small machine carries four of them, Ray, HAProxy and the load generator.

    deploy    until carpool.ray.deploy() returns, with two replicas
    step      the load goes from 0.6 of two replicas to 1.6: until four are behind the balancer
    node      a node with a replica is killed: until there are as many as before
    down      the load falls back: until two are left
    requests  all of them, over HTTP and over gRPC through the same balancer, and how many failed: a refusal
              for want of time is an answer

There is no row for TLS: Ray's balancers speak none, and what stands before them does.

    python benchmarks/ray_fleet.py             # about two minutes; make ray installs Ray
    python benchmarks/ray_fleet.py --quick     # without `down`
    python benchmarks/ray_fleet.py --json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from fleet import SLO_MS, Load
from fleet import row as counted

FOLDER = Path(__file__).parents[1] / ".venv" / "conformance" / "ray"
"""Where `make ray` installs it."""
NODES, CORES = 4, 2  # of each but the first, which has none to give
CAPACITY = 40.0  # images per second of one replica
BASE, STEP = 0.6 * 2 * CAPACITY, 1.0 * 2 * CAPACITY  # images per second, and so many more
GRPC = 0.2  # of the first load comes over gRPC
AIMS = {"deploy": 30.0, "step": 20.0, "node": 20.0}
LIMIT_S = 90.0  # for each part: then it has failed
MODEL = """backend = "fake"
slo_ms = 400
max_batch = 32
[fake]
curve = "40+20"
[[input]]
name = "x"
datatype = "UINT8"
shape = [64]
[[output]]
name = "y"
datatype = "FP32"
shape = [4]
"""


def main() -> int:
    args = parse_arguments()
    if args.inside:
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        return inside(quick=args.quick, as_json=args.json)
    python = FOLDER / "bin" / "python"
    if not python.exists():
        print("ray_fleet: no Ray here: make ray", file=sys.stderr)
        return 0 if args.quick else 1
    return become(isolated(python, Path(__file__).resolve(), [*sys.argv[1:], "--inside"]))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="without scaling down")
    parser.add_argument("--json", action="store_true", help="print one document for machines")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def isolated(python: Path, script: Path, arguments: list[str]) -> list[str]:
    """With the first process of the namespace everything in it ends."""
    spaces = ["unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if os.geteuid():
        spaces.append("--map-root-user")
    return [*spaces, str(python), str(script), *arguments]


def become(command: list[str]) -> NoReturn:
    """Rather than start it: what ends us ends it."""
    os.execvpe(command[0], command, clean())


def clean() -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("CARPOOL_", "RAY_"))}
    ours = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    return kept | ours | {"RAY_worker_niceness": "0"}  # else replicas come after everything else here


def inside(*, quick: bool, as_json: bool) -> int:
    with tempfile.TemporaryDirectory(prefix="carpool-ray-", ignore_cleanup_errors=True) as name:
        model = Path(name) / "models" / "fake"
        model.mkdir(parents=True)
        (model / "model.toml").write_text(MODEL)
        os.environ |= dict.fromkeys(("CARPOOL_CACHE_DIR", "CARPOOL_STATE_DIR", "TMPDIR"), name)
        with contextlib.redirect_stdout(sys.stderr):  # Ray says there when a node dies
            found = measure(model.parent, quick=quick)
    print(json.dumps(found, indent=1) if as_json else as_text(found))
    return 0


def measure(models: Path, *, quick: bool) -> dict[str, Any]:
    import ray
    from ray.cluster_utils import Cluster

    import carpool.ray

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    nodes = [cluster.add_node(num_cpus=CORES) for _ in range(NODES - 1)]
    ray.init(address=cluster.address, log_to_driver=False)
    loads: list[Load] = []
    seconds: dict[str, float] = {}
    try:
        began = time.monotonic()
        url = carpool.ray.deploy(
            models,
            slo_ms=SLO_MS,
            replicas=(2, 4),
            port=0,
            grpc_port=0,
            patience_s=10,
            cold_start_s=10,
            drain_s=10,
        )
        seconds["deploy"] = time.monotonic() - began
        whole = 60.0 if quick else 105.0
        loads.append(_load(url, (1.0 - GRPC) * BASE, whole, seed=1))
        loads.append(_load(balancer(url)["grpc"], GRPC * BASE, whole, seed=3))
        time.sleep(8.0)
        loads.append(_load(url, STEP, 50.0, seed=2))
        seconds["step"] = until(lambda: len(replicas(url)) == 4, "four replicas after the step")
        time.sleep(3.0)
        seconds["node"] = lose_a_node(cluster, nodes, url)
        if not quick:
            seconds["down"] = until(lambda: len(replicas(url)) == 2, "two replicas after the load fell")
        counts = [load.result() for load in loads]
        rows = [
            counted("ray", name, each) for name, each in zip(("http", "grpc", "http"), counts, strict=True)
        ]
    finally:
        for load in loads:
            load.stop()
        carpool.ray.delete()
        ray.shutdown()
        cluster.shutdown()
    requests = sum(row.requests for row in rows)
    return {
        "over": {
            name: {
                "requests": sum(row.requests for row in rows if row.balancer == name),
                "failed": sum(row.failed for row in rows if row.balancer == name),
            }
            for name in ("http", "grpc")
        },
        "seconds": {part: round(value, 1) for part, value in seconds.items()},
        "requests": requests,
        "failed": sum(row.failed for row in rows),
        "why": ", ".join(row.why for row in rows if row.why),
        "in_time": round(sum(row.in_time * row.requests for row in rows) / max(1, requests), 4),
        "refused": sum(sum(each["refused"].values()) for each in counts),
    }


def _load(url: str, rate: float, seconds: float, seed: int) -> Load:
    return Load(url, rate, seconds, seed, warmup=0.0)


def balancer(url: str) -> dict[str, Any]:
    from carpool.extensions.ray.ray_fleet import balancers

    return next((dict(each) for each in balancers("carpool") if each["url"] == url), {})


def replicas(url: str) -> dict[str, str]:
    """Behind that balancer, by name."""
    return dict(balancer(url).get("replicas", {}))


def lose_a_node(cluster: Any, nodes: list[Any], url: str) -> float:
    """As if its power was cut. Seconds until there are as many replicas as before."""
    from ray._private.state import available_resources_per_node

    free = available_resources_per_node()
    node = next(node for node in nodes if free[node.node_id].get("CPU", 0.0) < CORES)
    before = replicas(url)
    began = time.monotonic()
    cluster.remove_node(node, allow_graceful=False)
    until(lambda: len(now := replicas(url)) == len(before) and before.keys() != now.keys(), "a replacement")
    return time.monotonic() - began


def until(condition: Callable[[], bool], what: str) -> float:
    began = time.monotonic()
    while not condition():
        if time.monotonic() > began + LIMIT_S:
            raise SystemExit(f"ray_fleet: not within {LIMIT_S:g} s: {what}")
        time.sleep(0.1)
    return time.monotonic() - began


def as_text(found: dict[str, Any]) -> str:
    lines = [f"{'':<10}{'seconds':>8}{'aim':>8}"]
    for part, value in found["seconds"].items():
        aim = AIMS.get(part)
        wished = "" if aim is None or value <= aim else "  NOT as wished"
        lines.append(f"{part:<10}{value:>8.1f}{'' if aim is None else f'≤ {aim:g}':>8}{wished}")
    for name, each in found["over"].items():
        lines.append(f"over {name}: {each['requests']:,} requests, {each['failed']} failed")
    lines.append(
        f"{found['requests']:,} requests, {found['failed']} failed ({found['why'] or 'none'}), "
        f"{found['refused']} refused early, {100 * found['in_time']:.1f} % in time"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
