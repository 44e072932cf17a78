"""Engines that share rollouts: one goes on for all, an abort anywhere is one everywhere, and who is cut off
goes nowhere."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from carpool.errors import Unavailable, WrongState
from carpool.extensions.rollout import shared_rollouts
from carpool.extensions.rollout.command import sentences
from carpool.extensions.rollout.rollout_guards import Counts, Side
from carpool.extensions.rollout.rollout_states import act
from carpool.extensions.rollout.shared_places import FolderPlace, OutOfReach
from carpool.extensions.rollout.split import splits_of
from engine.scripted import run, weights
from extensions.rollout import staged
from extensions.rollout.lives import Life, Loader, life, models
from link.redis_server import redis_server
from waiting import PATIENCE_S
from waiting import until_in_loop as until

HELD = "shadow = 0\ncanary = [0.1, 0.5]\ncanary_h = 24\nstandby_h = 24\nleast = 20\n"
NOW = "shadow = 0\ncanary = [0.5]\ncanary_h = 0\nstandby_h = 24\nleast = 400\n"
TWO = ("a", "b")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("carpool.backends.load", staged.load)
    monkeypatch.setattr(shared_rollouts, "_LOOK_S", 0.03)
    monkeypatch.setattr(shared_rollouts, "_FIRST_LOOK_S", 0.5)
    monkeypatch.setattr(shared_rollouts, "_CUT_OFF_S", 0.02)
    monkeypatch.setattr("carpool.extensions.rollout.rollouts._TICK_S", 0.03)


@pytest.fixture(name="place")
def shared_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "shared"
    folder.mkdir()
    return folder


@contextlib.asynccontextmanager
async def replicas(folder: Path, place: str, names: tuple[str, ...] = TWO) -> AsyncIterator[list[Life]]:
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(life(folder, name, place)) for name in names]


async def all_in(lives: list[Life], state: str, step: int = 0) -> None:
    def found() -> set[tuple[str, int | None]]:
        return {(said["state"], said.get("step")) for said in (one.status() for one in lives)}

    await until(lambda: found() == {(state, step)})


def watched(one: Life) -> Any:
    found = one.desk.rollouts.find("m")
    assert found is not None
    return found


def document(place: Path) -> dict[str, Any]:
    (file,) = place.glob("m-*.json")
    return dict(orjson.loads(file.read_bytes()))


@pytest.mark.parametrize("kind", ["file", "redis"])
def test_one_rollout_for_all_and_an_abort_anywhere_is_one_everywhere(
    tmp_path: Path, place: Path, kind: str
) -> None:
    models(tmp_path, HELD)

    async def story(where: str) -> None:
        async with replicas(tmp_path, where, ("a", "b", "c")) as lives:
            await all_in(lives, "canary", 1)
            assert len({watched(one).record.mark for one in lives}) == 1, "whoever was first began it for all"
            # The routes are told behind the state.
            await until(lambda: all("m" in splits_of(one.host.catalog) for one in lives))
            assert len({splits_of(one.host.catalog)["m"].salt for one in lives}) == 1
            await lives[1].act("promote")
            await all_in(lives, "canary", 2)
            await lives[2].act("pause")
            await all_in(lives, "paused", 2)
            await lives[0].act("resume")
            await all_in(lives, "canary", 2)
            await lives[2].act("abort", reason="false alarms")
            await all_in(lives, "rolled-back")
            for one in lives:
                assert one.status()["why"] == "by hand: false alarms"
                await until(lambda one=one: one.loaded == {"1"})
                assert "m" not in splits_of(one.host.catalog)
        async with replicas(tmp_path, where, ("a", "new")) as lives:  # started again, and one more
            for one in lives:
                assert (one.status()["state"], one.serves, one.loaded) == ("rolled-back", "1", {"1"})

    if kind == "file":
        run(story(f"file:{place}"))
    else:
        with redis_server(place) as redis:
            run(story(redis.url))


def test_counts_add_up_and_prove_a_step_together(tmp_path: Path, place: Path) -> None:
    models(tmp_path, NOW + "guards = { disagreement = false, late = false, errors = 2.0 }\n")

    async def story() -> None:
        async with replicas(tmp_path, f"file:{place}") as lives:
            await all_in(lives, "canary", 1)
            for one in lives:
                watched(one).record.counts = Counts(Side(answers=250), Side(answers=250))
            await all_in(lives, "standby")
            for one in lives:
                lines = one.status()["history"]  # who looks later may go two steps at once
                assert "canary" in {line["from"] for line in lines}
            await until(lambda: all(one.serves == "2" for one in lives))
            shared = lives[0].status()["shared"]
            assert (shared["reached"], len(shared["replicas"])) == (True, 2)
            said = list(sentences(lives[0].status()))
            assert "2 replicas share it; 2 have loaded the candidate." in said
            assert any(line.startswith("errors: ") for line in said)
            assert not [line for line in said if ": off." in line], "guards that are switched off"

    run(story())


def test_what_each_alone_would_not_notice_all_together_do(tmp_path: Path, place: Path) -> None:
    models(tmp_path, HELD + "guards = { disagreement = 0.05, late = false, errors = false }\n")

    async def story() -> None:
        async with replicas(tmp_path, f"file:{place}", ("a", "b", "c")) as lives:
            await all_in(lives, "canary", 1)
            for one in lives:  # three of three differ: too few for one
                watched(one).record.counts = Counts(compared=3, differ=3, compared_here=3)
            await all_in(lives, "rolled-back")
            await until(lambda: len(reasons(lives, place)) == 1)
            assert "differ" in reasons(lives, place).pop()
            decided = [one for one in lives if one.status()["rollbacks"]]
            assert decided, "who noticed it counts it"

    run(story())


def reasons(lives: list[Life], place: Path) -> set[str]:
    """All that the replicas give, in their status and their history, and the one that is written for all."""
    given = {why for one in lives for why in (one.status()["why"], one.status()["history"][-1]["why"])}
    return {*given, document(place)["why"]}


def test_of_two_that_roll_back_at_once_the_first_that_is_written_gives_the_reason(
    tmp_path: Path, place: Path
) -> None:
    models(tmp_path, HELD + "guards = { disagreement = 0.05, late = false, errors = false }\n")

    async def story() -> None:
        async with replicas(tmp_path, f"file:{place}") as lives:
            await all_in(lives, "canary", 1)
            for one, seen in zip(lives, (30, 40), strict=True):  # each decides before the other has written
                watched(one).record.counts = Counts(compared=seen, differ=seen, compared_here=seen)
                one.desk.rollouts.decide(watched(one))
            own = {one.status()["why"] for one in lives}
            assert len(own) == 2
            assert {one.status()["state"] for one in lives} == {"rolled-back"}
            await until(lambda: len(reasons(lives, place)) == 1)
            assert reasons(lives, place) < own
        async with replicas(tmp_path, f"file:{place}") as lives:
            assert reasons(lives, place) < own, "and after the next start"

    run(story())


@pytest.mark.parametrize("first", [0, 1], ids=["by hand first", "the guard first"])
def test_of_a_pause_by_hand_and_one_by_a_guard_at_once_the_guards_holds_for_all(
    tmp_path: Path, place: Path, first: int
) -> None:
    guards = 'guards = { disagreement = 0.05, late = false, errors = false, on_breach = "pause" }\n'
    models(tmp_path, HELD + guards)

    async def story() -> None:
        async with replicas(tmp_path, f"file:{place}") as lives:
            await all_in(lives, "canary", 1)
            by_hand, by_guard = lives
            later = lives[1 - first].desk.rollouts.shared
            assert later is not None
            async with later._turns["m"]:  # its decision is written behind the other's
                rollouts, hand = by_hand.desk.rollouts, watched(by_hand)
                rollouts.moved(hand, act(hand.record.rollout, hand.record.plan, "pause", 0.0))
                watched(by_guard).record.counts = Counts(compared=40, differ=40, compared_here=40)
                by_guard.desk.rollouts.decide(watched(by_guard))
                assert [watched(one).record.rollout.held for one in lives] == [False, True]
                await until(lambda: document(place)["state"] == "paused")
            await until(lambda: all(watched(one).record.rollout.held for one in lives))
            await until(lambda: len({one.status()["why"] for one in lives}) == 1)
            assert "differ" in by_hand.status()["why"]
            assert (
                "m" not in splits_of(by_hand.host.catalog) or not splits_of(by_hand.host.catalog)["m"].share
            )

    run(story())


def unreachable(monkeypatch: pytest.MonkeyPatch, *who: Life) -> pytest.MonkeyPatch:
    """Only these, until it is undone."""
    places = {one.desk.rollouts.shared.place for one in who if one.desk.rollouts.shared is not None}
    read = FolderPlace._read

    def cut(self: FolderPlace, path: Path) -> bytes | None:
        if self in places:
            raise OSError(5, "Input/output error")
        return read(self, path)

    patch = pytest.MonkeyPatch()
    patch.setattr(FolderPlace, "_read", cut)
    return patch


def test_who_is_cut_off_stays_where_it_is_and_sends_nothing_to_the_candidate(
    tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models(tmp_path, HELD)

    async def story() -> None:
        async with replicas(tmp_path, f"file:{place}") as lives:
            near, far = lives
            await all_in(lives, "canary", 1)
            patch = unreachable(monkeypatch, far)
            await until(lambda: "m" not in splits_of(far.host.catalog))
            assert far.serves == "1"
            assert "Input/output error" in far.status()["shared"]["trouble"]
            assert "cannot be reached (Input/output error)" in " ".join(sentences(far.status()))
            with pytest.raises(Unavailable, match="only pause and abort"):
                await far.act("promote")
            assert (far.status()["state"], far.status()["step"]) == ("canary", 1)
            await near.act("promote")
            assert near.status()["step"] == 2
            assert far.status()["step"] == 1
            patch.undo()
            await all_in(lives, "canary", 2)
            await until(lambda: getattr(splits_of(far.host.catalog).get("m"), "share", 0.0) == 0.5)

    run(story())


@pytest.mark.parametrize("further", ["canary", "standby", "done"])
def test_an_abort_of_one_that_is_cut_off_is_told_later_and_wins(
    tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch, further: str
) -> None:
    models(tmp_path, HELD)

    async def story() -> None:
        async with replicas(tmp_path, f"file:{place}") as lives:
            near, far = lives
            await all_in(lives, "canary", 1)
            patch = unreachable(monkeypatch, far)
            assert (await far.act("abort"))["state"] == "rolled-back"
            await near.act("promote")
            if further != "canary":
                await near.act("promote")
                await near.until("standby")
            if further == "done":
                await near.act("promote")
                await near.until("done")
            patch.undo()
            await all_in(lives, "rolled-back")
            for one in lives:
                await until(lambda one=one: (one.serves, one.loaded) == ("1", {"1"}))

    run(story())


def test_it_is_in_the_file_after_a_crash_of_the_one_that_was_cut_off(
    tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models(tmp_path, HELD)

    async def story() -> None:
        async with life(tmp_path, "a", f"file:{place}") as near:
            async with life(tmp_path, "b", f"file:{place}") as far:
                await all_in([near, far], "canary", 1)
                patch = unreachable(monkeypatch, far)
                await far.act("abort")
            patch.undo()
            await near.act("promote")
            assert near.status()["step"] == 2
            async with life(tmp_path, "b", f"file:{place}") as far:
                await all_in([near, far], "rolled-back")
                assert far.serves == near.serves == "1"

    run(story())


def test_two_operators_start_different_rollouts_at_once(tmp_path: Path, place: Path) -> None:
    models(tmp_path, HELD, {1: "1", 2: "1", 3: "1"})

    async def story() -> None:
        async with replicas(tmp_path, f"file:{place}") as lives:
            await all_in(lives, "canary", 1)
            await lives[0].act("abort")
            await all_in(lives, "rolled-back")
            starts = (one.act("start", version=version) for one, version in zip(lives, (1, 3), strict=True))
            found = await asyncio.gather(*starts, return_exceptions=True)
            assert sum(isinstance(answer, WrongState) for answer in found) == 1
            await all_in(lives, "canary", 1)
            assert len({one.status()["candidate"] for one in lives}) == 1
            assert watched(lives[0]).record.mark.run == 2

    run(story())


@pytest.mark.parametrize("damage", ["emptied", "half", "noise"])
def test_a_place_that_lost_or_damaged_what_was_in_it_is_filled_again(
    tmp_path: Path, place: Path, damage: str
) -> None:
    models(tmp_path, HELD)

    async def story() -> None:
        async with replicas(tmp_path, f"file:{place}") as lives:
            await all_in(lives, "canary", 1)
            await lives[0].act("abort")
            await all_in(lives, "rolled-back")
            (file,) = place.glob("m-*.json")
            data = file.read_bytes()
            if damage == "emptied":
                file.unlink()
            else:
                file.write_bytes(data[: len(data) // 2] if damage == "half" else b"\xff" * 99)

            def whole() -> bool:
                with contextlib.suppress(OSError, ValueError):
                    return bool(document(place)["state"] == "rolled-back")
                return False

            await until(whole)
            async with life(tmp_path, "new", f"file:{place}") as fresh:
                assert (fresh.status()["state"], fresh.loaded) == ("rolled-back", {"1"})

    run(story())


def test_a_newer_format_is_left_alone(tmp_path: Path, place: Path) -> None:
    models(tmp_path, HELD)

    async def story() -> None:
        async with replicas(tmp_path, f"file:{place}") as lives:
            await all_in(lives, "canary", 1)
            newer = {**document(place), "format": 2}
            (file,) = place.glob("m-*.json")
            file.write_bytes(orjson.dumps(newer))
            await until(lambda: all("format 2" in one.status()["shared"]["trouble"] for one in lives))
            assert document(place)["format"] == 2
            assert {one.serves for one in lives} == {"1"}

    run(story())


def test_one_without_the_files_serves_stable_and_the_others_wait(
    tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody goes on before it is known, and nobody takes it for dead, however slow the disk is."""
    loader = Loader()
    monkeypatch.setattr("carpool.backends.load", loader.load)
    monkeypatch.setattr(shared_rollouts, "_ALIVE_S", PATIENCE_S)
    models(tmp_path, HELD)
    shutil.copytree(tmp_path / "models", tmp_path / "late")
    shutil.move(tmp_path / "late" / "m" / "2", tmp_path / "2")

    async def story() -> None:
        where = f"file:{place}"
        async with life(tmp_path, "b", where, "late") as late, life(tmp_path, "a", where) as early:
            await until(lambda: late.status()["state"] == early.status()["state"] == "loading")
            await until(lambda: late.status()["shared"]["replica"] in early.status()["shared"]["replicas"])
            loader.gate.set()
            await until(lambda: "has not loaded it yet" in early.status()["why"])
            await until(lambda: late.status().get("trouble") == "version 2 is not on this replica yet")
            assert (late.serves, early.serves) == ("1", "1")
            shutil.move(tmp_path / "2", tmp_path / "late" / "m" / "2")
            await all_in([late, early], "canary", 1)

    run(story())


