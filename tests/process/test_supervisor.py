"""The whole set of processes, and what happens when one is shot."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from carpool.config.server import ServerSettings
from carpool.link.child_process import Child
from carpool.process import standby, supervisor
from carpool.process.forking import PROCESSES
from waiting import until

LONG = 60.0
TESTS = Path(__file__).parents[1]
ECHO = "link.echo:start"
LINES = "link.lines:start"


class Server:
    """A supervisor in a process of its own, with its log as a list of events."""

    def __init__(
        self,
        *,
        engine: str = ECHO,
        frontend: str = LINES,
        aside: str = "",
        paths: tuple[str, ...] = (),
        stdin: int = subprocess.DEVNULL,
        **settings: Any,
    ):
        given = {"frontends": 1, "http_port": 0, "drain_s": 30.0, **settings}
        given |= {"engine": engine, "frontend": frontend, "paths": paths, "aside": aside}
        path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH", "")]))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "link.lines", json.dumps(given)],
            stdin=stdin,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
            preexec_fn=partial(signal.signal, signal.SIGHUP, signal.SIG_DFL),  # these may run under nohup
        )
        self.events: list[dict[str, Any]] = []
        self.other: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            try:
                self.events.append(json.loads(line))
            except ValueError:
                self.other.append(line.decode())

    def found(self, event: str, **fields: Any) -> list[dict[str, Any]]:
        return [
            entry
            for entry in list(self.events)
            if entry["event"] == event and fields.items() <= entry.items()
        ]

    def wait_event(self, event: str, count: int = 1, **fields: Any) -> dict[str, Any]:
        def enough() -> bool:
            assert self.process.poll() is None or len(self.found(event, **fields)) >= count, self.other
            return len(self.found(event, **fields)) >= count

        until(enough)
        return self.found(event, **fields)[count - 1]

    def pid(self, role: str, count: int = 1) -> int:
        """Of the `count`th process of that role that came up."""
        pid: int = self.wait_event("process-up", count, role=role)["child"]
        return pid

    def connect(self) -> Line:
        return Line(self.wait_event("listening")["http"])

    def serving(self) -> Line:
        """A connection to a front end that serves."""
        line = self.connect()
        until(lambda: line.status()["serving"])
        return line

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def exit_code(self) -> int:
        code = self.process.wait(LONG)
        self._reader.join(LONG)
        return code

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(LONG)
        self._reader.join(LONG)
        assert self.process.stderr is not None
        self.process.stderr.close()


class Line:
    """A connection to one front end."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=LONG)
        self._file = self._socket.makefile("rwb")

    def say(self, text: str) -> None:
        self._file.write(text.encode() + b"\n")
        self._file.flush()

    def hear(self) -> str:
        """The next answer; empty when the connection is over."""
        try:
            return self._file.readline().decode().strip()
        except ConnectionResetError:
            return ""

    def ask(self, text: str) -> str:
        self.say(text)
        return self.hear()

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = json.loads(self.ask("status"))
        return status

    def counts(self) -> dict[str, int]:
        answer = self.ask("ask counts")
        return {} if answer.startswith("error") else json.loads(answer)

    def close(self) -> None:
        self._file.close()
        self._socket.close()


@pytest.fixture
def serve(request: pytest.FixtureRequest) -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def start(**settings: Any) -> Server:
        servers.append(Server(**settings))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def lines() -> Iterator[list[Line]]:
    """Connections to close."""
    opened: list[Line] = []
    yield opened
    for line in opened:
        line.close()


def test_requests_go_through_and_sigterm_ends_it_well(
    serve: Callable[..., Server], lines: list[Line]
) -> None:
    server = serve(frontends=2)
    line = server.serving()
    lines.append(line)
    assert line.ask("infer - 1 2 3 4") == "1 2 3 4"
    assert line.status()["slots"] == 0
    assert "fixed:1" in server.wait_event("ready")["models"].split()
    server.signal(signal.SIGTERM)
    assert server.exit_code() == 0
    assert not server.other


