"""The log settings of the v2 protocol: what may be said, and what the process then writes."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest

from carpool.errors import CarpoolError, Forbidden, InvalidInput, Unsupported
from carpool.observe.logs import LineHandler, configure, logger
from carpool.process.shared_settings import LogSettings, apply_log_settings, log_settings
from frontend.fake_door import FakeDoor
from frontend.fake_host import FakeHost

START = {
    "log_file": "",
    "log_info": True,
    "log_warning": True,
    "log_error": True,
    "log_verbose_level": 0,
    "log_format": "default",
}


TRIES = count()


@pytest.fixture
def written() -> Iterator[int]:
    """The reading end of what is logged; the program's own logging is as before afterwards."""
    root, carpool = logging.getLogger(), logging.getLogger("carpool")
    handlers, level = list(root.handlers), carpool.level
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    configure("text", "info", writing)
    yield reading
    root.handlers[:] = handlers
    carpool.setLevel(level)
    os.close(reading)
    os.close(writing)


def lines(reading: int) -> list[str]:
    """The levels of the lines since the last look, one of each level having been tried."""
    log, event = logger("test"), f"tried-{next(TRIES)}"  # what repeats would only be counted
    for write in (log.debug, log.info, log.warning, log.error):
        write(event)
    logging.getLogger("another.library").warning(event)
    logging.getLogger("another.library").log(35, event)
    try:
        text = os.read(reading, 65536).decode()
    except BlockingIOError:
        return []
    return [line.split()[1] for line in text.splitlines() if "log-settings-changed" not in line]


def engine(level: str = "info") -> FakeDoor:
    door = FakeDoor()
    host: Any = FakeHost(door)
    LogSettings(host, level)
    host.publish()
    return door


def update(door: FakeDoor, **settings: Any) -> Any:
    return asyncio.run(door.ask("log-settings", {"settings": settings}))


def update_as_admin(door: FakeDoor, **settings: Any) -> Any:
    return asyncio.run(door.ask("log-settings", {"settings": settings, "by": "root", "admin": True}))


@pytest.mark.parametrize(
    ("level", "differs"),
    [
        ("debug", {"log_verbose_level": 1}),
        ("info", {}),
        ("warning", {"log_info": False}),
        ("error", {"log_info": False, "log_warning": False}),
    ],
)
def test_the_command_line_is_where_they_start(level: str, differs: dict[str, Any]) -> None:
    assert log_settings(level) == {**START, **differs}
    door = engine(level)
    assert update(door) == door.catalog.server.logging == {**START, **differs}


def test_every_kind_of_line_has_its_switch(written: int) -> None:
    door = engine()
    assert lines(written)[:4] == ["info", "warning", "error", "warning"]
    update(door, log_info=False)
    assert "info" not in lines(written)
    update(door, log_info=True, log_warning=False)
    assert lines(written) == ["info", "error"]
    update_as_admin(door, log_error=False, log_verbose_level=1)
    assert lines(written) == ["debug", "info"]
    update(door, log_info=False, log_verbose_level=0)
    assert lines(written) == []
    update(door, log_info=True, log_warning=True, log_error=True)
    assert lines(written)[:3] == ["info", "warning", "error"]


def test_no_setting_hides_that_the_settings_changed(written: int) -> None:
    door = engine("error")
    update_as_admin(door, log_error=False)
    update_as_admin(door, log_verbose_level=0)
    update(door, log_verbose_level=2)
    told = os.read(written, 65536).decode().splitlines()
    assert len(told) == 2
    assert "warning engine" in told[0]
    assert "log-settings-changed log_error=false by=root" in told[0]
    assert "log-settings-changed log_verbose_level=2 by=anybody" in told[1]


def test_other_processes_follow_the_catalogue(written: int) -> None:
    door = engine()
    update(door, log_info=False)
    apply_log_settings(log_settings("info"))
    assert "info" in lines(written)
    apply_log_settings(door.catalog.server.logging)
    assert "info" not in lines(written)
    apply_log_settings({})  # of an engine that says nothing
    assert "info" not in lines(written)


def test_what_was_read_can_be_written_back(written: int) -> None:
    door = engine()
    number = door.catalog.number
    assert update(door, **START) == START
    assert door.catalog.number == number + 1


@pytest.mark.parametrize(
    ("settings", "kind", "words"),
    [
        ({"log_infos": True}, InvalidInput, 'did you mean "log_info"?'),
        ({"x" * 500: True}, InvalidInput, "valid here: log_error"),
        ({"log_info": 1}, InvalidInput, "log_info must be true or false"),
        ({"log_warning": None}, InvalidInput, "true or false"),
        ({"log_verbose_level": True}, InvalidInput, "integer"),
        ({"log_verbose_level": -1}, InvalidInput, "integer"),
        ({"log_verbose_level": 1 << 40}, InvalidInput, "integer"),
        ({"log_file": "/etc/passwd"}, Unsupported, "through network protocol"),
        ({"log_info": False, "log_error": False}, Forbidden, "admin key"),
        ({"log_format": "json"}, InvalidInput, "invalid argument for log_format, got: json"),
        ({"log_info": False, "log_format": 3}, InvalidInput, "known are default, ISO8601"),
    ],
)
def test_what_cannot_be_done_changes_nothing(
    settings: dict[str, Any], kind: type[CarpoolError], words: str
) -> None:
    door = engine()
    with pytest.raises(kind) as raised:
        update(door, **settings)
    assert words in raised.value.message
    assert len(raised.value.message) < 300
    assert update(door) == START


def test_a_handler_writes_everything_until_it_is_told_otherwise() -> None:
    handler = LineHandler(2, as_json=False)
    for level in (1, 10, 20, 25, 30, 40, 50):
        assert handler.filter(logging.LogRecord("x", level, "", 0, "x", None, None))
