"""Faults on each of the server's routes, over real HTTP: the engine and a front end in one process.

What one call of one function raises is made by injection.py. Here is the load of each route, what each client
must see, and what must be left of it: nothing.
"""

from __future__ import annotations

import inspect
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from carpool.config.model import ModelConfig, ModelSignature
from carpool.config.repository import ModelVersion
from carpool.engine.engine_link import EngineSide
from carpool.errors import ModelError
from carpool.extensions.pipelines.pipeline_route import PipelineRoute
from carpool.frontend.link_client import LinkClient
from carpool.frontend.pictures.picture_service import PictureService
from carpool.process import front_ends, lone_server
from carpool.types import Array
from faults.injection import Fault, Point
from frontend.http.harness import Client
from frontend.picture_models import picture
from frontend.whole_server import WholeServer, whole_server
from waiting import until

PATIENCE_S = 30.0  # for a condition that comes in milliseconds
_TENSOR = '[[{kind}]]\nname = "{name}"\ndatatype = "{datatype}"\nshape = {shape}\n'
_STREET = """
slo_ms = 20000
[[step]]
name = "find"
model = "finder"
[[step]]
name = "kind"
model = "namer"
each = "find.boxes"
[[step]]
name = "scene"
model = "other"
"""
_CASCADE = """
slo_ms = 20000
[[step]]
name = "quick"
model = "namer"
[[step]]
name = "sure"
model = "other"
escalate = { from = "quick", by = "margin", below = 0.5 }
[answer]
from = "sure or quick"
under_load = "quick"
"""


def tensor(kind: str, name: str, shape: Sequence[int], datatype: str = "FP32") -> str:
    return _TENSOR.format(kind=kind, name=name, shape=list(shape), datatype=datatype)


def write_models(folder: Path) -> Path:
    def model(name: str, head: str, tensors: str, versions: int = 1) -> None:
        for version in range(1, versions + 1):
            (folder / name / str(version)).mkdir(parents=True)
        text = f'backend = "fake"\nmax_batch = 4\n{head}\n{tensors}'
        (folder / name / "model.toml").write_text(text)

    plain = tensor("input", "x", [1]) + tensor("output", "y", [1])
    model("cached", "slo_ms = 20000\nresponse_cache = true", plain)
    canary = "[rollout]\nshadow = 0\ncanary = [0.5]\ncanary_h = 24\nstandby_h = 24\nleast = 100000\n"
    canary += "[rollout.guards]\nerrors = false\nlate = false\n"  # it fails always, and is never rolled back
    model("m", f"slo_ms = 20000\n{canary}", plain, versions=2)
    image, boxes = tensor("input", "images", [3, 16, 16]), tensor("output", "boxes", [4, 4])
    model("finder", 'slo_ms = 20000\ntask = "detect"', image + boxes + tensor("output", "scores", [4, 3]))
    logits = tensor("output", "logits", [3])
    for name in ("namer", "other"):
        model(name, 'slo_ms = 20000\ntask = "classify"', image + logits)
    model("shown", f'slo_ms = 20000\ntask = "classify"\n{canary}', image + logits, versions=2)
    control = '[sequences]\n[[sequences.control]]\nname = "start"\nkind = "start"\ndatatype = "FP32"\n'
    model("sums", f"instances = 1\n{control}", plain)
    (folder / "writer").mkdir()
    fake = '[generate]\nslots = 4\n[fake]\ncurve = "0.2+0.01"\nstep_curve = "0.1+0.001"\n'
    (folder / "writer" / "model.toml").write_text(fake)
    for name, text in (("street", _STREET), ("hard", _CASCADE)):
        (folder / name).mkdir()
        (folder / name / "pipeline.toml").write_text(text)
    return folder