def test_a_process_that_is_not_vital_is_restarted_and_sends_requests(
    serve: Callable[..., Server], lines: list[Line]
) -> None:
    server = serve(aside="link.lines:start_aside")
    server.serving().close()
    os.kill(server.pid("grpc"), signal.SIGKILL)
    assert server.wait_event("process-died", role="grpc")["ending"] == "signal 9"
    server.pid("grpc", 2)
    aside = Line(server.wait_event("listening")["grpc"])
    lines.append(aside)
    until(lambda: aside.status()["serving"])
    assert aside.ask("infer - 1 2 3 4") == "1 2 3 4"
    assert aside.status()["restarts"]["grpc"] == 1
    server.signal(signal.SIGTERM)
    assert server.exit_code() == 0


def test_a_server_serves_without_a_process_that_is_not_vital(
    serve: Callable[..., Server], lines: list[Line]
) -> None:
    server = serve(aside="link.lines:fail")
    line = server.serving()
    lines.append(line)
    server.wait_event("ready")
    server.wait_event("process-died", 2, role="grpc")
    assert line.ask("infer - 1 2 3 4") == "1 2 3 4"
    assert not server.found("cannot-serve")
    server.signal(signal.SIGTERM)
    assert server.exit_code() == 0


def test_other_signals_are_logged_and_end_no_process(serve: Callable[..., Server], lines: list[Line]) -> None:
    server = serve()
    line = server.serving()
    lines.append(line)
    for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        for pid in (server.pid("engine"), server.pid("http")):
            os.kill(pid, number)
        server.signal(number)
        server.wait_event("signal-ignored", signal=number.name)
    assert line.ask("infer - 1 2 3 4") == "1 2 3 4"
    server.signal(signal.SIGTERM)
    assert server.exit_code() == 0
    assert not server.found("process-died")


def test_a_terminal_that_is_closed_stops_its_server(serve: Callable[..., Server], lines: list[Line]) -> None:
    ours, theirs = os.openpty()
    try:
        server = serve(stdin=theirs)
        line = server.serving()
        lines.append(line)
        server.signal(signal.SIGHUP)
        assert server.wait_event("stopping")["signal"] == "SIGHUP"
        assert server.exit_code() == 0
    finally:
        os.close(ours)
        os.close(theirs)


@pytest.mark.conformance
def test_the_engine_is_shot_with_calls_waiting(serve: Callable[..., Server], lines: list[Line]) -> None:
    server = serve(frontends=2)
    line = server.serving()
    waiting = [server.connect() for _ in range(8)]
    lines += [line, *waiting]
    for one in waiting:
        until(lambda one=one: one.status()["serving"])  # type: ignore[misc]
        one.say("infer hold 1 2 3 4")
    until(lambda: line.counts().get("waiting") == 8)
    os.kill(server.pid("engine"), signal.SIGKILL)
    for one in waiting:
        assert one.hear() == "error engine-restarted"
        status = one.status()  # the next line is the answer to this: nothing was said twice
        assert status["slots"] == 0
    server.pid("engine", 2)
    until(lambda: all(one.status()["ready"] for one in waiting))
    assert waiting[0].ask("infer - 5 6 7 8") == "5 6 7 8"
    assert line.status()["restarts"]["engine"] == 1
    assert server.wait_event("process-died", role="engine")["ending"] == "signal 9"
    assert server.pid("http", 2)
    assert len(server.found("process-started", role="http")) == 2  # front ends live on


