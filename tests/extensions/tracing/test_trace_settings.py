"""The trace settings of the v2 protocol: for all models and for one, how many, and what is refused."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from carpool.errors import CarpoolError, ConfigError, InvalidInput, NotFound, Unsupported
from carpool.extensions.tracing.engine import TraceSettings
from carpool.types import Datatype
from frontend.fake_door import FakeDoor, echo
from frontend.fake_engine_server import FakeEngineServer

DEFAULTS = {
    "trace_level": ["OFF"],
    "trace_rate": "1000",
    "trace_count": "-1",
    "log_frequency": "0",
    "trace_mode": "triton",
}


class Engine:
    def __init__(self, file: str) -> None:
        self.file = file
        self.door = FakeDoor(echo("a", Datatype.FP32), echo("b", Datatype.FP32))
        server: Any = FakeEngineServer(self.door, "tracing")
        server.serve(TraceSettings(server, file).part)

    def update(self, model: str = "", **settings: Any) -> Any:
        found = asyncio.run(self.door.ask("tracing/settings", {"model": model, "settings": settings}))
        assert found.pop("trace_file") == self.file
        return found

    def grant(self, model: str, wanted: int) -> int:
        granted = asyncio.run(self.door.ask("tracing/places", {"model": model, "wanted": wanted}))
        assert isinstance(granted, int)
        return granted


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return Engine(str(tmp_path / "traces.jsonl"))


def test_what_holds_at_the_start(engine: Engine) -> None:
    assert engine.update() == engine.update("a") == DEFAULTS
    assert engine.door.catalog.server.extensions == ("trace",)
    assert Engine("").door.catalog.server.extensions == ()


def test_a_model_has_its_own_and_the_rest_from_all(engine: Engine) -> None:
    on = {"trace_level": ["TIMESTAMPS"]}
    assert engine.update(**on, trace_rate="7") == {**DEFAULTS, **on, "trace_rate": "7"}
    assert engine.update("a", trace_rate=["2"]) == {**DEFAULTS, **on, "trace_rate": "2"}
    assert engine.update("b") == {**DEFAULTS, **on, "trace_rate": "7"}
    engine.update(trace_rate=9)
    assert (engine.update("a")["trace_rate"], engine.update("b")["trace_rate"]) == ("2", "9")
    assert set(engine.door.catalog.extra["tracing"]) == {"", "a"}


@pytest.mark.parametrize("nothing", [None, []])
def test_null_clears(engine: Engine, nothing: Any) -> None:
    engine.update(trace_rate="7")
    engine.update("a", trace_rate="2")
    assert engine.update("a", trace_rate=nothing)["trace_rate"] == "7"
    assert engine.update(trace_rate=nothing) == DEFAULTS
    assert set(engine.door.catalog.extra["tracing"]) == {""}


def test_traces_are_counted_down(engine: Engine) -> None:
    engine.update(trace_level="TIMESTAMPS", trace_count="5")
    assert (engine.grant("a", 2), engine.grant("b", 1)) == (2, 1)
    assert engine.update()["trace_count"] == "2"
    number = engine.door.catalog.number
    assert engine.grant("a", 10) == 2
    assert engine.door.catalog.number == number + 1
    assert engine.door.catalog.extra["tracing"][""]["trace_count"] == "0"
    assert engine.grant("b", 1) == 0
    assert engine.update(trace_count="3")["trace_count"] == "3"
    assert engine.grant("b", 9) == 3
    engine.update(trace_count="-1")
    assert engine.grant("b", 9) == 9


def test_a_model_with_settings_counts_by_itself(engine: Engine) -> None:
    engine.update(trace_level="TIMESTAMPS", trace_count="5")
    engine.update("a", trace_rate="1")
    assert (engine.grant("a", 9), engine.grant("b", 9)) == (5, 5)
    engine.update("a", trace_count="1")
    engine.update(trace_count="2")
    assert (engine.grant("a", 9), engine.grant("b", 9)) == (1, 2)


@pytest.mark.parametrize(
    ("settings", "kind", "words"),
    [
        ({"trace_levels": []}, InvalidInput, 'did you mean "trace_level"?'),
        ({"trace_level": "MAX"}, InvalidInput, "TIMESTAMPS or OFF"),
        ({"trace_level": [7]}, InvalidInput, "TIMESTAMPS or OFF"),
        ({"trace_level": ["TIMESTAMPS", "TENSORS"]}, Unsupported, "tensors are not traced"),
        ({"trace_rate": "0"}, InvalidInput, "1 or more"),
        ({"trace_rate": "x"}, InvalidInput, "1 or more"),
        ({"trace_rate": {}}, InvalidInput, "1 or more"),
        ({"trace_rate": ["1", "2"]}, InvalidInput, "1 or more"),
        ({"trace_rate": 10**40}, InvalidInput, "1 or more"),
        ({"trace_rate": "٣"}, InvalidInput, "1 or more"),
        ({"trace_count": "-2"}, InvalidInput, "-1 or more"),
        ({"trace_count": True}, InvalidInput, "-1 or more"),
        ({"log_frequency": "5"}, Unsupported, "one file"),
        ({"trace_file": "/etc/passwd"}, Unsupported, "over the network"),
        ({"trace_mode": "opentelemetry"}, Unsupported, "over the network"),
        ({"trace_rate": "5", "trace_level": "MAX"}, InvalidInput, "TIMESTAMPS or OFF"),
    ],
)
def test_what_cannot_be_done_changes_nothing(
    engine: Engine, settings: dict[str, Any], kind: type[CarpoolError], words: str
) -> None:
    with pytest.raises(kind) as raised:
        engine.update(**settings)
    assert words in raised.value.message
    assert engine.update() == DEFAULTS


def test_what_was_read_can_be_written_back(engine: Engine) -> None:
    found = {**engine.update(), "trace_file": engine.file}
    assert engine.update(**found) == DEFAULTS


def test_a_model_that_is_not_there(engine: Engine) -> None:
    with pytest.raises(NotFound, match="Request for unknown model: 'c' is not found"):
        engine.update("c")


def test_without_a_file_there_is_nothing_to_switch_on() -> None:
    engine = Engine("")
    with pytest.raises(Unsupported, match="--trace-file"):
        engine.update(trace_level=["TIMESTAMPS"])
    assert engine.update(trace_level=["OFF"]) == DEFAULTS


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="traces cannot be written"):
        Engine(str(tmp_path / "none" / "traces.jsonl"))
