"""One server with everything switched on, and for each feature a model and a request that shows it."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from carpool.backends import fake
from carpool.config.model import ModelConfig, ModelSignature
from carpool.errors import CarpoolError
from carpool.extensions.text.fake_stepper import fake_text
from carpool.types import Array
from carpool.vision.decode import decode
from engine import ensembles
from extensions.rollout.test_picture_rollouts import mean_colour
from extensions.sequences.test_sequences import STATE, stateful
from frontend.access import key_files
from frontend.http.harness import Client, Response
from frontend.picture_models import BLUE, GREEN, LABELS, RED, SIDE, detections, picture
from frontend.span_collector import Collector, collecting, told
from frontend.whole_server import WholeServer, whole_server
from waiting import until

HELD = (
    "[rollout]\nshadow = 0\ncanary = [0.5]\ncanary_h = 24\nstandby_h = 24\nleast = 20\n"
    "[rollout.guards]\ndisagreement = false\n"  # versions answer with their numbers
)
CACHED = "[cache]\nmin_uses = 1\naudit = 0.0\n"
SIMILAR = f"{CACHED}similar = true\nsimilar_ttl_s = 60.0\n"
COUNT = """
class Model:
    def predict(self, n):
        number = 0
        while number != n[0, 0]:  # without an end, below 0
            yield {"y": [[number]]}
            number += 1
"""
COUNT_SETTINGS = """
decoupled = true
max_batch = 4
max_open = 4
[[input]]
name = "n"
datatype = "INT32"
shape = [1]
[[output]]
name = "y"
datatype = "INT32"
shape = [1]
"""
PICTURES = """
backend = "fake"
task = "{task}"
max_batch = 4
labels = "labels.txt"
{more}
[image]
decode = "{decode}"
resize = "stretch"
[[input]]
name = "images"
datatype = "UINT8"
shape = [3, 16, 16]
{outputs}
"""
LOGITS = '[[output]]\nname = "logits"\ndatatype = "FP32"\nshape = [3]\n'
BOXES = (
    '[[output]]\nname = "boxes"\ndatatype = "FP32"\nshape = [4, 4]\n'
    '[[output]]\nname = "scores"\ndatatype = "FP32"\nshape = [4, 3]\n'
)
STREET = """
[[step]]
name = "find"
model = "{finder}"
[[step]]
name = "kind"
model = "{namer}"
each = "find.boxes"
"""
COLOURS = {"red": RED, "green": GREEN, "blue": BLUE}
ALICE = f"Authorization: Bearer {key_files.ALICE}\r\n".encode()
BOB = f"Authorization: Bearer {key_files.BOB}\r\n".encode()
LIVE = b"X-Carpool-Source: gate\r\nX-Carpool-Latest: 1\r\n"
X = [1.0, 2.0, 3.0]


class Colours:
    """Answers with the mean colour of its pictures: tensors, or files as a device that decodes gets them."""

    signature = ModelSignature()
    device = ""
    alive = True

    def run(self, inputs: Mapping[str, Array], wanted: Sequence[str]) -> Mapping[str, Array]:
        pixels = {"images": inputs["images"].astype(np.float32) / 255}
        if "boxes" in wanted:
            return {name: value.astype(np.float32) for name, value in detections(pixels).items()}
        return {"logits": 10 * pixels["images"].mean(axis=(-2, -1))}

    def run_encoded(
        self, pictures: Sequence[Array], wanted: Sequence[str]
    ) -> tuple[Mapping[str, Array], Mapping[int, CarpoolError]]:
        means = [decode(file.tobytes()).pixels.mean(axis=(0, 1)) for file in pictures]
        pixels = np.stack([np.broadcast_to(mean[:, None, None], (3, SIDE, SIDE)) for mean in means])
        return self.run({"images": pixels}, wanted), {}

    def abort(self) -> None: ...

    close = abort


def colours(models: Path, name: str, task: str = "classify", decode: str = "cpu", more: str = "") -> Path:
    (models / name).mkdir(parents=True)
    outputs = LOGITS if task == "classify" else BOXES
    text = PICTURES.format(task=task, decode=decode, more="", outputs=outputs) + more
    (models / name / "model.toml").write_text(text)
    (models / name / "labels.txt").write_text("\n".join(LABELS))
    return models / name


def namer(models: Path, name: str, more: str, versions: int = 1) -> None:
    """Pictures by onnxruntime, in versions of which each is as good as the other."""
    (models / name).mkdir(parents=True)
    (models / name / "labels.txt").write_text("\n".join(LABELS))
    (models / name / "model.toml").write_text(f'task = "classify"\nlabels = "labels.txt"\n{more}')
    for version in range(1, versions + 1):
        mean_colour(models / name / str(version) / "model.onnx", SIDE, 10.0)


def adder(models: Path, name: str, more: str, versions: int = 1) -> None:
    """y = x + the version's number."""
    for version in range(1, versions + 1):
        ensembles.adds(models, name, float(version), version=version)
    (models / name / "config.pbtxt").unlink()
    (models / name / "model.toml").write_text(f"max_batch = 8\n{more}")


