"""A model that writes, with encoders and decoders apart: right texts, and who dies takes only his along."""

from __future__ import annotations

import asyncio
import shutil
from collections import deque
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from random import Random
from threading import Event as Flag
from typing import Any

import numpy as np
import pytest

from carpool import backends
from carpool.backends.backend import Placement
from carpool.config.model import ModelConfig
from carpool.config.repository import find_models
from carpool.core.curve import BatchCurve
from carpool.demo import text_model
from carpool.engine.engine import Engine
from carpool.errors import CarpoolError, ConfigError, ModelError, Unavailable
from carpool.extensions.text import fake_stepper
from carpool.extensions.text.fake_stepper import fake_text
from carpool.extensions.text.stepper import AHEAD, ModelPart, TextInstance
from carpool.extensions.text.text_job import TextPromise
from carpool.extensions.text.text_loading import TextLoading
from carpool.extensions.text.text_loop import TextLoop
from carpool.extensions.text.text_records import Event, Failed, Piece
from carpool.extensions.text.text_runtime import TextRuntime
from carpool.extensions.text.text_scheduler import TextScheduler

SLOTS, ENCODERS, DECODERS = 3, 1, 2


class Encodes:
    """Reads bytes; some poison it."""

    device, broken = "", False
    notes: Sequence[str] = ()

    def __init__(self) -> None:
        self.closed = False

    def read(self, inputs: Any) -> bytes:
        return bytes(inputs)

    def encode(self, pictures: Sequence[bytes]) -> Sequence[bytes]:
        if any(b"poison" in picture for picture in pictures):
            raise RuntimeError("a kernel failed")
        return [b"rows of " + picture for picture in pictures]

    def sample(self) -> bytes:
        return b"x"

    def abort(self) -> None: ...

    def close(self) -> None:
        self.closed = True


class Writes:
    """Writes the rows that it was given again."""

    slots, longest, end, device, broken, overlaps = SLOTS, 64, 0, "", False, True
    widths: Sequence[int] = (1, 2, 3)
    notes: Sequence[str] = ()

    def __init__(self) -> None:
        self.left: list[bytes] = [b""] * SLOTS
        self.launched: deque[Any] = deque()
        self.fails = 0
        self.closed = False

    def admit(self, slots: Sequence[int], encoded: Sequence[bytes]) -> None:
        for slot, rows in zip(slots, encoded, strict=True):
            self.left[slot] = rows.removeprefix(b"rows of ")

    def launch(self, width: int) -> None:
        assert len(self.launched) < (AHEAD if self.overlaps else 1)
        tokens = np.array([text[0] if text else self.end for text in self.left[:width]], np.int64)
        self.launched.append(tokens)
        self.left[:width] = [text[1:] for text in self.left[:width]]

    def tokens(self) -> Any:
        tokens = self.launched.popleft()
        if self.fails:
            self.fails -= 1
            raise RuntimeError("no kernel image")
        return tokens

    def forget(self) -> None:
        self.launched.clear()

    def piece(self, token: int) -> bytes:
        return bytes((token,))

    def abort(self) -> None: ...

    def close(self) -> None:
        self.closed = True


@pytest.fixture(autouse=True, params=[False, True], ids=["in turn", "ahead"])
def _overlapping(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Writes, "overlaps", request.param)
    monkeypatch.setattr(fake_stepper.FakeStepper, "overlaps", request.param)


