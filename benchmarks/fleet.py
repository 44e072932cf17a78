"""Three servers behind real balancers, with the configurations of deploy/balancer as they are.

A fake device answers 100 images/s in each server (40 ms a batch, 8 ms an image, promise 400 ms), so that a
small machine carries three of them, a balancer and the load generator.

    goodput    answered in time at 1.5 times the load, over three times what one server without a balancer
               answers: everything is up at the same time and is measured in turn, medians of three slices;
               and over what the simulator says
    ways       the same for other ways of choosing: without retries, leastconn and random(2) (HAProxy)
    below      answered in time at 0.9 of the load
    overload   1.5 times the load for long: each server's part of what was answered; nobody is left out
    kill       one of three is killed with all its processes under 0.4 of the load, bodies of 150 KB
    grpc       the same over gRPC, with the configurations of deploy/balancer/grpc (HAProxy, Envoy)
    tls        the same with TLS between the client and the balancer
    jpeg       the same with photos that the servers decode
    restart    all three are restarted in turn under 0.4 of the load: with retries, and without them but with
               a lame duck
    half       one of three at half speed at 0.8 of the load, by weights that the servers report (Envoy)
    switch     two pools, switched through HAProxy's socket and back under 0.4 of the load
    scale      a real Prometheus evaluates the rules of deploy/monitoring: replicas wanted at 0.5, 1 and 2
               times the load, and those that `carpool plan` says
    abort      three servers share a rollout; it is aborted at one of them, and the others hear of it
    broken     a rolling update to models of which one does not load, as Kubernetes begins it: one server
               more, with --strict-readiness all, under 0.4 of the load. It is never ready
    second     the demo's models on this machine's cores: a second server that shares profiles with a first
               one, until it is ready, and how many models it measured

A failure is what the client hears of nobody's decision: a connection that breaks, a status that the balancer
makes up, a server that is going. Refusals for want of time are answers. The balancers come with `make fleet`;
what is not there is left out.

    python benchmarks/fleet.py                      # about twenty minutes
    python benchmarks/fleet.py --quick              # HAProxy: goodput, kill; within a minute
    python benchmarks/fleet.py --only kill --kinds nginx --json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

from carpool.core.curve import BatchCurve
from carpool.core.objectives import Promise
from carpool.extensions.deploy.balancer_config import Address
from carpool.sim.fleet_simulation import FleetScenario, measure_fleet
from carpool.sim.simulation import Scenario
from load.balancers import Replica, answers, balancer, blue_green_config, program, replicas, switch_pool
from load.burst import LoadError
from load.carpool_server import READY_S
from load.program import run_program
from load.real_prometheus import prometheus

KINDS = ("haproxy", "envoy", "nginx")
PARTS = (
    *(
        "goodput",
        "ways",
        "below",
        "overload",
        "kill",
        "grpc",
        "tls",
        "jpeg",
        "restart",
        "half",
        "switch",
        "scale",
    ),
    *("abort", "broken", "second"),
)
CAPACITY = 100.0  # images per second of one server
SLO_MS = 400.0
OVERLOAD, MODERATE, BELOW, HALF = 1.5, 0.4, 0.9, 0.8
GOODPUT_AIM = {"haproxy": 0.99, "envoy": 0.97, "nginx": 0.97}
READY_AIM_S = 4.0
DEMO = Path(__file__).parents[1] / "src" / "carpool" / "demo" / "models"
DECIDED = {"cannot-finish", "overload", "over-share", "given-up", "deadline", "queue-full"}
MODEL = """backend = "fake"
slo_ms = {slo:g}
max_batch = 32
[fake]
curve = "{curve}"
[[input]]
name = "x"
datatype = "UINT8"
shape = [{size}]
[[output]]
name = "y"
datatype = "FP32"
shape = [4]
"""
PICTURES = """backend = "fake"
task = "classify"
slo_ms = {slo:g}
max_batch = 32
[fake]
curve = "{curve}"
[image]
size = 64
[[input]]
name = "x"
datatype = "FP32"
shape = [3, {size}, {size}]
[[output]]
name = "y"
datatype = "FP32"
shape = [4]
"""
ROLLOUT = "[rollout]\nshadow = 0\ncanary = [0.5]\ncanary_h = 24\n"
PHOTO = Path(__file__).parents[1] / "src" / "carpool" / "demo" / "pictures" / "astronaut.jpg"
PICTURES_A_SECOND = 60.0  # decoding costs real time


@dataclass(frozen=True)
class Row:
    part: str
    balancer: str
    requests: int
    failed: int
    in_time: float  # of all requests
    goodput: float  # answered in time, per second
    of_three: float | None = None  # goodput over three times that of one
    least_part: float | None = None  # the smallest part that one of three servers has of what was answered
    counted: float | None = None  # images that the servers counted as asked for, over those that were
    simulated: float | None = None  # goodput over that of the simulator, for the speed that one alone has
    wanted: float | None = None  # replicas, by the rules of Prometheus
    planned: int | None = None  # and by `carpool plan`
    everywhere: float | None = None  # seconds from an abort at one server to the last
    ready: float | None = None  # seconds until a second server was
    measured: int | None = None  # models that it measured
    why: str = ""  # the failures, by reason

    @property
    def as_wished(self) -> bool:
        if self.part in ("half", "below"):
            return self.in_time >= (0.98 if self.part == "half" else 0.99)
        if self.wanted is not None and self.planned is not None:
            return abs(ceil(self.wanted) - self.planned) <= 1
        if self.ready is not None:
            return self.ready <= READY_AIM_S and not self.measured
        if self.simulated is not None and abs(self.simulated - 1.0) > 0.03:
            return False
        if self.part == "ways":
            return not self.failed
        if self.everywhere is not None and self.everywhere > 1.0:
            return False
        uneven = self.least_part is not None and self.least_part < 0.25
        return (
            not self.failed and not uneven and (self.of_three or 1.0) >= GOODPUT_AIM.get(self.balancer, 0.97)
        )


@dataclass(frozen=True)
class Length:
    """Seconds, and slices."""

    slice: float = 8.0
    rounds: int = 3
    overload: float = 30.0
    kill: float = 10.0
    half: float = 20.0
    scale: float = 45.0


QUICK = Length(slice=5.0, rounds=1, overload=8.0, kill=6.0, half=8.0, scale=34.0)


def main() -> int:
    args = parse_arguments()
    kinds = [kind for kind in args.kinds if program(kind) is not None]
    for kind in sorted({*args.kinds} - {*kinds}):
        print(f"left out: no {kind} here; make fleet fetches it", file=sys.stderr)
    length = QUICK if args.quick else Length()
    rows: list[Row] = []
    try:
        with tempfile.TemporaryDirectory(prefix="carpool-fleet-") as name:
            for part in args.only if kinds else ():
                rows += DO[part](kinds, length, Path(name) / part)
    except LoadError as error:
        print(f"fleet: {error}", file=sys.stderr)
        return 1
    print(json.dumps([asdict(row) for row in rows], indent=2) if args.json else as_text(rows))
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="HAProxy, two parts, within a minute")
    parser.add_argument("--json", action="store_true", help="print rows for machines")
    parser.add_argument("--kinds", help="balancers, like haproxy,envoy", type=_listed(KINDS))
    parser.add_argument("--only", help="parts, like goodput,kill", type=_listed(PARTS))
    args = parser.parse_args()
    args.kinds = args.kinds or (KINDS[:1] if args.quick else KINDS)
    args.only = args.only or (("goodput", "kill") if args.quick else PARTS)
    return args


def _listed(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    def read(text: str) -> tuple[str, ...]:
        words = tuple(text.split(","))
        if not {*words} <= {*known}:
            raise argparse.ArgumentTypeError(f"known are {', '.join(known)}")
        return words

    return read


# ---- what happens


def write_models(folder: Path, curve: str = "40+8", size: int = 64, text: str = MODEL) -> Path:
    model = folder / "models" / "fake"
    model.mkdir(parents=True)
    (model / "model.toml").write_text(text.format(slo=SLO_MS, curve=curve, size=size))
    return model.parent


class Load:
    """`carpool load` in a process of its own, for as long as a block takes, or so many seconds."""

    def __init__(
        self,
        to: Address | str,
        rate: float,
        seconds: float,
        seed: int = 1,
        warmup: float = 1.0,
        more: Sequence[str] = (),
    ) -> None:
        url = to if isinstance(to, str) else f"http://{to}"
        command = [str(Path(sys.executable).with_name("carpool")), "load", url, "--json"]
        command += ["--rate", f"{rate:g}", "--duration", f"{seconds:g}", "--warmup", f"{warmup:g}"]
        command += ["--slo-ms", f"{SLO_MS:g}", "--seed", str(seed), "--model", "fake", *more]
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        self._most = seconds + 60.0

    def result(self) -> dict[str, Any]:
        try:
            out, said = self._process.communicate(timeout=self._most)
        except subprocess.TimeoutExpired:
            progress = self.stop()  # a machine that is busy with others shows in it
            raise LoadError(f"the load generator does not come to an end: {progress[-500:]}") from None
        if self._process.returncode:
            raise LoadError(f"carpool load: {said.decode(errors='replace')[-2000:]}")
        found: dict[str, Any] = json.loads(out)
        return found

    def stop(self) -> str:
        """What it had written of its progress until now."""
        self._process.kill()
        return self._process.communicate()[1].decode(errors="replace")


def row(part: str, kind: str, counts: dict[str, Any], **more: Any) -> Row:
    undecided = {reason: n for reason, n in counts["refused"].items() if reason not in DECIDED}
    why = {**counts["failed"], **undecided}
    lost = counts["timed_out"] + counts["unanswered"]
    if lost:
        why["no answer"] = lost
    return Row(
        part,
        kind,
        counts["offered"],
        sum(why.values()),
        round(counts["good"] / max(1, counts["offered"]), 4),
        round(counts["goodput_rps"], 1),
        why=", ".join(f"{n} × {reason}" for reason, n in why.items()),
        **more,
    )


@contextlib.contextmanager
def fleet(
    folder: Path, *, options: Sequence[str] = (), size: int = 64, count: int = 3, grpc: bool = False
) -> Iterator[list[Replica]]:
    with replicas(write_models(folder, size=size), folder, count, options, grpc=grpc) as made:
        yield made


def goodput(kinds: Sequence[str], length: Length, folder: Path) -> list[Row]:
    return _in_overload("goodput", {kind: (kind, {}, ("rr", 1)) for kind in kinds}, length, folder)


def ways(kinds: Sequence[str], length: Length, folder: Path) -> list[Row]:
    """Of choosing a replica: what the configurations do not do, for the simulator to be held against."""
    if "haproxy" not in kinds:
        return []

    def by(word: str) -> Callable[[str], str]:
        return lambda text: text.replace("balance roundrobin", f"balance {word}")

    plain = {"retries": False}
    found: dict[str, Way] = {
        "haproxy, no retries": ("haproxy", plain, ("rr", 0)),
        "haproxy, leastconn, no retries": ("haproxy", {**plain, "change": by("leastconn")}, ("least", 0)),
        "haproxy, random(2), no retries": ("haproxy", {**plain, "change": by("random(2)")}, ("p2c", 0)),
    }
    return _in_overload("ways", found, length, folder)


Way = tuple[str, dict[str, Any], tuple[str, int]]
"""The kind of balancer, how it is configured, and what the simulator calls that."""


def _in_overload(part: str, found: dict[str, Way], length: Length, folder: Path) -> list[Row]:
    """Slices in turn: what else the machine does falls on all alike."""
    with contextlib.ExitStack() as stack:
        *three, alone = stack.enter_context(fleet(folder, count=4))
        at = {
            name: stack.enter_context(balancer(kind, three, folder / f"at-{number}", **options))
            for number, (name, (kind, options, _)) in enumerate(found.items())
        }
        one: list[float] = []
        behind: dict[str, list[dict[str, Any]]] = {name: [] for name in found}
        for seed in range(1, length.rounds + 1):
            counts = Load(alone.address, OVERLOAD * CAPACITY, length.slice, seed).result()
            one.append(counts["goodput_rps"])
            for name, address in at.items():
                behind[name].append(Load(address, 3 * OVERLOAD * CAPACITY, length.slice, seed).result())
    rows = []
    single = statistics.median(one)
    speed = single / simulated(
        1, "rr", 0, length.rounds
    )  # of a real server: hands over, sockets, a busy machine
    for name, slices in behind.items():
        middle = sorted(slices, key=lambda counts: float(counts["goodput_rps"]))[len(slices) // 2]
        ratio = round(middle["goodput_rps"] / (3 * single), 3)
        said = round(middle["goodput_rps"] / (speed * simulated(3, *found[name][2], length.rounds)), 3)
        rows.append(row(part, name, middle, of_three=ratio, simulated=said))
    return rows


def simulated(count: int, way: str, retries: int, seeds: int) -> float:
    """What comes out on paper."""
    curve, slo = BatchCurve.parse("40+8"), SLO_MS / 1e3
    one = Scenario(curve, slo, Promise(slo, 32), 3 * OVERLOAD * CAPACITY, seconds=12.0, seeds=seeds)
    one = replace(one, rate=count * OVERLOAD * CAPACITY)
    return measure_fleet(FleetScenario(one, count, way, retries)).goodput_rps


def below(kinds: Sequence[str], length: Length, folder: Path) -> list[Row]:
    rows = []
    with fleet(folder) as three:
        for kind in kinds:
            with balancer(kind, three, folder / kind) as address:
                counts = Load(address, 3 * BELOW * CAPACITY, length.slice).result()
                rows.append(row("below", kind, counts))
    return rows


def overload(kinds: Sequence[str], length: Length, folder: Path) -> list[Row]:
    rows = []
    with fleet(folder) as three:
        for kind in kinds:
            with balancer(kind, three, folder / kind) as address:
                before = _did(three)
                counts = Load(address, 3 * OVERLOAD * CAPACITY, length.overload, warmup=0.0).result()
                time.sleep(1.0)  # what was asked for is counted twice a second
                parts = [now - old for now, old in zip(_did(three)[0], before[0], strict=True)]
                rows.append(
                    row(
                        "overload",
                        kind,
                        counts,
                        least_part=round(min(parts) / max(1.0, sum(parts)), 3),
                        counted=round((_did(three)[1] - before[1]) / max(1, counts["sent"]), 3),
                    )
                )
    return rows


def _did(three: Sequence[Replica]) -> tuple[list[float], float]:
    """What each has answered, and what all were asked for."""
    asked = sum(replica.metric("carpool_offered_images_total") for replica in three)
    return [replica.metric("nv_inference_count") for replica in three], asked


def kill(kinds: Sequence[str], length: Length, folder: Path) -> list[Row]:
    with fleet(folder, size=150_000) as three:
        return [_killed("kill", kind, three, length, folder / kind) for kind in kinds]


def grpc(kinds: Sequence[str], length: Length, folder: Path) -> list[Row]:
    """nginx sends a body on as it comes, and so cannot send it again: it is left out."""
    with fleet(folder, size=150_000, grpc=True) as three:
        able = [kind for kind in kinds if kind != "nginx"]
        return [_killed("grpc", kind, three, length, folder / kind, grpc=True) for kind in able]


def tls(kinds: Sequence[str], length: Length, folder: Path) -> list[Row]:
    with fleet(folder, size=150_000) as three:
        certificate = write_certificate(folder)
        return [_killed("tls", kind, three, length, folder / kind, tls=certificate) for kind in kinds]


def write_certificate(folder: Path) -> Path:
    """For localhost, believed by nobody; its key lies beside it."""
    path = folder / "carpool.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost"]
    command += ["-days", "2", "-keyout", f"{path}.key", "-out", str(path)]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        raise LoadError(f"no certificate: {error}") from None
    return path


def jpeg(kinds: Sequence[str], length: Length, folder: Path) -> list[Row]:
    models = write_models(folder, text=PICTURES)
    more = ["--image", str(PHOTO)]
    with replicas(models, folder, 3) as three:
        return [_killed("jpeg", kind, three, length, folder / kind, more=more) for kind in kinds]


def _killed(
    part: str,
    kind: str,
    three: Sequence[Replica],
    length: Length,
    folder: Path,
    *,
    grpc: bool = False,
    tls: Path | None = None,
    more: Sequence[str] = (),
) -> Row:
    """One of three is, in the middle of it."""
    with balancer(kind, three, folder, grpc=grpc, tls=tls) as address:
        scheme = "grpc" if grpc else "https" if tls else "http"
        share = PICTURES_A_SECOND if more else 3 * MODERATE * CAPACITY
        to = f"{scheme}://{address}{'/classify' if more else ''}"
        load = Load(to, share, length.kill, more=[*more, *(["--insecure"] if tls else ())])
        time.sleep(1.0 + length.kill / 3)
        three[1].kill()
        found = row(part, kind, load.result())
    three[1].start()
    three[1].wait_ready()
    return found


def restart(kinds: Sequence[str], length: Length, folder: Path) -> list[Row]:
    rows = []
    with fleet(folder / "retries") as three:
        for kind in kinds:
            with balancer(kind, three, folder / kind) as address:
                rows.append(row("restart", kind, _in_turn(address, three, length.slice / 2)))
    looks = [kind for kind in kinds if kind != "nginx"]  # which asks nobody whether he is ready
    with fleet(folder / "lame", options=("--lame-duck-s", "3")) as three:
        for kind in looks:
            with balancer(kind, three, folder / f"plain-{kind}", retries=False) as address:
                name = f"{kind}, no retries, lame duck"
                rows.append(row("restart", name, _in_turn(address, three, length.slice / 2)))
    return rows


def switch(kinds: Sequence[str], length: Length, folder: Path) -> list[Row]:
    if "haproxy" not in kinds:
        return []
    place = folder / "haproxy"
    with contextlib.ExitStack() as stack:
        four = stack.enter_context(fleet(folder, count=4))
        blue, green = four[:2], four[2:]
        text_for = partial(_blue_green, blue, green, place)
        address = stack.enter_context(balancer("haproxy", four, place, text_for=text_for))
        load = Load(address, 2 * MODERATE * CAPACITY, length.kill, warmup=0.0)
        parts = [_did(green)[0]]
        for pool in ("green", "blue"):
            time.sleep(length.kill / 3)
            switch_pool(place, pool)
            parts.append(_did(green)[0])
        counts = load.result()
        green_had = sum(parts[2]) - sum(parts[1])
        more = {} if green_had > 0 else {"why": "green answered nothing"}
        return [row("switch", "haproxy, blue and green", counts, **more)]


def _blue_green(blue: list[Replica], green: list[Replica], place: Path, listen: Address) -> str:
    return blue_green_config(blue, green, listen, place)


def scale(_kinds: Sequence[str], length: Length, folder: Path) -> list[Row]:
    """Three servers; the load is what they can answer together."""
    rows = []
    with fleet(folder) as three, prometheus(three, folder / "prometheus") as asked:
        for times in (0.5, 1.0, 2.0):
            rate = times * 3 * CAPACITY
            loads = [Load(one.address, rate / 3, length.scale, warmup=0.0) for one in three]
            time.sleep(length.scale - 2.0)
            wanted = asked("carpool:replicas_wanted")
            counts = _sum([load.result() for load in loads])
            planned = planned_replicas(rate)
            name = f"{times:g} times the load"
            rows.append(row("scale", name, counts, wanted=round(wanted, 2), planned=planned))
    return rows


def abort(_kinds: Sequence[str], length: Length, folder: Path) -> list[Row]:
    """Three servers that share a canary's half, each with its part of the load."""
    models = write_models(folder, text=MODEL + ROLLOUT)
    for version in ("1", "2"):
        (models / "fake" / version).mkdir()
        (models / "fake" / version / "weights").write_text(version)
    place = folder / "shared"
    place.mkdir()
    shared = ("--rollout-state", f"file:{place}", "--allow-rollouts")
    took = []
    with replicas(models, folder, 3, shared) as three:
        for seed in range(1, length.rounds + 1):
            if seed > 1:
                three[0].rollout("start")
            while {one.rollout()["state"] for one in three} != {"canary"}:
                time.sleep(0.05)
            loads = [Load(one.address, MODERATE * CAPACITY, length.slice, seed) for one in three]
            time.sleep(1.0 + length.slice / 2)
            began = time.monotonic()
            three[seed % 3].rollout("abort")
            while {one.rollout()["state"] for one in three} != {"rolled-back"}:
                time.sleep(0.005)
            took.append(time.monotonic() - began)
            counts = _sum([load.result() for load in loads])
    return [row("abort", "none", counts, everywhere=round(max(took), 3))]