def chained(models: Path, name: str, more: str = "", last: str = "ten") -> None:
    steps = (
        ensembles.step("one", [("x", "in")], [("y", "mid")]),
        ensembles.step(last, [("x", "mid")], [("y", "out")]),
    )
    ensembles.write(models, name, ensembles.text(*steps, more=more))


def chip_chain(models: Path) -> None:
    """A step whose device decodes pictures gets pixels."""
    one = ensembles.step("chip", [("images", "in")], [("logits", "out")])
    text = ensembles.text(one, max_batch=4).replace("FP32 dims: [ 3 ]", "UINT8 dims: [ 3, 16, 16 ]", 1)
    ensembles.write(models, "chip_chain", text)


def repository(models: Path) -> Path:
    adder(models, "exact", CACHED)
    namer(models, "similar", SIMILAR)
    adder(models, "rolled", HELD, versions=2)
    colours(models, "finder", "detect")
    colours(models, "namer")
    pipeline(models, "street", "finder", "namer")
    ensembles.adds(models, "one", 1)
    ensembles.adds(models, "ten", 10)
    chained(models, "chain")
    stateful(models, STATE % "" + " max_sequence_idle_microseconds: 60000000").rename(models / "tracker")
    (models / "count" / "1").mkdir(parents=True)
    (models / "count" / "1" / "model.py").write_text(COUNT)
    (models / "count" / "model.toml").write_text(COUNT_SETTINGS)
    (models / "writer").mkdir()
    (models / "writer" / "model.toml").write_text(
        '[generate]\nslots = 4\n[fake]\ncurve = "1+0.1"\nstep_curve = "1+0.01"\n'
    )
    colours(models, "chip", decode="device")
    # Two at a time.
    adder(models, "exact_rolled", HELD + CACHED, versions=2)
    ensembles.adds(models, "swapped", 10)
    chained(models, "exact_chain", "response_cache { enable: true }", last="swapped")
    chip_chain(models)
    colours(models, "exact_chip", decode="device", more=CACHED)
    colours(models, "similar_chip", decode="device", more=SIMILAR)
    namer(models, "similar_rolled", f"{HELD}{SIMILAR}exact = false\n", versions=2)
    colours(models, "rolled_chip", decode="device", more=HELD)
    for version in "12":
        (models / "rolled_chip" / version).mkdir()
    pipeline(models, "rolled_street", "finder", "rolled_chip")
    one = ensembles.step("rolled", [("x", "in")], [("y", "out")])
    ensembles.write(models, "rolled_chain", ensembles.text(one))
    colours(models, "chip_finder", "detect", decode="device")
    pipeline(models, "chip_street", "chip_finder", "chip")
    return models


def pipeline(models: Path, name: str, finder: str, namer: str) -> None:
    (models / name).mkdir()
    (models / name / "pipeline.toml").write_text(STREET.format(finder=finder, namer=namer))


# ---- requests ---------------------------------------------------------------------------------------------


def tensor(name: str, values: Sequence[Any], shape: Sequence[int], datatype: str = "FP32") -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": list(shape), "data": list(values)}


def infer(
    client: Client, model: str, *inputs: Mapping[str, Any], extra: bytes = b"", **rest: Any
) -> Response:
    body = orjson.dumps({"inputs": inputs, **rest})
    return client.post(f"/v2/models/{model}/infer", body, ALICE + extra)


def values_of(answer: Response) -> list[Any]:
    assert answer.status == 200, answer
    return list(orjson.loads(answer.body)["outputs"][0]["data"])


def document(answer: Response) -> Any:
    assert answer.status == 200, answer
    return orjson.loads(answer.body)


def word(answer: Response) -> str:
    return answer.fields["x-carpool-cache"].partition(";")[0]


PIXELS = np.arange(32 * 320, dtype=np.uint8).reshape(1, 32, 320)


@dataclass
class Shown:
    """A feature: its model, how it is asked, and whether the answer is right."""

    model: str
    ask: Callable[[Client, bytes], Response]
    is_right: Callable[[Response], bool]
    tensor: Callable[[], tuple[str, str, tuple[int, ...], bytes]] = field(
        default=lambda: ("x", "FP32", (1, 3), np.array(X, np.float32).tobytes())
    )


def picture_bytes(name: str = "images") -> tuple[str, str, tuple[int, ...], bytes]:
    file = picture(RED)
    return name, "BYTES", (1,), struct.pack("<I", len(file)) + file


def classified(answer: Response) -> bool:
    return bool(document(answer)["classes"][0]["label"] == "red")


def ask_picture(path: str) -> Callable[[Client, bytes], Response]:
    return lambda client, extra: client.post(path, picture(RED), ALICE + extra)


def summed(client: Client, extra: bytes, sequence: int = 7) -> Response:
    said = {"sequence_id": sequence, "sequence_start": True, "sequence_end": True}
    return infer(client, "tracker", tensor("x", [1.0, 2.0], (1, 2)), extra=extra, parameters=said)


