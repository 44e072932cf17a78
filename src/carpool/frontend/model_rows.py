"""A front end's counters for each model version, kept as long as the catalogue they were taken for."""

from __future__ import annotations

from carpool.link.door import Catalog, Door, ModelEntry
from carpool.observe.counters import Block, Row, Slot


class ModelRows:
    def __init__(self, door: Door, block: Block) -> None:
        self._door = door
        self._block = block
        self._rows: dict[tuple[int, int], Row] = {}
        self._rows_of: Catalog | None = None

    def row(self, entry: ModelEntry) -> Row:
        """This process's counters for a model version."""
        catalog = self._door.catalog
        if self._rows_of is not catalog:
            self._rows_of = catalog
            self._rows.clear()
        row = self._rows.get(entry.row)
        if row is None:
            row = self._rows[entry.row] = self._block.row(Slot(*entry.row))
        return row
