"""Names the columns in which a model that writes is counted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from carpool.observe.columns import Column, HistogramColumns, by_word, histogram, single

NAME = "text"
FIRST_TOKEN: Final[HistogramColumns] = histogram(NAME, "first_token")
TOKEN: Final[HistogramColumns] = histogram(NAME, "token")
ENCODE_SIZE: Final[HistogramColumns] = histogram(NAME, "encode_size")
STEP_WIDTH: Final[HistogramColumns] = histogram(NAME, "step_width")
TOKENS: Final[Column] = single(NAME, "tokens")
SLOTS: Final[Mapping[str, Column]] = by_word(NAME, "slots")