def test_other_files_under_the_same_number_end_it_for_all(tmp_path: Path, place: Path) -> None:
    models(tmp_path, HELD)
    shutil.copytree(tmp_path / "models", tmp_path / "other")
    weights(tmp_path / "other", "m", 2, "7")

    async def story() -> None:
        where = f"file:{place}"
        async with life(tmp_path, "a", where) as one, life(tmp_path, "b", where, "other") as other:
            await all_in([one, other], "failed")
            assert "the files of version 2" in one.status()["why"]
            assert one.status()["why"].startswith(other.status()["shared"]["replica"])

    run(story())


def test_a_replica_with_older_settings_follows_the_plan_of_all(tmp_path: Path, place: Path) -> None:
    models(tmp_path, HELD)
    shutil.copytree(tmp_path / "models", tmp_path / "old")
    staged.settings(tmp_path / "old", None)

    async def story() -> None:
        where = f"file:{place}"
        async with life(tmp_path, "a", where) as one:
            await one.until("loading", "checked", "canary")
            async with life(tmp_path, "b", where, "old") as old:
                await all_in([one, old], "canary", 1)
                assert old.serves == "1", "without [rollout] it would have served the newest"
                assert old.status()["plan"] == one.status()["plan"]
                await one.act("abort")
                await until(lambda: old.loaded == {"1"})

    run(story())


