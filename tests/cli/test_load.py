"""`carpool load`: what is typed wrongly, and what a person sees."""

from __future__ import annotations

from pathlib import Path

import pytest

from carpool.cli.load_command import Load, Window, aim_of, line, plan_of
from carpool.lab.load.load_plan import Closed, Open, Phase
from carpool.lab.load.tally import Slice
from carpool.sim.arrivals import Bursty, Cameras, Constant
from cli_run import run_cli

URL = "http://127.0.0.1:1"


def refused(options: str, code: int = 2) -> str:
    result = run_cli(["load", *options.split()])
    assert result.exit_code == code
    assert result.stdout == ""
    (said,) = result.stderr.splitlines()
    assert said.startswith("carpool: ")
    return said


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("", "--rate 100 for an open loop, --concurrency 8 for a closed one"),
        ("--rate 5 --concurrency 5", "--concurrency is a closed loop"),
        ("--rate 0", "--rate must be above 0"),
        ("--rate nan", "--rate must be above 0"),
        ("--rate 1e9", "at most 100,000"),
        ("--rate many", "a number like 800, or steps like 800:20,2400:20, not 'many'"),
        ("--rate 800:20,x:3", "not 'x'"),
        ("--rate 800:0", "--rate must be above 0"),
        ("--rate 800:20 --duration 5", "leave out --duration"),
        ("--rate 5 --duration 0", "--duration must be above 0"),
        ("--rate 5 --duration 1e9", "--duration must be above 0 and at most 86,400"),
        ("--rate 100000 --duration 86400", "lower the rate or the duration"),
        ("--rate 5 --requests 3", "--requests goes with --concurrency"),
        ("--rate 5 --think-ms 3", "--think-ms goes with --concurrency"),
        ("--rate 5 --arrivals rain", "--arrivals must be poisson, constant, bursty, cameras or trace:FILE"),
        ("--arrivals cameras", "like --cameras 100"),
        ("--arrivals trace:/no/such/file", "--arrivals: cannot read"),
        ("--concurrency 0", "--concurrency must be a whole number from 1 to 4,096"),
        ("--concurrency 5 --requests 0", "--requests must be a whole number from 1"),
        ("--rate 5 --connections 0", "--connections must be a whole number from 1"),
        ("--rate 5 --processes 0", "--processes must be a whole number from 1 to 64"),
        ("--concurrency 1 --processes 2", "--processes 2 are more than the --concurrency"),
        ("--rate 5 --processes 2 --save a.csv", "--save needs --processes 1"),
        ("--rate 5 --timeout 0", "--timeout must be above 0"),
        ("--rate 5 --drain -1", "--drain must be from 0"),
        ("--rate 5 --slo-ms 0", "--slo-ms must be above 0"),
        ("--rate 5 --batch 0", "--batch must be a whole number from 1"),
        ("--rate 5 --shape 3", "--shape must be like image:1,3,224,224"),
        ("--rate 5 --shape x:0", "--shape must be like"),
        ("--rate 5 --header oops", "--header must be like 'Name: value'"),
        ("--rate 5 --header Host:x", "the generator sets it"),
        ("--rate 5 --source :3", "--source must be printable text"),
        ("--rate 5 --source a:0", "the weight of --source must be above 0"),
        ("--rate 5 --priority x", "--priority must be a whole number"),
        ("--rate 5 --deadline-ms 0", "--deadline-ms must be above 0"),
        ("--rate 5 --image a.jpg --batch 2", "go with tensors, not with --image"),
    ],
)
def test_what_is_typed_wrongly(options: str, says: str) -> None:
    assert says in refused(f"{URL} {options}")


@pytest.mark.parametrize("url", ["https://", "ftp://h:1"])
def test_addresses_that_are_none(url: str) -> None:
    assert "the address must be like http://localhost:8000" in refused(f"{url} --rate 5")


