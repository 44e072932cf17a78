"""Batching over HTTP equals Triton's: stories recorded from a real tritonserver, played on a live server.

The model writes down who shared each execution and holds it until the story lets it end, so no outcome hangs
on a clock: requests are sent one after the other, each once the server is known to have the previous one. The
stories here are without delays and timeouts; `core/test_triton_stories.py` plays them all in virtual time.
"""

from __future__ import annotations

import json
import select
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import pytest

from conformance.record_triton_batching import config_pbtxt
from core.test_triton_stories import RECORDED, Story
from frontend.http.harness import Client, Response, post
from later import later
from live.server import Live, infer_path, serving
from together import cases_of
from waiting import until

Json = dict[str, Any]

MODEL = """
import os, time
import numpy as np

FOLDER = {folder!r}

def predict(x):
    ids = [int(number) for number in x[:, 0]]
    if any(ids):  # the warm-up is all zeros
        with open(FOLDER + "/executions", "a") as log:
            log.write(" ".join(map(str, ids)) + "\\n")
        while not os.path.exists(FOLDER + "/end." + str(ids[0])):
            time.sleep(0.001)
    return np.zeros((len(x), 1), np.uint8)
"""
CHOSEN = """
queued/prefetch/preferred none/delay 0/5 requests
queued/prefetch/preferred none/delay 0/17 requests
queued/policy/preferred none/delay 0/11 requests
queued/prefetch/preferred 4/delay 0/6 requests
queued/prefetch/preferred 4/delay 0/9 requests
queued/prefetch/preferred 2+6/delay 0/7 requests
queued/prefetch/preferred 2+6/delay 0/9 requests
images/prefetch/preferred none/delay 0/3+3+3+2+8+1
images/prefetch/preferred none/delay 0/5+4+4+3
images/prefetch/preferred 4/delay 0/3+3+2+4
images/policy/preferred 4/delay 0/3+3+2+4
images/prefetch/preferred 4/delay 0/1+5+1+1
images/policy/preferred 4/delay 0/1+5+1+1
images/more than the maximum
idle/delay 0: the first request goes alone
idle/delay 0: preferred 4 does not make it wait
idle/2 instances delay 0
set aside/preferred 2: two batches, the rest waits
set aside/preferred 2: arrivals during the next execution
set aside/no preferred: 9, then 3 during the next execution
set aside/2 instances no preferred: 5
set aside/2 instances no preferred: 12
shapes/prefetch/delay 0/AABA
shapes/prefetch/delay 0/ABAB
shapes/prefetch/delay 0/ABBBBBBBBB
priority/preferred 2 max 4
priority/0 and out of range mean the default
priority/a high one overtakes during execution
queue size/3: the fourth and fifth are refused
queue size/3 counts requests, not images
queue size/3: room again once a batch has started
queue size/2 for each level
queue size/1 for level 1 only
timeout/no policy: the request's timeout is ignored
random/1
random/18
random/28
random/52
random/62
random/94
""".strip().splitlines()
AT_ONCE = """
queued/prefetch/preferred none/delay 0/17 requests
queued/prefetch/preferred 2+6/delay 0/9 requests
images/prefetch/preferred 4/delay 0/3+3+2+4
idle/2 instances delay 0
set aside/preferred 2: arrivals during the next execution
shapes/prefetch/delay 0/ABAB
priority/a high one overtakes during execution
queue size/3: the fourth and fifth are refused
random/18
random/62
""".strip().splitlines()  # of each kind; `make conformance` plays the others, too
STORIES: dict[str, Json] = {story["name"]: story for story in RECORDED["stories"]}
CONFIGS = sorted({config_pbtxt(STORIES[name]["config"]) for name in CHOSEN})
PLUGS = {"plug": 255, "plug1": 255, "plug2": 254}


