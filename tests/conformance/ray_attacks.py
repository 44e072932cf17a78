"""A fleet on a real Ray, and what may happen to it: run inside a namespace by tests/bench/test_ray_fleet.py.

Prints one JSON document: by attack, what came of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray import serve

import carpool.ray
from carpool.ray_cluster.haproxy_pool import BalancerError
from carpool.ray_cluster.ray_fleet import NAMESPACE, actors_of, balancers
from carpool.ray_cluster.server_child import ReplicaFailed
from ray_fleet import MODEL

PATIENCE_S = 90.0


def main() -> None:
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    with tempfile.TemporaryDirectory(prefix="carpool-ray-", ignore_cleanup_errors=True) as name:
        model = Path(name) / "models" / "fake"
        model.mkdir(parents=True)
        (model / "model.toml").write_text(MODEL)
        os.environ |= dict.fromkeys(("CARPOOL_CACHE_DIR", "CARPOOL_STATE_DIR", "TMPDIR"), name)
        with contextlib.redirect_stdout(sys.stderr):
            ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
            told = attack(model.parent)
            ray.shutdown()
    sys.stdout.write(json.dumps(told))


def attack(models: Path) -> dict[str, Any]:
    told: dict[str, Any] = {}
    try:
        carpool.ray.deploy("/nowhere/models", name="wrong")
    except ReplicaFailed as error:
        told["bad path"] = error.message
        told["bad path leaves"] = [*serve.status().applications, *actors_of("wrong")]
    try:
        carpool.ray.deploy(models, name="slow", ready_s=0.1, port=0)
    except ReplicaFailed as error:
        told["never ready"] = error.message

    url = carpool.ray.deploy(models, slo_ms=1000, replicas=2, drain_s=5)
    told["first answer"] = ask(url)
    told["addresses"] = carpool.ray.addresses() == [url]
    told["same port"] = same_port(models, url)
    second = carpool.ray.deploy(models, name="second", slo_ms=500, port=0, drain_s=5)
    told["two fleets"] = [ask(url), ask(second), url != second]
    carpool.ray.delete("second")
    told["one deleted, the other serves"] = [ask(url), list(actors_of("second"))]

    told["deployed again"] = deployed_again(models, url)
    told["book killed"] = book_killed(url)
    told["haproxy killed"] = haproxy_killed(url)
    told["balancer killed"] = balancer_killed(url)
    told["server killed"] = killed(url, servers)
    told["actor killed"] = killed(url, actors)

    built = carpool.ray.app({"models": str(models), "replicas": "1,2", "port": "8100"})
    serve.run(built, name="built", route_prefix=None)
    wait(lambda: any(each["serves"] for each in balancers("built")), "a balancer that a replica made")
    told["built"] = [ask(address) for address in carpool.ray.addresses("built")]
    carpool.ray.delete("built")

    serve.delete("carpool")  # by somebody who knows nothing of balancers
    wait(lambda: not list(actors_of("carpool")), "the balancers' end")
    told["deleted by Serve alone"] = [*actors_of("carpool"), *servers()]
    return told


def ask(url: str) -> int:
    body = json.dumps({"inputs": [{"name": "x", "datatype": "UINT8", "shape": [1, 64], "data": [[0] * 64]}]})
    request = urllib.request.Request(f"{url}/v2/models/fake/infer", body.encode(), method="POST")
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def wait(condition: Callable[[], object], what: str) -> None:
    give_up = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > give_up:
            raise SystemExit(f"not within {PATIENCE_S:g} s: {what}")
        time.sleep(0.1)


def state() -> dict[str, Any]:
    return next(iter(balancers("carpool")), {})


def same_port(models: Path, url: str) -> str:
    try:
        carpool.ray.deploy(models, name="third", port=int(url.rpartition(":")[2]), drain_s=5)
    except BalancerError as error:
        return error.message
    return ""


def deployed_again(models: Path, url: str) -> list[Any]:
    """With other settings: replicas are replaced in turn, and what is asked meanwhile is answered."""
    before, answers, over = set(state()["replicas"]), set(), threading.Event()

    def go_on() -> None:
        while not over.is_set():
            answers.add(ask(url))

    asking = threading.Thread(target=go_on)
    asking.start()
    same = carpool.ray.deploy(models, slo_ms=900, replicas=2, drain_s=5) == url
    wait(lambda: len(state()["replicas"]) == 2 and not before & set(state()["replicas"]), "new replicas")
    over.set()
    asking.join()
    return [same, sorted(answers)]


def book_killed(url: str) -> list[Any]:
    """Once so that Ray starts it again, and once so that somebody must make another: replicas stay."""
    answers = []
    before = state()["replicas"]
    for for_ever in (False, True):
        ray.kill(ray.get_actor("carpool.book", NAMESPACE), no_restart=for_ever)
        until = time.monotonic() + 8.0  # longer than a lease
        while time.monotonic() < until:
            answers.append(ask(url))
    wait(lambda: "carpool.book" in list(actors_of("carpool")), "another book")
    return [sorted(set(answers)), state()["replicas"] == before]


def haproxy_killed(url: str) -> list[Any]:
    pid = state()["pid"]
    os.kill(pid, signal.SIGKILL)
    wait(lambda: state()["pid"] not in (0, pid) and state()["serves"], "another HAProxy")
    return [ask(url), state()["url"] == url]


def balancer_killed(url: str) -> list[Any]:
    pid = state()["pid"]
    name = next(name for name in actors_of("carpool") if ".balancer." in name)
    ray.kill(ray.get_actor(name, NAMESPACE), no_restart=False)
    wait(lambda: state().get("serves"), "another balancer")
    return [ask(url), pid in processes(b"haproxy.cfg")]


def processes(word: bytes) -> list[int]:
    """Whose command line has it: a process that has ended has none."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if word in (place / "cmdline").read_bytes():
                found.append(int(place.name))
    return found


def servers() -> list[int]:
    return processes(b"carpool\0serve\0")


def actors() -> list[int]:
    return processes(b"ray::ServeReplica:carpool:")


def killed(url: str, those: Callable[[], list[int]]) -> list[Any]:
    """One of them: what is answered until another replica is there, and how many servers there are then."""
    before, answers = set(state()["replicas"]), set()
    os.kill(those()[0], signal.SIGKILL)

    def replaced() -> bool:
        answers.add(ask(url))
        now = set(state()["replicas"])
        return len(now) == len(before) and now != before

    wait(replaced, "another replica")
    return [sorted(answers), len(servers())]


if __name__ == "__main__":
    main()
