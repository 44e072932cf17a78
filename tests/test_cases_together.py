"""In a run of all tests, cases without fixtures of their own are one test (together.py)."""

from __future__ import annotations

import types
from typing import Any

import pytest

from later import later
from together import cases_of, one_test

RUN: list[tuple[int, str]] = []


@pytest.mark.parametrize("word", ["a", "b", "skip"])
@pytest.mark.parametrize("number", [1, 2, later(3)])
def _some(number: int, word: str) -> None:
    RUN.append((number, word))
    if word == "skip":
        pytest.skip("not here")
    assert word == "a", "it is not a"


@pytest.mark.parametrize("number", [later(1)])
def _later(number: int) -> None:
    raise AssertionError


@pytest.mark.parametrize("number", [1, 2])
def _with_a_folder(number: int, tmp_path: object) -> None: ...


@pytest.mark.parametrize("number", [1, pytest.param(2, marks=pytest.mark.gpu)])
def _with_a_device(number: int) -> None: ...


def test_each_case_runs_and_what_fails_is_named(request: pytest.FixtureRequest) -> None:
    module = request.node.getparent(pytest.Module)
    RUN.clear()
    made = one_test(module, "_some", _some)
    assert made is not None
    with pytest.raises(ExceptionGroup) as failed:
        made.obj()
    assert [(number, word) for number in (1, 2) for word in ("a", "b", "skip")] == RUN
    assert len(cases_of(made)) == 6
    notes = [error.__notes__ for error in failed.value.exceptions]
    assert notes == [[f"case: {{'number': {number}, 'word': 'b'}}"] for number in (1, 2)]


@pytest.mark.parametrize(
    "test", [_later, _with_a_folder, _with_a_device, test_each_case_runs_and_what_fails_is_named]
)
def test_which_stay_apart(request: pytest.FixtureRequest, test: types.FunctionType) -> None:
    """Those for later alone, with a fixture of their own, with another mark, and without cases."""
    module: Any = request.node.getparent(pytest.Module)
    assert one_test(module, test.__name__, test) is None