def test_a_start_without_the_place_serves_what_it_knows_and_begins_nothing(
    tmp_path: Path, place: Path
) -> None:
    models(tmp_path, HELD)
    where = f"file:{place}"

    async def story() -> None:
        place.rmdir()
        async with life(tmp_path, "a", where) as one:
            assert (one.status()["state"], one.serves) == ("none", "1")
            with pytest.raises(Unavailable):
                await one.act("start", version=2)
            place.mkdir()
            await one.until("canary")
            await one.act("abort")
        shutil.rmtree(place)
        async with life(tmp_path, "a", where) as one:
            assert (one.status()["state"], one.serves) == ("rolled-back", "1")
            assert not place.exists()

    run(story())


def test_clocks_that_differ_change_nothing(
    tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing that is shared is a time of day."""
    models(tmp_path, HELD)
    monkeypatch.setattr("time.time", lambda: 1.0e9)

    async def story() -> None:
        async with life(tmp_path, "a", f"file:{place}") as one:
            await one.until("canary")
            monkeypatch.setattr("time.time", lambda: 2.0e9)
            async with life(tmp_path, "b", f"file:{place}") as other:
                await all_in([one, other], "canary", 1)
                await one.act("promote")
                await all_in([one, other], "canary", 2)
                assert other.status()["elapsed_s"] < 100.0

    run(story())


def test_redis_started_again_empty_brings_nothing_back(tmp_path: Path, place: Path) -> None:
    models(tmp_path, HELD)

    async def story() -> None:
        with redis_server(place) as redis:
            async with replicas(tmp_path, redis.url) as lives:
                await all_in(lives, "canary", 1)
                await lives[0].act("abort")
                await all_in(lives, "rolled-back")
                redis.end()
                await until(lambda: all(one.status()["shared"]["trouble"] for one in lives))
                redis.start()
                await until(lambda: not any(one.status()["shared"]["trouble"] for one in lives))
                await until(lambda: redis.ask("DBSIZE") == 1)
                async with life(tmp_path, "new", redis.url) as fresh:
                    assert (fresh.status()["state"], fresh.serves) == ("rolled-back", "1")

    run(story())


def test_who_never_gets_through_says_so(tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models(tmp_path, HELD)

    async def story() -> None:
        async with life(tmp_path, "a", f"file:{place}") as one:
            await one.until("canary")

            async def never(*_: object) -> bool:
                return False

            monkeypatch.setattr(FolderPlace, "swap", never)
            with pytest.raises(Unavailable, match="other replicas keep changing it"):
                await one.act("promote")
            assert one.status()["step"] == 1
            assert issubclass(OutOfReach, Exception)

    run(story())