class Counts(NamedTuple):
    """Of requests, without the plugs. Not their sum alone: one that is run is still counted as waiting for a
    moment, and would stand in for one that has not arrived."""

    ran: int
    refused: int
    waiting: int


def model_of(story: Json) -> str:
    return f"m{CONFIGS.index(config_pbtxt(story['config']))}"


class Timed(Story):
    """In virtual time: when each execution ends, so that the live one can be held until then; and what has
    become of all requests when each one has been taken in, so that the live one is known to be as far."""

    def __init__(self, story: Json) -> None:
        self.ends: list[tuple[float, list[str]]] = []
        self.taken: dict[str, Counts] = {}
        super().__init__(story)

    def happen(self, event: Json) -> None:
        super().happen(event)
        if "send" in event:
            ran, refused = sum(map(len, self.executions)), len(self.rejected)
            self.taken[event["send"]] = Counts(ran, refused, len(self.jobs) - ran - refused)

    def act(self, now: float) -> None:
        begun = len(self.running)
        super().act(now)
        for end, batch in self.running[begun:]:
            self.ends.append((end * 1e3, [job.payload[0] for job in batch.jobs]))


@dataclass
class Play:
    """One story on the live server."""

    server: Live
    folder: Path
    story: Json
    model: str = field(init=False)
    numbers: dict[str, int] = field(default_factory=dict)
    clients: dict[str, Client] = field(default_factory=dict)
    answers: dict[str, Response] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.model = model_of(self.story)
        for leftover in self.folder.iterdir():
            leftover.unlink()

    # What is sent, and what is known of it.

    def send(self, event: Json) -> None:
        name = event["send"]
        number = self.numbers[name] = PLUGS.get(name) or len(self.numbers) + 1
        shape = [event.get("images", 1), *event.get("shape", [4])]
        row = [number] + [0] * (shape[1] - 1)
        tensor = {"name": "x", "shape": shape, "datatype": "UINT8", "data": row * shape[0]}
        options = {"priority": event.get("priority"), "timeout": event.get("timeout_us")}
        given = {key: value for key, value in options.items() if value is not None}
        body = orjson.dumps({"id": name, "inputs": [tensor], "parameters": given})
        self.clients[name] = self.server.connect().send(post(infer_path(self.model), body))

    def executions(self) -> list[list[str]]:
        """The requests of each execution in order; a request with several images has as many equal rows."""
        log = self.folder / "executions"
        lines = log.read_text().splitlines(keepends=True) if log.exists() else []
        named = {str(number): name for name, number in self.numbers.items()}
        return [
            [named[number] for number in dict.fromkeys(line.split())] for line in lines if line.endswith("\n")
        ]

    def look(self) -> None:
        """Take in the answers that are there."""
        waiting = {name: client for name, client in self.clients.items() if name not in self.answers}
        ready, _, _ = select.select([client.socket for client in waiting.values()], [], [], 0)
        for name, client in waiting.items():
            if client.socket in ready:
                self.answers[name] = client.response()

    def counts(self) -> Counts:
        self.look()
        ran = {name for execution in self.executions() for name in execution if name not in PLUGS}
        refused = [name for name, answer in self.answers.items() if answer.status != 200]
        return Counts(len(ran), len(refused), int(self.pending()))

    def pending(self) -> float:
        return self.server.metric("nv_inference_pending_request_count", model=self.model)

    def until_answered(self, names: Sequence[str]) -> None:
        def done() -> bool:
            self.look()
            return all(name in self.answers for name in names)

        until(done, f"answers to {names}; there are {self.executions()}")

    # The story.

    def end(self, names: Sequence[str]) -> None:
        """Let the execution of these end. The next one is formed before they hear of it."""
        (self.folder / f"end.{self.numbers[names[0]]}").touch()
        self.until_answered(names)

    def run(self) -> None:
        try:
            for number in range(self.story["plugs"]):
                name = "plug" if self.story["plugs"] == 1 else f"plug{number + 1}"
                self.send({"send": name, "images": self.story["config"]["max_batch"]})
                until(lambda count=number + 1: len(self.executions()) == count, "the plug runs")
            until(lambda: self.pending() == 0, "the plugs are not counted as waiting")
            timed = Timed(self.story)
            events = [(event["at_ms"], 1, event) for event in self.story["events"]]
            last = max(at for at, _, _ in events)
            ends = [(at, 0, {"end": names}) for at, names in timed.ends if at <= last]
            for _, _, event in sorted([*events, *ends], key=lambda entry: entry[:2]):
                self.happen(event, timed.taken)
        finally:
            self.finish()

    def happen(self, event: Json, taken: Mapping[str, Counts]) -> None:
        if "send" in event:
            self.send(event)
            until(lambda: self.counts() == taken[event["send"]], f"{event['send']} has arrived")
        else:
            self.end(event.get("end") or [event["release"]])

    def finish(self) -> None:
        for number in self.numbers.values():
            (self.folder / f"end.{number}").touch()
        self.until_answered(list(self.clients))
        for client in self.clients.values():
            client.socket.close()
        until(lambda: self.pending() == 0, "the queue is empty")

    def batch_sizes(self) -> Counter[int]:
        images = {event["send"]: event.get("images", 1) for event in self.story["events"] if "send" in event}
        images |= dict.fromkeys(PLUGS, self.story["config"]["max_batch"])
        plugs = [[name] for name in self.clients if name in PLUGS]
        return Counter(sum(images[name] for name in run) for run in [*plugs, *self.story["executions"]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stories")


@pytest.fixture(scope="module")
def server(folder: Path, request: pytest.FixtureRequest) -> Iterator[Live]:
    """One model for each configuration that the stories need which are played this time."""
    played = {
        str(case["name"])
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.path == Path(__file__)
        for case in cases_of(item)
    }
    needed = {config_pbtxt(STORIES[name]["config"]) for name in played}
    for number, config in enumerate(CONFIGS):
        if config not in needed:
            continue
        model = folder / "models" / f"m{number}"
        (model / "1").mkdir(parents=True)
        notes = folder / f"m{number}"
        notes.mkdir()
        (model / "config.pbtxt").write_text(config.replace('name: "m"', f'name: "m{number}"'))
        (model / "1" / "model.py").write_text(MODEL.format(folder=str(notes)))
    with serving(folder / "models", frontends=1, folder=folder) as running:
        yield running


def statistics(server: Live, model: str) -> tuple[int, Counter[int]]:
    (stats,) = server.get_json(f"/v2/models/{model}/stats")["model_stats"]
    sizes = {batch["batch_size"]: batch["compute_infer"]["count"] for batch in stats["batch_stats"]}
    return stats["execution_count"], Counter(sizes)


@pytest.mark.conformance
@pytest.mark.parametrize("name", [name if name in AT_ONCE else later(name) for name in CHOSEN])
def test_batches_are_those_that_triton_formed(server: Live, folder: Path, name: str) -> None:
    story = STORIES[name]
    model = model_of(story)
    executions_before, sizes_before = statistics(server, model)
    play = Play(server, folder / model, story)
    play.run()
    formed = [run for run in play.executions() if not run[0].startswith("plug")]
    assert formed == story["executions"]
    refused = {name: answer for name, answer in play.answers.items() if answer.status != 200}
    assert {name: answer.status for name, answer in refused.items()} == {
        one["id"]: one["status"] for one in story.get("rejected", ())
    }
    for answer in refused.values():
        if answer.status == 503:
            assert json.loads(answer.body)["error"] == "Exceeds maximum queue size"
    expected = play.batch_sizes()
    # The last answers leave before their batch is counted.
    until(
        lambda: statistics(server, model) == (executions_before + expected.total(), sizes_before + expected),
        f"{expected} more batches than {sizes_before}; there are {statistics(server, model)}",
    )
