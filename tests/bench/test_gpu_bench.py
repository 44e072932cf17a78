"""What the GPU benchmark does before and beside measuring: its options, its order, its rows, its picture."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import gpu
from carpool.lab.load.aim import Aim
from carpool.lab.load.load_report import LoadReport, Part, report
from carpool.lab.load.tally import Answer, Histogram, Kind, Tally, Ticket, Timing
from chip import draw_processes, isolation
from chip.isolation import Flood
from chip.serving import Load, row
from chip.showing import shown
from chip.watching import Seen

PNG = b"\x89PNG\r\n"


def test_what_matters_most_comes_first() -> None:
    everything = set(gpu.SECTIONS)
    assert gpu.in_order(["resnet50", "vit_b_16"], everything) == [
        ("resnet50", "serve"),
        ("resnet50", "start"),
        ("resnet50", "promise"),
        ("resnet50", "onnx"),
        ("resnet50", "isolation"),
        ("resnet50", "pipeline"),
        ("resnet50", "ceiling"),
        ("resnet50", "fastapi"),
        ("vit_b_16", "serve"),
        ("vit_b_16", "ceiling"),
        ("resnet50", "timeline"),
        ("vit_b_16", "promise"),
    ]
    assert gpu.in_order(["resnet50"], {"light"}) == [("resnet50", "serve")]
    assert gpu.in_order(["resnet50"], {"timeline", "promise"}) == [
        ("resnet50", "promise"),
        ("resnet50", "timeline"),
    ]


def test_options_say_who_runs_where(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(gpu.os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setattr(gpu, "first_siblings", lambda _: {})
    given = gpu.read([])
    assert len(given.cores.server) == 10
    assert (given.processes, given.frontends) == (6, 7)
    given = gpu.read(["--server-cores", "0", "--factors", "0.5,2"])
    assert not given.cores.divided
    assert (given.processes, given.frontends) == (gpu.SHARED_PROCESSES, gpu.FRONTENDS)
    assert given.factors == [0.5, 2.0]
    assert gpu.read(["--processes", "3"]).processes == 3
    assert gpu.read(["--frontends", "2"]).frontends == 2
    for wrong in (["--server-cores", "16"], ["--server-cores", "all"], ["--sections", "jpeg,nothing"]):
        with pytest.raises(SystemExit):
            gpu.read(wrong)
    assert "there are no sections nothing" in capsys.readouterr().err


def test_quick_is_one_network_and_two_sections() -> None:
    given = gpu.read(["--quick"])
    assert (given.networks, given.sections, given.clients) == ("resnet50", "jpeg,tensor", [256])
    assert gpu.in_order(given.networks.split(","), set(given.sections.split(","))) == [("resnet50", "serve")]


def test_a_machine_that_lacks_something_is_told_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "find_spec", lambda name: None)
    assert gpu.missing("cuda") == ["torch", "torchvision"]
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--quick"])
    gpu.main()
    assert "needs a CUDA device, torch and torchvision" in capsys.readouterr().out


def test_without_a_device_only_the_cpu_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(gpu, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.missing("cuda") == ["a CUDA device"]
    assert gpu.missing("cpu") == []


# ---- sections and their results


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> gpu.Bench:
    monkeypatch.setattr(gpu, "write_photos", lambda folder: [])
    given = gpu.read(["--out", str(tmp_path), "--server-cores", "0", "--device", "cpu"])
    return gpu.Bench(given, "resnet50", given.cores, {})


def written(bench: gpu.Bench) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((bench.given.out / "gpu.json").read_text())
    return found


def test_every_section_leaves_a_row_of_the_machine_and_the_file(bench: gpu.Bench) -> None:
    bench.attempt("tensor", lambda: None)
    found = written(bench)["resnet50"]["machine"]
    assert [entry["section"] for entry in found] == ["tensor"]
    assert set(found[0]) == {"section", "seconds", "busy", "steal"}


def test_a_section_that_fails_does_not_take_the_next_with_it(bench: gpu.Bench) -> None:
    def fail() -> None:
        raise RuntimeError("no nvJPEG here")

    bench.attempt("jpeg", fail)
    bench.attempt("tensor", lambda: bench.keep("tensor_images_per_s", 5.0))
    found = written(bench)
    assert found["errors"] == {"resnet50: jpeg": "RuntimeError: no nvJPEG here"}
    assert found["resnet50"]["tensor_images_per_s"] == 5.0
    assert len(found["resnet50"]["machine"]) == 2


def test_a_run_that_is_cut_off_is_not_an_error_of_a_section(bench: gpu.Bench) -> None:
    def cut_off() -> None:
        bench.keep("ready_after_s", 1.0)
        sys.exit(143)

    with pytest.raises(SystemExit):
        bench.attempt("serve", cut_off)
    assert written(bench)["resnet50"]["ready_after_s"] == 1.0


def test_the_promise_is_measured_at_shares_of_the_best_that_was_in_time(
    bench: gpu.Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[Load] = []
    in_time = {256: 900.0, 512: 1000.0}

    def made(what: str, load: Load, *_: object) -> dict[str, Any]:
        loads.append(load)
        goodput = in_time[load.concurrency] if load.concurrency else 800.0
        return {"what": what, "goodput_rps": goodput}

    monkeypatch.setattr(gpu, "drive", lambda server, load: ())
    monkeypatch.setattr(gpu, "row", made)
    monkeypatch.setattr(gpu, "shown", lambda entry: "")
    bench.promise_of(None, "shared", Aim("http://127.0.0.1:1"))
    assert [load.concurrency for load in loads] == [256, 512, None, None]
    assert [load.rate for load in loads[2:]] == [900.0, 1500.0]
    rows = written(bench)["resnet50"]["rows"]
    assert [entry["what"] for entry in rows[2:]] == ["promise shared x0.9", "promise shared x1.5"]
    assert rows[-1]["goodput_of_capacity"] == 0.8


def test_the_promise_is_for_all_three_ways_in(bench: gpu.Bench) -> None:
    aims = bench.aims("http://127.0.0.1:1")
    assert list(aims) == ["jpeg", "tensor", "shared"]
    assert [aim.shared_memory for aim in aims.values()] == [False, False, True]
    assert aims["jpeg"].url.endswith("/models/resnet50/predict")


def test_isolation_floods_each_network_beside_the_other(
    bench: gpu.Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[str] = []

    @contextlib.contextmanager
    def served(folder: Path, *_: object, **__: object) -> Iterator[Any]:
        assert sorted(path.name for path in folder.iterdir()) == ["resnet50", "vit_b_16"]
        yield SimpleNamespace(url="http://127.0.0.1:1")

    @contextlib.contextmanager
    def flood(aim: Aim, rate: float, seconds: float, processes: int, *_: object) -> Iterator[Flood]:
        happened.append(f"flood {aim.model} {rate:g}")
        yield Flood({"answered_rps": 1.0, "images_rps": 2.0})
        happened.append("over")

    def made(what: str, load: Load, *_: object) -> dict[str, Any]:
        happened.append(f"{load.aim.model} {load.rate:g}")
        return {"what": what, "attainment": 0.99}

    monkeypatch.setattr(gpu.serving, "carpool", served)
    monkeypatch.setattr(gpu, "flooded", flood)
    monkeypatch.setattr(gpu, "drive", lambda server, load: ())
    monkeypatch.setattr(gpu, "row", made)
    monkeypatch.setattr(gpu, "shown", lambda entry: "")
    monkeypatch.setattr(gpu.time, "sleep", lambda seconds: None)
    bench.isolation()
    assert happened[:5] == ["vit_b_16 500", "flood resnet50 40000", "vit_b_16 500", "over", "vit_b_16 500"]
    assert happened[5:] == ["resnet50 500", "flood vit_b_16 40000", "resnet50 500", "over", "resnet50 500"]
    found = written(bench)["resnet50"]
    assert found["vit_b_16_beside_resnet50"] == found["resnet50_beside_vit_b_16"] == 0.99
    assert found["rows"][1]["flood"]["answered_rps"] == 1.0


def test_a_flood_ends_with_its_block_and_tells_what_it_found(monkeypatch: pytest.MonkeyPatch) -> None:
    said = 'import time; print(\'{"total": {"answered": 3}}\', flush=True); time.sleep(%s)'
    for sleeps, expected in (("0", {"total": {"answered": 3}}), ("60", {"total": {"answered": 3}})):
        words = [sys.executable, "-c", said % sleeps]
        monkeypatch.setattr(isolation, "command", lambda *_, words=words: words)
        monkeypatch.setattr(isolation, "_END_S", 1.0)
        with isolation.flooded(Aim("http://127.0.0.1:1"), 1.0, 0.1, 1, os.sched_getaffinity(0)) as flood:
            pass
        assert flood.report == expected


def test_a_flood_is_what_carpool_load_makes_of_it() -> None:
    words = isolation.command(Aim("http://127.0.0.1:1", "resnet50", connections=9), 40_000.0, 5.0, 3)
    assert " ".join(words[words.index("load") + 1 :]) == (
        "http://127.0.0.1:1 --model resnet50 --json --rate 40000 --duration 5 --processes 3 "
        "--timeout 5 --drain 5 --connections 9"
    )


# ---- rows


SEEN = Seen(
    {"engine": 0.5, "front end 1": 1.0, "runner": 0.8},
    [0.4, 0.05],
    [0.1, 0.7],
    {"busy": 0.9},
    {"busy": 0.5, "steal": 0.01},
    in_time=0.95,
)


def reported(load: Load, latencies: list[float], lag: float) -> LoadReport:
    """Of requests that took so long, each of which the generator got to so late."""
    warm, counted = Tally(), Tally()
    for number, latency in enumerate(latencies):
        ticket = Ticket(number, 1.0)
        ticket.started = ticket.sent = 1.0 + lag
        counted.start(ticket)
        counted.end(ticket, 1.0 + latency, Answer(Kind.ANSWERED, "", Timing(0.01, 0.02, 8)), load.slo)
    part = Part([warm, counted], 2.0, 2.0, False, 0.5, 2.0, Histogram([0.001]))
    return report(load.plan(), [part], "pretended")


def test_a_row_has_both_accounts_of_what_was_in_time_and_how_late_the_generator_was() -> None:
    load = Load(Aim("http://127.0.0.1:1"), 1.0, 1, rate=10.0, slo=0.05)
    entry = row("promise shared x0.9", load, reported(load, [0.02] * 9 + [0.2], 0.012), SEEN)
    assert (entry["offered_rps"], entry["goodput_rps"]) == (10.0, 9.0)
    assert entry["attainment"] == entry["in_time_of_answered"] == 0.9
    assert entry["server_in_time"] == 0.95
    assert entry["p99_ms"] == pytest.approx(200, rel=0.02)
    assert entry["generator_start_lag_p99_ms"] == pytest.approx(12, rel=0.02)
    assert entry["generator_late"]
    assert "late" in entry["generator_late_because"][0]
    assert entry["us_per_request"] == {
        "front ends": 100_000.0,
        "engine": 50_000.0,
        "engine loop": 40_000.0,
        "runner": 80_000.0,
    }
    assert entry["machine"]["steal"] == 0.01
    line = shown(entry)
    for part in ("of 10/s: 9/s", "the server says 0.95", "runner 80000 µs", "steal 0.01", "p99 12", "late)"):
        assert part in line


def test_a_row_of_another_server_has_what_there_is() -> None:
    load = Load(Aim("http://127.0.0.1:1"), 1.0, 1, concurrency=64)
    entry = row("fastapi x1", load, reported(load, [0.02], 0.0), Seen())
    assert entry["server_in_time"] is None
    assert entry["us_per_request"] == entry["shares"] == {}
    assert "64 clients" in shown(entry)
    nothing = row("fastapi x1", load, reported(load, [], 0.0), Seen())
    assert nothing["in_time_of_answered"] is None
    json.dumps([entry, nothing])


# ---- the picture of processes


def test_figures_are_those_of_the_fastest_closed_loop() -> None:
    def entry(what: str, rate: float, **more: Any) -> dict[str, Any]:
        shares = {"front ends": 2.5, "engine loop": 0.4, "runner": 1.25}
        costs = {name: share * 1e6 / rate for name, share in shares.items()}
        device = {"busy": 0.61, "jpeg_decoder": 0.5}
        return {"what": what, "images_per_s": rate, "shares": shares, "us_per_request": costs} | {
            "device": device,
            **more,
        }

    rows = [entry("tensor", 10_000), entry("jpeg", 5_000), entry("tensor", 20_000), entry("light jpeg", 500)]
    network, chosen = draw_processes.chosen({"machine": {"cores": 16}, "resnet50": {"rows": rows}})
    assert network == "resnet50"
    assert [(what, row["images_per_s"]) for what, row in chosen.items()] == [
        ("jpeg", 5_000),
        ("tensor", 20_000),
    ]
    assert draw_processes.figures("runner", chosen) == [
        ("jpeg", "1.25 cores, 250 µs"),
        ("tensor", "1.25 cores, 62 µs"),
    ]
    assert draw_processes.figures("gpu", chosen) == [
        ("jpeg", "busy 0.61, decoder 0.50"),
        ("tensor", "busy 0.61"),
    ]
    assert draw_processes.figures("engine", {"tensor": {"what": "tensor"}}) == []
    assert draw_processes.chosen({"machine": {}}) == ("", {})


def test_the_picture_is_drawn_with_figures_and_without(tmp_path: Path) -> None:
    plain, told = tmp_path / "plain.png", tmp_path / "told.png"
    draw_processes.main([str(plain)])
    row = {"what": "tensor", "images_per_s": 7.0, "shares": {}, "us_per_request": {}, "device": {}}
    file = tmp_path / "gpu.json"
    file.write_text(json.dumps({"resnet50": {"rows": [row]}}))
    draw_processes.main([str(told), str(file)])
    assert plain.read_bytes().startswith(PNG)
    assert told.read_bytes().startswith(PNG)
    with pytest.raises(SystemExit):
        draw_processes.main([])
