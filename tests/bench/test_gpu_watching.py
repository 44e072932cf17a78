"""Which process of a server is which, what it spent, and what the server says of itself."""

from __future__ import annotations

import http.server
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from carpool.observe.columns import REQUEST_SECONDS
from carpool.observe.counters import Table, table_bytes
from carpool.observe.prometheus import Exposition
from chip.account import Account, Answered, read_page
from chip.cores import divide
from chip.watching import Seen, Watch, busiest, roles

CHILD = ["python", "-P", "-m", "carpool.process.children"]
RUNNER = ["python", "-P", "-m", "carpool.extensions.torch.runner_process", "7"]


def test_processes_are_known_by_how_they_were_started() -> None:
    commands = {
        10: ["python", "-c", "…", "serve", "models"],
        11: [*CHILD, "engine", "5"],
        12: [*CHILD, "frontend", "6"],
        14: [*CHILD, "frontend", "8"],
        15: RUNNER,
        16: [],
    }
    assert roles(commands) == {
        10: "process 10",
        11: "engine",
        12: "front end 1",
        14: "front end 2",
        15: "runner",
        16: "process 16",
    }
    assert roles({1: RUNNER, 2: RUNNER}) == {1: "runner", 2: "runner 2"}


def test_parts_are_what_a_request_passes_through() -> None:
    seen = Seen(
        {"engine": 0.5, "runner": 1.2, "runner 2": 0.1, "front end 1": 0.4, "front end 2": 0.6},
        [0.4, 0.1],
        [0.2, 0.6],
    )
    assert seen.parts() == {"front ends": 1.0, "engine": 0.5, "engine loop": 0.4, "runner": 1.3}


def test_without_a_runner_there_is_no_such_part() -> None:
    seen = Seen({"engine": 1.3, "front end 1": 0.4, "process 9": 0.1}, [0.4, 0.9])
    assert seen.parts() == {"front ends": 0.4, "engine": 1.3, "engine loop": 0.4}
    assert Seen().parts() == {}


def test_threads_are_the_first_and_the_busiest() -> None:
    after = {7: 3.0, 8: 1.0, 9: 2.0, **dict.fromkeys(range(10, 20), 0.5)}
    assert busiest(7, {7: 1.0, 8: 0.0}, after, 2.0) == [1.0, 1.0, 0.5, 0.25, 0.25, 0.25, 0.25]


SPIN = "import sys, time\nprint('up', flush=True)\nend = time.process_time() + 0.3\n"
SPIN += "while time.process_time() < end: pass\nprint('spent', flush=True)\nsys.stdin.read()"


@contextmanager
def pretended(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A process that looks like one of a server's, spends 0.3 s of CPU, and waits to be let go."""
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", SPIN, *arguments]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdin is not None
        try:
            yield process
        finally:
            process.stdin.close()


def test_a_runner_is_seen_at_work() -> None:
    with pretended("carpool.extensions.torch.runner_process") as runner:
        watch = Watch(runner.pid, divide(os.sched_getaffinity(0), "0"))
        assert runner.stdout is not None
        assert runner.stdout.readline() == "up\n"
        watch.start()
        assert runner.stdout.readline() == "spent\n"
        seen = watch.stop()
        assert list(seen.processes) == ["runner"]
        assert seen.processes["runner"] > 0
        assert seen.runner_threads[0] > 0
        assert seen.engine_threads == []
        assert set(seen.machine) == {"busy", "steal"}


# ---- the server's own account


def page(name: str, counts: str) -> str:
    label = f'model="{name}",version="1"'
    bounds = zip(("0.02", "0.05", "0.1", "+Inf"), counts.split(), strict=True)
    family = "carpool_request_duration_seconds"
    lines = [f'{family}_bucket{{{label},le="{bound}"}} {count}' for bound, count in bounds]
    return "\n".join([f"# TYPE {family} histogram", *lines, f"{family}_sum{{{label}}} 3.5", ""])


def test_answers_in_time_are_read_from_the_page_of_metrics() -> None:
    both = page("a", "1 5 8 9") + page("b", "0 1 2 10")
    assert read_page(both, 0.05) == Answered(19, 6)
    assert read_page(both, 0.1) == Answered(19, 10)
    assert read_page(both, 0.07) is None  # not a bound, so that nobody can tell
    assert read_page("", 0.05) is None


def test_the_servers_own_page_has_what_is_read() -> None:
    table = Table(bytearray(table_bytes(2)))
    row = table.block(1).row(table.directory.assign("m", "1"))
    for seconds in (0.01, 0.049, 0.3):
        row.observe(REQUEST_SECONDS, seconds)
    assert read_page(Exposition(table, "1.0").page().decode(), 0.05) == Answered(3, 2)


class Pages(http.server.BaseHTTPRequestHandler):
    pages: list[str]

    def do_GET(self) -> None:
        assert self.path == "/metrics"
        body = self.pages.pop(0).encode()
        self.send_response(200 if body else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def metrics() -> Iterator[tuple[str, list[str]]]:
    pages: list[str] = []
    handler = type("These", (Pages,), {"pages": pages})
    with http.server.HTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", pages
        server.shutdown()
        thread.join(30)


def test_the_share_is_of_what_was_answered_between_two_looks(metrics: tuple[str, list[str]]) -> None:
    url, pages = metrics
    pages += [page("a", "1 5 8 10"), page("a", "1 95 105 110")]
    account = Account(url, 0.05)
    account.look()
    account.look()
    assert account.share() == 0.9


def test_a_server_that_cannot_tell_leaves_it_open(metrics: tuple[str, list[str]]) -> None:
    url, pages = metrics
    pages += ["", ""]
    account = Account(url, 0.05)
    account.look()
    account.look()
    assert account.share() is None
    without = Account(url, None)  # nothing was promised
    without.look()
    assert without.share() is None