def counted(client: Client, extra: bytes) -> Response:
    return client.post("/v2/models/count/generate_stream", b'{"n": 3}', ALICE + extra)


def written(client: Client, extra: bytes) -> Response:
    given = tensor("image", PIXELS.ravel().tolist(), PIXELS.shape, "UINT8")
    return infer(client, "writer", given, extra=extra)


def is_street(answer: Response) -> bool:
    found = document(answer)["detections"]
    return bool([one["kind"]["classes"][0]["label"] for one in found] == ["red"])


SHOWN: dict[str, Shown] = {
    "exact": Shown(
        "exact",
        lambda client, extra: infer(client, "exact", tensor("x", X, (1, 3)), extra=extra),
        lambda answer: values_of(answer) == [2.0, 3.0, 4.0],
    ),
    "similar": Shown("similar", ask_picture("/classify?model=similar"), classified, picture_bytes),
    "rollout": Shown(
        "rolled",
        lambda client, extra: infer(client, "rolled", tensor("x", X, (1, 3)), extra=extra),
        lambda answer: values_of(answer) in ([2.0, 3.0, 4.0], [3.0, 4.0, 5.0]),
    ),
    "pipeline": Shown(
        "street", ask_picture("/detect?model=street"), is_street, lambda: picture_bytes("image")
    ),
    "ensemble": Shown(
        "chain",
        lambda client, extra: infer(client, "chain", tensor("in", X, (1, 3)), extra=extra),
        lambda answer: values_of(answer) == [12.0, 13.0, 14.0],
        lambda: ("in", "FP32", (1, 3), np.array(X, np.float32).tobytes()),
    ),
    "sequence": Shown(
        "tracker",
        summed,
        lambda answer: values_of(answer) == [1.0, 2.0],
        lambda: ("x", "FP32", (1, 2), np.array([1, 2], np.float32).tobytes()),
    ),
    "decoupled": Shown(
        "count",
        counted,
        lambda answer: re.findall(rb'"y": ?([0-9]+)', answer.body) == [b"0", b"1", b"2"],
        lambda: ("n", "INT32", (1, 1), np.array([3], np.int32).tobytes()),
    ),
    "text": Shown(
        "writer",
        written,
        lambda answer: values_of(answer) == [fake_text(PIXELS).decode()],
        lambda: ("image", "UINT8", PIXELS.shape, PIXELS.tobytes()),
    ),
    "device": Shown("chip", ask_picture("/classify?model=chip"), classified, picture_bytes),
}


# ---- the server -------------------------------------------------------------------------------------------


@dataclass
class Stage:
    server: WholeServer
    models: Path
    collector: Collector
    record: Path

    def connect(self) -> Client:
        return self.server.connect()

    def states(self) -> dict[str, str]:
        with self.connect() as client:
            lines = orjson.loads(client.post("/v2/repository/index", b"", ALICE).body)
        return {line["name"]: line.get("state", "") for line in lines}

    def served(self, model: str) -> list[Any]:
        return [one for one in self.server.host.engine.served.values() if one.name == model]

    def unload(self, model: str) -> None:
        engine = self.server.host.engine
        self.server.wait_for(engine.control.unload(model))
        self.server.wait_for(engine.fleet.left(model))

    def load(self, model: str) -> None:
        self.server.wait_for(self.server.host.engine.control.load(model))

    def recorded(self, model: str) -> list[dict[str, Any]]:
        lines = self.record.read_text().splitlines()
        return [line for line in map(json.loads, lines) if line["model"] == model]

    def until_settled(self) -> None:
        """What was asked before is written, which happens now and then."""
        before = len(self.recorded("ten"))
        with self.connect() as client:
            infer(client, "ten", tensor("x", X, (1, 3)))
        until(lambda: len(self.recorded("ten")) > before)

    def spans(self, model: str) -> list[Any]:
        return [span for span in self.collector.spans if told(span).get("carpool.model") == model]


@contextmanager
def staged(folder: Path) -> Iterator[Stage]:
    models = repository(folder / "models")
    keys = key_files.write(
        folder / "api",
        f"alice {key_files.ALICE}\nbob {key_files.BOB} models=exact,similar,street,chain,tracker,count\n",
    )
    record = folder / "arrivals.jsonl"
    with pytest.MonkeyPatch.context() as patch, collecting() as collector:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        patch.setattr("carpool.extensions.recording.front._FLUSH_S", 0.05)
        usual = fake.load

        def load(config: ModelConfig, *rest: Any) -> Any:
            return Colours() if config.image is not None else usual(config, *rest)

        patch.setattr(fake, "load", load)
        with whole_server(
            models,
            on_demand=True,
            api_key_file=keys,
            allow_client_shm=True,
            record=str(record),
            otlp_endpoint=collector.url.removesuffix("/v1/traces"),
            trace_sample=1.0,
            allow_rollouts=True,
            state_dir=folder / "state",
            grpc_frontends=1,
            grpc_port=0,
        ) as server:
            yield Stage(server, models, collector, record)
