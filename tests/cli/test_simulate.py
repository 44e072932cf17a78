from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from carpool import __version__
from carpool.compiling import is_compiled
from cli_run import run_cli

KEYS = {
    "offered_rps",
    "goodput_rps",
    "attainment",
    "capacity_rps",
    "fluid_bound_rps",
    "fraction_of_bound",
    "p50_ms",
    "p95_ms",
    "p99_ms",
    "mean_batch",
    "wasted_fraction",
    "shed_at_arrival_fraction",
    "busy_fraction",
    "replaced_fraction",
    "staleness_ms",
}
BASE = ("simulate", "--curve", "4+1", "--slo-ms", "50", "--seconds", "2")


def run(*args: str) -> str:
    result = run_cli(args)
    assert result.exit_code == 0, result.stderr
    progress = ("carpool: simulating: ", "carpool: drawing: ")  # on a machine that is busy
    assert all(line.startswith(progress) for line in result.stderr.splitlines())
    return result.stdout


def as_json(*args: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(*BASE, *args, "--json"))
    return found


def test_json_has_every_key_and_the_settings_used() -> None:
    found = as_json("--load", "2")
    assert found.keys() >= KEYS
    assert found["mode"] == "promise"
    assert found["capacity_rps"] == 840
    assert found["fraction_of_bound"] == pytest.approx(
        found["goodput_rps"] / found["fluid_bound_rps"], abs=1e-5
    )
    assert found["settings"]["rate_rps"] == 1680
    assert found["settings"]["max_batch"] == 64
    assert "max_delay_ms" not in found["settings"]


def test_load_is_1_unless_told_and_rate_replaces_it() -> None:
    assert as_json()["settings"]["load"] == 1
    assert as_json("--rate", "420")["settings"]["load"] == 0.5


def test_compare_puts_four_side_by_side() -> None:
    found = as_json("--compare", "--load", "1.5")
    assert list(found["compare"]) == ["promise", "knobs", "eager", "batch-1"]
    assert all(column.keys() >= KEYS for column in found["compare"].values())
    assert found["compare"]["promise"]["goodput_rps"] == found["goodput_rps"]
    assert found["compare"]["batch-1"]["mean_batch"] == 1
    assert found["settings"]["max_delay_ms"] == 5
    text = run(*BASE, "--compare")
    assert all(name in text for name in ("promise", "knobs", "eager", "batch-1", "attainment"))


@pytest.mark.conformance
def test_fixed_mode_obeys_its_fixed() -> None:
    waiting = as_json("--mode", "knobs", "--rate", "50", "--max-delay-ms", "20")
    assert waiting["p50_ms"] > 15
    assert as_json("--mode", "knobs", "--rate", "50", "--max-delay-ms", "0")["p50_ms"] < 7
    sizes = as_json("--mode", "knobs", "--load", "3", "--preferred", "4,8", "--max-batch", "16")
    assert sizes["mean_batch"] == pytest.approx(16, abs=1)
    short = as_json("--mode", "knobs", "--load", "3", "--queue-timeout-ms", "10")
    late = as_json("--mode", "knobs", "--load", "3", "--queue-timeout-ms", "10", "--timeout-action", "delay")
    assert short["p99_ms"] < 200 < late["p99_ms"]
    assert as_json("--mode", "knobs", "--load", "3", "--max-queue", "20")["shed_at_arrival_fraction"] == 1


def test_a_curve_of_points_sets_the_largest_batch_and_buckets_pad() -> None:
    args = (
        "simulate",
        "--curve",
        "1:6.2,4:9.1,16:21",
        "--slo-ms",
        "60",
        "--rate",
        "20",
        "--seconds",
        "5",
        "--json",
    )
    found = json.loads(run(*args))
    assert found["settings"]["max_batch"] == 16
    padded = json.loads(run(*args, "--buckets", "4,16"))
    assert padded["settings"]["buckets"] == [4, 16]
    assert found["p50_ms"] < 7 < 9 < padded["p50_ms"]