class Backend:
    """Finds two things in every picture, is never sure of what they are, adds up sequences, and fails where
    it is the second version of a model."""

    device = ""

    def __init__(self, config: ModelConfig, version: int) -> None:
        self.signature = ModelSignature()
        self.alive = True
        self._name, self._version = config.name, version
        self._sum = 0.0

    def run(self, inputs: Mapping[str, Array], wanted: Sequence[str]) -> Mapping[str, Array]:
        images = inputs.get("images")
        if self._version == 2 and any(np.any(given) for given in inputs.values()):  # zeros are measured
            raise ModelError("it always raises")
        if images is None:
            return self._numbers(inputs)
        if self._name != "finder":
            return {"logits": np.zeros((len(images), 3), np.float32)}
        boxes = np.tile(np.float32([[0, 0, 8, 16], [8, 0, 16, 16]] * 2), (len(images), 1, 1))
        scores = np.zeros((len(images), 4, 3), np.float32)
        scores[:, 0, 0], scores[:, 1, 1] = 0.9, 0.8
        return {"boxes": boxes, "scores": scores}

    def _numbers(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        x = inputs["x"]
        if "start" not in inputs:
            return {"y": x + 1}
        self._sum = float(x.sum()) if np.any(inputs["start"]) else self._sum + float(x.sum())
        return {"y": np.full_like(x, self._sum)}

    def abort(self) -> None:
        self.alive = False

    close = abort


_load: Any = None


def load(config: ModelConfig, version: ModelVersion, *more: Any) -> Any:
    return _load(config, version, *more) if config.asks("text") else Backend(config, version.number)


@dataclass
class Seen:
    """What the clients of one load saw; `None` is a connection that was closed."""

    statuses: list[int | None] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, status: int | None) -> None:
        with self.lock:
            self.statuses.append(status)


Ask = Callable[["Routes"], Seen]


class Routes:
    """A server, and all that its requests may leave behind."""

    def __init__(self, server: WholeServer, door: LinkClient, side: EngineSide) -> None:
        self.server, self.door, self.side = server, door, side

    def each(self, *requests: tuple[str, bytes, bytes]) -> Seen:
        """All at once, each on a connection of its own: path, body, more head lines."""
        seen = Seen()
        threads = [threading.Thread(target=self._one, args=(seen, *request)) for request in requests]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert not any(thread.is_alive() for thread in threads), "a client waits for ever"
        assert len(seen.statuses) == len(requests)
        return seen

    def _one(self, seen: Seen, path: str, body: bytes, more: bytes) -> None:
        """The next request of the connection would get what was answered twice."""
        try:
            with self.server.connect() as client:
                status = client.post(path, body, more).status
                assert _is_live(client), "answered twice"
        except OSError:
            status = None
        seen.add(status)

    def check_empty(self) -> None:
        until(lambda: not self._left(), lambda: f"left behind: {self._left()}")

    def _left(self) -> dict[str, Any]:
        found: dict[str, Any] = {"slots": self.door.arena.slots_used}
        found["calls"] = sum(len(link.calls) for link in self.side.links)
        found |= _of_pictures()
        for model in self.server.host.engine.control.models.values():
            for served in model.serving.values():
                name = f"{served.name}:{served.version}"
                if served.runs_nothing and isinstance(route := served.runtime.route(), PipelineRoute):
                    remaining = route.remaining
                    found[f"{name} open"] = (
                        len(route.under_way) + remaining._under_way + sum(remaining._coming)
                    )
                    found[f"{name} live"] = len(route.waiting)
                elif (core := served.scheduler) is None:
                    found[f"{name} busy"] = not served.runtime.idle
                else:
                    found[f"{name} waiting"] = core.lanes.waiting + core.ledger.running
        return {name: count for name, count in found.items() if count}


def _is_live(client: Client) -> bool:
    try:
        return client.get("/v2/health/live").status == 200
    except OSError:
        return True  # closed after its answer


_services: list[PictureService] = []


def _of_pictures() -> dict[str, int]:
    (service,) = _services
    return {
        "kept pixels": service._kept,
        "held bytes": service._held.total,
        "pixels": service._pixels.total,
        "decoding": service.workers.waiting,
    }


@contextmanager
def routes(folder: Path, **settings: Any) -> Iterator[Routes]:
    global _load
    joined: list[tuple[EngineSide, LinkClient]] = []
    real_joined, real_http = lone_server._joined, front_ends.http

    async def join(*given: Any) -> Any:
        joined.append(await real_joined(*given))
        return joined[-1]

    async def http(*given: Any) -> Any:
        frontend: Any = await real_http(*given)
        _services[:] = [frontend._app._service.with_pictures()]
        return frontend

    with pytest.MonkeyPatch.context() as patch:
        _load = __import__("carpool.backends").backends.load
        patch.setattr("carpool.backends.load", load)
        patch.setattr(lone_server, "_joined", join)
        patch.setattr(front_ends, "http", http)
        home, state = write_models(folder), folder.parent / "state"
        with whole_server(home, state_dir=state, allow_rollouts=True, **settings) as server:
            server.loop.call_soon_threadsafe(server.loop.set_exception_handler, lambda *_: None)
            side, door = joined[-1]
            yield Routes(server, door, side)
    _services.clear()


# ---- the load of each route


