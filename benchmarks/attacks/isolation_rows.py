"""Measures attacks of `isolation` beside an honest client, each with its control just before; and draws some
at random for a while."""

import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path

from attacks import honest, isolation
from attacks.attacker import Attack, Ports
from load.processes import anonymous_memory, command_line, tree_cpu

ATTAINMENT, MOST_GROWTH_MB, MOST_KEPT_MB, MOST_CORES = 0.95, 300.0, 50.0, 0.5
SLO_S: Mapping[str, float] = {"http": 0.2, "grpc": 0.2, "pictures": 1.0, "sequences": 0.2}
CONTROL_S, SETTLED_S = 5.0, 15.0
CONNECTIONS = (1, 16, 64)
_WORKER = "carpool.backends.python.python_worker"
STEADY = """backend = "fake"
slo_ms = 200
max_batch = 16
[fake]
curve = "16+4"
[[input]]
name = "x"
datatype = "UINT8"
shape = [64]
[[output]]
name = "y"
datatype = "FP32"
shape = [4]
"""
WIDE = STEADY.replace("slo_ms = 200\n", "").replace("16+4", "1+0.1").replace("shape = [4]", "shape = [65536]")
MANY = """decoupled = true
max_batch = 4
[[input]]
name = "count"
datatype = "INT32"
shape = [1]
[[output]]
name = "y"
datatype = "FP32"
shape = [16384]
"""
MANY_CODE = """
import numpy as np

class Model:
    def predict(self, count):
        answer = {"y": np.zeros((1, 16384), np.float32)}
        for _ in range(int(count[0, 0])):
            yield answer
"""


@dataclass(frozen=True)
class Row:
    attack: str
    control: float  # attainment of the honest client alone
    attainment: float
    before_mb: float
    most_mb: float
    after_mb: float
    cores: float  # more than in the control, of the engine and the front ends
    model_cores: float  # the same of the processes of models, whose work it is that was asked for

    @property
    def failures(self) -> list[str]:
        found = []
        if self.attainment < ATTAINMENT * self.control:
            found.append("attainment")
        if self.most_mb - self.before_mb > MOST_GROWTH_MB:
            found.append("memory")
        if self.after_mb - self.before_mb > MOST_KEPT_MB:
            found.append("kept")
        if self.cores > MOST_CORES:
            found.append("cores")
        return found

    def __str__(self) -> str:
        verdict = "pass" if not self.failures else "FAIL: " + ", ".join(self.failures)
        return (
            f"{self.attack:58} control {self.control:.3f}  attainment {self.attainment:.3f}  "
            f"MB {self.before_mb:.0f} most {self.most_mb:.0f} after {self.after_mb:.0f}  "
            f"cores {self.cores:+.2f} and {self.model_cores:+.2f} in models  {verdict}"
        )

    def as_json(self) -> dict[str, object]:
        return asdict(self) | {"failures": self.failures}


def write_models(models: Path) -> None:
    for name, text in (("steady", STEADY), ("wide", WIDE), ("many", MANY)):
        (models / name).mkdir()
        (models / name / "model.toml").write_text(text)
    (models / "many" / "1").mkdir()
    (models / "many" / "1" / "model.py").write_text(MANY_CODE)


def write_keys(folder: Path) -> Path:
    file = folder / "api-keys"
    file.write_text(f"honest {honest.KEY}\nmallory {isolation.KEY}\n")
    file.chmod(0o600)
    return file


def names(*, keyed: bool) -> list[str]:
    shown = "keyed" if keyed else "open"
    return [f"{kind}, {count} × {shown}" for kind, count in product(isolation.KINDS, CONNECTIONS)]


def parse(name: str) -> tuple[str, int, bool]:
    kind, _, rest = name.rpartition(", ")
    count, _, shown = rest.partition(" × ")
    return kind, int(count), shown == "keyed"


Start = Callable[[Attack, Ports], object]