def test_bursts_cameras_and_traces(tmp_path: Path) -> None:
    bursty = as_json("--arrivals", "bursty", "--burst-factor", "4", "--burst-period", "1")
    assert bursty["settings"]["burst_factor"] == 4
    assert "rough estimate" in bursty["notes"][0]
    cameras = as_json("--arrivals", "cameras", "--cameras", "30", "--fps", "5", "--aligned")
    assert cameras["settings"]["rate_rps"] == 150
    assert (
        as_json("--arrivals", "cameras", "--cameras", "30", "--per-source")["settings"]["per_source"] is True
    )
    trace = tmp_path / "t.jsonl"
    trace.write_text("\n".join(json.dumps({"time": 7 + n / 100}) for n in range(301)))
    whole = json.loads(run(*BASE[:5], "--arrivals", f"trace:{trace}", "--json"))
    assert whole["settings"]["seconds"] == pytest.approx(3)
    assert whole["offered_rps"] == pytest.approx(100, rel=0.02)
    assert as_json("--arrivals", f"trace:{trace}")["settings"]["seconds"] == 2
    lines = [json.dumps({"time": n / 100, "model": "ab"[n % 2]}) for n in range(601)]
    trace.write_text("\n".join(lines))
    chosen = json.loads(run(*BASE[:5], "--arrivals", f"trace:{trace}", "--model", "a", "--json"))
    assert chosen["offered_rps"] == pytest.approx(50, rel=0.02)
    assert chosen["settings"]["model"] == "a"


def test_a_wrong_profile_is_said_so() -> None:
    found = as_json("--profile-error", "1.3", "--load", "1.5")
    assert found["fluid_bound_rps"] < 680
    assert any("1.3" in note for note in found["notes"])


def test_seeds_are_averaged() -> None:
    found = as_json("--seeds", "3", "--load", "1.2")
    assert found["settings"]["seeds"] == 3
    assert found["worst_seed_attainment"] < found["attainment"]


def test_text_says_what_was_asked_and_found() -> None:
    text = run(*BASE, "--load", "3", "--instances", "2", "--seeds", "2")
    assert "2 instances" in text
    assert "capacity 1,680/s" in text
    assert "mean of 2 seeds" in text
    assert "p99 of answered" in text


STEPS = ("simulate", "--step", "4+1", "--step", "3+0.22@4.2", "--slo-ms", "100", "--seconds", "1")


def test_steps_have_one_promise() -> None:
    found = json.loads(run(*STEPS, "--load", "3", "--json"))
    assert found.keys() >= KEYS
    assert len(found["steps"]) == 2
    assert found["steps"][0].keys() == {"mean_batch", "wasted_fraction", "busy_fraction"}
    assert found["settings"]["steps"] == ["4+1", "3+0.22@4.2"]
    assert "curve" not in found["settings"]
    assert found["fraction_of_bound"] > 0.8
    assert found == json.loads(run(*STEPS, "--load", "3", "--json"))  # a seed is a seed


def test_steps_on_one_device_carry_less() -> None:
    apart, together = (json.loads(run(*STEPS, "--json", *more)) for more in ((), ("--one-device",)))
    assert together["capacity_rps"] < apart["capacity_rps"]
    assert together["settings"]["one_device"] is True


def test_the_text_has_a_row_for_each_step() -> None:
    text = run(*STEPS, "--compare")
    assert "Steps 4+1, 3+0.22@4.2 ms, SLO 100 ms" in text
    assert "step 2 (3+0.22@4.2): mean batch" in text
    assert "batch-1" in text


def test_plot_writes_a_picture(tmp_path: Path) -> None:
    picture = tmp_path / "load.png"
    text = run("simulate", "--curve", "20+5", "--slo-ms", "200", "--seconds", "3", "--plot", str(picture))
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "plotted in" in text.replace("\n", " ")


def test_version_and_help() -> None:
    this, other = ("compiled", "interpreted") if is_compiled() else ("interpreted", "compiled")
    assert run("--version").startswith(f"carpool {__version__} ({this})\n{other}: pip install ")
    assert "carpool simulate --curve" in run("--help")
    assert "carpool plan --curve" in run()
    assert "carpool serve" in run()


CASCADE = ("simulate", "--step", "2+0.3", "--step", "6+2@0.3", "--one-device", "--slo-ms", "100")


