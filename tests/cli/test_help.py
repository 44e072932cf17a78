"""--help fits a terminal of 80 columns: whole names, and examples that the shell reads as they stand."""

from __future__ import annotations

import re
import shlex

import pytest

from carpool.cli.verbs import listed, verb_class
from cli_run import params, run_cli

VERBS = [*listed()]


def shown(monkeypatch: pytest.MonkeyPatch, columns: int, *words: str) -> str:
    monkeypatch.setenv("COLUMNS", str(columns))
    return run_cli([*words, "--help"]).output


def examples(page: str) -> list[list[str]]:
    text = page.replace("\\\n", " ")
    return [shlex.split(line) for line in re.findall(r"^    carpool ((?!COMMAND).*)$", text, re.MULTILINE)]


@pytest.mark.parametrize("columns", [60, 80, 200])
@pytest.mark.parametrize("verb", VERBS)
def test_nothing_is_cut_off(monkeypatch: pytest.MonkeyPatch, verb: str, columns: int) -> None:
    page = shown(monkeypatch, columns, verb)
    for option in params(verb):
        wanted = (option.declared.metavar or option.name) if option.is_argument else option.opts[0]
        assert wanted.lower() in page.lower()
        for word in option.declared.help.split():
            assert word in page
    names = {name for one in params(verb) for name in one.opts}
    wide = [line for line in page.splitlines() if len(line) > min(columns, 100)]
    assert all(line.strip().split()[0] in names or " " not in line.strip() for line in wide), wide


@pytest.mark.parametrize("verb", [None, *VERBS])
def test_examples_can_be_copied(monkeypatch: pytest.MonkeyPatch, verb: str | None) -> None:
    found = examples(shown(monkeypatch, 80, *([verb] if verb else [])))
    assert found
    for words in found:
        known = {name for one in params(words[0]) for name in one.opts}
        assert {word for word in words if word.startswith("--")} <= known
        assert words == [word.strip() for word in words]


def test_a_long_example_goes_on_after_a_backslash(monkeypatch: pytest.MonkeyPatch) -> None:
    page = shown(monkeypatch, 80, "rollout")
    assert '    carpool rollout abort detector --reason "false alarms at night"\n' in page
    page = shown(monkeypatch, 60, "rollout")
    assert '    carpool rollout abort detector \\\n      --reason "false alarms at night"\n' in page


def test_every_command_is_listed_once_with_its_first_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    page = shown(monkeypatch, 80)
    for verb in VERBS:
        assert len(re.findall(rf"^  {verb} ", page, re.MULTILINE)) == 1
        first = " ".join((verb_class(verb).__doc__ or "").split("\n\n")[0].split())
        assert listed()[verb].sentence == first
        assert first in " ".join(page.split())


def test_an_option_has_its_unit_range_and_default(monkeypatch: pytest.MonkeyPatch) -> None:
    page = " ".join(shown(monkeypatch, 100, "predict").split())
    assert "--at-once N Number of concurrent requests. [1 to 64; default: 4]" in page
    assert "[variable: CARPOOL_URL; default: http://localhost:8000]" in page


def test_the_servers_options_are_grouped(monkeypatch: pytest.MonkeyPatch) -> None:
    page = shown(monkeypatch, 80, "serve")
    panels = re.split(r"^(?=[A-Z][^\n]*:\n  (?:--|\[))", page, flags=re.MULTILINE)
    [security] = [one for one in panels if one.startswith("Security:")]
    assert "--api-key-file FILE" in security
    assert "--no-on-demand" in panels[0]