class Stage:
    """Turn by turn, one thread after the other."""

    def __init__(self, seed: int = 1, **promise: Any) -> None:
        self.at = 100.0
        self.events: list[Event] = []
        self.encoders = [Encodes() for _ in range(ENCODERS)]
        self.decoders = [Writes() for _ in range(DECODERS)]
        self.instance = TextInstance(self.encoders, self.decoders, apart=True)
        told = TextPromise(SLOTS, 64, encoders=ENCODERS, decoders=DECODERS, **promise)
        curves = BatchCurve.parse("2+0.5", 8), BatchCurve.parse("1+0.1", SLOTS)
        self.scheduler = TextScheduler(*curves, told)
        self.loop = TextLoop("m", self.instance, self.scheduler, self.events.extend, now=self._now)
        self._random = Random(seed)

    def _now(self) -> float:
        self.at += 1e-4
        return self.at

    def turn(self, turns: int = 1) -> None:
        """In any order: devices do not wait for each other."""
        for _ in range(turns):
            self.loop.turn(self._random.randrange(self.loop.threads))

    def submit(self, number: int, text: bytes) -> CarpoolError | None:
        return self.loop.submit(number, text, self.at)

    def texts(self) -> dict[int, str]:
        found: dict[int, str] = {}
        for event in self.events:
            if isinstance(event, Piece):
                found[event.number] = found.get(event.number, "") + event.text
        return found

    def done(self) -> set[int]:
        return {event.number for event in self.events if isinstance(event, Piece) and event.finish}

    def failed(self) -> dict[int, CarpoolError]:
        return {event.number: event.error for event in self.events if isinstance(event, Failed)}


@pytest.mark.parametrize("seed", range(2))
def test_texts_are_whole_whoever_leaves_meanwhile(seed: int) -> None:
    random, stage, left = Random(seed), Stage(seed), set[int]()
    wanted = {n: f"{n} " * (1 + n % 7) for n in range(200)}
    used = set[int]()
    for number, text in wanted.items():
        assert stage.submit(number, text.encode()) is None
        stage.turn(random.randrange(8))
        used |= {job.decoder for job in stage.scheduler.slots if job is not None}
        if random.random() < 0.3:
            gone = random.randrange(max(0, number - 8), number + 1)
            if gone not in stage.done():
                left.add(gone)
            stage.loop.cancel(gone)
            told = stage.texts().get(gone)
            stage.turn(3)
            assert stage.texts().get(gone) == told
    while stage.scheduler.used or stage.scheduler.waiting:
        stage.turn()
    assert used == {0, 1}
    assert {n: text for n, text in stage.texts().items() if n not in left} == {
        n: text for n, text in wanted.items() if n not in left
    }
    assert not stage.failed()


def test_a_poisoned_picture_costs_only_its_own_request() -> None:
    stage = Stage()
    for number in range(12):
        stage.submit(number, b"poison" if number in (2, 5) else b"fine")
    stage.turn(1000)
    assert stage.texts() == {n: "fine" for n in range(12) if n not in (2, 5)}
    assert set(stage.failed()) == {2, 5}


def begun(stage: Stage, count: int) -> dict[int, set[int]]:
    """So many answers, of which each has a token; by decoder."""
    for number in range(count):
        assert stage.submit(number, b"a long text") is None
    while len(stage.texts()) < count:
        stage.turn()
    found: dict[int, set[int]] = {}
    for job in stage.scheduler.slots:
        if job is not None:
            found.setdefault(job.decoder, set()).add(job.payload.number)
    return found


def test_a_decoder_that_fails_once_costs_its_own_riders_one_error_each() -> None:
    stage = Stage()
    riding = begun(stage, 4)
    stage.decoders[1].fails = 1
    for number in range(4, 40):
        assert stage.submit(number, b"more words") is None
    while len(stage.done()) + len(stage.failed()) < 40:
        stage.turn()
    lost = set(stage.failed())
    assert riding[1] <= lost
    assert not lost & riding[0]
    assert len(lost) <= SLOTS
    assert all(isinstance(error, ModelError) for error in stage.failed().values())
    assert stage.done() == set(range(40)) - lost
    assert stage.loop.alive


def test_when_a_decoder_fails_again_and_again_the_instance_ends_and_everybody_hears_so() -> None:
    stage = Stage()
    begun(stage, 4)
    stage.decoders[1].fails = 1000
    for number in range(4, 30):
        stage.submit(number, b"words")
    for _ in range(10_000):
        stage.turn()
    assert not stage.loop.alive
    ended = Flag()
    stage.loop._ended = ended.set
    stage.loop.start()  # its threads find it broken, and say so
    assert ended.wait(30)
    assert stage.done() | set(stage.failed()) == set(range(30))
    assert all(part.closed for part in (*stage.encoders, *stage.decoders))
    assert isinstance(stage.submit(99, b"x"), ModelError)


