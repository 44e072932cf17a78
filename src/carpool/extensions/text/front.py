"""Says on the console's page what was counted of a model that writes."""

from __future__ import annotations

from typing import Any

from carpool.extensions.text.text_columns import FIRST_TOKEN, SLOTS, TOKENS
from carpool.frontend.calls.front_part import FrontPart, FrontServer
from carpool.observe.counters import Cells
from carpool.observe.statistics import histogram_counts


def front(_: FrontServer) -> FrontPart:
    """Returns what a front end does for models that write."""
    return FrontPart(counts=text_counts)


def text_counts(cells: Cells) -> dict[str, Any]:
    """Returns slots in use and free, tokens so far, and how soon first tokens came."""
    slots = {word: int(cells[column]) for word, column in SLOTS.items()}
    return {**slots, "tokens": int(cells[TOKENS]), "first": histogram_counts(cells, FIRST_TOKEN)}
