"""What is counted of a model that writes: on the console's page, and in each second of the history."""

from __future__ import annotations

from carpool.extensions.text.front import text_counts
from carpool.extensions.text.text_columns import FIRST_TOKEN, SLOTS, TOKENS
from carpool.observe.history import HistoryKeeper
from observe.test_history import points, table_with


def test_counts_of_a_model_that_writes() -> None:
    table, row, slot = table_with()
    row.set(SLOTS["free"], 6)
    row.set(SLOTS["used"], 2)
    row.add(TOKENS, 30)
    row.observe(FIRST_TOKEN, 0.02)
    counts = text_counts(table.cells(slot))
    assert (counts["used"], counts["free"], counts["tokens"]) == (2, 6, 30)
    assert sum(counts["first"]["buckets"]) == 1


def test_a_second_of_the_history_has_tokens_and_slots_while_some_are_in_use() -> None:
    table, row, _ = table_with()
    keeper = HistoryKeeper(table)
    row.set(SLOTS["free"], 6)
    row.set(SLOTS["used"], 2)
    row.add(TOKENS, 30)
    row.observe(FIRST_TOKEN, 0.02)
    keeper.look()
    row.set(SLOTS["free"], 8)
    row.set(SLOTS["used"], 0)
    keeper.look()
    first, second = (point["models"] for point in points(table))
    assert (first["m/1"]["slots"], first["m/1"]["tokens"]) == ([2, 8], 30)
    assert sum(first["m/1"]["first_token"]["buckets"].values()) == 1
    assert second == {}, "a model at rest takes no memory"
