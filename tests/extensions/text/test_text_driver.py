"""Riders of a model that writes, with an engine around it: each is told once, whatever becomes of it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from absent import rows
from carpool.core.job import INFINITY, JobOptions, JobOrigin
from carpool.engine.engine import Engine
from carpool.engine.run.batch import Outcome, Work
from carpool.errors import (
    Cancelled,
    CarpoolError,
    ConfigError,
    InvalidInput,
    ModelError,
    Replaced,
    Unavailable,
)
from carpool.extensions.text.fake_stepper import fake_text
from carpool.extensions.text.text_driver import TextDriver, outputs, read_limit
from carpool.extensions.text.text_records import Event, Failed, Piece, Worked
from carpool.types import StepTiming


def picture(seed: int) -> Any:
    return np.random.default_rng(seed).integers(0, 256, (1, 32, 64), dtype=np.uint8)


def write_model(folder: Path, more: str = "", curve: str = "0.2+0.01") -> Path:
    model = folder / "writer"
    model.mkdir(parents=True)
    fake = f'[fake]\ncurve = "{curve}"\nstep_curve = "0.1+0.001"\n'
    (model / "model.toml").write_text(f"{more}\n[generate]\nslots = 4\n{fake}")
    return model


def test_an_engine_answers_whole_texts(tmp_path: Path) -> None:
    async def play() -> None:
        async with Engine(write_model(tmp_path)) as engine:
            asked = [picture(seed) for seed in range(30)]
            found = await asyncio.gather(*(engine.infer("writer", {"image": one}) for one in asked))
            for one, answer in zip(asked, found, strict=True):
                assert answer["text_output"].tolist() == [fake_text(one)]
                assert answer["finish_reason"].tolist() == [b"stop"]
            served = engine.find("writer")
            assert served.runtime.idle
            assert served.able
            with pytest.raises(CarpoolError, match="image"):
                await engine.infer("writer", {"image": np.zeros((1, 31, 64), np.uint8)})

    asyncio.run(play())


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("ttft_ms = 5\n[fake]", "ttft_ms"),
        ("[generate]\nslots = 0\n[fake]", "generate.slots"),
        ("[generate]\nmax_tokens = 99999\n[fake]", "generate.max_tokens"),
        ("[generate]\nfamily = 'gpt'\n[fake]", "generate.family"),
        ("per_token_ms = 0\n[generate]\n[fake]", "per_token_ms"),
        ("ttft_ms = 'soon'\n[generate]\n[fake]", "ttft_ms"),
        ("max_batch = 4\n[generate]\n[fake]", "max_batch"),
        ("[generate]\n[batching]\n[fake]", "batching"),
        ("backend = 'python'\n[generate]", "backend"),
        *rows(
            "cache",
            ("response_cache = true\n[generate]\n[fake]", "response_cache does not go with"),
            ("[generate]\n[cache]\n[fake]", "cache does not go with"),
        ),
        *rows("sequences", ("[generate]\n[sequences]\n[fake]", "sequences does not go with")),
        *rows("rollout", ("[generate]\n[rollout]\n[fake]", "rollout does not go with")),
        *rows(
            "registry",
            (
                "[generate]\n[registry]\nstable = 'models:/m@a'\ncandidate = 'models:/m@b'\n[fake]",
                "registry.candidate does not go with",
            ),
        ),
        ("[generate]\n[fake]\nstep_curve = 'slow'", "fake.step_curve"),
        ("[generate]\nlots = 1\n[fake]", "generate.lots"),
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


class Scripted:
    """An instance that does what the test says."""

    responsive = True

    def __init__(self) -> None:
        self.alive = True
        self.asked: list[int] = []
        self.left: list[int] = []
        self.ended: list[str] = []

    def submit(self, number: int, work: Work, limit: int) -> None:
        del work, limit
        self.asked.append(number)

    def cancel(self, number: int) -> None:
        self.left.append(number)

    def abort(self) -> None:
        self.ended.append("abort")

    def close(self) -> None:
        self.ended.append("close")

    def join(self, timeout: float) -> None: ...


class Sink:
    """A `PartSink`, and the place that makes payloads for it."""

    full = False

    def __init__(self) -> None:
        self.got: list[tuple[Any, str, bool]] = []

    def part(self, rows: Any) -> Any:
        return {name: array.tolist() for name, array in rows.items()}

    def send(self, payload: Any, finish: str = "", *, last: bool = False) -> None:
        self.got.append((payload, finish, last))


class Stage:
    def __init__(self, writers: int = 1) -> None:
        self.lost: list[int] = []
        self.counts: list[str] = []
        self.outcomes: dict[Work, list[Outcome]] = {}
        self.driver = TextDriver("m", 80, self, asyncio.get_running_loop())
        self.writers = [Scripted() for _ in range(writers)]
        for index, writer in enumerate(self.writers):
            self.driver.place(index, writer)

    def first_token(self, seconds: float) -> None:
        self.counts.append("first")

    def next_token(self, seconds: float) -> None:
        self.counts.append("next")

    def worked(self, index: int, work: Worked) -> None:
        self.counts.append("worked")

    def wrote(self, timing: StepTiming) -> None:
        _, writing = timing.steps[-1]
        self.counts.append(f"wrote {writing.batch}")

    def writer_lost(self, index: int, why: str) -> None:
        self.lost.append(index)

    def ask(self, details: bytes = b"", sink: Sink | None = None, source: str = "") -> Work:
        """With a `source`, a frame that newer ones may take the place of."""
        work = Work({}, lambda work, outcome: self.outcomes[work].append(outcome), 0.0, INFINITY)
        work.own_extras().details = details
        work.origin, work.options = JobOrigin(source), JobOptions(latest=bool(source))
        if sink is not None:
            work.own_extras().parts = sink
            work.place = sink  # type: ignore[assignment]
        self.outcomes[work] = []
        self.driver.submit([work])
        return work

    def hear(self, *events: Event, writer: int = 0) -> None:
        self.driver.heard(self.writers[writer], events)

    def one(self, work: Work) -> Outcome:
        (outcome,) = self.outcomes[work]
        return outcome


def staged(test: Any) -> Any:
    def run() -> None:
        async def play() -> None:
            test()

        asyncio.run(play())

    run.__name__ = test.__name__
    run.__doc__ = test.__doc__
    return run


@staged
def test_a_newer_frame_takes_the_place_of_one_whose_text_has_not_begun() -> None:
    stage = Stage()
    other = stage.ask(source="yard")
    began, first = (stage.ask(source="gate") for _ in range(2))
    stage.hear(Piece(2, "He", 1))
    frames = [stage.ask(source="gate") for _ in range(4)]
    assert all(isinstance(stage.one(frame).error, Replaced) for frame in frames[:-1])
    assert stage.writers[0].left == [4, 5, 6]
    assert [stage.outcomes[work] for work in (other, began, first, frames[-1])] == [[]] * 4
    stage.hear(*(Piece(number, "", 2, "stop") for number in (1, 2, 3, 7)))
    assert all(stage.one(work).error is None for work in (other, began, first, frames[-1]))
    assert stage.driver.idle
    assert not stage.driver._live


@staged
def test_pieces_go_to_who_waits_for_them() -> None:
    stage, sink = Stage(), Sink()
    streamed, whole = stage.ask(sink=sink), stage.ask()
    stage.hear(Piece(1, "He", 1), Piece(2, "He", 1), Worked(0, 2, 0.1, 2, 0))
    stage.hear(Piece(1, "llo", 2), Piece(2, "llo", 2))
    stage.hear(Piece(1, "", 3, "stop"), Piece(2, "!", 3, "length"))
    assert [payload.get("text_output") for payload, _, _ in sink.got] == [[b"He"], [b"llo"], [b""]]
    assert sink.got[-1][1:] == ("stop", True)
    assert sink.got[-1][0]["finish_reason"] == [b"stop"]
    assert stage.one(streamed).error is None
    found = stage.one(whole).outputs
    assert found is not None
    assert found["text_output"].tolist() == [b"Hello!"]
    assert found["finish_reason"].tolist() == [b"length"]
    assert stage.counts.count("first") == 2
    assert stage.driver.idle


@staged
def test_who_leaves_is_told_once_and_what_comes_later_is_not_heard() -> None:
    stage = Stage()
    work = stage.ask()
    stage.driver.cancel(work)
    stage.driver.cancel(work)
    stage.hear(Piece(1, "x", 1), Piece(1, "", 2, "stop"), Failed(1, ModelError("late")))
    assert isinstance(stage.one(work).error, Cancelled)
    assert stage.writers[0].left == [1]


@staged
def test_an_instance_that_dies_costs_each_rider_one_error() -> None:
    stage = Stage(2)
    works = [stage.ask() for _ in range(4)]
    assert stage.writers[0].asked == [1, 3]  # the one with fewer riders is next
    stage.hear(Piece(1, "x", 1))
    stage.driver.lost(stage.writers[0])
    stage.driver.lost(stage.writers[0])
    assert stage.lost == [0]
    for work in (works[0], works[2]):
        error = stage.one(work).error
        assert isinstance(error, ModelError)
        assert error.reason == "model-died"
    assert not stage.outcomes[works[1]]
    late = stage.ask()
    assert stage.writers[1].asked == [2, 4, 5]
    stage.driver.lost(stage.writers[1])
    assert stage.one(late).error is not None
    refused = stage.one(stage.ask()).error
    assert isinstance(refused, Unavailable)
    assert refused.reason == "restarting"


@staged
def test_a_picture_that_is_still_to_come_is_waited_for() -> None:
    stage = Stage()
    works = [Work({}, lambda work, outcome: stage.outcomes[work].append(outcome)) for _ in range(3)]
    for work in works:
        stage.outcomes[work] = []
        work.own_course().ready_at = 5.0
    stage.driver.submit(works)
    assert not stage.writers[0].asked
    assert not stage.driver.idle
    stage.driver.ready(works[1])
    stage.driver.ready(works[1])
    assert stage.writers[0].asked == [1]
    stage.driver.cancel(works[0])
    assert isinstance(stage.one(works[0]).error, Cancelled)
    stage.driver.ready(works[0])
    stage.driver.close()
    assert isinstance(stage.one(works[2]).error, Unavailable)
    assert stage.driver.idle


@staged
def test_closing_tells_everybody() -> None:
    stage = Stage()
    works = [stage.ask() for _ in range(3)]
    stage.driver.close()
    assert all(isinstance(stage.one(work).error, Unavailable) for work in works)
    assert stage.writers[0].ended == ["close"]
    assert isinstance(stage.one(stage.ask()).error, Unavailable)


def test_how_long_an_answer_may_be() -> None:
    assert read_limit(b"", 80) == 80
    assert read_limit(b'{"id": "x", "parameters": {"max_tokens": 3}}', 80) == 3
    assert read_limit(b'{"parameters": {"max_tokens": 300}}', 80) == 80
    for wrong in (b"0", b"-1", b"true", b'"7"', b"1.5"):
        with pytest.raises(InvalidInput, match="max_tokens"):
            read_limit(b'{"parameters": {"max_tokens": ' + wrong + b"}}", 80)
    assert list(outputs("x", "")) == ["text_output"]
