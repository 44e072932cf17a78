"""A server as a child: awaited by its own word, watched, stopped, and gone with its parent."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from carpool.extensions.ray.leash import start_on_leash
from carpool.extensions.ray.server_child import LoadReports, ReplicaFailed, ServerChild
from live.server import is_alive
from waiting import until

READY = '{"time": "x", "level": "info", "event": "ready", "http": 31000, "grpc": 31001, "metrics": 31002}'
LOG = logging.getLogger("ray.serve")


def child(script: str) -> ServerChild:
    """With another program in the place of the server."""
    made = ServerChild(["serve", "/models"], {}, LOG)
    made._command = [sys.executable, "-u", "-c", textwrap.dedent(script)]
    return made


def test_ready_when_it_says_so_and_stopped_by_a_signal() -> None:
    made = child(f"import signal\nprint('Loading …')\nprint('{{}}')\nprint('{READY}')\nsignal.pause()")
    place = made.start("10.0.0.1", 60.0)
    assert (place, made.metrics_port) == (("10.0.0.1", 31000, 31001), 31002)
    assert os.getpgid(made.pid) == made.pid, "in a group of its own"
    assert not made.has_ended
    assert made.stop(60.0)
    assert made.has_ended


def test_what_it_writes_is_logged_with_its_level(caplog: pytest.LogCaptureFixture) -> None:
    lines = ["Loading …", '{"level":"warning","event":"model-slow","model":"a"}', '{"x"', "[1]", READY]
    with caplog.at_level(logging.INFO, "ray.serve"):
        made = child("".join(f"print({line!r})\n" for line in lines))
        made.start("10.0.0.1", 60.0)
        until(lambda: made.has_ended, "its end")
    assert caplog.messages[:4] == [
        "carpool: Loading …",
        "carpool: model-slow model=a",
        'carpool: {"x"',
        "carpool: [1]",
    ]
    assert caplog.messages[4] == "carpool: ready http=31000 grpc=31001 metrics=31002"
    assert [record.levelname for record in caplog.records[:2]] == ["INFO", "WARNING"]


def test_one_that_fails_tells_why() -> None:
    made = child("print('Loading …'); print('carpool: /models: not there'); raise SystemExit(2)")
    with pytest.raises(ReplicaFailed, match="ended with status 2: carpool: /models: not there"):
        made.start("10.0.0.1", 60.0)


def test_one_that_is_never_ready_is_ended() -> None:
    made = child("import signal\nprint('Loading …')\nsignal.pause()")
    with pytest.raises(ReplicaFailed, match=r"was not ready within 0\.2 s"):
        made.start("10.0.0.1", 0.2)
    until(lambda: made.has_ended, "its end")


def test_one_that_does_not_want_to_stop_is_ended() -> None:
    script = f"import signal\nsignal.signal(15, signal.SIG_IGN)\nprint('{READY}')\nwhile 1: signal.pause()"
    made = child(script)
    made.start("10.0.0.1", 60.0)
    assert not made.stop(0.1)
    until(lambda: made.has_ended, "its end")


def test_it_ends_with_its_parent(tmp_path: Path) -> None:
    source = Path(__file__).parents[3] / "src"
    script = f"""
    import signal, subprocess, sys
    sys.path.insert(0, {str(source)!r})
    from carpool.extensions.ray.leash import start_on_leash
    command = [sys.executable, "-c", "import signal; signal.pause()"]
    print(start_on_leash(command, {{}}, subprocess.DEVNULL).pid, flush=True)
    signal.pause()
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        until(lambda: b"pause" in Path(f"/proc/{pid}/cmdline").read_bytes(), "the program")
        parent.send_signal(signal.SIGKILL)
    until(lambda: not is_alive(pid), "its end")


def test_a_parent_that_is_gone_already() -> None:
    """Between its start and the word to the kernel."""
    done = subprocess.run(
        [sys.executable, "-I", "-S", start_on_leash.__code__.co_filename, "1", "/bin/false"], check=False
    )
    assert done.returncode == 0, "it did not become the program"


def test_load_by_model_and_version() -> None:
    reports = LoadReports("127.0.0.1", 1)
    reports.read(
        "# HELP carpool_offered_images_total x\n"
        'carpool_offered_images_total{model="a",version="1"} 12\n'
        'carpool_offered_images_total{model="a",version="2"} 3\n'
        'carpool_offered_images_total{model="b}\\"",version="1"} nonsense\n'
        'carpool_capacity_images_per_second{model="a",version="1"} 39.5\n'
        'carpool_load{model="a",version="1"} 0.3\n'
    )
    assert reports.offered == {"a/1": 12.0, "a/2": 3.0}
    assert reports.capacity == {"a/1": 39.5}


def test_a_server_that_does_not_answer_keeps_its_last_report() -> None:
    reports = LoadReports("127.0.0.1", 1)
    reports.offered = {"a/1": 1.0}
    before = reports.answered_at
    reports.look()
    assert (reports.offered, reports.answered_at) == ({"a/1": 1.0}, before)
