"""Verbs of another package: found by its entry point, listed by a sentence, imported when they are run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from absent import ABSENT
from carpool.cli.verbs import listed, verb_class
from carpool.extension import PANELS
from carpool.extensions import BUILT_IN, installed
from carpool.lab import machine_check
from cli_run import run_cli

NAME = "carpool_counting"


def forget() -> None:
    installed.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == NAME]:
        del sys.modules[name]


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(Path(__file__).parent / "sample")
    forget()
    yield
    forget()


def test_its_verb_is_listed_without_its_module_and_run(package: None) -> None:
    assert "  count    Count the words of a text.\n" in run_cli(["--help"]).stdout
    assert f"{NAME}.command" not in sys.modules
    done = run_cli(["count", "one two three", "--least=4"])
    assert (done.exit_code, done.stdout) == (0, "1\n")
    assert run_cli(["count", "one", "--least", "4"]).exit_code == 1


def test_its_mistakes_and_help_are_like_those_of_others(package: None) -> None:
    wrong = run_cli(["count", "one", "--least", "0"])
    assert wrong.exit_code == 2
    why = "Invalid value for '--least': 0 is not in the range 1<=x<=100. Try: carpool count --help\n"
    assert wrong.stderr == f"carpool: {why}"
    assert "--least N  Letters of the shortest word that counts. [1 to 100; default: 1]" in (
        run_cli(["count", "--help"]).stdout
    )
    assert "count" in run_cli(["completion", "bash"]).stdout


def test_without_it_there_is_no_such_verb() -> None:
    forget()
    assert "No such command 'count'" in run_cli(["count", "one"]).stderr


def test_every_verb_is_where_its_manifest_says_and_in_a_panel_of_the_help() -> None:
    for one in BUILT_IN:
        for name, verb in one.verbs.items():
            assert verb.panel in PANELS
            assert verb_class(name) is one.part(verb.place)
    assert ABSENT or len(listed()) > 20


def test_doctor_names_the_packages_that_extend_a_server(
    package: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_check, "kinds", dict)
    assert f"is installed, in the package {NAME}" in [one.says for one in machine_check.check_machine()]
