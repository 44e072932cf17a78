"""docs/cli.md names every verb and option, and the commands that the documentation shows exist."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import pytest

import carpool
from carpool.cli.verbs import listed
from cli_run import params

DOCS = Path(__file__).parents[2] / "docs"
CLI = (DOCS / "cli.md").read_text("utf-8")
VERBS = [*listed()]


COMMON = dict(
    re.findall(r"^\| `(--[\w-]+)` \|[^|]*\|[^|]*\| (`.*`) \|$", CLI.split("\n## ")[0], re.MULTILINE)
)
"""Options of several verbs stand once, at the top, with the verbs that have them."""


def _options(verb: str) -> list[str]:
    return [option for param in params(verb) if not param.is_argument for option in param.opts]


def _section(verb: str) -> str:
    found = re.search(rf"^## carpool {verb}\n(.*?)(?=^## |\Z)", CLI, re.MULTILINE | re.DOTALL)
    assert found, f"docs/cli.md has no section '## carpool {verb}'"
    return found[1]


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_and_option_is_documented(verb: str) -> None:
    assert f"[`carpool {verb}`]" in CLI
    rows = re.findall(r"^\| `(--[\w-]+)` \|", _section(verb), re.MULTILINE)
    rows += [option for option, verbs in COMMON.items() if f"`{verb}`" in verbs.split(", ")]
    assert sorted(rows) == sorted(_options(verb))


def test_every_json_key_is_documented() -> None:
    from dataclasses import fields

    from carpool.lab.batch_profile import BatchRow, Budget, ProfileReport
    from carpool.lab.evaluate.evaluation import Evaluation, VersionGap, VersionScore
    from carpool.lab.fleet_plan import FleetPlan
    from carpool.lab.sweep.sweep_results import PointRow, Results
    from carpool.sim.simulation import Outcome

    for verb, kind in (
        ("simulate", Outcome),
        ("plan", FleetPlan),
        ("sweep", Results),
        ("sweep", PointRow),
        *(("evaluate", kind) for kind in (Evaluation, VersionScore, VersionGap)),
        *(("profile", kind) for kind in (ProfileReport, BatchRow, Budget)),
    ):
        assert all(f"`{field.name}`" in _section(verb) for field in fields(kind))


OF_EXAMPLES = {"limit"}
"""Verbs of the extension that docs/extending.md builds: tests/extensions has its test."""


def test_every_command_shown_exists() -> None:
    """On every page, also where it needs a cluster or a folder of the reader's and no test can run it."""
    pages = [DOCS.parent / "README.md", *DOCS.rglob("*.md")]
    count = 0
    for page in pages:
        for block in re.findall(r"```(?:console|sh)\n(.*?)```", page.read_text("utf-8"), re.DOTALL):
            for verb, rest in re.findall(r"^(?:\$ )?[\w./=:-]*\bcarpool (\w+)(.*)$", block, re.MULTILINE):
                given = {word.partition("=")[0] for word in _words(rest) if word.startswith("--")}
                if verb in OF_EXAMPLES:
                    continue
                assert verb in VERBS, f"{page.name}: carpool {verb}"
                assert given <= {*_options(verb), "--help"}, f"{page.name}: carpool {verb}{rest}"
                count += 1
    assert count > 150


def _words(rest: str) -> list[str]:
    """Of a command's first line, which may go on after a backslash or a quote."""
    try:
        return shlex.split(rest, comments=True)
    except ValueError:
        return rest.split()


@pytest.mark.parametrize("page", ["scheduling.md", "planning.md", "choosing-an-slo.md", "pipelines.md"])
def test_every_picture_is_there_and_small(page: str) -> None:
    names = re.findall(r"\]\((images/[\w-]+\.png)\)", (DOCS / page).read_text("utf-8"))
    assert names
    for name in names:
        assert (DOCS / name).stat().st_size < 150_000


def explained_in(tree: ast.Module) -> dict[str, float]:
    """Returns public numbers of a module, each with a sentence below it or below those that follow it."""
    found: dict[str, float] = {}
    waiting: dict[str, float] = {}
    for node in tree.body:
        match node:
            case ast.AnnAssign(ast.Name(name), ast.Name("Final"), ast.Constant(int() | float() as value)):
                waiting |= {} if name.startswith("_") else {name.lower(): float(value)}
            case ast.Expr(ast.Constant(str())):
                found, waiting = found | waiting, {}
            case _:
                waiting = {}
    return found


def test_every_constant_is_explained_with_its_value() -> None:
    """Those of several modules stand in one class, those of one beside what uses them, in capitals."""
    from dataclasses import asdict

    from carpool.core.constants import CONSTANTS

    numbers = dict(asdict(CONSTANTS))
    package = Path(carpool.__file__).parent
    for path in (*(package / "core").glob("*.py"), *(package / "extensions" / "text").glob("*.py")):
        numbers |= explained_in(ast.parse(path.read_text("utf-8")))
    text = (DOCS / "scheduling.md").read_text("utf-8")
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| ([\d., ]+) \|", text, re.MULTILINE)
    told: dict[str, float] = {}
    for names, values in rows:
        told |= dict(zip(re.findall(r"`(\w+)`", names), map(float, values.split(", ")), strict=True))
    assert told == pytest.approx(numbers)