def test_a_front_end_is_shot_with_work_running(serve: Callable[..., Server], lines: list[Line]) -> None:
    server = serve(frontends=2)
    shot, other = _one_of_each(server, lines)
    victim = shot.status()["pid"]
    survivor = other.status()["pid"]
    neighbour = _another(server, lines, victim)
    shot.say("infer run 1 2 3 4")
    neighbour.say("infer hold 1 2 3 4")
    other.say("infer hold 9 9 9 9")
    watch = _another(server, lines, survivor)
    until(lambda: watch.counts() == watch.counts() and watch.counts()["waiting"] == 2)
    until(lambda: watch.counts()["running"] == 1)
    os.kill(victim, signal.SIGKILL)
    assert shot.hear() == ""
    assert neighbour.hear() == ""
    until(lambda: watch.counts()["waiting"] == 1)  # the dead one's was cancelled, the other's waits on
    assert watch.counts()["running"] == 1
    watch.ask("ask release")
    assert other.hear() == "9 9 9 9"
    server.wait_event("process-up", 3, role="http")
    successor = _another(server, lines, lambda pid: pid not in (victim, survivor))
    until(lambda: successor.status()["serving"])
    assert successor.ask("infer - 1 2 3 4") == "1 2 3 4"
    assert successor.status()["restarts"]["http"] == 1
    assert len(server.found("process-started", role="engine")) == 1


def test_connections_in_the_queue_of_a_dead_front_end_are_served_by_the_next(
    serve: Callable[..., Server], lines: list[Line]
) -> None:
    server = serve(frontends=1)
    lines.append(server.serving())
    victim = server.pid("http")
    os.kill(victim, signal.SIGSTOP)  # it accepts no more, but its socket does
    queued = [server.connect() for _ in range(5)]
    lines += queued
    os.kill(victim, signal.SIGKILL)
    assert lines[0].hear() == ""
    for line in queued:
        until(lambda line=line: line.status()["serving"])  # type: ignore[misc]
        assert line.ask("infer - 1 2 3 4") == "1 2 3 4"


def test_a_front_end_that_lies_is_replaced(serve: Callable[..., Server], lines: list[Line]) -> None:
    server = serve(frontends=1)
    line = server.serving()
    lines.append(line)
    line.ask("lie")
    server.wait_event("link-dropped")
    server.pid("http", 2)
    assert line.hear() == ""
    lines.append(server.serving())
    assert lines[-1].ask("infer - 1 2 3 4") == "1 2 3 4"
    assert len(server.found("process-started", role="engine")) == 1


def test_what_dies_is_forked_again_and_so_it_is_when_the_zygote_had_died(
    serve: Callable[..., Server], lines: list[Line]
) -> None:
    server = serve()
    zygote = server.wait_event("zygote-started")["child"]
    for role in ("engine", "http"):
        os.kill(server.pid(role), signal.SIGKILL)
        server.pid(role, 2)
    assert [event["forked"] for event in server.found("process-started")] == [True] * 4
    os.kill(zygote, signal.SIGSTOP)  # it is asked, does not answer, and is ended: a fresh process serves
    os.kill(server.pid("http", 2), signal.SIGKILL)
    server.pid("http", 3)
    assert server.wait_event("zygote-ended")["child"] == zygote
    assert not server.found("process-started", role="http")[-1]["forked"]
    server.wait_event("zygote-ready", 2)
    os.kill(server.pid("http", 3), signal.SIGKILL)
    server.pid("http", 4)
    assert server.found("process-started", role="http")[-1]["forked"]
    lines.append(server.serving())
    assert lines[0].ask("infer - 1 2 3 4") == "1 2 3 4"


@pytest.mark.conformance
def test_everything_can_die_again_and_again(serve: Callable[..., Server], lines: list[Line]) -> None:
    server = serve(frontends=2)
    server.pid("http", 2)
    server.wait_event("ready")
    files = _open_files(server.process.pid)
    for round_ in range(1, 4):
        engine = server.pid("engine", round_)
        frontends = [entry["child"] for entry in server.found("process-up", role="http")[-2:]]
        for pid in (engine, *frontends):
            os.kill(pid, signal.SIGKILL)
        server.pid("engine", round_ + 1)
        server.pid("http", 2 + 2 * round_)
    lines.append(server.serving())
    assert lines[-1].ask("infer - 1 2 3 4") == "1 2 3 4"
    delays = [entry["restart_in_s"] for entry in server.found("process-died", role="engine")]
    assert delays == [0.0, 0.1, 0.2]
    until(lambda: _open_files(server.process.pid) <= files)
    server.signal(signal.SIGINT)
    assert server.exit_code() == 0


