"""Names what a rollout counts of a candidate: comparisons and fallbacks where they are answered."""

from __future__ import annotations

from carpool.observe.columns import by_word, single

COMPARED = by_word("rollout", "compared")
SKIPPED = by_word("rollout", "skipped")
FALLBACKS = single("rollout", "fallbacks")
ROLLBACKS = by_word("rollout", "rollbacks")
FEEDBACK = by_word("rollout", "feedback")
STATE = by_word("rollout", "state")
SHARE = by_word("rollout", "share")
BOUND = by_word("rollout", "bound")
"""By the guard and the end: `late,low`."""
