"""Whenever the server is killed, it is in the same state afterwards; and from every state abort leads to
stable, in one catalogue."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.errors import WrongState
from carpool.extensions.rollout import rollouts, watched_rollout
from carpool.extensions.rollout.rollout_file import Record, as_json, read_record, write_document
from carpool.extensions.rollout.rollout_states import GuardVerdict, Rollout, State, act, advance, failed
from carpool.extensions.rollout.settings import GuardSettings, RolloutSettings
from carpool.extensions.rollout.split import splits_of
from engine.scripted import run, weights
from extensions.rollout.lives import Life, Loader, life, models
from waiting import PATIENCE_S
from waiting import until as until_at_once
from waiting import until_in_loop as until

PLAN = (
    "shadow = 1.0\nshadow_h = 24\ncanary = [0.1, 0.5]\ncanary_h = 24\nstandby_h = 24\nleast = 20\n"
    'evaluate = "labelled.csv"\n'  # which is not there: it waits in `checked`
)
WALK = (  # what is done, and where it leads
    ("", "checked", 0),
    ("promote", "shadow", 0),
    ("pause", "paused", 0),
    ("resume", "shadow", 0),
    ("promote", "canary", 1),
    ("promote", "canary", 2),
    ("pause", "paused", 2),
    ("resume", "canary", 2),
    ("promote", "standby", 0),
    ("pause", "paused", 0),
    ("resume", "standby", 0),
    ("promote", "done", 0),
)
GOES_ON = {"loading": "checked", "full": "standby", "retired": "done"}  # at once


# ---- the file


class Killed(BaseException):
    """Nothing that would have come after this happens."""


def record(rollout: Rollout, plan: RolloutSettings = RolloutSettings()) -> Record:  # noqa: B008
    made = Record("m", plan, rollout, digests={"1": "a", "2": "b"})
    made.note(1.7e9, "", "by hand")
    return made


@given(torn=st.integers(0, 2000), calls=st.integers(0, 3))
def test_killed_in_the_middle_of_a_write_the_file_is_the_old_one_or_the_new_one(
    torn: int, calls: int
) -> None:
    """`calls`: of writing, forcing to the disk and renaming so many happen."""
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        path = Path(folder) / "m.json"
        old, new = (record(Rollout("1", "2", state)) for state in (State.SHADOW, State.ROLLED_BACK))
        write_document(path, as_json(old, 0.0))
        fsync, rename = os.fsync, Path.replace

        def force(fd: int) -> None:
            if calls == 0:
                os.ftruncate(fd, min(torn, os.fstat(fd).st_size))
            if calls <= 1:
                raise Killed
            fsync(fd)

        def move(self: Path, target: Path) -> Path:
            if calls == 2:
                raise Killed
            moved = rename(self, target)
            raise Killed if calls == 3 else AssertionError(moved)

        patch.setattr(os, "fsync", force)
        patch.setattr(Path, "replace", move)
        patch.setattr(Path, "unlink", lambda _self: None)  # the dead tidy nothing up
        with pytest.raises(Killed):
            write_document(path, as_json(new, 0.0))
        patch.undo()
        back, trouble = read_record(path)
        assert trouble == ""
        assert back is not None
        assert back.rollout == (new if calls == 3 else old).rollout
        write_document(path, as_json(new, 0.0))
        assert [each.name for each in Path(folder).iterdir()] == ["m.json"]


@given(st.data())
def test_a_file_that_was_cut_off_or_changed_is_understood_or_left_as_it_is(data: st.DataObject) -> None:
    document = as_json(record(Rollout("1", "2", State.CANARY, 1, 50.0)), 0.0)
    place = data.draw(st.integers(0, len(document) - 1))
    damaged = data.draw(
        st.sampled_from([document[:place], document[:place] + b"\0" * (len(document) - place)])
        | st.binary(min_size=1, max_size=4).map(lambda more: document[:place] + more + document[place + 1 :])
    )
    with TemporaryDirectory() as folder:
        path = Path(folder) / "m.json"
        path.write_bytes(damaged)
        back, trouble = read_record(path)
        assert (back is None) == ("cannot be parsed" in trouble)
        assert path.read_bytes() == damaged
        if back is not None:
            rollout = back.rollout
            assert rollout.serving in rollout.wanted
            assert 0.0 <= rollout.traffic(back.plan).share < 1.0
            assert act(rollout, back.plan, "abort", 0.0).wanted == (rollout.stable,)
            assert as_json(back, 0.0)


EVENTS = ["promote", "pause", "resume", "abort", "tick", "proven", "breach", "fails"]


def after(rollout: Rollout, plan: RolloutSettings, event: str, now: float) -> Rollout:
    verdicts = {"proven": GuardVerdict(proven=True), "breach": GuardVerdict("9 of 9 differ", "disagreement")}
    if event in ("tick", *verdicts):
        return advance(
            rollout, plan, now, verdicts.get(event, GuardVerdict(waits_for="more")), 500, loaded=True
        )
    if event == "fails":
        return failed(rollout, now, "its files changed")
    with suppress(WrongState):
        return act(rollout, plan, event, now)
    return rollout


@given(
    st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 30)), max_size=25),
    st.sampled_from([0.0, 1.0]),
    st.sampled_from([(), (0.1,), (0.1, 0.5)]),
    st.sampled_from(["rollback", "pause"]),
)
def test_killed_before_every_event_it_goes_the_same_way(
    events: list[tuple[str, int]], shadow: float, canary: tuple[float, ...], on_breach: str
) -> None:
    guards = GuardSettings(on_breach=on_breach)
    plan = RolloutSettings(
        shadow=shadow, canary=canary, shadow_h=1, canary_h=1, standby_h=1, least=0, guards=guards
    )
    whole, now = Rollout("1", "2", since=0.0), 0.0
    broken, clock = Rollout("1", "2", since=7e6), 7e6
    with TemporaryDirectory() as folder:
        path = Path(folder) / "m.json"
        for event, minutes in events:
            now, clock = now + 60.0 * minutes, clock + 60.0 * minutes
            path.write_bytes(as_json(record(broken, plan), clock))
            back, trouble = read_record(path)
            assert back is not None, trouble
            clock = (clock * 7.0) % 9e6  # another process, another clock
            broken = after(back.rollout.going(clock), plan, event, clock)
            whole = after(whole, plan, event, now)
            assert replace(broken.stopped(clock), why="") == replace(whole.stopped(now), why="")


# ---- the engine


@pytest.fixture(name="loader")
def gated_loader(monkeypatch: pytest.MonkeyPatch) -> Loader:
    loader = Loader()
    monkeypatch.setattr("carpool.backends.load", loader.load)
    return loader


@pytest.fixture(name="written")
def recorded_writes(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Every document that the engine keeps, if it is not followed by another at once."""
    documents: list[bytes] = []

    def recorded(*given: Any) -> bytes:
        documents.append(as_json(*given))
        return documents[-1]

    monkeypatch.setattr(watched_rollout, "as_json", recorded)
    return documents


