"""What a newcomer meets in the first hour: full disks, wrong words, a server that is gone."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from rich.console import Console

from carpool.cli import show
from carpool.cli.top_command import _screen, single_keys
from carpool.config.toml import toml_config
from carpool.core.job import Terms
from carpool.core.refusal_words import _too_late
from carpool.errors import ConfigError, advice_for
from carpool.lab.load.load_plan import Closed, ClosedLoop
from cli_run import run_cli
from client.scripted_server import scripted_server
from frontend.http.front_end import front_end
from frontend.picture_models import RED, detector, picture
from vision.classifiers import classifier

LIMITED = """
import resource, signal, sys
from carpool.cli.main import main
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
sys.argv = ["carpool", *sys.argv[1:]]
main()
"""


def run_on_a_full_disk(*words: object) -> subprocess.CompletedProcess[str]:
    """A process that can write no byte to any file."""
    command = [sys.executable, "-B", "-c", LIMITED, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_a_full_disk_is_one_line_and_leaves_nothing_behind(tmp_path: Path) -> None:
    model = classifier(tmp_path / "net.onnx")
    found = run_on_a_full_disk("init", model)
    assert found.returncode == 1, found.stderr
    assert "model.toml cannot be written: File too large" in found.stderr
    assert "Traceback" not in found.stderr
    assert list(tmp_path.iterdir()) == [model]
    settings = tmp_path / "model.toml"
    settings.write_text("# mine\nmax_batch = 2\n")
    found = run_on_a_full_disk("inspect", model, "--write", "torchvision")
    assert found.returncode == 1, found.stderr
    assert "cannot be written" in found.stderr
    assert settings.read_text() == "# mine\nmax_batch = 2\n"


def test_a_stream_of_results_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(picture(RED, "JPEG", size=(64, 48)))
    with front_end(detector()) as served:
        words = ["predict", str(tmp_path / "a.jpg"), "--format", "jsonl", "--out", "/dev/full"]
        found = run_cli([*words, "--url", f"http://{served.url}"])
    assert found.exit_code == 1
    assert "No space left on device" in found.output


def test_a_file_format_as_the_backend_leads_to_its_engine(tmp_path: Path) -> None:
    for wrong, meant in (("onnx", "onnxruntime"), ("tflite", "litert"), ("onnxruntime_onnx", "onnxruntime")):
        with pytest.raises(ConfigError, match=f'did you mean "{meant}"'):
            toml_config(f'backend = "{wrong}"', tmp_path / "model.toml", "m")


def test_a_safety_margin_of_a_rounding_error_is_not_mentioned() -> None:
    terms = Terms(deadline=0.06, batch=0.0600000001, spread=1.946e-13)
    said = _too_late(terms)
    assert "margin" not in said
    assert "e-" not in said


def test_one_thing_is_not_many() -> None:
    assert [show.count(number, "replica") for number in (0, 1, 2)] == [
        "0 replicas",
        "1 replica",
        "2 replicas",
    ]


def test_a_closed_loop_waits_longer_after_failures_in_a_row() -> None:
    """A thousand seconds of a server that is gone: a client sends no more than two requests a second."""
    pace, now, sent = ClosedLoop(Closed(1, seconds=1000.0)), 0.0, 0
    while not pace.finished:
        for _ in pace.due(now, 64):
            sent += 1
            pace.answered(now, failed=True)
        now = max(now, pace.next_at)
        if now >= 1000.0:
            break
    assert 900 < sent < 1100
    pace.answered(now)
    assert pace.next_at <= 1000.0


def test_a_certificate_that_is_not_trusted_is_not_a_missing_server() -> None:
    assert "--ca FILE" in advice_for(
        "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: self-signed"
    )
    assert advice_for("Connection refused") == "is the server running?"


def test_predict_reads_an_image_from_standard_input() -> None:
    with front_end(detector()) as served:
        words = ["predict", "-", "--json", "--url", f"http://{served.url}"]
        found = run_cli(words, input=picture(RED, "JPEG", size=(64, 48)))
    assert found.exit_code == 0, found.output
    assert '"file": "-"' in found.output


def test_predict_waits_its_turn_instead_of_being_rejected_by_the_slo(tmp_path: Path) -> None:
    """A folder of images has no latency to keep: each request has the deadline of a person's patience."""
    (tmp_path / "a.jpg").write_bytes(picture(RED, "JPEG", size=(64, 48)))
    with scripted_server() as script:
        script.say({"image": {}, "detections": []})
        found = run_cli(["predict", str(tmp_path), "--task", "detect", "--url", script.url])
        assert found.exit_code == 0, found.output
        assert [asked.fields["x-carpool-deadline-ms"] for asked in script.asked] == ["60000"]


def test_top_ends_with_q_and_leaves_the_terminal_as_it_was() -> None:
    theirs, ours = pty.openpty()
    kept = os.dup(0)
    os.dup2(ours, 0)
    stdin = sys.stdin
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    try:
        import termios

        before = termios.tcgetattr(ours)
        with single_keys() as pressed:
            threading.Thread(target=os.write, args=(theirs, b"q")).start()
            assert pressed(60.0) == "q"
        assert termios.tcgetattr(ours) == before
    finally:
        sys.stdin = stdin
        os.dup2(kept, 0)
        for each in (kept, ours, theirs):
            os.close(each)


def test_no_title_of_top_is_wrapped_in_a_narrow_terminal() -> None:
    model = {
        "answered_rps": 1234.5,
        "p50_ms": 12.3,
        "p99_ms": 123.4,
        "rejected_rps": 12.0,
        "rejected": {"cannot-finish": 3},
        "failed": 0,
        "mean_batch": 2.0,
        "pending": 3,
        "saturation": 0.5,
        "answered_by_second": [1.0] * 20,
    }
    found = {
        "time": 0.0,
        "seconds": 10.0,
        "core_ms_per_request": None,
        "server": {},
        "models": {"detector-of-a-long-name/12": model},
        "senders": [],
    }
    for width in (60, 80, 100, 110, 140):
        console = Console(width=width, file=io.StringIO())
        console.print(_screen(found, "http://localhost:8000", width))
        lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
        titles = next(line for line in lines if line.startswith("model"))
        assert "answered/s" in titles
        assert lines[lines.index(titles) + 1].startswith("detector-of-a-long-name/12"), (width, lines)
