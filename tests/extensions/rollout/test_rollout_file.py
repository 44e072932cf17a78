"""What is kept: whole or the previous one, and nothing that is read is believed."""

from __future__ import annotations

import os
from pathlib import Path

import orjson
import pytest

from carpool.extensions.rollout.rollout_file import (
    Record,
    as_json,
    file_for,
    read_record,
    set_aside,
    write_document,
)
from carpool.extensions.rollout.rollout_guards import Counts, Side
from carpool.extensions.rollout.rollout_states import Rollout, State
from carpool.extensions.rollout.settings import RolloutSettings


def record(state: State = State.CANARY, before: State | None = None) -> Record:
    made = Record(
        "detector",
        RolloutSettings(canary=(0.1, 0.5)),
        Rollout("1", "2", state, int(State.CANARY in (state, before)), 100.0, 1000.0, before, False, "waits"),
        digests={"1": "aa", "2": "bb"},
        counts=Counts(Side(10), Side(2), 5, 1, 5),
        rates=[1.0, 2.5],
        rollbacks={"errors": 1},
    )
    made.note(1.7e9, "shadow", "every guard is proven")
    return made


@pytest.mark.parametrize("state", [state for state in State if state is not State.PAUSED])
def test_it_comes_back_in_every_state(tmp_path: Path, state: State) -> None:
    path = file_for(tmp_path, "detector", tmp_path)
    made = record(state)
    write_document(path, as_json(made, 1040.0))
    back, trouble = read_record(path)
    assert trouble == ""
    assert back is not None
    assert back.rollout == made.rollout.stopped(1040.0)
    assert back.rollout.going(7.0).elapsed(7.0) == 140.0
    assert (back.plan, back.counts, back.digests) == (made.plan, made.counts, made.digests)
    assert (back.history, back.rates, back.rollbacks) == (made.history, made.rates, made.rollbacks)


def test_a_pause_comes_back(tmp_path: Path) -> None:
    made = record(State.PAUSED, State.SHADOW)
    write_document(tmp_path / "r.json", as_json(made, 1.0))
    back, _ = read_record(tmp_path / "r.json")
    assert back is not None
    assert back.rollout.before is State.SHADOW


def test_no_file_is_no_trouble(tmp_path: Path) -> None:
    assert read_record(tmp_path / "none.json") == (None, "")


def mutated(**changes: object) -> bytes:
    return orjson.dumps({**orjson.loads(as_json(record(), 0.0)), **changes})


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"{}",
        mutated(format=2),
        mutated(state="happy"),
        mutated(step=3),
        mutated(step="one"),
        mutated(spent=-1),
        mutated(spent=float("1e300")),
        mutated(before="shadow"),
        mutated(state="paused"),
        mutated(plan={"canary": [3]}),
        mutated(plan={"unknown": 1}),
        mutated(counts={}),
        mutated(counts=None),
        mutated(digests=[1]),
        mutated(rates=["x"]),
        mutated(rates=[-1.0]),
        mutated(rates=[True]),
        mutated(stable="one"),
        mutated(candidate="../2"),
        mutated(candidate=2),
        mutated(candidate="1"),
        mutated(state="shadow"),  # which has no steps: it would leave the canary out
        mutated(held=True),
        mutated(state="paused", before="done"),
        mutated(capacity={"enough": False}),
        mutated(history=[]),
        mutated(history=[{"to": "shadow"}]),
        mutated(history=[1]),
        b"x" * (5 << 20),
    ],
)
def test_what_cannot_be_understood_stays_until_something_is_written(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "r.json"
    path.write_bytes(content)
    for _ in range(2):
        back, trouble = read_record(path)
        assert back is None
        assert "cannot be parsed" in trouble
    set_aside(path)
    (aside,) = tmp_path.iterdir()
    assert aside.name.startswith("r.json.unreadable-")
    assert aside.read_bytes() == content
    set_aside(path)


def test_a_write_that_fails_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "r.json"
    write_document(path, as_json(record(State.SHADOW), 0.0))

    def full(_fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_document(path, as_json(record(State.CANARY), 0.0))
    back, _ = read_record(path)
    assert back is not None
    assert back.rollout.state is State.SHADOW
    assert [each.name for each in tmp_path.iterdir()] == ["r.json"]


def test_models_of_one_name_in_two_places_have_two_files(tmp_path: Path) -> None:
    one, other = (file_for(tmp_path, "m", tmp_path / place) for place in ("a", "b"))
    assert one != other
    assert file_for(tmp_path, "../../x y", tmp_path).parent == tmp_path / "rollouts"


def test_history_is_bounded() -> None:
    made = record()
    for _ in range(500):
        made.note(0.0, "x", "y")
    assert len(made.history) == 200
