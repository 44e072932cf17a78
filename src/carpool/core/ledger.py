"""Where every job went, for those who check that none was lost."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from carpool.core.job import Reason


@dataclass(slots=True)
class Ledger:
    """Where every job went: offered = refused + given up + cancelled + answered + waiting + running."""

    offered: int = 0
    answered: int = 0
    cancelled: int = 0
    running: int = 0
    refused: Counter[Reason] = field(default_factory=Counter)
    given_up: Counter[Reason] = field(default_factory=Counter)