def measure(pid: int, ports: Ports, name: str, seconds: float, start: Start) -> Row:
    """`start` begins an attack in a process of its own, which has `kill` and `join`."""
    kind, connections, keyed = parse(name)
    protocol = isolation.KINDS[kind][1]
    before = anonymous_memory(pid)
    control_cpu = _cores(pid, lambda: _asked(protocol, ports, CONTROL_S, keyed))
    attacker = start(isolation.attack(kind, connections, keyed=keyed), ports)
    most = [before]

    def attacked() -> honest.Answers:
        running = honest.Running(honest.Load(protocol, ports, seconds, keyed, seed=2))
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            most.append(anonymous_memory(pid))
            time.sleep(0.1)
        return running.result()

    try:
        attacked_cpu = _cores(pid, attacked)
    finally:
        attacker.kill()  # type: ignore[attr-defined]
        attacker.join()  # type: ignore[attr-defined]
    after = least(pid, SETTLED_S, before + MOST_KEPT_MB * 1e6 / 2)
    slo = SLO_S[protocol]
    return Row(
        name,
        round(control_cpu[0].attainment(slo), 3),
        round(attacked_cpu[0].attainment(slo), 3),
        round(before / 1e6, 1),
        round(max(most) / 1e6, 1),
        round(after / 1e6, 1),
        *_more(attacked_cpu[1], [control_cpu[1]]),
    )


def _asked(protocol: str, ports: Ports, seconds: float, keyed: bool) -> honest.Answers:
    return honest.Running(honest.Load(protocol, ports, seconds, keyed)).result()


Cores = tuple[float, float]  # of the server, and of its models' own processes


def _cores(pid: int, act: Callable[[], honest.Answers]) -> tuple[honest.Answers, Cores]:
    began, before = time.monotonic(), _cpu(pid)
    found = act()
    seconds, after = time.monotonic() - began, _cpu(pid)
    return found, ((after[0] - before[0]) / seconds, (after[1] - before[1]) / seconds)


def _cpu(pid: int) -> Cores:
    used = tree_cpu(pid)
    models = sum(seconds for one, seconds in used.items() if _WORKER in command_line(one))
    return sum(used.values()) - models, models


def _more(attacked: Cores, controls: Sequence[Cores]) -> Cores:
    alone = [sum(one[kind] for one in controls) for kind in (0, 1)]
    return round(attacked[0] - alone[0], 2), round(attacked[1] - alone[1], 2)


def least(pid: int, within_s: float, enough: float) -> float:
    found = anonymous_memory(pid)
    until = time.monotonic() + within_s
    while time.monotonic() < until and found > enough:
        time.sleep(0.2)
        found = min(found, anonymous_memory(pid))
    return found


def fuzz(
    pid: int, ports: Ports, seconds: float, seed: int, start: Start, tell: Callable[[str], None]
) -> list[Row]:
    """Attacks that are drawn (kind, number, how many together, for how long), beside honest clients of both
    protocols all the while. One row for each of those."""
    draw = random.Random(seed)
    kinds = [kind for kind in isolation.KINDS if not kind.startswith("N9")]
    controls = {one: _cores(pid, partial(_asked, one, ports, CONTROL_S, False)) for one in ("http", "grpc")}
    before = most = anonymous_memory(pid)
    running = {
        one: honest.Running(honest.Load(one, ports, seconds, False, seed=seed)) for one in ("http", "grpc")
    }
    began, cpu = time.monotonic(), _cpu(pid)
    until = began + seconds
    while time.monotonic() < until:
        count = draw.choice((1, 1, 2))
        chosen = [(draw.choice(kinds), draw.choice((1, 2, 4, 8, 16, 32, 64))) for _ in range(count)]
        span = min(draw.uniform(2.0, 12.0), max(0.0, until - time.monotonic()))
        tell(f"{span:.1f} s of {json.dumps(chosen)}; {most / 1e6:.0f} MB at most")
        attackers = [start(isolation.attack(kind, count, keyed=False), ports) for kind, count in chosen]
        end = time.monotonic() + span
        while time.monotonic() < end:
            most = max(most, anonymous_memory(pid))
            time.sleep(0.1)
        for attacker in attackers:
            attacker.kill()  # type: ignore[attr-defined]
            attacker.join()  # type: ignore[attr-defined]
    answers = {one: client.result() for one, client in running.items()}
    used, took = _cpu(pid), time.monotonic() - began
    attacked = (used[0] - cpu[0]) / took, (used[1] - cpu[1]) / took
    after = least(pid, SETTLED_S, before + MOST_KEPT_MB * 1e6 / 2)
    return [
        Row(
            f"drawn at random, seed {seed}, {seconds:.0f} s, {one}",
            round(controls[one][0].attainment(SLO_S[one]), 3),
            round(answers[one].attainment(SLO_S[one]), 3),
            round(before / 1e6, 1),
            round(most / 1e6, 1),
            round(after / 1e6, 1),
            *_more(attacked, [control[1] for control in controls.values()]),
        )
        for one in answers
    ]


def as_text(rows: Sequence[Row]) -> str:
    return "\n".join(map(str, rows))