def test_what_connects_to_a_front_end_that_stands_still_is_served_by_another(
    serve: Callable[..., Server], lines: list[Line]
) -> None:
    server = serve(frontends=2, watchdog_s=0.0)
    first, second = _one_of_each(server, lines)
    still, other = first.status()["pid"], second.status()["pid"]
    os.kill(still, signal.SIGSTOP)
    for _ in range(20):  # half of them come to the socket of the one that stands still
        line = server.connect()
        assert line.status()["pid"] == other
        line.close()
    os.kill(still, signal.SIGCONT)
    lines.append(_another(server, lines, still))
    assert first.status()["pid"] == still


@pytest.mark.conformance
def test_clients_are_sent_elsewhere_while_a_front_end_keeps_dying(
    serve: Callable[..., Server], lines: list[Line]
) -> None:
    server = serve(frontends=2)
    first, second = _one_of_each(server, lines)
    victim, survivor = first.status()["pid"], second.status()["pid"]
    for deaths in range(1, 7):
        os.kill(victim, signal.SIGKILL)
        died = server.wait_event("process-died", deaths, role="http")
        if died["restart_in_s"] < 1.0:
            victim = server.pid("http", 2 + deaths)
    assert died["restart_in_s"] == pytest.approx(1.6)
    for _ in range(20):
        line = server.connect()
        # On a machine that stands still meanwhile the next one may be here already.
        assert line.status()["pid"] == survivor or len(server.found("process-started", role="http")) == 8
        line.close()
    server.pid("http", 8)
    back = _another(server, lines, lambda pid: pid != survivor)
    until(lambda: back.status()["serving"])
    assert back.ask("infer - 1 2 3 4") == "1 2 3 4"


# ── stopping ──


def test_sigterm_finishes_what_was_accepted_front_ends_first(
    serve: Callable[..., Server], lines: list[Line]
) -> None:
    server = serve(frontends=1)
    held, other = server.serving(), server.serving()
    lines += [held, other]
    held.say("infer hold 1 2 3 4")
    until(lambda: other.counts()["waiting"] == 1)
    server.signal(signal.SIGTERM)
    until(lambda: not other.status()["serving"])  # not ready first
    port = server.wait_event("listening")["http"]
    until(lambda: _refused(port))
    assert other.ask("infer - 1 2 3 4") == "error not-serving"
    assert other.counts()["waiting"] == 1
    other.ask("ask release")
    assert held.hear() == "1 2 3 4"
    assert server.exit_code() == 0
    ends = [entry["part"] for entry in server.found("drained")]
    assert ends == ["frontend", "engine"]


def test_the_time_to_drain_is_bounded(serve: Callable[..., Server], lines: list[Line]) -> None:
    # Of these thirty seconds, 1.5 are left to the front end to say what it cut off, before it is ended.
    server = serve(frontends=1, drain_s=30.0)
    held, other = server.serving(), server.serving()
    lines += [held, other]
    held.say("infer hold 1 2 3 4")
    until(lambda: other.counts()["waiting"] == 1)
    server.signal(signal.SIGTERM)
    assert server.exit_code() == 3
    assert server.found("drained", part="frontend")[0]["cut_off"] == 1
    assert held.hear() == ""


def test_a_second_signal_stops_at_once(serve: Callable[..., Server], lines: list[Line]) -> None:
    server = serve(frontends=1, drain_s=3600.0)
    held, other = server.serving(), server.serving()
    lines += [held, other]
    held.say("infer hold 1 2 3 4")
    until(lambda: other.counts()["waiting"] == 1)
    server.signal(signal.SIGTERM)
    server.wait_event("stopping")
    server.signal(signal.SIGINT)
    assert server.exit_code() == 128 + signal.SIGINT
    assert held.hear() == ""


