"""A server whose model has versions that do as their files say: answer a number, raise, or sleep."""

from __future__ import annotations

import contextlib
import http.client
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from carpool.config.model import ModelConfig, ModelSignature
from carpool.config.repository import ModelVersion
from carpool.errors import ModelError
from carpool.types import Array
from engine.scripted import weights
from frontend.whole_server import WholeServer, whole_server
from waiting import until

PATIENCE_S = 30.0
PROMISE = "slo_ms = 60000"  # which a machine that stands still for seconds keeps
TENSORS = (
    '[[input]]\nname = "x"\ndatatype = "FP32"\nshape = [1]\n'
    '[[output]]\nname = "y"\ndatatype = "FP32"\nshape = [1]\n'
)
QUICK = "shadow = 0\ncanary = [0.5]\ncanary_h = 0\nstandby_h = 24\nleast = 20\n"


class Behaving:
    """`value` is a number, `raise`, `sleep S` or `large`; measured at loading, all of them answer at once."""

    signature = ModelSignature()
    device = ""
    loaded_gb = 0.0  # that all which were loaded pretend to have taken

    def __init__(self, value: str) -> None:
        self.value = value
        self.alive = True
        Behaving.loaded_gb += 2.0 if value == "large" else 0.0

    def run(self, inputs: Mapping[str, Array], wanted: Sequence[str]) -> Mapping[str, Array]:
        x = inputs["x"]
        word, _, rest = self.value.partition(" ")
        asked = bool(np.any(x))  # what is measured holds zeros
        if asked and word == "raise":
            raise ModelError("it always raises")
        if asked and word == "sleep":
            time.sleep(float(rest))
        number = float(word) if word not in ("raise", "sleep", "large") else 1.0
        return {"y": np.full(x.shape, number, np.float32)}

    def abort(self) -> None:
        self.alive = False

    close = abort


def load(config: ModelConfig, version: ModelVersion, *_: object) -> Behaving:
    text = (config.path / str(version.number) / "weights").read_text()
    if text == "broken":
        raise ModelError(f"{config.name}: broken weights")
    return Behaving(text)


def settings(home: Path, rollout: str | None, head: str = PROMISE, tensors: str = TENSORS) -> None:
    folder = home / "m"
    folder.mkdir(parents=True, exist_ok=True)
    table = "" if rollout is None else f"[rollout]\n{rollout}\n"
    (folder / "model.toml").write_text(f'backend = "fake"\nmax_batch = 4\n{head}\n{table}{tensors}')


@dataclass
class Staged:
    server: WholeServer
    home: Path

    def ask(
        self, method: str, path: str, body: object = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, Any, Mapping[str, str]]:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=PATIENCE_S)
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, dict(headers or {}))
            answer = connection.getresponse()
            text = answer.read()
            return answer.status, json.loads(text) if text else None, dict(answer.getheaders())
        finally:
            connection.close()

    def infer(
        self, source: str = "", x: float = 5.0, headers: Mapping[str, str] | None = None, identity: str = ""
    ) -> tuple[int, Any, Mapping[str, str]]:
        more = {"X-Carpool-Source": source} if source else {}
        body: dict[str, Any] = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [x]}]}
        if identity:
            body["id"] = identity
        return self.ask("POST", "/v2/models/m/infer", body, {**more, **(headers or {})})

    def version(self, source: str = "", **more: Any) -> str:
        status, answer, _ = self.infer(source, **more)
        assert status == 200, answer
        return str(answer["model_version"])

    def status(self) -> dict[str, Any]:
        status, found, _ = self.ask("GET", "/v2/models/m/rollout")
        assert status == 200, found
        return dict(found)

    def act(self, action: str, **more: Any) -> tuple[int, Any]:
        status, found, _ = self.ask("POST", "/v2/models/m/rollout", {"action": action, **more})
        return status, found

    def until(self, *states: str, work: Callable[[], object] | None = None) -> dict[str, Any]:
        """Let it come to one of these, with a bound that only a failure reaches."""
        return until(lambda: (now := self.status())["state"] in states and now, self.status, work=work)

    def add(self, version: int, value: str) -> None:
        weights(self.home, "m", version, value)

    def look(self) -> None:
        """As poll mode does now and then."""
        self.server.wait_for(self.server.desk.look())


@contextlib.contextmanager
def staged(
    folder: Path, rollout: str | None = QUICK, versions: Mapping[int, str] | None = None, **given: Any
) -> Iterator[Staged]:
    home = folder / "models"
    given.setdefault("allow_rollouts", True)
    if not home.exists():
        settings(home, rollout, given.pop("head", PROMISE))
        for version, value in (versions or {1: "1", 2: "1"}).items():
            weights(home, "m", version, value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("carpool.backends.load", load)
        with whole_server(home, state_dir=folder / "state", **given) as server:
            yield Staged(server, home)
