"""Models whose device decodes pictures: who they are, how their batches run, what they are measured with."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from carpool.backends import fake
from carpool.config.model import ModelSignature
from carpool.config.toml import toml_config
from carpool.core.curve import BatchCurve
from carpool.engine.engine import Engine
from carpool.engine.loading.device_pictures import SAMPLE_TOLD, divided, filling, sample_picture
from carpool.engine.profile.layouts import Layout
from carpool.engine.profile.measuring import Effort, Measured, Measuring, Point
from carpool.engine.profile.model_profile import Profile, choices
from carpool.engine.run.batch import Outcome, Work
from carpool.errors import CarpoolError, ConfigError, InvalidInput
from carpool.link.templates import RequestForm
from carpool.memory.layout import ENCODED
from carpool.types import Array, Datatype, Signature, TensorSpec
from carpool.vision.decode import plain_size
from carpool.vision.heads import read_head
from carpool.vision.plans.settings import VisionSettings, describe, read, write
from engine.scripted import run
from waiting import until_in_loop as until

PIXELS = TensorSpec("x", Datatype.UINT8, (3, 8, 8))
TOML = """
backend = "{backend}"
task = "classify"
max_batch = 4
[image]
decode = "{decode}"
"""
TENSORS = """
[[input]]
name = "x"
datatype = "UINT8"
shape = [3, 8, 8]
[[output]]
name = "y"
datatype = "FP32"
shape = [2]
"""


def vision(
    decode: str, backend: str = "fake", spec: TensorSpec = PIXELS, max_batch: int = 4
) -> VisionSettings:
    config = toml_config(TOML.format(backend=backend, decode=decode), Path("m/model.toml"))
    signature = Signature("m", (spec,), (TensorSpec("y", Datatype.FP32, (2,)),), max_batch)
    found, *_ = describe(config, signature)
    assert found is not None
    return divided(config, signature, found)


# ---- settings ---------------------------------------------------------------------------------------------


def test_whoever_asks_for_it_gets_files() -> None:
    found = vision("device")
    assert found.encoded
    assert read(write(found)) == found
    assert not vision("cpu").encoded
    assert not vision("auto").encoded  # it does not run on a GPU


@pytest.mark.parametrize(
    ("backend", "spec", "max_batch", "why"),
    [
        ("onnxruntime", PIXELS, 4, "pytorch backend"),
        ("fake", TensorSpec("x", Datatype.FP32, (3, 8, 8)), 4, "UINT8 with 3 channels"),
        ("fake", TensorSpec("x", Datatype.UINT8, (1, 8, 8)), 4, "UINT8 with 3 channels"),
        ("fake", PIXELS, 0, "takes batches"),
    ],
)
def test_a_model_that_cannot_is_told_what_to_change(
    backend: str, spec: TensorSpec, max_batch: int, why: str
) -> None:
    with pytest.raises(ConfigError, match=why) as error:
        vision("device", backend, spec, max_batch)
    assert "image.decode" in error.value.message
    assert not vision("auto", backend, spec, max_batch).encoded


def test_only_such_a_model_is_given_a_decoder() -> None:
    config = toml_config(TOML.format(backend="fake", decode="device"), Path("m/model.toml"))
    assert filling(config, vision("device")) is not None
    assert filling(config, vision("cpu")) is None
    assert filling(config, None) is None


# ---- batches ----------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Recorder:
    """Answers a tensor with its mean, and a file with its length; `bad` is no picture."""

    signature: ModelSignature = field(default_factory=ModelSignature)
    alive: bool = True
    batches: list[str] = field(default_factory=list)
    go: threading.Event = field(default_factory=threading.Event)

    def run(self, inputs: Mapping[str, Array], wanted: Sequence[str]) -> Mapping[str, Array]:
        assert self.go.wait(60)
        images = inputs["x"]
        self.batches.append("t" * len(images))
        means = images.reshape(len(images), -1).mean(1)
        return {"y": np.stack([means, means], 1).astype(np.float32)}

    def run_encoded(
        self, pictures: Sequence[Array], wanted: Sequence[str]
    ) -> tuple[Mapping[str, Array], Mapping[int, CarpoolError]]:
        assert self.go.wait(60)
        self.batches.append("p" * len(pictures))
        rows = np.array([[len(picture)] * 2 for picture in pictures], np.float32)
        bad = {n: InvalidInput("no picture") for n, p in enumerate(pictures) if p.tobytes() == b"bad"}
        return {"y": rows}, bad

    def abort(self) -> None: ...

    def close(self) -> None: ...


def test_files_and_tensors_take_turns_and_never_share_a_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = Recorder()
    backend.go.set()
    monkeypatch.setattr(fake, "load", lambda *_: backend)
    (tmp_path / "m").mkdir()
    settings = TOML.format(backend="fake", decode="device") + TENSORS
    (tmp_path / "m" / "model.toml").write_text(settings)
    sent: list[bytes | int] = [b"one", 7, b"three", 9, b"bad", b"", 11, b"seven77"]

    async def main() -> list[Outcome]:
        async with Engine(tmp_path) as engine:
            [(key, served)] = engine.served.items()
            assert served.vision is not None
            assert served.vision.encoded
            assert set(backend.batches) == {"p", "pp", "pppp"}  # measured with pictures
            backend.batches.clear()
            backend.go.clear()
            outcomes: dict[int, Outcome] = {}
            for number, what in enumerate(sent):
                engine.submit(key, [work_of(what, number, outcomes)])
            backend.go.set()
            await until(lambda: len(outcomes) == len(sent))
            return [outcomes[number] for number in range(len(sent))]

    outcomes = run(main())
    for what, outcome in zip(sent, outcomes, strict=True):
        if what == b"bad":
            assert isinstance(outcome.error, InvalidInput)
        else:
            assert outcome.error is None
            assert outcome.outputs is not None
            expected = what if isinstance(what, int) else len(what)
            assert outcome.outputs["y"].tolist() == [[expected, expected]]
    assert "".join(sorted("".join(backend.batches))) == "pppppttt"
    assert all(len(set(batch)) == 1 for batch in backend.batches)


def work_of(what: bytes | int, number: int, outcomes: dict[int, Outcome]) -> Work:
    def done(_work: Work, outcome: Outcome) -> None:
        outcomes[number] = outcome

    if isinstance(what, int):
        return Work({"x": np.full((1, 3, 8, 8), what, np.uint8)}, done)
    return Work({"x": np.frombuffer(what, np.uint8)}, done, shape=ENCODED, form=RequestForm(encoded=True))


# ---- measuring --------------------------------------------------------------------------------------------


def test_it_is_measured_with_an_ordinary_photo() -> None:
    picture = sample_picture()
    assert plain_size(picture.tobytes()) == (640, 480)
    assert read_head(picture.data).orientation == 1
    assert 50_000 < picture.nbytes < 120_000
    backend = Recorder()
    backend.go.set()
    signature = Signature("m", (PIXELS,), (TensorSpec("y", Datatype.FP32, (2,)),), 4)
    effort = Effort(least_runs=1, most_runs=2, seconds=0.0, warm_up=0.0)
    measured = Measuring([backend], signature, effort, picture=picture).points([1, 4])
    assert [point.size for point in measured.points] == [1, 4]
    assert set(backend.batches) == {"p", "pppp"}


def test_what_it_was_measured_with_is_said() -> None:
    profile = Profile(Layout(1, 1), measured=Measured((Point(1, 0.01), Point(2, 0.015))))
    said = choices(profile, profile.measured.curve(2), 2, None, SAMPLE_TOLD)
    assert f"Measured and warm: batches of 1, 2, {SAMPLE_TOLD}." in said
    assert isinstance(profile.measured.curve(2), BatchCurve)
