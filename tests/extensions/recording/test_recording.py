"""What is written of arrivals, and what is not; the file is bounded and nobody's older one is touched."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from carpool.config.server import ServerSettings
from carpool.errors import (
    CarpoolError,
    ConfigError,
    DeadlineExceeded,
    InvalidInput,
    NotFound,
    Refused,
    Unavailable,
)
from carpool.extensions import started
from carpool.extensions.recording import front as recording
from carpool.extensions.recording.front import Recorder, RecordingClient, claim, front
from carpool.link.engine_client import Ask
from carpool.link.senders import Sender
from carpool.sim.arrivals import Recording as Trace
from carpool.types import Datatype, RequestOptions
from carpool.wire.v2 import RequestHead
from frontend.fake_door import FakeDoor, echo
from heard import Heard

MB = 1_000_000


def lines(file: Path) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in file.read_bytes().splitlines()]


def warnings(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """What is logged from here on."""

    class Log:
        def warning(self, event: str, **fields: Any) -> None:
            said.append((event, fields))

    said: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr(recording, "_log", Log())
    return said


@pytest.fixture
def door() -> FakeDoor:
    door = FakeDoor(echo("cats", Datatype.FP32), echo("dogs", Datatype.FP32, max_batch=0))
    door.held = True
    return door


def test_a_line_for_each_arrival_with_its_time_since_the_beginning(tmp_path: Path, door: FakeDoor) -> None:
    file = tmp_path / "arrivals.jsonl"
    recorder = Recorder(file, began=1000.0, limit_bytes=MB)
    cats, dogs = door.catalog.newest["cats"], door.catalog.newest["dogs"]
    recorder.note(cats, 1000.25, 3, "")
    recorder.note(dogs, 1000.1234567, 1, 'gate "4"\n')
    recorder.close()
    assert lines(file) == [
        {"time": 0.25, "model": "cats", "images": 3},
        {"time": 0.123457, "model": "dogs", "images": 1, "source": 'gate "4"\n'},
    ]
    recorder.note(cats, 1001.0, 1, "")  # too late, and no harm
    assert len(lines(file)) == 2


def test_what_several_front_ends_write_is_one_trace_in_order(tmp_path: Path, door: FakeDoor) -> None:
    file = tmp_path / "arrivals.jsonl"
    recorders = [Recorder(file, began=5.0, limit_bytes=MB) for _ in range(3)]
    entry = door.catalog.newest["cats"]
    for number in range(3000):
        recorders[number % 3].note(entry, 5.0 + number / 1000, 1, f"s{number % 3}")
    for recorder in recorders:
        recorder.close()
    trace = Trace.read(file, per_source=True).recorded
    assert [round(arrival.at * 1000) for arrival in trace] == list(range(3000))
    assert [arrival.source for arrival in trace[:4]] == ["s0", "s1", "s2", "s0"]


def test_it_stops_at_its_limit_and_says_so_once(
    tmp_path: Path, door: FakeDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = warnings(monkeypatch)
    file = tmp_path / "arrivals.jsonl"
    recorder = Recorder(file, began=0.0, limit_bytes=50_000)
    for number in range(5000):
        recorder.note(door.catalog.newest["cats"], number / 1000, 1, "")
    recorder.close()
    assert 30_000 < file.stat().st_size <= 50_000
    assert [line["time"] for line in lines(file)] == [n / 1000 for n in range(len(lines(file)))]
    assert [event for event, _ in said] == ["record-stopped"]
    assert "--record-limit-mb" in said[0][1]["why"]


def test_a_disk_that_is_full_ends_the_record_and_nothing_else(
    tmp_path: Path, door: FakeDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = warnings(monkeypatch)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    recorder = Recorder(tmp_path / "arrivals.jsonl", began=0.0, limit_bytes=MB)
    monkeypatch.setattr(recording, "_write", full)
    recorder.note(door.catalog.newest["cats"], 1.0, 1, "")
    recorder.close()
    recorder.note(door.catalog.newest["cats"], 2.0, 1, "")
    assert [event for event, _ in said] == ["record-stopped"]


def test_a_recording_ends_at_its_last_whole_line(
    tmp_path: Path, door: FakeDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk takes half of a line, and a front end that was killed has left one: both are cut off, and
    what others wrote to the same file stays."""
    said = warnings(monkeypatch)
    file = tmp_path / "arrivals.jsonl"
    file.write_bytes(b'{"time":0.5,"model":"cats","images":1}\n{"time":0.7,"mod')
    first, other = (Recorder(file, began=0.0, limit_bytes=MB) for _ in range(2))
    first.note(door.catalog.newest["cats"], 1.0, 1, "")
    first.close()
    assert [line["time"] for line in lines(file)] == [0.5, 1.0]
    whole, write = file.read_bytes(), os.write
    room = [20, 0]

    def full(fd: int, data: bytes) -> int:
        if fd != other._fd:
            return write(fd, data)
        if not (left := room.pop(0)):
            raise OSError(28, "No space left on device")
        return write(fd, data[:left])

    monkeypatch.setattr(os, "write", full)
    other.note(door.catalog.newest["cats"], 2.0, 1, "")
    other.close()
    assert (file.read_bytes(), room) == (whole, [])
    assert [(event, fields["why"]) for event, fields in said] == [
        ("record-stopped", "No space left on device")
    ]


