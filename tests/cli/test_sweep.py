from __future__ import annotations

import sys
from pathlib import Path

import pytest

from carpool.cli.sweep_command import Sweep, SweepMode, order_of
from carpool.lab.sweep.conduct import SweepProgress, lasting
from carpool.lab.sweep.sweep_runs import AS_IS
from cli_run import CliResult, run_cli
from engine import repositories
from lab.sweep.samples import run


def invoke(*args: str) -> CliResult:
    return run_cli(["sweep", *args])


def test_without_a_model_it_is_the_demo_detector_under_its_own_promise() -> None:
    order = order_of(Sweep())
    assert (order.model, order.slo_ms, order.url) == ("nanodet", 500.0, "")
    assert [setting.name for setting in order.settings] == ["promise 500 ms", "knobs 0 ms", "knobs 10 ms"]
    assert order.loads == (0.3, 0.6, 0.9, 1.1, 1.5)
    assert order_of(Sweep(target="nanodet")).identity() == order.identity()


def test_a_path_with_its_own_settings(tmp_path: Path) -> None:
    repositories.fake(tmp_path, name="a", head="")
    repositories.fake(tmp_path, name="b")
    order = order_of(
        Sweep(target=str(tmp_path), name="a", mode=SweepMode.knobs, max_batch="4,8", rates="20,10,10")
    )
    assert (order.model, order.place, order.slo_ms) == ("a", tmp_path / "a", 100.0)
    assert [setting.name for setting in order.settings][:2] == ["knobs 0 ms, batch 4", "knobs 0 ms, batch 8"]
    assert (order.rates, order.loads) == ((10.0, 20.0), ())
    before = order.identity()
    (tmp_path / "a" / "model.toml").write_text((tmp_path / "a" / "model.toml").read_text() + "\n")
    assert order.identity() != before, "a model that changed is another one"


def test_a_server_is_taken_as_it_is() -> None:
    order = order_of(Sweep(target="http://localhost:1", name="m", slo_ms=20.0))
    assert (order.url, order.model, order.slo_ms, order.place) == ("http://localhost:1", "m", 20.0, None)
    assert [setting.kind for setting in order.settings] == [AS_IS]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("no/such/model",), "no file or folder 'no/such/model', nor a demo model"),
        (("ftp://host",), "the address must be like"),
        (("--rates", "fast"), "--rates must be numbers like 10,20,40"),
        (("--rates", "0"), "--rates must be above 0"),
        (("--rates", "nan"), "--rates must be above 0"),
        (("--rates", ",".join(map(str, range(1, 100)))), "--rates: 64 at most"),
        (("--loads", "1,-1"), "--loads must be above 0"),
        (("--max-delay-ms", "-1"), "--max-delay-ms must be from 0"),
        (("--max-delay-ms", ",".join(map(str, range(17)))), "the limit of 16"),
        (("--max-batch", "8,4"), "--max-batch must be rising"),
        (("--seconds", "0"), "--seconds must be above 0"),
        (("--warmup", "-1"), "--warmup must be from 0"),
        (("--repeats", "0"), "--repeats must be"),
        (("--repeats", "100", "--max-delay-ms", "0,1,2,3,4"), "2,000 are the limit"),
        (("--slo-ms", "0"), "--slo-ms must be above 0"),
        (("--curve", "x"), "--curve"),
        (("--instances", "0"), "--instances must be"),
        (("--image", "no.jpg"), "--image: cannot read"),
        (("--shape", "x"), "--shape must be like"),
        (("--rates", "100000", "--seconds", "3600"), "more than the"),
    ],
)
def test_bad_options_are_one_line(args: tuple[str, ...], said: str) -> None:
    result = invoke(*args)
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.split())
    assert result.stderr.count("\n") == 1


def test_several_models_need_a_name(tmp_path: Path) -> None:
    for name in ("a", "b"):
        repositories.fake(tmp_path, name=name)
    assert "choose one with --name: a, b" in invoke(str(tmp_path)).stderr


def test_without_matplotlib_it_says_so_before_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = invoke()
    assert result.exit_code == 2
    assert "pip install 'carpool[plot]'" in result.stderr


def test_progress_tells_what_is_done_and_how_long_it_takes() -> None:
    said: list[str] = []
    bars: list[tuple[int, int, str]] = []
    lines = SweepProgress(said.append, lambda *bar: bars.append(bar))
    lines.planned(left=2, done=1, seconds_each=60)
    lines.step("a at 10/s")
    lines.ended(run("a", 10.0))
    lines.ended(run("a", 20.0, void=("late",)))
    assert said[0] == "2 runs (1 are done already), about 2 min"
    assert said[1].startswith("[2/3] a at 10/s: 10/s within the SLO, p99 20 ms; ")
    assert said[2].endswith(", void; 0 s left")
    assert bars[0] == (1, 3, "a at 10/s")
    assert (lasting(12), lasting(600)) == ("12 s", "10 min")
