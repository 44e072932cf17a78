"""Decides in a cascade whether the large model is asked, and counts which model answered and what that
saved.

One for each version of a cascade and front end. Everything but `read` happens in the loop's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from random import random
from typing import Any

from carpool.config.rules import shown
from carpool.errors import CarpoolError, DeadlineExceeded, InvalidInput, Refused, Unavailable
from carpool.extensions.cascades.cascade_shares import ShareWatch
from carpool.extensions.pipelines.picture_graph import Document, PictureGraph
from carpool.extensions.pipelines.settings import REFUSE
from carpool.observe import columns
from carpool.observe.counters import Row
from carpool.observe.logs import logger
from carpool.types import Timing
from carpool.vision.certainty import CLASSES_NEEDED, LOWEST_SCORE, certainty
from carpool.vision.picture_answers import Option, Options

NAME = "cascades"
STEP = "step"
"""The option with which a client says which of the two is to answer."""
_AUDITED = 0.01  # of what the cheap model keeps
_KEPT_WINDOW, _AUDIT_WINDOW = 1000, 100
_USUAL_SCORE = 0.5
_LEARNING = 0.02  # how much one answer moves what the big model is thought to take

_ANSWERED, _AUDITS = columns.by_word("cascades", "answered"), columns.by_word("cascades", "audits")
_SAVED = columns.single("cascades", "saved")

log = logger("cascade")


class Cascade:
    def __init__(self, name: str, graph: PictureGraph, row: Callable[[], Row], counts: float | None) -> None:
        """`counts` is the score from which on the cheap model's boxes do; None where it finds none."""
        settings = graph.settings
        self.cheap = graph.base
        self.big = next(n for n, step in enumerate(graph.steps) if step.escalate is not None)
        escalate = graph.steps[self.big].escalate
        assert escalate is not None
        self._by, self._below = escalate.by, escalate.below
        self._degrades = settings.under_load != REFUSE
        self._names = graph.steps[self.cheap].name, graph.steps[self.big].name
        self._counts = counts
        self.name = name
        self._row = row
        self._kept = ShareWatch(_KEPT_WINDOW)
        self._agreement = ShareWatch(_AUDIT_WINDOW)
        self._big_s = 0.0  # seconds of a batch for a picture, learned
        self._balance = 0.0  # spared and not counted yet: below 0, what the cheap model took for nothing

        self.option = Option(
            self._step, {"type": "string", "enum": list(self._names)}, "Which of the two models answers."
        )

    def _step(self, name: str, text: str) -> str:
        if text not in self._names:
            raise InvalidInput(f"{name} must be {' or '.join(self._names)}, not {shown(text)}", field=name)
        return text

    # ---- one request ----------------------------------------------------------------------------------

    def read(self, answer: Callable[[Options], Document], options: Options) -> tuple[Document, float]:
        """The cheap model's answer as the client wants it, and how certain it is; any thread."""
        score = None if self._counts is None else LOWEST_SCORE
        top_k = max(options.top_k, CLASSES_NEEDED[self._by])
        enough = options.top_k == top_k and options.score == score
        full = answer(options if enough else replace(options, top_k=top_k, score=score))
        counts = options.score or self._counts or _USUAL_SCORE
        sure = certainty(full, self._by, counts)
        return (full if enough else answer(options)), sure or 0.0

    def escalates(self, sure: float, asked: object) -> bool:
        """`asked` is the step that the client insists on, if any."""
        return asked == self._names[1] if asked else sure < self._below

    def degraded(self, error: CarpoolError, asked: object) -> str:
        """Why the cheap answer is given although it is not certain; empty where it is not."""
        if not self._degrades or asked:
            return ""
        if isinstance(error, Refused | DeadlineExceeded):
            return "overload"
        return "unavailable" if isinstance(error, Unavailable) else ""

    def marks(self, *, by_big: bool, degraded: str) -> Mapping[str, Any]:
        """Returns what stands in the answer of who gave it."""
        return {"answered_by": self._names[by_big], "escalated": by_big, "degraded": bool(degraded)}

    # ---- what it is worth -----------------------------------------------------------------------------

    def answered(self, cheap: Timing, big: Timing | None, *, degraded: bool, asked: object) -> bool:
        """Counts it. True if the big model is to be asked all the same, for the audit: of those answers only
        that it was not asked for because the cheap model was certain."""
        self._row().add(_ANSWERED["degraded" if degraded else "cheap" if big is None else "big"])
        self._balance -= _seconds(cheap)
        if big is not None:
            took = _seconds(big)
            self._big_s += (_LEARNING if self._big_s else 1.0) * (took - self._big_s)
        else:
            self._balance += self._big_s
        if self._balance > 0.0:
            self._row().add(_SAVED, self._balance)
            self._balance = 0.0
        if asked:
            return False
        kept = big is None and not degraded
        self._watch("kept", self._kept, kept)
        return kept and random() < _AUDITED

    def audited(self, agrees: bool | None) -> None:
        """Counts what the big model said to an answer that was kept; None if it could not be asked."""
        if agrees is None:
            self._row().add(_AUDITS["skipped"])
            return
        self._row().add(_AUDITS["same" if agrees else "differs"])
        self._watch("agreement", self._agreement, agrees)

    def _watch(self, what: str, watch: ShareWatch, happened: bool) -> None:
        moved = watch.seen(happened)
        if moved is not None:
            said = {"what": what, "before": round(moved.before, 3), "now": round(moved.now, 3)}
            log.warning("cascade-drift-over" if moved.over else "cascade-drift", model=self.name, **said)


def _seconds(timing: Timing) -> float:
    """Returns the seconds of the device, for one picture of the batch."""
    return timing.infer / max(1, timing.batch)