def test_threads_write_side_by_side_until_it_is_closed() -> None:
    stage, ended, whole = Stage(), Flag(), Flag()
    told, wanted = stage.loop._tell, {n: f"text {n} " + "x" * (n % 9) for n in range(300)}

    def tell(events: Sequence[Event]) -> None:
        told(events)
        if len(stage.done()) == len(wanted):
            whole.set()

    stage.loop._tell, stage.loop._ended = tell, ended.set
    stage.loop.start()
    for number, text in wanted.items():
        assert stage.submit(number, text.encode()) is None
    assert whole.wait(60)
    assert stage.texts() == wanted
    stage.loop.close()
    assert ended.wait(30)
    assert all(part.closed for part in (*stage.encoders, *stage.decoders))
    assert isinstance(stage.submit(999, b"x"), Unavailable)


# ---- with an engine around it


def write_model(folder: Path, pools: str) -> Path:
    model = folder / "writer"
    model.mkdir(parents=True)
    fake = '[fake]\ncurve = "0.2+0.01"\nstep_curve = "0.1+0.001"\n'
    (model / "model.toml").write_text(f"[generate]\nslots = 4\n{pools}\n{fake}")
    return model


def picture(seed: int) -> Any:
    return np.random.default_rng(seed).integers(0, 256, (1, 32, 64), dtype=np.uint8)


def test_an_engine_answers_and_drains_and_unloads(tmp_path: Path) -> None:
    async def play() -> None:
        async with Engine(
            write_model(tmp_path, "[encoder]\ninstances = 2\n[decoder]\ninstances = 3")
        ) as engine:
            served = engine.find("writer")
            assert isinstance(served.runtime, TextRuntime)
            found = served.runtime.document(0.0)
            assert (found["encoders"], found["decoders"], found["slots"]) == (2, 3, 4)
            asked = [picture(seed) for seed in range(60)]
            tasks = [asyncio.create_task(engine.infer("writer", {"image": one})) for one in asked]
            gone = [asyncio.create_task(engine.infer("writer", {"image": asked[0]})) for _ in range(10)]
            await asyncio.sleep(0)
            for task in gone:
                task.cancel()
            await asyncio.sleep(0)
            await engine.unload("writer")  # who is in it is answered
            for one, task in zip(asked, tasks, strict=True):
                assert (await task)["text_output"].tolist() == [fake_text(one)]
            assert served.runtime.idle
            with pytest.raises(CarpoolError):
                await engine.infer("writer", {"image": asked[0]})

    asyncio.run(play())