def test_it_can_be_stopped_while_the_engine_starts(serve: Callable[..., Server]) -> None:
    server = serve(paths=["never"])
    server.wait_event("process-up", role="http")
    server.signal(signal.SIGTERM)
    assert server.exit_code() == 0


def test_children_do_not_outlive_the_supervisor(serve: Callable[..., Server]) -> None:
    server = serve(frontends=2)
    pids = [server.pid("engine"), server.pid("http"), server.pid("http", 2)]
    handles = [os.pidfd_open(pid) for pid in pids]
    server.signal(signal.SIGKILL)
    for handle in handles:
        assert select.select([handle], [], [], LONG)[0]
        os.close(handle)


# ── not starting ──


@pytest.mark.conformance
@pytest.mark.parametrize(
    ("fault", "code", "words"),
    [("config", 2, "'sloms'"), ("raise", 1, "no such device"), ("die", 1, "exit status 9")],
)
def test_an_engine_that_cannot_start_is_not_tried_again(
    serve: Callable[..., Server], fault: str, code: int, words: str
) -> None:
    server = serve(paths=[fault])
    assert server.exit_code() == code
    assert words in server.found("cannot-serve")[0]["error"]
    assert len(server.found("process-started", role="engine")) == 1


def test_neither_is_a_front_end(serve: Callable[..., Server]) -> None:
    server = serve(frontend="link.lines:nowhere")
    assert server.exit_code() == 1
    assert server.found("cannot-serve", role="http")


