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

import numpy as np
import ray
from ray import serve

import carpool.ray
from carpool.errors import CarpoolError
from carpool.extensions.ray.haproxy_pool import BalancerError
from carpool.extensions.ray.ray_fleet import NAMESPACE, actors_of, balancers
from carpool.extensions.ray.server_child import ReplicaFailed
from fleet import PHOTO, PICTURES
from ray_fleet import MODEL

PATIENCE_S = 90.0


def main() -> None:
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    with tempfile.TemporaryDirectory(prefix="carpool-ray-", ignore_cleanup_errors=True) as name:
        model = Path(name) / "models" / "fake"
        model.mkdir(parents=True)
        (model / "model.toml").write_text(MODEL)
        eyes = model.with_name("eyes")
        eyes.mkdir()
        (eyes / "model.toml").write_text(PICTURES.format(slo=1000, curve="4+1", size=64))
        os.environ["PYTHONPATH"] += f":{name}"
        os.environ |= dict.fromkeys(("CARPOOL_CACHE_DIR", "CARPOOL_STATE_DIR", "TMPDIR"), name)
        with contextlib.redirect_stdout(sys.stderr):
            ray.init(num_cpus=4, include_dashboard=True, dashboard_host="127.0.0.1", log_to_driver=False)
            told = attack(model.parent) | at_home(model.parent, Path(name))
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


def at_home(models: Path, folder: Path) -> dict[str, Any]:
    """What users of Ray expect: a handle, a log, metrics, gRPC, and files that Serve builds."""
    told: dict[str, Any] = {}
    url = carpool.ray.deploy(models, slo_ms=1000, replicas=1, drain_s=5, port=0, grpc_port=0)
    told["served"] = ask(url)
    handle = serve.get_app_handle("carpool")
    photo, zeros = PHOTO.read_bytes(), {"x": np.zeros((1, 64), np.uint8)}
    told["predict"] = handle.predict.remote(photo, model="eyes").result()["model"]
    told["infer"] = handle.infer.remote("fake", zeros).result()["y"].tolist()
    told["errors"] = [
        failure(lambda: handle.infer.remote("nobody", zeros).result()),
        failure(lambda: handle.predict.remote(b"none", model="eyes").result()),
        failure(lambda: handle.predict.remote(photo, model="eyes", deadline_ms=0.01).result()),
        failure(lambda: handle.remote("what").result()),
    ]
    told["grpc"] = over_grpc(carpool.ray.addresses(grpc=True))
    logs = Path(ray._private.worker._global_node.get_logs_dir_path()) / "serve"
    found = "".join(path.read_text() for path in logs.glob("replica_carpool_server_*"))
    told["log"] = "carpool: ready " in found and "carpool: model-ready " in found
    told["changed ports"] = [
        failure(lambda: carpool.ray.deploy(models, replicas=1, port=0)),
        failure(lambda: carpool.ray.deploy(models, replicas=1, port=8300, grpc_port=0)),
    ]
    wait(lambda: "carpool_requests_total{" in metrics(), "the server's counts among Ray's")
    carpool.ray.delete()
    told["composed"] = composed(models)
    told["serve build"] = built_and_deployed(models, folder)
    return told


def failure(call: Callable[[], object]) -> list[str]:
    try:
        call()
    except CarpoolError as error:
        cause = getattr(error, "cause", error)
        return [type(cause).__name__, cause.reason]
    return []


def over_grpc(urls: list[str]) -> int:
    """How many calls were answered, of as many as there were."""
    program = str(Path(sys.executable).with_name("carpool"))
    command = [
        program,
        "load",
        urls[0],
        "--model",
        "fake",
        "--rate",
        "10",
        "--duration",
        "2",
        "--warmup",
        "0",
    ]
    done = subprocess.run(
        [*command, "--slo-ms", "1000", "--json"], capture_output=True, text=True, timeout=90, check=True
    )
    counts = json.loads(done.stdout)
    return int(counts["offered"] - counts["answered"] - sum(counts["refused"].values()))


def metrics() -> str:
    """The pages of all nodes."""
    pages = ""
    for node in ray.nodes():
        place = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        with contextlib.suppress(OSError), urllib.request.urlopen(place, timeout=10) as answer:
            pages += answer.read().decode()
    return pages


def composed(models: Path) -> str:
    photo = PHOTO.read_bytes()

    @serve.deployment(ray_actor_options={"num_cpus": 0.1})
    class Asks:
        def __init__(self, eyes: Any) -> None:
            self._eyes = eyes

        async def __call__(self) -> str:
            found = await self._eyes.predict.remote(photo, model="eyes")
            return str(found["model"])

    fleet = carpool.ray.app({"models": str(models), "port": 8101, "drain_s": 5})
    outer = serve.run(Asks.bind(fleet), name="both", route_prefix=None)
    found = str(outer.remote().result())
    serve.delete("both")
    return found


def built_and_deployed(models: Path, folder: Path) -> list[int]:
    """What HAProxy answers for the file that `serve build` writes, as it is."""
    (folder / "fleet_app.py").write_text(
        "import carpool.ray\n"
        f"app = carpool.ray.app({{'models': {str(models)!r}, 'replicas': (1, 2), 'port': 8200}})\n"
    )
    program = str(Path(sys.executable).with_name("serve"))
    for words in (("build", "fleet_app:app", "-o", "built.yaml"), ("deploy", "built.yaml")):
        subprocess.run([program, *words], cwd=folder, check=True, capture_output=True, timeout=120)
    wait(lambda: any(each["serves"] for each in balancers("app1")), "what serve build wrote")
    return [ask(url) for url in carpool.ray.addresses("app1")]


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
    """One that does not answer in time on a busy machine is asked again."""
    found: list[dict[str, Any]] = []
    wait(lambda: found.extend(balancers("carpool")) or found, "the balancer's state")
    return found[0]


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
