"""What users see stays as it was: numbers of the simulator, and every public name. See record.py."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import carpool
from goldens import names, simulations
from later import later

HERE = Path(__file__).parent
KEPT: dict[str, Any] = json.loads((HERE / "names.json").read_text("utf-8"))
HASHES: dict[str, str] = json.loads((HERE / "simulations.json").read_text("utf-8"))


@pytest.mark.parametrize("seed", simulations.WHOLE)
def test_a_simulation_prints_what_it_printed(seed: int) -> None:
    assert simulations.printed(seed) == (HERE / f"simulation_{seed}.json").read_text("utf-8")


@pytest.mark.parametrize("seeds", [simulations.EACH_ONCE, later(simulations.SEEDS)], ids=len)
def test_simulations_print_what_they_printed(seeds: range) -> None:
    assert len(HASHES) == 50
    found = {seed: simulations.digest(simulations.printed(seed)) for seed in seeds}
    assert {seed for seed in seeds if found[seed] != HASHES[str(seed)]} == set()


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return json.loads(json.dumps(names.public_names()))


@pytest.mark.parametrize("kind", KEPT)
def test_public_names_are_what_they_were(kind: str, found: dict[str, Any]) -> None:
    assert found[kind] == KEPT[kind]


def test_every_kind_of_name_is_kept(found: dict[str, Any]) -> None:
    assert list(found) == list(KEPT)


def test_the_reference_has_every_name_of_the_package() -> None:
    page = (HERE.parents[1] / "docs" / "python.md").read_text("utf-8")
    assert set(re.findall(r"^::: carpool\.(\w+)$", page, re.MULTILINE)) == {
        *set(carpool.__all__) - {"__version__"},
        "errors",
    }