def test_a_disk_that_is_stuck_costs_arrivals_but_no_memory(
    tmp_path: Path, door: FakeDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = warnings(monkeypatch)
    monkeypatch.setattr(recording, "_MOST_WAITING", 10)
    recorder = Recorder(tmp_path / "arrivals.jsonl", began=0.0, limit_bytes=MB)
    for number in range(25):  # within the second between two looks of the thread
        recorder.note(door.catalog.newest["cats"], float(number), 1, "")
    recorder.close()
    assert len(lines(tmp_path / "arrivals.jsonl")) == 10
    assert [fields["lost"] for _, fields in said] == [15]


def test_only_a_new_or_an_empty_file_is_written_to(tmp_path: Path) -> None:
    assert claim(str(tmp_path / "new.jsonl")).stat().st_size == 0
    assert claim(str(tmp_path / "new.jsonl")).is_absolute()
    (tmp_path / "old.jsonl").write_text('{"time": 1}\n')
    os.mkfifo(tmp_path / "pipe")
    for name, says in (
        ("old.jsonl", "holds 12 bytes already"),
        ("pipe", "cannot record"),
        ("no/such/folder", "No such file"),
        (".", "Is a directory"),
    ):
        with pytest.raises(ConfigError, match=says):
            claim(str(tmp_path / name))
    assert (tmp_path / "old.jsonl").read_text() == '{"time": 1}\n'


def head(batch: int, source: str = "") -> RequestHead:
    return RequestHead("", (), (), RequestOptions(source=source), True, 0, batch=batch)


def test_whoever_comes_to_the_door_is_noted_once(tmp_path: Path, door: FakeDoor) -> None:
    file = tmp_path / "arrivals.jsonl"
    recorder = Recorder(file, began=0.0, limit_bytes=MB)
    noting = RecordingClient(door, recorder)
    cats, dogs = noting.catalog.newest["cats"], noting.catalog.newest["dogs"]
    slot = noting.slot(8)
    assert slot is not None
    noting.infer(Ask(cats, head(4, "own"), slot, 0, 1.0, 9.0), Heard())
    noting.infer(Ask(dogs, head(4), slot, 0, 2.0, sender=Sender("given")), Heard())
    assert [(call.arrived, call.source) for call in door.calls] == [(1.0, ""), (2.0, "given")]
    assert door.calls[0].deadline == 9.0
    told: list[CarpoolError] = [
        Refused("full"),
        Unavailable("no memory", reason="no-slots"),
        DeadlineExceeded("too late"),
        InvalidInput("a bad one stays bad"),
        NotFound("gone"),
    ]
    for number, error in enumerate(told):
        noting.rejected_here(cats, error, 3.0 + number, 2, "x")
    noting.answered_here(cats, 8.0, 4, "")
    recorder.close()
    assert lines(file)[-1] == {"time": 8.0, "model": "cats", "images": 4, "cached": True}
    found = [(line["time"], line["model"], line["images"], line.get("source")) for line in lines(file)[:-1]]
    expected: list[tuple[float, str, int, str | None]] = [(1.0, "cats", 4, "own"), (2.0, "dogs", 1, "given")]
    assert found == expected + [(at, "cats", 2, "x") for at in (3.0, 4.0, 5.0)]


def test_the_end_of_a_front_end_writes_the_last_arrivals(tmp_path: Path, door: FakeDoor) -> None:
    file = tmp_path / "arrivals.jsonl"
    settings = ServerSettings(record=str(file), record_limit_mb=1.0)
    server: Any = SimpleNamespace(settings=settings, began=5.0)
    part = front(server)
    assert part.engine is not None
    assert part.close is not None
    noting = part.engine(door)
    noting.rejected_here(noting.catalog.newest["cats"], Refused("draining"), 7.0)
    part.close()
    assert lines(file) == [{"time": 2.0, "model": "cats", "images": 1}]


def test_only_a_file_starts_it() -> None:
    assert [one.name for one in started(ServerSettings(record="arrivals.jsonl"))] == ["recording"]
    assert started(ServerSettings()) == ()