def broken(kinds: Sequence[str], length: Length, folder: Path) -> list[Row]:
    models = write_models(folder / "new")
    (models / "torn" / "1").mkdir(parents=True)
    (models / "torn" / "1" / "model.onnx").write_bytes(b"half of a file")
    strict = ("--strict-readiness", "all")
    rows = []
    with fleet(folder / "old", options=strict) as three:
        for kind in kinds:
            new = Replica(models, folder / f"new-{kind}", "new", strict)
            try:
                with balancer(kind, [*three, new], folder / kind) as address:
                    new.start()
                    give_up = time.monotonic() + READY_S
                    while 'state="failed"} 1' not in new.metrics():
                        if time.monotonic() > give_up:
                            raise LoadError("a model that cannot load is not reported as failed")
                        time.sleep(0.05)
                    found = Load(address, 3 * MODERATE * CAPACITY, length.kill).result()
                    if answers(new.address, "/v2/health/ready"):
                        raise LoadError("a server whose model failed is ready")
                    rows.append(row("broken", kind, found))
            finally:
                new.begin_to_stop()
                new.wait_stopped()
    return rows


def second(_kinds: Sequence[str], _length: Length, folder: Path) -> list[Row]:
    shared = ("--shared-profiles", f"file:{folder / 'shared'}", "--log-level", "debug")
    found = []
    for name in ("first", "second"):
        one = Replica(DEMO, folder, name, shared)
        began = time.monotonic()
        one.start()
        try:
            one.wait_ready()
            found.append(time.monotonic() - began)
        finally:
            one.begin_to_stop()
            one.wait_stopped()
    measured = one.log().count(" profile-measured ")
    why = f"{found[0]:.1f} s with measuring"
    return [Row("second", "none", 0, 0, 1.0, 0.0, ready=round(found[1], 2), measured=measured, why=why)]