@pytest.mark.conformance
def test_a_cascade_answers_with_its_cheap_model_under_load() -> None:
    given = ("--under-load", "quick", "--load", "3", "--seconds", "1.5")
    found = json.loads(run(*CASCADE, *given, "--json"))
    assert found["attainment"] > 0.7
    assert 0.0 < found["cascade"]["degraded_fraction"] < 0.35
    assert found["cascade"]["hard_by_big_fraction"] < 0.5
    assert found["settings"]["under_load"] == "quick"
    assert "answered by the cheap model for lack of time" in run(*CASCADE, *given)


@pytest.mark.parametrize("steps", [("2+0.3",), ("2+0.3", "6+2@1.5"), ("2+0.3", "6+2@0.3", "1+1")])
def test_what_is_no_cascade_is_said_to_be_none(steps: tuple[str, ...]) -> None:
    given = [word for step in steps for word in ("--step", step)]
    done = run_cli(["simulate", *given, "--slo-ms", "100", "--under-load", "quick"])
    assert done.exit_code == 2
    assert "--under-load is for a cascade" in done.stderr


FLEET = ("simulate", "--curve", "4+1", "--slo-ms", "50", "--seconds", "1", "--replicas", "3")


def test_several_replicas_behind_a_balancer() -> None:
    args = [*FLEET, "--load", "0.6", "--retries", "1", "--slow", "1:2.0", "--lose", "0.5", "--json"]
    result = run_cli(args)
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert (found["mode"], found["failed"], found["most_replicas"]) == ("fleet", 0, 3)
    assert found["settings"]["load"] == pytest.approx(0.6)
    assert found["capacity_rps"] == pytest.approx(3 * 840)
    text = run_cli([*FLEET, "--autoscale", "load:0.75"]).stdout
    assert "replica-hours" in text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--retries", "1"), "give --replicas"),
        (("--replicas", "33"), "--replicas must be"),
        (("--replicas", "2", "--compare"), "--compare is for one server"),
        (("--replicas", "2", "--mode", "knobs"), "--mode is for one server"),
        (("--replicas", "2", "--slow", "3:2"), "--slow must be"),
        (("--replicas", "2", "--slow", "one"), "--slow must be like"),
        (("--replicas", "2", "--autoscale", "cpu:0.5"), "--autoscale must be like"),
        (("--replicas", "4", "--autoscale", "load:0.5", "--max-replicas", "2"), "--max-replicas must be"),
    ],
)
def test_fleets_that_cannot_be(options: tuple[str, ...], words: str) -> None:
    result = run_cli(["simulate", "--curve", "4+1", "--slo-ms", "50", *options])
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.split())


DAY = ("simulate", "--curve", "4+1", "--slo-ms", "50", "--rate", "5000", "--replicas", "6")
TROUBLES = ("--day", "surge:2@12:00+10", "--day", "lose:0.5@12:00+10")


@pytest.mark.conformance
def test_a_day_with_troubles_each_alone_and_all_at_once() -> None:
    """Fixed replicas, then as many as are wanted: what is lost is said for each."""
    fixed = run_cli([*DAY, *TROUBLES, "--json"])
    days = json.loads(fixed.stdout)["days"]
    assert list(days) == ["a day without", "surge:2@12:00+10", "lose:0.5@12:00+10", "all of these"]
    assert days["all of these"]["lost"] > days["lose:0.5@12:00+10"]["lost"] > days["a day without"]["lost"]
    assert {day["peak_replicas"] for day in days.values()} == {6}
    scaled = [*DAY, *TROUBLES[:2], "--autoscale", "load:0.75", "--max-replicas", "32"]
    assert "surge:2@12:00+10" in run_cli(scaled).stdout


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--day", "flood:2@12:00+10"), "must be like surge:1.3@12:00+20"),
        (("--day", "surge:2@25:00+10"), "must be like surge:1.3@12:00+20"),
        (("--day", "lose:2@12:00+10"), "--day lose"),
        ((*TROUBLES, "--retries", "1"), "--retries is not known of a day"),
        ((*TROUBLES, "--arrivals", "bursty"), "--arrivals is not known of a day"),
        ((*TROUBLES, "--autoscale", "saturation:0.6"), "--day scales by load"),
        ((*TROUBLES, "--slo-ms", "9"), "--day needs a capacity"),
        (TROUBLES * 5, "--day: 8 at most"),
    ],
)
def test_days_that_cannot_be(options: tuple[str, ...], words: str) -> None:
    result = run_cli([*DAY, *options])
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.split())
