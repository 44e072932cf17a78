"""Encoders in processes of their own: right texts, and whoever dies, hangs or lies takes nobody along."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from carpool.backends import fake
from carpool.backends.fake import FakeStepper, fake_text
from carpool.backends.stepper import EncoderOrder
from carpool.config.model import FakeSettings
from carpool.config.repository import ModelSource, find_models
from carpool.demo import text_model
from carpool.engine.engine import Engine
from carpool.engine.generation import encoder_process
from carpool.engine.generation.encoder_process import EncoderDied, EncoderProcess
from carpool.engine.models.text_model import TextModel, text_document
from carpool.errors import CarpoolError, ConfigError, DeadlineExceeded, ModelError, Unavailable
from carpool.memory.host_rows import HostRows, RowForm, create_rows
from waiting import until as wait_until

PIECES = encoder_process._PIECES
ODD = """
import os, signal, sys, time
from carpool.runner import encoder_worker


class Odd(encoder_worker.EncoderWorker):
    def answer(self, asked):
        if "inputs" in asked:
            pictures = self._inputs.read(asked["inputs"]).values()
            {what}
        return super().answer(asked)


encoder_worker.EncoderWorker = Odd
sys.exit(encoder_worker.main(sys.argv[1:]))
"""
POISON = np.frombuffer(b"poison", np.uint8)
DIES_OF_POISON = (
    "if any(one.tobytes() == b'poison' for one in pictures): os.kill(os.getpid(), signal.SIGSEGV)"
)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder_process, "_FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(encoder_process, "_BEAT_S", 0.05)


def odd(folder: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """From now on processes do this with what they are given."""
    (folder / "odd_encoder.py").write_text(ODD.format(what=what))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setattr(encoder_process, "_WORKER", "odd_encoder")


def source_of(folder: Path, settings: str = "", curve: str = "0.1+0.01") -> ModelSource:
    model = folder / "writer"
    model.mkdir(parents=True)
    pools = settings or "[encoder]\nown_process = true"
    fake = f'[fake]\ncurve = "{curve}"\nstep_curve = "0.1+0.001"\n'
    (model / "model.toml").write_text(f"[generate]\nslots = 32\n{pools}\n{fake}")
    (source,), _ = find_models([model])
    return source


@contextmanager
def encoders(source: ModelSource, count: int = 1) -> Iterator[list[EncoderProcess]]:
    found: list[EncoderProcess] = []
    for number in range(count):
        order = EncoderOrder(source.config, source.versions[-1], number, 1, None)
        found.append(EncoderProcess(order, fake, lambda: None))
    for one in found:
        one.pool = found
    try:
        for one in found:
            one.loaded(FakeStepper(replace(source.config, fake=FakeSettings())))
        yield found
    finally:
        for one in found:
            one.close()


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def pid_of(one: EncoderProcess) -> int:
    assert one._process is not None
    return one._process.pid


def texts(count: int) -> list[Any]:
    return [np.frombuffer(f"text {n}".encode(), np.uint8) for n in range(count)]


def read(rows: Any) -> list[bytes]:
    return [one.tobytes() for one in rows]


# ---- rows in memory that both map


def test_pieces_come_back_when_nobody_has_their_rows() -> None:
    form, back = RowForm("<f4", 8, 3, (2,)), list[int]()
    file = create_rows()
    ours = HostRows.grown(form, file, 4)
    theirs = HostRows(form, file)
    os.close(file)
    given = [np.arange(6, dtype=np.float32).reshape(3, 2), np.full((1, 2), 7, np.float32)]
    assert theirs.put([2, 0], given) == [3, 1]
    taken = [ours.rows(2, 3, lambda: back.append(2)), ours.rows(0, 1, lambda: back.append(0))]
    assert [one.tolist() for one in taken] == [one.tolist() for one in given]
    part = taken[0][1:]
    taken.clear()
    assert back == [0]  # somebody still has a part of the other
    assert part.tolist() == [[2.0, 3.0], [4.0, 5.0]]
    del part
    assert back == [0, 2]
    for piece, count in ((4, 1), (-1, 1), (0, 4), (0, 0)):
        with pytest.raises(ValueError, match="rows"):
            ours.rows(piece, count, lambda: None)


@pytest.mark.parametrize(
    "form",
    [
        RowForm("O", 8, 1, ()),
        RowForm("no such thing", 8, 1, ()),
        RowForm("<f4", 4, 0, ()),
        RowForm("<f4", 8, 1, (3,)),
        RowForm("<f4", 4, 1, (-1, -1)),
        RowForm("<f4", 4, 1 << 40, ()),
    ],
)
def test_forms_that_cannot_be_are_refused(form: RowForm) -> None:
    file = create_rows()
    with pytest.raises(ValueError, match="rows"):
        HostRows.grown(form, file, 2)
    assert os.fstat(file).st_size == 0
    os.close(file)


@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16"])
def test_rows_of_pytorch_go_over_as_they_are(kind: str) -> None:
    torch = pytest.importorskip("torch")
    from carpool.backends.torch import torch_rows

    given = [
        torch.randn(rows, 3, generator=torch.manual_seed(rows)).to(getattr(torch, kind)) for rows in (5, 2)
    ]
    form, back, file = torch_rows.form_of(given[0]), list[int](), create_rows()
    ours = torch_rows.make(form, file, 2, None)
    counts = torch_rows.opened(form, file, ours.told).put([1, 0], given)
    os.close(file)
    taken = [ours.rows(1, counts[0], lambda: back.append(1)), ours.rows(0, counts[1], lambda: back.append(0))]
    assert all(torch.equal(one, other) for one, other in zip(taken, given, strict=True))
    part = taken[0].view(torch.int16)[1:]
    taken.clear()
    assert back == [0]
    del part
    assert back == [0, 1]
    with pytest.raises(ValueError, match="rows"):
        torch_rows.make(replace(form, datatype="float64"), file, 2, None)


# ---- one process and its stand-in


def test_memory_stays_as_it_is_over_thousands_of_encodings(tmp_path: Path) -> None:
    given = texts(40)
    with encoders(source_of(tmp_path, curve="0.001+0")) as (one,):
        held = one.encode(given[:3])
        files, finalizers = open_files(), len(weakref.finalize._registry)  # type: ignore[attr-defined]
        for turn in range(2000):
            assert read(one.encode(given[: 1 + turn % 40])) == read(given[: 1 + turn % 40])
        assert one._free.qsize() == PIECES - 3
        assert read(held) == read(given[:3])  # what somebody has is written over by nobody
        del held
        assert one._free.qsize() == PIECES
        assert open_files() == files
        assert len(weakref.finalize._registry) == finalizers - 3  # type: ignore[attr-defined]


def test_who_takes_no_rows_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder_process, "_PATIENCE_S", 0.05)
    with encoders(source_of(tmp_path)) as (one,):
        held = [*one.encode(texts(32)), *one.encode(texts(30))]
        with pytest.raises(ModelError, match="do not take"):
            one.encode(texts(3))
        assert one._free.qsize() == 2
        held.pop()
        assert read(one.encode(texts(3))) == read(texts(3))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_process_that_is_killed_is_followed_by_another(tmp_path: Path, number: int) -> None:
    with encoders(source_of(tmp_path)) as (one,):
        kept = one.encode(texts(2))
        first = pid_of(one)
        os.kill(first, number)
        wait_until(lambda: one.up and one._process is not None and pid_of(one) != first, "another process")
        assert read(one.encode(texts(3))) == read(texts(3))
        assert read(kept) == read(texts(2))


def test_one_that_dies_over_a_picture_costs_that_picture_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd(tmp_path, monkeypatch, DIES_OF_POISON)
    with encoders(source_of(tmp_path)) as (one,):
        with pytest.raises(EncoderDied, match=r"signal 11"):
            one.encode([*texts(2), POISON])
        assert read(one.encode(texts(2))) == read(texts(2))  # waits for the next process
        with pytest.raises(EncoderDied, match=r"signal 11"):
            one.encode([POISON])
        assert read(one.encode(texts(1))) == read(texts(1))
        assert one._free.qsize() == PIECES


def test_one_that_is_killed_once_encodes_the_same_picture_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = tmp_path / "died"
    odd(tmp_path, monkeypatch, f"if not os.path.exists({str(mark)!r}): open({str(mark)!r}, 'x'); os._exit(9)")
    with encoders(source_of(tmp_path)) as (one,):
        assert read(one.encode(texts(1))) == read(texts(1))
        assert mark.exists()


def test_while_one_is_down_the_others_of_its_pool_help(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoder_process, "_FIRST_PAUSE_S", 600.0)
    with encoders(source_of(tmp_path), 2) as (one, other):
        os.kill(pid_of(one), signal.SIGKILL)
        wait_until(lambda: not one.up, "it is down")
        assert read(one.encode(texts(3))) == read(texts(3))
        assert other._free.qsize() == PIECES


def test_who_waits_too_long_for_a_process_hears_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder_process, "_FIRST_PAUSE_S", 600.0)
    monkeypatch.setattr(encoder_process, "_PATIENCE_S", 0.1)
    with encoders(source_of(tmp_path)) as (one,):
        beats: list[int] = []
        one._tell = lambda: beats.append(1)
        os.kill(pid_of(one), signal.SIGKILL)
        wait_until(lambda: not one.up, "it is down")
        with pytest.raises(Unavailable, match="being restarted"):
            one.encode(texts(2))
        assert beats


def test_one_that_hangs_is_killed_and_followed_by_another(tmp_path: Path) -> None:
    source = source_of(tmp_path)
    source = replace(source, config=replace(source.config, execution_timeout=0.5))
    with encoders(source) as (one,):
        first = pid_of(one)
        os.kill(first, signal.SIGSTOP)
        with pytest.raises(DeadlineExceeded, match="did not answer"):
            one.encode(texts(1))
        assert read(one.encode(texts(3))) == read(texts(3))
        assert pid_of(one) != first
        assert one._free.qsize() == PIECES


def test_aborting_ends_an_encoding_that_hangs(tmp_path: Path) -> None:
    with encoders(source_of(tmp_path)) as (one,):
        pid, found = pid_of(one), list[CarpoolError]()

        def encode() -> None:
            try:
                one.encode(texts(1))
            except CarpoolError as error:
                found.append(error)

        os.kill(pid, signal.SIGSTOP)
        thread = threading.Thread(target=encode)
        thread.start()
        one.abort()
        thread.join(30)
        assert [error.reason for error in found] == ["aborted"]
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize(
    "said",
    [
        "{'rows': 'many'}",
        "{'rows': [1]}",
        "{'rows': [1, 41]}",
        "{'rows': [1, 0]}",
        "{'rows': [True, 1]}",
        "{'rows': [1, 1.0]}",
        "{}",
    ],
)
def test_what_a_process_says_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    odd(tmp_path, monkeypatch, f"return {said}")
    with encoders(source_of(tmp_path)) as (one,):
        with pytest.raises(ModelError, match="broken answer"):
            one.encode(texts(2))
        assert one._free.qsize() == PIECES


def test_an_error_of_a_model_is_told_and_the_process_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd(tmp_path, monkeypatch, "if len(pictures) > 2: raise RuntimeError('a kernel failed')")
    with encoders(source_of(tmp_path)) as (one,):
        pid = pid_of(one)
        with pytest.raises(ModelError, match=r"writer: RuntimeError: a kernel failed"):
            one.encode(texts(3))
        assert read(one.encode(texts(2))) == read(texts(2))
        assert pid_of(one) == pid


def test_one_that_cannot_be_loaded_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = source_of(tmp_path)
    wrong = replace(source.config, fake=FakeSettings(curve="no curve"))
    with pytest.raises(ModelError, match="no curve"), encoders(replace(source, config=wrong)):
        raise AssertionError("it was loaded")
    monkeypatch.setattr(encoder_process, "_WORKER", "carpool.no_such_module")
    with pytest.raises(ModelError, match=r"died \(exit status 1\)"), encoders(source):
        raise AssertionError("it was loaded")
    (tmp_path / "odd_encoder.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(encoder_process, "_WORKER", "odd_encoder")
    with pytest.raises(ModelError, match=r"died \(signal 9\)"), encoders(source):
        raise AssertionError("it was loaded")


# ---- with an engine around it


def picture(seed: int) -> Any:
    return np.random.default_rng(seed).integers(0, 256, (1, 32, 64), dtype=np.uint8)


def processes(engine: Engine) -> list[EncoderProcess]:
    served = engine.find("writer")
    assert isinstance(served, TextModel)
    return [one for writer in served.text._writers.values() for one in writer._instance.encoders]  # type: ignore[attr-defined]


def test_an_engine_answers_who_rode_in_a_process_that_was_killed(tmp_path: Path) -> None:
    """Nobody is lost, the model says meanwhile that it is not ready, and no process is left behind."""
    source_of(tmp_path, "[encoder]\nown_process = true\n[decoder]\ninstances = 2", curve="200+0")
    pids: list[int] = []

    async def play() -> None:
        async with Engine(tmp_path / "writer") as engine:
            served = engine.find("writer")
            assert isinstance(served, TextModel)
            assert text_document(served)["own_processes"] == ["encoder"]
            (one,) = processes(engine)
            changes: list[bool] = []
            served.changed = lambda: changes.append(served.able)
            pids.append(pid_of(one))
            asked = [picture(seed) for seed in range(6)]
            tasks = [asyncio.create_task(engine.infer("writer", {"image": each})) for each in asked]
            gone = asyncio.create_task(engine.infer("writer", {"image": asked[0]}))
            async with asyncio.timeout(60):
                while one._free.qsize() == PIECES:  # until some are being encoded, which takes 200 ms
                    await asyncio.sleep(0.01)
            os.kill(pids[0], signal.SIGKILL)
            gone.cancel()
            for each, task in zip(asked, tasks, strict=True):
                assert (await task)["text_output"].tolist() == [fake_text(each)]
            pids.append(pid_of(one))
            assert changes == [False, True]
            assert one._free.qsize() == PIECES

    asyncio.run(play())
    assert len(set(pids)) == 2
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "no process is left")


def test_newcomers_are_refused_while_nobody_encodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder_process, "_FIRST_PAUSE_S", 600.0)
    source_of(tmp_path)

    async def play() -> None:
        async with Engine(tmp_path / "writer") as engine:
            served = engine.find("writer")
            assert served.able
            os.kill(pid_of(processes(engine)[0]), signal.SIGKILL)
            async with asyncio.timeout(60):
                while served.able:
                    await asyncio.sleep(0.01)
            with pytest.raises(Unavailable, match="being restarted"):
                await engine.infer("writer", {"image": picture(1)})

    asyncio.run(play())


def test_a_poisoned_picture_costs_only_its_own_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = fake_text(picture(3))
    odd(tmp_path, monkeypatch, DIES_OF_POISON.replace("b'poison'", repr(bad)))
    source_of(tmp_path, curve="50+0")

    async def play() -> None:
        async with Engine(tmp_path / "writer") as engine:
            asked = [engine.infer("writer", {"image": picture(seed)}) for seed in range(8)]
            answers = await asyncio.gather(*asked, return_exceptions=True)
            for seed, answer in enumerate(answers):
                if seed == 3:
                    assert isinstance(answer, ModelError)
                    assert answer.reason == "model-died"
                else:
                    assert not isinstance(answer, BaseException), answer
                    assert answer["text_output"].tolist() == [fake_text(picture(seed))]

    asyncio.run(play())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("[decoder]\nown_process = true", "decoder.own_process"),
        ("[encoder]\nown_process = 1", "encoder.own_process"),
    ],
)
def test_settings_that_cannot_be(tmp_path: Path, settings: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        source_of(tmp_path, settings)


@pytest.mark.conformance
def test_an_encoder_in_its_process_writes_what_one_instance_writes(tmp_path: Path) -> None:
    """The reader that ships, token by token."""
    pytest.importorskip("torch")
    random = np.random.default_rng(5)
    lines = [random.integers(0, 256, (1, 32, 64 + 8 * n), dtype=np.uint8) for n in range(12)]

    async def written(settings: str) -> list[Any]:
        model = tmp_path / f"reader{len(settings)}" / "reader"
        shutil.copytree(text_model(), model)
        told = (model / "model.toml").read_text().replace("max_tokens = 80", "max_tokens = 24\nslots = 3")
        (model / "model.toml").write_text(told + settings)
        async with Engine(model) as engine:
            asked = (engine.infer("reader", {"image": line}) for line in lines)
            return [answer["text_output"].tolist() for answer in await asyncio.gather(*asked)]

    whole = asyncio.run(written(""))
    assert len({str(text) for text in whole}) > 1
    pools = "\n[encoder]\ninstances = 2\nown_process = true\n[decoder]\ninstances = 2\n"
    assert asyncio.run(written(pools)) == whole
