from __future__ import annotations

import json

import pytest

from carpool.lab.sweep.sweep_results import best_of, noise_of, noise_words, rows_of, sentences
from carpool.lab.sweep.sweep_runs import read_run
from lab.sweep.samples import DELAYED, PROMISED, SLO_MS, results, run, runs

NAMES = [PROMISED.name, DELAYED.name]


def test_repeats_are_one_point_and_rows_come_in_order() -> None:
    rows = rows_of(reversed(runs()), NAMES)
    assert [(row.setting, row.rate) for row in rows] == [(n, r) for n in NAMES for r in (30.0, 90.0, 150.0)]
    first = rows[0]
    assert (first.runs, first.offered, first.answered, first.good) == (2, 600, 600, 600)
    assert first.p99_ms == pytest.approx(45, rel=0.01), "ten of six hundred"
    assert first.offered_rps == pytest.approx(30)
    assert first.mean_batch == pytest.approx(1.6), "half of the answers rode in a fifth of the batches"


def test_void_runs_do_not_count_if_others_do() -> None:
    row = rows_of([run("a", 10.0), run("a", 10.0, 1, ms=[400.0] * 100, void=("late",))], ["a"])[0]
    assert (row.void, row.void_runs, row.p99_ms < 25) == (False, 1, True)
    alone = rows_of([run("a", 10.0, void=("late",))], ["a"])[0]
    assert alone.void
    assert not alone.keeps(SLO_MS)
    assert best_of([alone], SLO_MS) is None
    assert "every point is void" in sentences([alone], ["a"], SLO_MS)[0]


def test_the_best_point_answers_most_while_nearly_everybody_is_in_time() -> None:
    rows = rows_of(runs(), NAMES)
    best = best_of(rows, SLO_MS)
    assert best is not None
    assert (best.rate, best.goodput_rps) == (90.0, 90.0), "150/s has more answered, but refuses a third"
    late = rows_of([run("a", 10.0, ms=[200.0] * 100)], ["a"])
    assert best_of(late, SLO_MS) is None


def test_what_was_found_in_words() -> None:
    promise, fixed = results().words()
    assert promise == (
        "promise 50 ms: 90/s within 50 ms at load 0.9 (90/s), p99 44.8 ms. At load 1.5 (150/s), the highest, "
        "100/s are answered within the SLO, 33.3 % rejected, p99 of responses 21 ms."
    ).replace("44.8", f"{results().rows[1].p99_ms:.3g}").replace(
        "21 ms", f"{results().rows[2].p99_ms:.3g} ms"
    )
    assert fixed.startswith("knobs 10 ms, batch 8: 90/s within 50 ms at load 0.9 (90/s)")
    assert "0/s are answered within the SLO, p99 of responses 200 ms" in fixed
    nowhere = sentences(rows_of([run("a", 10.0, ms=[200.0] * 100)], ["a"]), ["a"], SLO_MS)
    assert "no point had 99% answered within 50 ms; nearest at load 0.1 (10/s): 0.0 % of 10/s" in nowhere[0]
    unfinished = results(runs=tuple(runs()[:5])).words()
    assert unfinished[-1] == "Ended early: 7 of 12 runs were not made."


def test_the_noise_is_what_repeats_lie_apart() -> None:
    noise = noise_of([run("a", 10.0), run("a", 10.0, 1, ms=[22.0] * 100, steal=0.2), run("b", 10.0)])
    assert noise.goodput == 0
    assert noise.p99 == noise.p99_worst == pytest.approx(2 / 21, rel=0.05)
    assert "0% in goodput and 10% in p99" in noise_words(noise)
    assert "20% of the processor" in noise_words(noise)
    assert "the noise is not known" in noise_words(noise_of([run("a", 10.0)]))
    assert "1 run is void" in noise_words(noise_of(runs()))


def test_json_has_everything_and_reads_back() -> None:
    found = json.loads(json.dumps(results().as_json()))
    assert [row["best"] for row in found["points"]] == [False, True, False] * 2
    assert len(found["runs"]) == found["planned_runs"] == 12
    assert tuple(read_run(one) for one in found["runs"]) == results().runs
    assert found["noise"]["void_runs"] == 1
    assert [setting["name"] for setting in found["settings"]] == NAMES
