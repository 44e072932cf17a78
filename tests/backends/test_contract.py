"""What every backend promises, asked of all of them."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from backends.cases import CASES, Case
from carpool.backends import Backend
from carpool.errors import ModelError, Unsupported
from carpool.types import DATATYPES, Datatype

Opened = Callable[[Backend], Backend]


@pytest.fixture(params=CASES, ids=str, scope="module")
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


@pytest.fixture(scope="module")
def arithmetic(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Backend]:
    """For whoever only asks: one that was asked by many answers the next as well."""
    backend = case.arithmetic(tmp_path_factory.mktemp("arithmetic"))
    yield backend
    backend.close()


@pytest.fixture
def to_be_ended(case: Case, opened: Opened, tmp_path: Path) -> Backend:
    return opened(case.arithmetic(tmp_path))


def rows(count: int) -> np.ndarray:
    return np.arange(count * 3, dtype=np.float32).reshape(count, 3)


def samples(datatype: Datatype) -> np.ndarray:
    if datatype is Datatype.BYTES:
        words = ["", "plain", "Zürich", "a\0b", "車", " "]
        return np.array([word.encode() for word in words], dtype=object).reshape(2, 3)
    if datatype is Datatype.BOOL:
        return np.array([[True, False, True], [False, False, True]])
    return np.array([[0, 1, 2], [3, 100, 127]]).astype(datatype.dtype)


@pytest.mark.parametrize("batch", [1, 2, 7, 32])
def test_a_whole_batch_comes_back_in_its_order(case: Case, arithmetic: Backend, batch: int) -> None:
    x = rows(batch)
    answer = arithmetic.run({"x": x}, ["double", "total"])
    expected = {"double": x + x, "total": x.sum(axis=1, keepdims=True)}
    assert set(answer) == set(expected)
    for name, values in expected.items():
        assert answer[name].dtype == np.float32
        np.testing.assert_array_equal(answer[name], values if case.computes else np.zeros_like(values))


def test_batches_of_changing_size_do_not_mix(case: Case, arithmetic: Backend) -> None:
    first = arithmetic.run({"x": rows(5)}, ["double"])["double"]
    kept = first.copy()
    for batch in (1, 32, 3):
        assert len(arithmetic.run({"x": rows(batch) + 100}, ["double"])["double"]) == batch
    np.testing.assert_array_equal(first, kept, "an answer changed when later batches ran")


def test_only_the_outputs_asked_for_come_back(arithmetic: Backend) -> None:
    assert set(arithmetic.run({"x": rows(2)}, ["total"])) == {"total"}
    assert set(arithmetic.run({"x": rows(2)}, [])) == {"double", "total"}


def test_an_unknown_output_is_named_and_the_instance_goes_on(arithmetic: Backend) -> None:
    with pytest.raises(ModelError, match=r"no output 'nope'.*double, total"):
        arithmetic.run({"x": rows(2)}, ["double", "nope"])
    assert arithmetic.alive
    assert len(arithmetic.run({"x": rows(2)}, ["double"])["double"]) == 2


def test_signature_says_what_the_file_says(case: Case, arithmetic: Backend) -> None:
    signature = arithmetic.signature
    if case.name in ("fake", "triton-python"):  # the settings say it
        assert (signature.inputs, signature.outputs) == ((), ())
        return
    shapes = {t.name: (t.datatype, t.shape) for t in (*signature.inputs, *signature.outputs)}
    assert shapes == {"x": ("FP32", (-1, 3)), "double": ("FP32", (-1, 3)), "total": ("FP32", (-1, 1))}
    assert signature.can_batch


@pytest.fixture(scope="module")
def passed(case: Case, tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """What one model with an input of every datatype answers to the samples, where the case has one."""
    if case.identities is None:
        return {}
    carried = [name for name in DATATYPES if name not in case.refuses]
    backend = case.identities(tmp_path_factory.mktemp("identities"), *carried)
    try:
        return backend.run({f"x_{name}": samples(DATATYPES[name]) for name in carried}, [])
    finally:
        backend.close()


@pytest.mark.parametrize("name", DATATYPES)
def test_every_datatype_passes_through(
    case: Case, opened: Opened, passed: dict[str, np.ndarray], tmp_path: Path, name: str
) -> None:
    if name in case.refuses:
        with pytest.raises((Unsupported, ModelError), match="does not support"):
            case.identity(tmp_path, name)
        return
    datatype = DATATYPES[name]
    x = samples(datatype)
    y = passed.get(f"y_{name}")
    if y is None:
        y = opened(case.identity(tmp_path, name)).run({"x": x}, ["y"])["y"]
    assert (y.dtype, y.shape) == (datatype.dtype, x.shape)
    if case.computes:
        np.testing.assert_array_equal(y, x)


def test_an_empty_batch_is_a_batch(case: Case, arithmetic: Backend) -> None:
    answer = arithmetic.run({"x": rows(0)}, ["double", "total"])
    assert {name: array.shape for name, array in answer.items()} == {"double": (0, 3), "total": (0, 1)}


@pytest.mark.parametrize(
    "view",
    [lambda x: x[::2], lambda x: x[::-1], lambda x: np.asfortranarray(x), lambda x: np.tile(x, 2)[:, 1:4]],
    ids=["every second row", "reversed", "Fortran order", "middle columns"],
)
def test_inputs_need_not_be_contiguous(
    case: Case, arithmetic: Backend, view: Callable[[np.ndarray], np.ndarray]
) -> None:
    x = view(rows(6))
    answer = arithmetic.run({"x": x}, ["double"])["double"]
    np.testing.assert_array_equal(answer, x + x if case.computes else np.zeros_like(x))


def test_inputs_are_left_as_they_were(arithmetic: Backend) -> None:
    x = rows(4)
    x.setflags(write=False)
    arithmetic.run({"x": x}, [])
    np.testing.assert_array_equal(x, rows(4))


class Runner(threading.Thread):
    """Runs one batch beside the test and keeps what it raised."""

    def __init__(self, backend: Backend) -> None:
        super().__init__(daemon=True)
        self.backend = backend
        self.started = threading.Event()
        self.error: Exception | None = None

    def run(self) -> None:
        self.started.set()
        try:
            self.backend.run({"x": rows(2)}, ["y"])
        except Exception as error:
            self.error = error


def test_abort_ends_a_batch_that_hangs(case: Case, opened: Opened, tmp_path: Path) -> None:
    backend = opened(case.endless(tmp_path))
    runner = Runner(backend)
    runner.start()
    runner.started.wait()
    # A batch that kept the interpreter to itself would not let this thread come this far, nor count.
    assert sum(1 for _ in range(100_000) if runner.is_alive()) == 100_000
    backend.abort()
    runner.join()
    assert isinstance(runner.error, ModelError)
    assert "stopped" in runner.error.message
    assert not backend.alive


def test_after_an_abort_nothing_runs(to_be_ended: Backend) -> None:
    to_be_ended.abort()
    assert not to_be_ended.alive
    with pytest.raises(ModelError, match="stopped"):
        to_be_ended.run({"x": rows(1)}, ["double"])


def test_closing_twice_is_closing_once(to_be_ended: Backend) -> None:
    to_be_ended.close()
    to_be_ended.close()
    assert not to_be_ended.alive
    with pytest.raises(ModelError):
        to_be_ended.run({"x": rows(1)}, ["double"])


def held_resources() -> tuple[int, int, set[str]]:
    """Returns how many files and threads this process has, and its children."""
    gc.collect()
    tasks = list(Path("/proc/self/task").iterdir())
    children: set[str] = set()
    for task in tasks:
        with suppress(OSError):  # a thread of another test that has just ended
            children.update((task / "children").read_text().split())
    return len(list(Path("/proc/self/fd").iterdir())), len(tasks), children


def test_close_gives_everything_back(case: Case, tmp_path: Path) -> None:
    def use() -> None:
        backend = case.arithmetic(tmp_path)
        backend.run({"x": rows(3)}, ["double"])
        backend.close()

    use()  # whatever the runtime itself keeps for good
    before = held_resources()
    for _ in range(3):
        use()
    files, threads, children = held_resources()
    assert files <= before[0], "other tests' may be closed meanwhile, and none is added"
    assert threads <= before[1]
    assert children <= before[2]