def test_a_port_that_is_taken_is_an_error_in_the_settings(serve: Callable[..., Server]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = serve(http_port=taken.getsockname()[1])
        assert server.exit_code() == 2
        assert "cannot listen" in server.found("cannot-serve")[0]["error"]
        assert not server.found("process-started")


def _open_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def _refused(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=LONG).close()
    except ConnectionRefusedError:
        return True
    return False


def _another(server: Server, lines: list[Line], wanted: int | Callable[[int], bool]) -> Line:
    """A connection that the kernel gave to that front end."""

    def attempt() -> Line | None:
        line = server.connect()
        pid = line.status()["pid"]
        if wanted(pid) if callable(wanted) else pid == wanted:
            return line
        line.close()
        return None

    line: Line = until(attempt)
    lines.append(line)
    return line


def _one_of_each(server: Server, lines: list[Line]) -> tuple[Line, Line]:
    server.pid("engine")
    first = server.serving()
    lines.append(first)
    pid = first.status()["pid"]
    second = _another(server, lines, lambda other: other != pid)
    until(lambda: second.status()["serving"])
    return first, second


def test_a_front_end_accepts_nobody_before_it_knows_the_models(
    serve: Callable[..., Server], lines: list[Line]
) -> None:
    server = serve(frontends=1, frontend="link.lines:start_late")
    server.pid("engine")
    server.serving().close()
    os.kill(server.pid("http"), signal.SIGKILL)
    lines.append(server.connect())  # waits in the socket, which outlives the process
    assert lines[-1].ask("infer - 1 2 3 4") == "1 2 3 4"


# ---- processes that hang without dying


def test_an_engine_that_is_stopped_is_not_served_from_and_is_replaced(
    serve: Callable[..., Server], lines: list[Line]
) -> None:
    server = serve(frontends=1, watchdog_s=4.0)
    line, waiting = server.serving(), server.serving()
    lines += [line, waiting]
    waiting.say("infer hold 1 2 3 4")
    until(lambda: line.counts().get("waiting") == 1)
    engine = server.pid("engine")
    os.kill(engine, signal.SIGSTOP)
    assert waiting.hear() == "error engine-stalled"
    assert not line.status()["serving"]
    assert line.ask("infer - 1 2 3 4") == "error not-serving"
    assert server.wait_event("process-hangs", role="engine")["child"] == engine
    until(lambda: line.status()["serving"])
    assert line.ask("infer - 1 2 3 4") == "1 2 3 4"
    assert line.status()["restarts"]["engine"] == 1


def test_an_engine_that_goes_on_in_time_is_kept(serve: Callable[..., Server], lines: list[Line]) -> None:
    server = serve(frontends=1, watchdog_s=60.0)
    line = server.serving()
    lines.append(line)
    engine = server.pid("engine")
    os.kill(engine, signal.SIGSTOP)
    until(lambda: not line.status()["serving"])
    os.kill(engine, signal.SIGCONT)
    until(lambda: line.status()["serving"])
    assert line.ask("infer - 1 2 3 4") == "1 2 3 4"
    assert not server.found("process-died")


@pytest.mark.conformance
def test_a_front_end_that_is_stopped_is_replaced(serve: Callable[..., Server], lines: list[Line]) -> None:
    server = serve(frontends=1, watchdog_s=2.0)
    server.serving().close()
    os.kill(server.pid("http"), signal.SIGSTOP)
    server.wait_event("process-hangs", role="http")
    line = server.serving()
    lines.append(line)
    assert line.ask("infer - 1 2 3 4") == "1 2 3 4"


@pytest.mark.conformance
def test_when_everybody_was_stopped_nobody_is_killed(serve: Callable[..., Server], lines: list[Line]) -> None:
    server = serve(frontends=1, watchdog_s=2.0)
    line = server.serving()
    lines.append(line)
    everybody = [server.process.pid, server.pid("engine"), server.pid("http")]
    for pid in everybody:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(4.0)  # longer than anybody may stand still while the others move
    for pid in everybody:
        os.kill(pid, signal.SIGCONT)
    until(lambda: line.status()["serving"])
    assert line.ask("infer - 1 2 3 4") == "1 2 3 4"
    assert not server.found("process-hangs")


def test_a_process_that_cannot_be_started_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """No memory or no descriptor for a moment must not end a server that was well."""
    tried: list[str] = []

    class NoChild:
        def __init__(self, *_: str) -> None:
            tried.append("fork")
            if len(tried) == 3:
                keeper._stopping.set()
            raise OSError(errno.EAGAIN, "no process")

    monkeypatch.setattr(standby, "Child", NoChild)

    async def story() -> None:
        nonlocal keeper
        keeper = supervisor.Supervisor(ServerSettings(), [], engine=ECHO, frontends=[])
        keeper._finished = asyncio.get_running_loop().create_future()
        keeper._engine.was_up = True
        keeper._engine.delay = 0.001
        await asyncio.wait_for(keeper._keep(keeper._engine), LONG)
        assert len(tried) == 3
        assert not keeper._finished.done(), "the whole server ended"

    keeper: supervisor.Supervisor = None  # type: ignore[assignment]
    asyncio.run(story())


def test_it_can_be_stopped_while_the_zygote_imports_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def begins(module: str, *arguments: str, **named: str) -> Child:
        child = Child(module, *arguments, **named)
        if module != PROCESSES:
            os.kill(child.pid, signal.SIGSTOP)
        return child

    monkeypatch.setattr(standby, "Child", begins)

    async def story() -> None:
        keeper = supervisor.Supervisor(ServerSettings(drain_s=LONG), [], engine=ECHO, frontends=[])
        keeper._finished = asyncio.get_running_loop().create_future()
        keeper._standby.begin()
        keeper._keepers[keeper._engine] = asyncio.create_task(keeper._keep(keeper._engine))
        await asyncio.sleep(0)
        zygote = keeper._standby._zygote
        assert zygote is not None
        assert zygote._forks, "it waits for no fork"
        await keeper._drain()
        assert keeper._finished.result() == 0
        await keeper._end_all()

    asyncio.run(story())