async def check_abort(one: Life, state: str) -> None:
    """Whoever is stable has everything, from the first catalogue on."""
    stable, count = one.status()["stable"], len(one.catalogs)
    found = await one.act("abort", reason="enough")
    assert found["state"] == ("done" if state == "done" else "rolled-back")
    for catalog in one.catalogs[count:]:
        assert catalog.newest["m"].version == stable
        assert "m" not in splits_of(catalog)
    await until(lambda: one.loaded == {stable})


@pytest.mark.conformance
def test_killed_after_any_write_it_is_in_the_same_state_and_can_be_aborted(
    tmp_path: Path, loader: Loader, written: list[bytes]
) -> None:
    models(tmp_path, PLAN)

    async def to_the_end() -> None:
        async with life(tmp_path) as one:
            await until(loader.waiting.is_set)
            assert one.status()["state"] == "loading"
            loader.gate.set()
            for action, state, step in WALK:
                if action:
                    await one.act(action)
                found = await one.until(state)
                assert found["step"] == step
                watched = one.desk.rollouts.find("m")
                assert watched is not None
                watched.record.rollout = replace(watched.record.rollout, spent=1000.0)

    run(to_the_end())
    documents = [document for document in written if orjson.loads(document)["candidate"] == "2"]
    states = [(document["state"], document["step"]) for document in map(orjson.loads, documents)]
    for state in ("loading", "checked", "shadow", "paused", "full", "standby", "retired", "done"):
        assert (state, 0) in states
    assert {("canary", 1), ("canary", 2), ("paused", 2)} <= set(states)
    (file,) = (tmp_path / "state" / "rollouts").glob("*.json")

    async def again(document: dict[str, Any]) -> None:
        async with life(tmp_path) as one:
            found = await one.until(GOES_ON.get(document["state"], document["state"]))
            settled = found["state"] == document["state"]
            await until(lambda: one.loaded == ({"2"} if found["state"] == "done" else {"1", "2"}))
            for key in ("step", "stable", "candidate"):
                assert found[key] == document[key]
            assert found["paused_in"] == document["before"]
            assert 0.0 <= found["elapsed_s"] - (document["spent"] if settled else 0.0) <= 10.0
            under_way = document["before"] or found["state"]
            share = {"canary": (0.0, 0.1, 0.5)[document["step"]], "standby": 1.0}.get(under_way, 0.0)
            await until(lambda: one.status()["share"] == share)  # when it was looked at
            assert one.serves == ("2" if under_way in ("standby", "done") else "1")
            await check_abort(one, found["state"])
        if document["state"] == "standby":
            async with life(tmp_path) as one:  # and after a restart it still is
                assert (one.status()["state"], one.loaded) == ("rolled-back", {"1"})

    for document, following in zip(documents, [*documents[1:], b""], strict=True):
        file.write_bytes(document)
        file.with_name(f".{file.name}.1").write_bytes(following[: len(following) // 2])  # it came so far
        run(again(orjson.loads(document)))


def test_killed_while_it_loads_it_loads_again(tmp_path: Path, loader: Loader) -> None:
    models(tmp_path, PLAN)

    async def story() -> None:
        for _ in range(2):
            loader.waiting.clear()
            async with life(tmp_path) as one:
                await until(loader.waiting.is_set)
                assert (one.status()["state"], one.serves, one.loaded) == ("loading", "1", {"1"})
                loader.gate.set()  # only so that this life can end
            loader.gate.clear()

    run(story())


def test_one_is_started_while_it_is_written_down_who_was_there_first(
    tmp_path: Path, loader: Loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    models(tmp_path, PLAN, {1: "1"})
    folders, digest_of, asked = rollouts.version_folders, rollouts.digest_of, threading.Event()

    def late_folders(home: Path) -> dict[int, Path]:
        assert asked.wait(PATIENCE_S)
        found: dict[int, Path] = folders(home)
        return {number: place for number, place in found.items() if number == 1}

    def late_digest(home: Path, version: str) -> str:
        asked.set()
        until_at_once(lambda: list((tmp_path / "state" / "rollouts").glob("*.json")))
        return digest_of(home, version)

    monkeypatch.setattr(rollouts, "version_folders", late_folders)
    monkeypatch.setattr(rollouts, "digest_of", late_digest)

    async def story() -> None:
        async with life(tmp_path) as one:
            weights(tmp_path / "models", "m", 2, "1")
            assert (await one.act("start", version=2))["state"] == "loading"
            loader.gate.set()

    run(story())


def test_stopped_while_it_loads_it_has_not_failed(
    tmp_path: Path, loader: Loader, caplog: pytest.LogCaptureFixture
) -> None:
    """A stop gives up what loads; the next start loads it again."""
    models(tmp_path, PLAN)

    async def story() -> None:
        async with life(tmp_path) as one:
            await until(loader.waiting.is_set)
            closed = asyncio.ensure_future(until(lambda: one.host.engine.control.closed))
            closed.add_done_callback(lambda _: loader.gate.set())
        (file,) = (tmp_path / "state" / "rollouts").glob("*.json")
        assert orjson.loads(file.read_bytes())["state"] == "loading"
        async with life(tmp_path) as one:
            await until(lambda: one.loaded == {"1", "2"})
            assert one.status()["state"] != "failed"
        assert "failed" not in caplog.text

    run(story())


def test_a_load_that_a_stop_has_given_up_has_not_failed(tmp_path: Path, loader: Loader) -> None:
    models(tmp_path, PLAN)

    async def story() -> None:
        async with life(tmp_path) as one:
            await until(loader.waiting.is_set)
            one.host.give_up_loads()
            await until(lambda: not one.host.engine.control.under_way)
            loader.gate.set()
        (file,) = (tmp_path / "state" / "rollouts").glob("*.json")
        assert orjson.loads(file.read_bytes())["state"] == "loading"

    run(story())


def test_abort_while_it_loads_leaves_stable_alone(tmp_path: Path, loader: Loader) -> None:
    models(tmp_path, PLAN)

    async def story() -> None:
        async with life(tmp_path) as one:
            await until(loader.waiting.is_set)
            assert (await one.act("abort"))["state"] == "rolled-back"
            assert one.serves == "1"
            loader.gate.set()
            await until(lambda: not one.host.engine.control.under_way)
            await until(lambda: one.loaded == {"1"})
            assert one.status()["state"] == "rolled-back"

    run(story())


# ---- files that go


def test_one_that_was_sent_back_does_not_serve_when_stable_is_gone(tmp_path: Path, loader: Loader) -> None:
    models(tmp_path, PLAN)
    loader.gate.set()
    home = tmp_path / "models" / "m"

    async def story() -> None:
        async with life(tmp_path) as one:
            await one.until("checked")
            await one.act("abort")
            await until(lambda: one.loaded == {"1"})
        shutil.move(home / "1", tmp_path / "1")
        async with life(tmp_path) as one:
            assert one.loaded == set()
            message = one.failed["m"].message
            assert "version 1, which serves, is not in its folder, and version 2 is rolled-back" in message
            assert one.status()["trouble"] == message.removeprefix("m: ")
        weights(tmp_path / "models", "m", 3, "1")
        async with life(tmp_path) as one:  # somebody nobody has sent back
            await until(lambda: one.loaded == {"3"})
            await until(lambda: one.status()["stable"] == "3")
        shutil.rmtree(home / "3")
        shutil.move(tmp_path / "1", home / "1")
        async with life(tmp_path) as one:
            assert one.loaded == {"1"}

    run(story())


@pytest.mark.parametrize(
    ("state", "gone", "ends", "stays"),
    [
        ("checked", "1", "failed", "1"),
        ("checked", "2", "failed", "1"),
        ("standby", "2", "failed", "1"),
        ("standby", "1", "done", "2"),  # no way leads back
    ],
)
def test_a_folder_that_goes_while_it_is_rolled_out(
    tmp_path: Path, loader: Loader, state: str, gone: str, ends: str, stays: str
) -> None:
    models(tmp_path, PLAN)
    loader.gate.set()

    async def story() -> None:
        async with life(tmp_path) as one:
            found = await one.until("checked")
            while found["state"] != state:
                found = await one.act("promote")
            shutil.rmtree(tmp_path / "models" / "m" / gone)
            with suppress(Exception):
                await one.host.engine.control.load("m")  # as whoever looks at the folder does
            found = await one.until(ends)
            assert f"version {gone}" in found["why"]
            assert one.serves == stays

    run(story())


def test_two_starts_at_once_are_one(tmp_path: Path, loader: Loader) -> None:
    models(tmp_path, PLAN, {1: "1", 2: "1", 3: "1"})
    loader.gate.set()

    async def story() -> list[object]:
        async with life(tmp_path) as one:
            await one.until("checked")
            await one.act("abort")
            starts = [one.act("start", version=version) for version in (1, 3)]
            found = await asyncio.gather(*starts, return_exceptions=True)
            assert (await one.until("checked"))["stable"] == "2"
            return list(found)

    answers = run(story())
    assert sum(isinstance(answer, WrongState) for answer in answers) == 1


def test_writes_do_not_pile_up_behind_a_disk_that_hangs(tmp_path: Path) -> None:
    jobs: list[tuple[Future[None], Callable[[], None]]] = []

    class Hangs:
        def submit(self, work: Callable[..., None], *given: Any) -> Future[None]:
            jobs.append((Future(), lambda: work(*given)))
            return jobs[-1][0]

    watched = watched_rollout.WatchedRollout(record(Rollout("1", "2", State.SHADOW)), tmp_path / "m.json")
    for number in range(100):
        watched.record.rollout = replace(watched.record.rollout, why=str(number))
        watched.save(cast("Any", Hangs()))
    assert len(jobs) == 1
    jobs[0][1]()
    assert orjson.loads((tmp_path / "m.json").read_bytes())["why"] == "99"
    watched.save(cast("Any", Hangs()))
    assert len(jobs) == 2


def test_a_disk_that_was_full_has_the_end_of_it_later(
    tmp_path: Path, loader: Loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    models(tmp_path, PLAN)
    loader.gate.set()
    monkeypatch.setattr("carpool.extensions.rollout.rollouts._SAVE_S", 0.0)
    monkeypatch.setattr("carpool.extensions.rollout.rollouts._TICK_S", 0.01)
    write = watched_rollout.write_document

    def full(_path: Path, _document: bytes) -> None:
        raise OSError(28, "No space left on device")

    async def story() -> None:
        async with life(tmp_path) as one:
            await one.until("checked")
            monkeypatch.setattr(watched_rollout, "write_document", full)
            found = await one.act("abort")
            assert "No space left" in found["trouble"]
            monkeypatch.setattr(watched_rollout, "write_document", write)
            await until(lambda: not one.status()["trouble"])
            (file,) = (tmp_path / "state" / "rollouts").glob("*.json")
            assert orjson.loads(file.read_bytes())["state"] == "rolled-back"

    run(story())
