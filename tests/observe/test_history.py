"""The history: what points say, how long they are kept, and what a reader meets in mid-write."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from carpool.observe import columns
from carpool.observe.counters import CounterRow, Row, Table, table_bytes
from carpool.observe.history import HistoryKeeper, quantile
from carpool.observe.shared_history import HISTORY_BYTES, KEPT_S, SharedHistory
from carpool.observe.steady_time import steady_time


def points(table: Table, after: int = 0) -> list[dict[str, Any]]:
    return [orjson.loads(point) for _, point in table.history.read(after)]


def table_with(model: str = "m") -> tuple[Table, Row, CounterRow]:
    table = Table(bytearray(table_bytes(2)))
    slot = table.directory.assign(model, "1")
    return table, table.block(1).row(slot), slot


def test_a_point_is_what_happened_since_the_last_one() -> None:
    table, row, _ = table_with()
    row.observe(columns.REQUEST_SECONDS, 0.02, 5)  # before anybody kept it
    keeper = HistoryKeeper(table)
    row.observe(columns.REQUEST_SECONDS, 0.02, 40)
    row.add(columns.SHED["overload"], 7)
    row.add_batch(4, [0.001] * 4, input_s=0.0, infer_s=0.01, output_s=0.0, ended_ms=1.0)
    row.set(columns.SATURATION, 0.5)
    keeper.look()
    row.set(columns.SATURATION, 0.0)
    keeper.look()
    first, second = points(table)
    assert second["number"] == first["number"] + 1
    found = first["models"]["m/1"]
    assert found["answered"] == 40
    assert found["rejected"] == {"overload": 7}
    assert found["p99_ms"] == pytest.approx(19.9)
    assert found["batch"]["sum"] == 4
    assert found["saturation"] == 0.5
    assert second["models"] == {}, "a model at rest takes no memory"
    assert points(table, first["number"]) == [second]


def test_a_model_that_was_loaded_anew_counts_from_nothing() -> None:
    table, row, _ = table_with()
    keeper = HistoryKeeper(table)
    row.observe(columns.REQUEST_SECONDS, 0.02, 40)
    keeper.look()
    table.directory.retire("m", "1")
    again = table.block(1).row(table.directory.assign("m", "1"))
    again.observe(columns.REQUEST_SECONDS, 0.02, 3)
    keeper.look()
    assert [point["models"]["m/1"]["answered"] for point in points(table)] == [40, 3]


def test_another_process_reads_what_one_has_written_and_only_so_much_is_kept() -> None:
    memory = bytearray(HISTORY_BYTES)
    writer, reader = SharedHistory(memoryview(memory)), SharedHistory(memoryview(memory))
    for number in range(1000, 1000 + 3 * KEPT_S):
        writer.write(number, b'{"number":%d}' % number, b"[]")
    found = reader.read()
    assert [number for number, _ in found] == list(range(1000 + 2 * KEPT_S, 1000 + 3 * KEPT_S))
    assert reader.read(found[-1][0]) == []


def test_large_points_overwrite_the_oldest_and_none_is_ever_torn() -> None:
    memory = bytearray(HISTORY_BYTES)
    history = SharedHistory(memoryview(memory))
    for number in range(1, 200):
        history.write(number, orjson.dumps({"number": number, "text": "x" * 100_000}), b"[]")
    found = history.read()
    assert 50 < len(found) < 100
    assert found[-1][0] == 199
    assert all(orjson.loads(point)["number"] == number for number, point in found)
    history.write(200, b"[" + b"1," * 5_000_000 + b"1]", b"[]")
    assert history.read()[-1][0] == 199, "no second is worth that much memory"


def test_who_sends_can_be_left_out() -> None:
    history = SharedHistory(memoryview(bytearray(HISTORY_BYTES)))
    assert history.senders() == b""
    history.tell_senders(b'[{"source":"gate"}]')
    history.write(1, b'{"number":1}', history.senders())
    assert [orjson.loads(point) for _, point in history.read()] == [
        {"number": 1, "senders": [{"source": "gate"}]}
    ]
    assert [orjson.loads(point) for _, point in history.read(with_senders=False)] == [{"number": 1}]


def test_points_are_numbered_by_time_and_rise_though_the_clock_stands() -> None:
    table, _, _ = table_with()
    keeper = HistoryKeeper(table, day=lambda: 5000.5)
    for _ in range(3):
        keeper.look()
    assert [point["number"] for point in points(table)] == [5000, 5001, 5002]


def test_a_machine_whose_clock_is_set_loses_no_points() -> None:
    clock = {"wall": 16.0, "passed": 100.0}
    day = steady_time(lambda: clock["wall"], lambda: clock["passed"])
    table, _, _ = table_with()
    keeper = HistoryKeeper(table, now=lambda: clock["passed"], day=day)
    for wall in (16.0, 1.795e9, 1000.0, 1.8e9):
        clock["wall"] = wall
        clock["passed"] += 1.0
        keeper.look()
    assert [(point["number"], point["time"]) for point in points(table)] == [
        (17, 17.0),
        (18, 18.0),
        (19, 19.0),
        (20, 20.0),
    ]


@pytest.mark.parametrize(("share", "value"), [(0.5, 1.0), (0.75, 1.5), (1.0, 2.0)])
def test_quantiles_are_interpolated(share: float, value: float) -> None:
    assert quantile([2, 2, 0], [1.0, 2.0], share) == pytest.approx(value)
    assert quantile([0, 0, 0], [1.0, 2.0], share) is None
    assert quantile([0, 0, 4], [1.0, 2.0], share) == 2.0
