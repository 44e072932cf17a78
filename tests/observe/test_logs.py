"""One event, one line, one write, whatever a client puts into it."""

from __future__ import annotations

import json
import logging
import os
import select
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.observe.logs import Event, LineHandler, configure, line_of, logger


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


@pytest.fixture
def written(pipe: tuple[int, int]) -> Iterator[Callable[[], list[str]]]:
    """What has been logged since the last call; the tests choose the format with `configure`."""
    root, ours = logging.getLogger(), logging.getLogger("carpool")
    level = ours.level

    def read() -> list[str]:
        os.set_blocking(pipe[0], False)
        try:
            return os.read(pipe[0], 1 << 20).decode().splitlines()
        except BlockingIOError:
            return []

    yield read
    for handler in [handler for handler in root.handlers if isinstance(handler, LineHandler)]:
        root.removeHandler(handler)
    ours.setLevel(level)


def record(fields: dict[str, object]) -> logging.LogRecord:
    made = logging.LogRecord("carpool.engine", logging.INFO, "", 0, Event("model-ready", fields), None, None)
    made.created, made.process = 1760000000.25, 42
    return made


def test_text() -> None:
    line = line_of(record({"model": "a b", "seconds": 1.5, "warm": True, "id": None, "n": 3}), as_json=False)
    assert line.decode() == (
        '2025-10-09T08:53:20.250Z info engine[42] model-ready model="a b" seconds=1.5 warm=true id=null n=3\n'
    )


def test_json() -> None:
    line = line_of(record({"model": "a b", "error": ValueError("bad"), "rate": float("inf")}), as_json=True)
    assert json.loads(line) == {
        "time": "2025-10-09T08:53:20.250Z",
        "level": "info",
        "part": "engine",
        "pid": 42,
        "event": "model-ready",
        "model": "a b",
        "error": "ValueError: bad",
        "rate": "inf",
    }


def test_a_field_cannot_replace_what_every_line_has() -> None:
    line = json.loads(line_of(record({"level": "fake", "pid": 1}), as_json=True))
    assert (line["level"], line["pid"], line["level_"], line["pid_"]) == ("info", 42, "fake", 1)


@pytest.mark.parametrize("as_json", [False, True])
@given(value=st.text(max_size=6000))
def test_no_value_breaks_the_line(value: str, as_json: bool) -> None:
    line = line_of(record({"model": value, "after": 1}), as_json)
    text = line.decode()
    assert len(line) <= select.PIPE_BUF
    assert text.endswith("\n")
    assert text[:-1].isprintable()
    if as_json and len(value) <= 40:
        assert json.loads(line)["model"] == value


@pytest.mark.parametrize(
    "value", ["a\nfake line", "\x1b[31mred", "\x7f\x00", "\u202eright to left", "\ud800"]
)
def test_control_characters_are_spelled_out(value: str) -> None:
    text = line_of(record({"id": value}), as_json=False).decode()
    word = text.partition("id=")[2].rstrip("\n")
    assert "\\" in word
    assert json.loads(word) == value


def test_text_values_cannot_forge_fields() -> None:
    text = line_of(record({"id": 'x" level=error'}), as_json=False).decode()
    assert text.endswith(r'id="x\" level=error"' + "\n")


@pytest.mark.parametrize("as_json", [False, True])
def test_too_many_fields_are_left_out_rather_than_split(as_json: bool) -> None:
    line = line_of(record({f"field{number}": "x" * 100 for number in range(500)}), as_json)
    assert len(line) <= select.PIPE_BUF
    assert b"fields_left_out" in line
    assert b"model-ready" in line


def test_levels_and_bound_fields(pipe: tuple[int, int], written: Callable[[], list[str]]) -> None:
    configure("text", "warning", pipe[1])
    log = logger("http").bind(request_id="r1")
    log.debug("hidden")
    log.info("hidden")
    log.warning("slow-client", seconds=2)
    log.error("bad-head", request_id="r2")
    first, second = written()
    assert first.partition("] ")[2] == "slow-client request_id=r1 seconds=2"
    assert second.partition("] ")[2] == "bad-head request_id=r2"


def test_an_unexpected_error_brings_its_traceback_in_the_same_line(
    pipe: tuple[int, int], written: Callable[[], list[str]]
) -> None:
    configure("json", "debug", pipe[1])
    try:
        raise RuntimeError("boom")
    except RuntimeError:
        logger("engine").exception("loop-failed")
    [line] = written()
    fields = json.loads(line)
    assert fields["error"] == "RuntimeError: boom"
    assert "test_logs.py" in fields["traceback"]


def test_other_libraries_warnings_take_the_same_form(
    pipe: tuple[int, int], written: Callable[[], list[str]]
) -> None:
    configure("json", "info", pipe[1])
    configure("json", "info", pipe[1])  # twice is not two lines
    logging.getLogger("asyncio").warning("task %s\nis slow", "x")
    [line] = written()
    fields = json.loads(line)
    assert (fields["part"], fields["event"], fields["text"]) == ("asyncio", "message", "task x\nis slow")


def test_a_log_nobody_reads_does_not_stop_the_server(written: Callable[[], list[str]]) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    configure("text", "info", write_end)
    logger("engine").info("still-here")
    os.close(write_end)
    logger("engine").info("still-here")


def test_a_program_that_embeds_carpool_sees_readable_messages(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="carpool"):
        logger("engine").info("model-ready", model="x y")
    assert caplog.messages == ['model-ready model="x y"']