def planned_replicas(rate: float) -> int:
    """As `carpool plan` says, with one to spare: the rule keeps a quarter of a fleet free, for bursts and for
    what comes while a replica starts, where a plan without spares is for steady traffic alone."""
    command = [str(Path(sys.executable).with_name("carpool")), "plan", "--curve", "40+8", "--json"]
    command += ["--rate", f"{rate:g}", "--slo-ms", f"{SLO_MS:g}", "--redundancy", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        raise LoadError(f"carpool plan: {done.stderr[-2000:]}")
    return int(json.loads(done.stdout)["replicas"])


def _in_turn(address: Address, three: Sequence[Replica], seconds: float) -> dict[str, Any]:
    """How long a restart takes is not known: the load is poured in pieces until all are done."""
    done = threading.Event()
    parts: list[dict[str, Any]] = []

    def pour() -> None:
        while not done.is_set():
            try:
                parts.append(Load(address, 3 * MODERATE * CAPACITY, seconds, len(parts) + 1).result())
            except LoadError as error:
                if "Nothing was sent" not in str(error):
                    raise
                # It asked for readiness, and met a replica in its lame duck that the balancer still knew.

    with ThreadPoolExecutor(1) as pool:
        pouring = pool.submit(pour)
        try:
            for replica in three:
                replica.begin_to_stop()
                replica.wait_stopped()
                replica.start()
                replica.wait_ready()
                time.sleep(1.5)  # for the balancer to see it
        finally:
            done.set()
        pouring.result()
    return _sum(parts)


def _sum(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    total: dict[str, Any] = {"refused": {}, "failed": {}}
    for name in ("offered", "good", "timed_out", "unanswered"):
        total[name] = sum(part[name] for part in parts)
    for name in ("refused", "failed"):
        for part in parts:
            for reason, count in part[name].items():
                total[name][reason] = total[name].get(reason, 0) + count
    total["goodput_rps"] = statistics.fmean(part["goodput_rps"] for part in parts)
    return total


def half(kinds: Sequence[str], length: Length, folder: Path) -> list[Row]:
    """Of three, two and a half are there."""
    if "envoy" not in kinds:
        return []
    options = ("--load-report", "always")
    with contextlib.ExitStack() as stack:
        quick = stack.enter_context(replicas(write_models(folder / "a"), folder / "a", 2, options))
        slow_models = write_models(folder / "b", curve="80+16")
        slow = stack.enter_context(replicas(slow_models, folder / "b", 1, options))
        address = stack.enter_context(balancer("envoy", [*quick, *slow], folder / "envoy", weighted=True))
        rate = HALF * (2 * CAPACITY + slow[0].metric("carpool_capacity_images_per_second"))
        Load(address, rate, length.half / 2).result()  # until the weights are known
        return [row("half", "envoy, weighted", Load(address, rate, length.half, 2).result())]


_FIRST = (goodput, ways, below, overload, kill, grpc, tls, jpeg, restart, half, switch, scale)
DO = dict(zip(PARTS, (*_FIRST, abort, broken, second), strict=True))


def as_text(rows: Sequence[Row]) -> str:
    lines = [f"{'part':<9} {'balancer':<31} {'requests':>8} {'failed':>6} {'in time':>8} {'/s':>6}  notes"]
    for each in rows:
        notes = [] if each.of_three is None else [f"{each.of_three:.3f} × three of one"]
        notes += [] if each.least_part is None else [f"least part {each.least_part:.3f}"]
        notes += [] if each.counted is None else [f"counted {each.counted:.2f} times"]
        notes += [] if each.simulated is None else [f"{each.simulated:.3f} × simulated"]
        notes += [] if each.wanted is None else [f"{each.wanted:.2f} replicas wanted, {each.planned} planned"]
        notes += [] if each.everywhere is None else [f"everywhere after {each.everywhere * 1e3:.0f} ms"]
        notes += [] if each.ready is None else [f"ready after {each.ready} s, {each.measured} measured"]
        notes += [each.why] if each.why else []
        notes += [] if each.as_wished else ["NOT as wished"]
        lines.append(
            f"{each.part:<9} {each.balancer:<31} {each.requests:>8,} {each.failed:>6} "
            f"{100 * each.in_time:>6.1f} % {each.goodput:>6.0f}  {'; '.join(notes)}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    run_program(main, "fleet")
