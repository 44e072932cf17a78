"""Cases and examples that `make conformance` runs and `make test` does not."""

from __future__ import annotations

import os
from collections.abc import Iterable

import pytest
from _pytest.mark.structures import ParameterSet


def later(*values: object, name: str | None = None) -> ParameterSet:
    """A case for `make conformance`: a longer proof of what the cases beside it show."""
    return pytest.param(*values, id=name, marks=pytest.mark.conformance)


def exhaustive(*values: object, name: str | None = None) -> ParameterSet:
    """A case for `make conformance` alone: one of so many that its form for every change leaves them out."""
    return pytest.param(*values, id=name, marks=[pytest.mark.conformance, pytest.mark.exhaustive])


def first(now: int, cases: Iterable[object]) -> list[object]:
    """The first so many cases at once, the others later. A case of several values is a tuple."""
    given = list(cases)
    return given[:now] + [later(*case) if isinstance(case, tuple) else later(case) for case in given[now:]]


THOROUGH = "CARPOOL_THOROUGH"  # in the environment of `make conformance`


def many(examples: int) -> int:
    """How many examples Hypothesis makes: a tenth in `make test`. What lands has passed all of them, too."""
    return examples if os.environ.get(THOROUGH) else max(5, examples // 10)