@pytest.mark.parametrize("processes", [1, 2])
def test_nobody_there(processes: int) -> None:
    said = refused(f"{URL} --rate 5 --processes {processes}", code=1)
    assert "there is no server at 127.0.0.1:1" in said
    assert "Nothing was sent" in said


def open_loop(**given: object) -> Open:
    load = plan_of(Load(url=URL, **given)).load  # type: ignore[arg-type]
    assert isinstance(load, Open)
    return load


def test_a_schedule_of_steps() -> None:
    assert open_loop(rate="800:20,2400:20,800:20").phases == (Phase(800, 20), Phase(2400, 20), Phase(800, 20))
    assert open_loop(rate="5", warmup=2.0).phases == (Phase(5, 2, warmup=True), Phase(5, 10))


def test_kinds_of_traffic(tmp_path: Path) -> None:
    assert open_loop(rate="5", arrivals="constant").traffic == Constant()
    assert open_loop(rate="5", arrivals="bursty", burst_factor=4.0).traffic == Bursty(factor=4.0)
    cameras = open_loop(arrivals="cameras", cameras=20, fps=5.0)
    assert cameras.traffic == Cameras(20, 5.0, per_source=True)
    assert cameras.phases == (Phase(100, 10),)
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"time": 5}\n{"time": 7, "source": "gate"}\n')
    (phase,) = open_loop(arrivals=f"trace:{trace}").phases
    assert (phase.rate, phase.seconds) == (1.0, pytest.approx(2.0))
    (faster,) = open_loop(arrivals=f"trace:{trace}", rate="10").phases
    assert (faster.rate, faster.seconds) == (10.0, pytest.approx(0.2))


def test_a_closed_loop() -> None:
    def closed(**given: object) -> Closed:
        load = plan_of(Load(url=URL, concurrency=8, **given)).load  # type: ignore[arg-type]
        assert isinstance(load, Closed)
        return load

    assert closed() == Closed(8, seconds=10.0)
    assert closed(requests=5, think_ms=20.0) == Closed(8, requests=5, think=0.02)


def test_what_requests_say() -> None:
    given = Load(
        url=URL,
        shapes=["a:b:1,3"],
        sources=["cam:1:3", "x", "a:b"],
        priorities=["1", "2:3"],
        headers=["A: b:c"],
    )
    aim = aim_of(given)
    assert aim.filling.shapes == {"a:b": (1, 3)}
    assert aim.sources == (("cam:1", 3.0), ("x", 1.0), ("a:b", 1.0))
    assert aim.priorities == ((1, 1.0), (2, 3.0))
    assert aim.headers == (("A", "b:c"),)


def test_connections_follow_the_clients_unless_calls_share_them() -> None:
    assert aim_of(Load(url=URL, concurrency=300)).connections == 300
    assert aim_of(Load(url="grpc://h", concurrency=300)).connections is None
    assert aim_of(Load(url=URL, rate="5")).connections is None


def test_every_key_of_the_report_is_documented() -> None:
    from dataclasses import fields

    from carpool.lab.load.load_report import Counts, Generator, LoadReport
    from carpool.lab.load.tally import COLUMNS, Spread

    text = (Path(__file__).parents[2] / "docs" / "cli.md").read_text("utf-8")
    names = {field.name for kind in (Counts, LoadReport, Generator, Spread) for field in fields(kind)}
    missing = [name for name in (names - {"total"}) | set(COLUMNS) if f"`{name}`" not in text]
    assert not missing


def test_the_line_is_of_the_last_seconds() -> None:
    window = Window()
    for second in range(1, 21):
        seen = Slice()
        seen.offered = seen.answered = seen.good = 100 if second > 10 else 7
        seen.refused = 10
        for _ in range(seen.answered):
            seen.response.add(0.02)
        window.add(float(second), seen)
    said = line(window, 50.0)
    assert said.startswith("20 s  offered 100/s  answered 100/s  p50 20.")
    assert "within 50 ms 90.9 %" in said
    assert "rejected 10/s  failed 0/s" in said
    assert line(Window(), None).startswith("0 s  offered 0/s")