def numbers(model: str, *values: float, **parameters: Any) -> list[tuple[str, bytes, bytes]]:
    def body(value: float) -> bytes:
        given = {"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [value]}
        return json.dumps({"inputs": [given], "parameters": parameters}).encode()

    return [(f"/v2/models/{model}/infer", body(value), b"") for value in values]


def pictures(path: str, *colours: tuple[int, int, int], more: bytes = b"") -> list[tuple[str, bytes, bytes]]:
    return [(path, picture(colour, size=(64, 48)), more) for colour in colours]


_RED, _BLUE = (255, 0, 0), (0, 0, 255)
_turn = iter(range(1 << 30))


def cached(server: Routes) -> Seen:
    """Identical concurrent requests, and one that is known by then: each load has a number of its own."""
    value = 1.0 + next(_turn)
    seen = server.each(*numbers("cached", value, value, value, value + 0.5))
    for _ in range(3):
        seen.statuses += server.each(*numbers("cached", value)).statuses
    return seen


def pipeline(server: Routes) -> Seen:
    live = b"X-Carpool-Source: gate\r\nX-Carpool-Latest: 1\r\n"
    asked = pictures("/detect?model=street", _RED, _BLUE, _RED)
    return server.each(*asked, *pictures("/detect?model=street", _RED, _BLUE, more=live))


def cascade(server: Routes) -> Seen:
    return server.each(*pictures("/classify?model=hard", _RED, _BLUE, _RED))


def workers(server: Routes) -> Seen:
    many = json.dumps({"images": ["aGVsbG8="]}).encode()
    asked = pictures("/classify?model=namer", _RED, _BLUE, _RED) + pictures("/detect?model=finder", _RED)
    return server.each(*asked, ("/models/namer/predict", many, b"Content-Type: application/json\r\n"))


def text(server: Routes) -> Seen:
    events = b"Accept: text/event-stream\r\n"
    asked = pictures("/read?model=writer", _RED, _BLUE, more=events)
    return server.each(*asked, *pictures("/read?model=writer", _RED))


def sequence(server: Routes) -> Seen:
    seen, name = Seen(), 1 + next(_turn)
    for number, flags in enumerate(({"sequence_start": True}, {}, {"sequence_end": True})):
        asked = numbers("sums", float(number), sequence_id=name, **flags)
        asked += numbers("sums", 1.0, sequence_id=name + (1 << 20), sequence_start=True, sequence_end=True)
        seen.statuses += server.each(*asked).statuses
    return seen


def canary(server: Routes) -> Seen:
    """Some by their source, and some that the candidate gets and fails: stable answers those."""
    candidate = b"X-Carpool-Rollout: candidate\r\n"
    asked = pictures("/classify?model=shown", _RED, _BLUE, more=candidate)
    for number, (path, body, _) in enumerate(numbers("m", 5.0, 6.0, 7.0, 8.0)):
        asked.append((path, body, candidate if number % 2 else f"X-Carpool-Source: s{number}\r\n".encode()))
    return server.each(*asked)


# ---- one fault at each point in turn


def points_of(*owners: Any, without: Sequence[str] = ()) -> list[Point]:
    """Every function of these modules and classes that can be made to raise where it is called."""
    found: list[Point] = []
    for owner in owners:
        inside = [owner] if inspect.isclass(owner) else _classes(owner)
        for one in [*inside, *([owner] if isinstance(owner, ModuleType) else [])]:
            home = one.__name__ if isinstance(one, ModuleType) else one.__module__
            for name, value in list(vars(one).items()):
                if not inspect.isfunction(value) or inspect.iscoroutinefunction(value):
                    continue
                if inspect.isgeneratorfunction(value) or value.__module__ != home:
                    continue
                if not name.startswith("__") and f"{one.__name__}.{name}" not in without:
                    found.append(Point(one, name))
    return found


def _classes(module: ModuleType) -> list[type]:
    return [
        value
        for value in vars(module).values()
        if inspect.isclass(value) and value.__module__ == module.__name__
    ]


def suffer(server: Routes, ask: Ask, point: Point, most: int) -> int:
    """Load after load, in each of which one more call of the point raises; returns how many did."""
    made = 0
    while made < most:
        with Fault(point, made + 1).injected() as fault:
            seen = ask(server)
        server.check_empty()
        if fault.calls <= made:
            break
        made += 1
        assert set(seen.statuses) <= {200, 400, 409, 422, 429, 500, 503, 504, None}, seen.statuses
    again = recovers(server, ask)
    server.check_empty()
    assert again
    return made


def recovers(server: Routes, ask: Ask) -> bool:
    """After however many tries all is answered as without faults."""
    return until(lambda: set(ask(server).statuses) <= {200, 400, 409}, "it does not recover")
