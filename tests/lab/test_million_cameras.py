"""The fleet on paper of docs/planning.md: its tables are what the commands beside them print."""

from __future__ import annotations

import json
import re
import shlex
from math import ceil
from pathlib import Path
from typing import Any

import pytest

from carpool.core.curve import BatchCurve, slo_capacity
from cli_run import run_cli
from later import later

PAGE = (Path(__file__).parents[2] / "docs" / "planning.md").read_text("utf-8")


def section(title: str) -> str:
    return re.split(r"\n##", PAGE.partition(f"\n### {title}\n")[2])[0]


def rows(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def simulated(text: str, which: int = 0, **options: str) -> dict[str, Any]:
    """What a command of the section prints, with some of its options changed."""
    command = shlex.split(re.findall(r"^\$ carpool (simulate .+)$", text, re.MULTILINE)[which])
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        if option not in command:
            command += [option, ""]
        command[command.index(option) + 1] = value
    done = run_cli([*command, "--json"])
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


SURGES = [
    pytest.param("`saturation:0.6`", marks=pytest.mark.conformance),
    pytest.param("`saturation:0.3`", marks=pytest.mark.conformance),
    pytest.param("**`load:0.75`**", marks=pytest.mark.conformance),
    pytest.param("`load:0.75 --hpa-period 5`", marks=pytest.mark.conformance),
]


@pytest.mark.parametrize("scaled", SURGES)
def test_the_surge(scaled: str) -> None:
    text = section("What to scale on")
    row = next(row for row in rows(text) if row[0].startswith(scaled))
    by, _, period = row[0].split("`")[1].partition(" --hpa-period ")
    found = simulated(text, autoscale=by, hpa_period=period or "15")
    assert row[1:] == [
        f"{100 * found['attainment']:.1f} %",
        str(found["most_replicas"]),
        f"{found['replica_seconds']:,.0f}",
    ]


@pytest.mark.parametrize(
    ("column", "load"),
    [(1, "0.75"), *(pytest.param(n, x, marks=pytest.mark.conformance) for n, x in ((2, "0.95"), (3, "1.2")))],
)
def test_one_cell(column: int, load: str) -> None:
    text = section("One cell")
    told = [row[column] for row in rows(text)]
    found = simulated(text, load=load)
    assert told[0].removeprefix("load ") == load
    assert told[2] == f"{found['goodput_rps']:,.0f}"
    assert float(told[3].rstrip(" %")) == pytest.approx(100 * found["attainment"], abs=0.06)
    assert told[4] == f"{found['p50_ms']:.0f} / {found['p99_ms']:.0f}"
    assert told[5] == f"{found['mean_batch']:.0f}"


def test_what_is_not_the_gpu() -> None:
    one = slo_capacity(BatchCurve.parse("1:8,8:12,32:22,64:35,128:60"), 0.1)
    needed = ceil(1e6 / (0.75 * one))
    cells = ceil(needed / 32)
    assert (needed, cells, 32 * cells) == (652, 21, 672)
    assert "**652 replicas**" in PAGE
    assert "**672 replicas**" in PAGE
    assert f"{1e6 / (672 * one):.2f}" == "0.73"
    assert f"{1e6 / (640 * one):.2f}" == "0.76"
    assert f"{1e6 / (448 * one):.2f}" == "1.09"
    assert 3 * ceil(needed / 2) == 978, "two zones of three carry it all"
    assert "978 replicas in all" in PAGE
    rates = [1e6 / 672, 1e6 / 21, 1e6]
    _, frames, network, cores, price = (
        row[1:] for row in rows(section("What is not the GPU")) if row[0] != "---"
    )
    assert frames == [f"{rate:,.0f}" for rate in rates]
    assert [float(cell) for cell in network] == pytest.approx(
        [rate * 60e3 * 8 / 1e9 for rate in rates], rel=0.01
    )
    assert [float(cell.replace(",", "")) for cell in cores] == pytest.approx(
        [rate * 0.003 for rate in rates], rel=0.01
    )
    assert price == [f"{24 * 2.5 * count:,.0f}" for count in (1, 32, 672)]


def given(cell: str) -> dict[str, str]:
    """Options as a cell of a table has them."""
    words = cell.strip("`").split()
    return {name.removeprefix("--"): value for name, value in zip(words[::2], words[1::2], strict=True)}


@pytest.mark.conformance
def test_which_balancer() -> None:
    text = section("Balancers, a slow replica, a day")
    found = [row for row in rows(text) if len(row) == 4 and row[2].startswith("`--")]
    assert len(found) == 4
    for _, _, options, told in found:
        changed = {"retries": "0", **given(options)}
        assert told == f"{simulated(text, **changed)['goodput_rps']:,.0f}", options


@pytest.mark.conformance
@pytest.mark.parametrize(
    ("changed", "told"), [later("", "98.2"), ("--retries 0", "92.2"), later("weighted", "100.0")]
)
def test_a_slow_replica(changed: str, told: str) -> None:
    text = section("Balancers, a slow replica, a day")
    options = {"balancer": changed, "retries": "0"} if changed == "weighted" else given(changed)
    assert f"{told} % w" in text
    assert told == f"{100 * simulated(text, 1, **options)['attainment']:.1f}"


@pytest.mark.conformance
@pytest.mark.parametrize("column", [1, 2, 3])
def test_a_bad_day(column: int) -> None:
    text = section("A bad day")
    _, _, options, *told = (row[column] for row in rows(text))
    command = {name.replace("-", "_"): value for name, value in given(options).items()}
    calm, *troubled = simulated(text, **command)["days"].values()
    assert calm["lost"] == 0.0
    assert f"{calm['offered'] / 1e9:.1f} billion images" in text
    assert told == [
        f"{100 * day['lost'] / day['offered']:.3f} %"
        + (f", {day['short_s']:.0f} s too few" if day["lost"] else "")
        for day in troubled
    ]
