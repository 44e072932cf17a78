"""In a run of all tests, the cases of a test function are one test.

pytest takes 6 ms for each test, in which most cases could run many times. Cases become one test only where
they share nothing but what the tests of their file share anyway: no case has a fixture of its own. Each
case runs whatever those before it do, and what fails is named with its values. A run of some files, or of
one test, has a test for each case.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

import pytest
from _pytest.mark.structures import Mark, ParameterSet

from carpool.compiling import is_compiled

_WITHOUT_LATER = "not conformance"  # what `make test` runs
_SHARED = ("module", "package", "session")
# Fixtures of tests/conftest.py that look after each test: they look after all cases as well.
_OF_ALL = {"_no_instance_outlives_its_test", "_process_wide_settings_are_restored"}

Case = Mapping[str, Any]


def are_together(config: pytest.Config) -> bool:
    """A test whose stand-in compiled code refuses is skipped: there, that is to skip no other case."""
    whole = config.args == config.getini("testpaths") and not config.getoption("keyword")
    return whole and config.getoption("markexpr") == _WITHOUT_LATER and not is_compiled()


def one_test(collector: pytest.Module, name: str, test: Any) -> pytest.Function | None:
    """The one for all cases of a function; None where each has to be a test."""
    marks = [mark for mark in getattr(test, "pytestmark", []) if mark.name == "parametrize"]
    if not marks or not inspect.isfunction(test) or hasattr(test, "hypothesis"):
        return None
    tables = [_table(mark) for mark in marks]
    signature = inspect.signature(test)
    if not all(tables):
        return None
    cases = [dict(part for one in parts for part in one.items()) for parts in product(*filter(None, tables))]
    given = cases[0].keys()
    if not given <= signature.parameters.keys():
        return None
    rest = [parameter for parameter in signature.parameters.values() if parameter.name not in given]
    together: Any = _looped(test, cases)
    together.cases = cases
    together.__signature__ = signature.replace(parameters=rest)
    together.pytestmark = [mark for mark in test.pytestmark if mark.name != "parametrize"]
    made: pytest.Function = pytest.Function.from_parent(collector, name=name, callobj=together)
    return made if _shares_all(made) else None


def cases_of(test: pytest.Function) -> Sequence[Case]:
    cases: Sequence[Case] = getattr(test.obj, "cases", ())
    return cases or [test.callspec.params]


def _table(mark: Mark) -> list[Case] | None:
    """The cases of one `parametrize`, without those for later; None where one of them is marked otherwise, or
    its values go to a fixture."""
    if mark.kwargs.get("indirect") or len(mark.args) < 2:
        return None
    names, rows = mark.args[:2]
    split = names.replace(",", " ").split() if isinstance(names, str) else list(names)
    found: list[Case] = []
    for row in rows:
        given = ParameterSet.extract_from(row, force_tuple=len(split) == 1 and isinstance(names, str))
        words = {one.name for one in given.marks}
        if not words:
            found.append(dict(zip(split, given.values, strict=True)))
        elif "conformance" not in words:
            return None
    return found


def _shares_all(made: pytest.Function) -> bool:
    found = [definitions[-1] for definitions in made._fixtureinfo.name2fixturedefs.values()]
    return all(one.params is None and (one.scope in _SHARED or one.argname in _OF_ALL) for one in found)


def _looped(test: Callable[..., None], cases: Sequence[Case]) -> Callable[..., None]:
    @functools.wraps(test)
    def together(**shared: Any) -> None:
        failed: list[Exception] = []
        skipped: list[BaseException] = []
        for case in cases:
            try:
                test(**shared, **case)
            except pytest.skip.Exception as error:
                skipped.append(error)
            except (Exception, pytest.fail.Exception) as error:
                error.add_note(f"case: {case!r:.500}")
                failed.append(error)
        if len(failed) == 1:
            raise failed[0]
        if failed:
            raise ExceptionGroup(f"{len(failed)} of {len(cases)} cases failed", failed)
        if len(skipped) == len(cases):
            raise skipped[0]

    return together
