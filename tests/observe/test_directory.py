"""Rows and their names: found again after a restart, never shared by two models."""

from __future__ import annotations

import pytest

from carpool.errors import ConfigError, Unavailable
from carpool.observe.counters import DIRECTORY_BYTES, MODEL_ROWS, Directory, Table, table_bytes


@pytest.fixture
def memory() -> bytearray:
    return bytearray(DIRECTORY_BYTES)


@pytest.fixture
def directory(memory: bytearray) -> Directory:
    return Directory(memoryview(memory))


def test_a_fresh_one_is_empty(directory: Directory) -> None:
    assert directory.live() == {}
    assert directory.find("m", "1") is None
    directory.retire("m", "1")


def test_versions_have_rows_of_their_own_and_never_the_servers(directory: Directory) -> None:
    slots = [directory.assign("m", "1"), directory.assign("m", "2"), directory.assign("детектор", "1")]
    assert len({slot.row for slot in slots}) == 3
    assert all(slot.row > 0 for slot in slots)
    assert list(directory.live().values()) == [("m", "1"), ("m", "2"), ("детектор", "1")]


def test_another_process_and_a_restarted_engine_find_the_same_row(memory: bytearray) -> None:
    slot = Directory(memoryview(memory)).assign("m", "1")
    later = Directory(memoryview(memory))
    assert later.find("m", "1") == slot
    assert later.assign("m", "1") == slot


def test_a_retired_name_comes_back_as_another_life(directory: Directory) -> None:
    first = directory.assign("m", "1")
    directory.retire("m", "1")
    assert directory.find("m", "1") is None
    assert directory.assign("m", "1") != first


def test_a_row_just_retired_is_the_last_to_be_reused(directory: Directory) -> None:
    first = directory.assign("m", "1")
    directory.retire("m", "1")
    others = [directory.assign(f"m{number}", "1") for number in range(MODEL_ROWS - 1)]
    assert first.row not in {slot.row for slot in others}
    assert directory.assign("last", "1") == (first.row, first.generation + 1)


def test_full_says_so(directory: Directory) -> None:
    for number in range(MODEL_ROWS):
        directory.assign(f"m{number}", "1")
    with pytest.raises(Unavailable, match="256 model versions are loaded"):
        directory.assign("one-more", "1")
    assert directory.assign("m7", "1").row == 8


def test_a_name_that_does_not_fit(directory: Directory) -> None:
    assert directory.assign("é" * 127, "9223372036854775807")  # the longest folder name there is
    with pytest.raises(ConfigError, match="must be shorter"):
        directory.assign("m" * 400, "1")


def test_a_record_torn_by_a_dying_engine_is_free(memory: bytearray, directory: Directory) -> None:
    slot = directory.assign("model", "1")
    start = memory.index(b"model")
    memory[start : start + 2] = b"xx"
    assert directory.live() == {}
    assert directory.assign("other", "1").row != slot.row
    assert directory.assign("model", "1") != slot


def test_it_lies_in_the_table() -> None:
    memory = bytearray(table_bytes(1))
    slot = Table(memory).directory.assign("m", "1")
    assert [(row.model, row.version) for row in Table(memory).models()] == [("m", "1")]
    assert Table(memory).directory.find("m", "1") == slot
