"""The verb `carpool count`."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from carpool.cli import verb_options as o


@dataclass(frozen=True, kw_only=True)
class Count:
    """Count the words of a text.

    carpool count "one two three" --least 2
    """

    text: str = o.argument("The text.")
    least: int = o.option(1, "Letters of the shortest word that counts.", min=1, max=100)

    def run(self) -> int:
        found = sum(len(word) >= self.least for word in self.text.split())
        sys.stdout.write(f"{found}\n")
        return 0 if found else 1