@pytest.mark.parametrize(
    ("pools", "placed"),
    [
        (
            "[decoder]\ninstances = 2",
            [(ModelPart.ENCODER, "cuda", 0), (ModelPart.DECODER, "cuda", 0), (ModelPart.DECODER, "cuda", 1)],
        ),
        ("[encoder]\ndevice = 'cuda:1'", [(ModelPart.ENCODER, "cuda:1", 1), (ModelPart.DECODER, "cuda", 0)]),
        ("[encoder]\ndevice = 'cpu'", [(ModelPart.ENCODER, "cpu", None), (ModelPart.DECODER, "cuda", 0)]),
        (
            "[encoder]\ndevice = 'cuda:0'\n[decoder]\ndevice = 'cuda:1'\ninstances = 2",
            [
                (ModelPart.ENCODER, "cuda:0", 0),
                (ModelPart.DECODER, "cuda:1", 1),
                (ModelPart.DECODER, "cuda:1", 1),
            ],
        ),
    ],
)
def test_parts_go_where_the_settings_say(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    pools: str,
    placed: list[tuple[ModelPart, str, int | None]],
) -> None:
    """On a machine with two GPUs, as far as the settings can tell."""
    found: list[tuple[ModelPart, str, int | None]] = []

    def devices(config: ModelConfig) -> tuple[int, ...]:
        return {"cpu": (), "cuda": (0, 1), "cuda:0": (0,), "cuda:1": (1,)}[config.pytorch.device]

    def load_text(config: ModelConfig, version: Any, placement: Placement, part: ModelPart) -> Any:
        found.append((part, config.pytorch.device, placement.gpu))
        return fake_stepper.FakeStepper(config)

    monkeypatch.setattr(backends, "devices", devices)
    monkeypatch.setattr(fake_stepper, "load_text", load_text)
    (source,), _ = find_models([write_model(tmp_path, pools)], gpus=2)
    config = replace(source.config, pytorch=replace(source.config.pytorch, device="cuda"))
    loading = TextLoading(config, source.versions[-1])
    loading.check()
    with closing(loading.backend(0, 1)) as instance:
        assert instance.apart
    assert found == placed


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("[encoder]\n[fake]", "encoder is for models that write"),
        ("[decoder]\n[fake]", "decoder is for models that write"),
        ("[generate]\n[encoder]\ninstances = 0\n[fake]", "encoder.instances"),
        ("[generate]\n[decoder]\ninstances = 65\n[fake]", "decoder.instances"),
        ("[generate]\n[decoder]\ndevice = 'gpu'\n[fake]", "decoder.device"),
        ("[generate]\n[decoder]\nslots = 3\n[fake]", "decoder.slots"),
        ("[generate]\n[encoder]\nown_process = true\n[fake]", "encoder.own_process was removed"),
        ("[generate]\n[decoder]\nown_process = true\n[fake]", "decoder.own_process"),
        ("instances = 2\n[generate]\n[decoder]\n[fake]", "instances does not go with"),
    ],
)
def test_settings_that_cannot_be_name_their_key(tmp_path: Path, text: str, field: str) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "model.toml").write_text(text)

    async def play() -> None:
        async with Engine(folder):
            raise AssertionError("it was loaded")

    with pytest.raises(ConfigError, match=field):
        asyncio.run(play())


@pytest.mark.conformance
def test_one_encoder_and_two_decoders_write_what_one_line_after_the_other_would(tmp_path: Path) -> None:
    """The reader that ships, token by token against a loop without slots or caches."""
    torch = pytest.importorskip("torch")
    from carpool.extensions.text import line_reader
    from carpool.extensions.text.text_network import read_line_reader

    model = tmp_path / "reader"
    shutil.copytree(text_model(), model)
    settings = (model / "model.toml").read_text()
    pools = "[encoder]\ninstances = 1\n[decoder]\ninstances = 2\ndevice = 'cpu'\n"
    settings = settings.replace("max_tokens = 80", "max_tokens = 12\nslots = 2") + pools
    (model / "model.toml").write_text(settings)
    network = read_line_reader(text_model() / "1" / "model.safetensors").eval()
    lines = [np.random.default_rng(n).integers(0, 256, (1, 32, 64 + 8 * n), dtype=np.uint8) for n in range(9)]

    def alone(line: Any) -> bytes:
        with torch.no_grad():
            encoded = network.encode(torch.from_numpy(line)[None].float() / 255)
            tokens = [line_reader.END]
            while len(tokens) <= 12 and (len(tokens) == 1 or tokens[-1] != line_reader.END):
                tokens.append(int(network.write(encoded, torch.tensor([tokens]))[0, -1].argmax()))
        return line_reader.text_of(tokens[1:]).encode()

    async def play() -> None:
        async with Engine(model) as engine:
            served = engine.find("reader")
            runtime = served.runtime
            assert isinstance(runtime, TextRuntime)
            assert (runtime.driver._most, runtime.document(0.0)["decoders"]) == (12, 2)
            asked = (engine.infer("reader", {"image": line}) for line in lines)
            for line, answer in zip(lines, await asyncio.gather(*asked), strict=True):
                assert answer["text_output"].tolist() == [alone(line)]

    asyncio.run(play())
