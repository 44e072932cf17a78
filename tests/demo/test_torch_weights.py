"""Weights are numbers: a file that wants to be more than that is refused before anything of it runs."""

from __future__ import annotations

import math
import pickle
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from carpool.demo.torch_weights import read_weights
from carpool.errors import InvalidInput
from demo import pth_files as write

ONE = np.arange(6, dtype="<f4")

in_one_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@pytest.fixture
def read(tmp_path: Path) -> Callable[[bytes], dict[str, np.ndarray[Any, Any]]]:
    def reading(data: bytes) -> dict[str, np.ndarray[Any, Any]]:
        path = tmp_path / "weights.pth"
        path.write_bytes(data)
        return read_weights(path)

    return reading


@in_one_folder
@given(
    shape=st.lists(st.integers(1, 4), max_size=4).map(tuple),
    order=st.randoms(use_true_random=False),
    offset=st.integers(0, 5),
    dtype=st.sampled_from(["<f4", "<i8"]),
)
def test_tensors_come_back_as_they_were(
    read: Any, shape: tuple[int, ...], order: Any, offset: int, dtype: str
) -> None:
    """Also those that are stored with their axes in another order, or in the middle of a storage."""
    axes = order.sample(range(len(shape)), len(shape))
    values = np.arange(math.prod(shape), dtype=dtype).reshape(shape)
    stored = np.concatenate([np.full(offset, 7, dtype), values.transpose(axes).ravel()])
    laid = values.transpose(axes).copy()
    strides = [0] * len(shape)
    for place, axis in enumerate(axes):
        strides[axis] = laid.strides[place] // laid.itemsize
    named = {"a": write.tensor("k", stored, shape, tuple(strides), offset)}
    [found] = read(write.pth(named, {"k": stored})).values()
    assert found.dtype == values.dtype
    assert np.array_equal(found, values)
    assert found.flags.c_contiguous


def test_two_tensors_may_share_a_storage(read: Any) -> None:
    named = {"a": write.tensor("k", ONE, (3,)), "b": write.tensor("k", ONE, (3,), offset=3)}
    found = read(write.pth(named, {"k": ONE}))
    assert found["a"].tolist() == [0, 1, 2]
    assert found["b"].tolist() == [3, 4, 5]


def test_a_command_in_a_file_is_refused_and_not_run(read: Any, tmp_path: Path) -> None:
    sign = tmp_path / "was-run"

    class Evil:
        def __reduce__(self) -> Any:
            import os

            return os.system, (f"touch {sign}",)

    hostile = write.head() + pickle.dumps({"a": Evil()}, 2)
    with pytest.raises(InvalidInput, match=r"weights.pth: it asks for .*\.system, which weights"):
        read(hostile)
    assert not sign.exists()


@pytest.mark.parametrize(
    "function",
    [
        ("builtins", "eval"),
        ("builtins", "getattr"),
        ("collections", "namedtuple"),
        ("torch", "load"),
        ("torch._utils", "_rebuild_parameter"),
        ("carpool.demo.torch_weights", "read_weights"),
        ("numpy", "load"),
    ],
    ids=".".join,
)
def test_only_what_tensors_need_can_be_named(read: Any, function: tuple[str, str]) -> None:
    before = set(sys.modules)  # other tests may have PyTorch loaded
    with pytest.raises(InvalidInput, match="asks for"):
        read(write.pth({"a": write.call(function, write.text("1"))}, {}))
    assert "torch" not in set(sys.modules) - before


def test_a_file_can_change_nothing_of_the_program(read: Any) -> None:
    """BUILD sets attributes: there is nothing here on which it could."""
    for target in (write.REBUILD, ("collections", "OrderedDict"), ("torch", "FloatStorage")):
        state = write.tuple_of(b"N", write.dictionary({"__defaults__": write.text("changed")}))
        with pytest.raises(InvalidInput):
            read(write.pth({"a": write.name(*target) + state + b"b"}, {}))


@pytest.mark.parametrize(
    ("shape", "strides", "offset"),
    [
        ((7,), (1,), 0),
        ((6,), (1,), 1),
        ((2, 2), (5, 1), 0),
        ((2,), (2**30,), 0),
        ((0,), (1,), 0),
        ((2**20, 2**10), (0, 0), 0),
        ((-1,), (1,), 0),
        ((2,), (-1,), 1),
        ((2, 3), (1,), 0),
        ((1,) * 9, (1,) * 9, 0),
    ],
)
def test_a_tensor_stays_within_its_storage(
    read: Any, shape: tuple[int, ...], strides: tuple[int, ...], offset: int
) -> None:
    with pytest.raises(InvalidInput, match="a tensor"):
        read(write.pth({"a": write.tensor("k", ONE, shape, strides, offset)}, {"k": ONE}))


def test_a_memo_of_billions_takes_no_memory(read: Any) -> None:
    huge = b"r" + (2**31).to_bytes(4, "little")
    with pytest.raises(InvalidInput, match="numbers more objects"):
        read(write.pth({"a": write.text("x") + huge}, {}))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"PK\x03\x04",
        b"\x80\x02}.",
        write.pth({}, {}, magic=1),
        write.pth({}, {}, protocol=1002),
        write.pth({}, {}, little_endian=False),
        write.pth({"a": write.number(1)}, {}),
        write.pth({"a": write.tensor("k", ONE)}, {}),
        write.pth({"a": write.tensor("k", ONE)}, {"k": ONE[:5]}),
        write.pth({"a": write.tensor("k", ONE)}, {"k": ONE, "other": ONE}),
    ],
)
def test_what_is_not_such_a_file_is_refused(read: Any, data: bytes) -> None:
    with pytest.raises(InvalidInput, match=r"weights\.pth: ") as refused:
        read(data)
    assert refused.value.field == "weights"


def test_the_zip_archives_of_later_torch_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "new.pth"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02}.")
    with pytest.raises(InvalidInput):
        read_weights(path)


def test_too_much_is_not_read(read: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("carpool.demo.torch_weights.MAX_BYTES", 100)
    with pytest.raises(InvalidInput, match="more than"):
        read(b"\0" * 101)


GOOD = write.pth({"a": write.tensor("k", ONE, (2, 3)), "b": write.tensor("j", ONE)}, {"k": ONE, "j": ONE})


@in_one_folder
@given(st.integers(0, len(GOOD) - 1))
def test_a_file_that_was_cut_off_is_refused(read: Any, length: int) -> None:
    with pytest.raises(InvalidInput):
        read(GOOD[:length])


@in_one_folder
@given(st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), min_size=1, max_size=4))
def test_a_damaged_file_is_read_or_refused_and_nothing_else(
    read: Any, changes: list[tuple[int, int]]
) -> None:
    data = bytearray(GOOD)
    for place, value in changes:
        data[place] = value
    try:
        found = read(bytes(data))
    except InvalidInput:
        return
    assert all(isinstance(array, np.ndarray) for array in found.values())
