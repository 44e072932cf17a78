"""Was a model measured while others used its cores? And what would it have taken alone?

Numbers in, a verdict out: who reads them is `engine/profile/hardware.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from carpool.engine.profile.hardware import CpuTaken

_TAKEN = 0.1  # of our cores' time: below that, others are the usual noise of a machine
_WAITED = 0.05  # of the runs: a process on a core that is otherwise idle disturbs no run
_SPREAD = 0.5  # of the runs of a usual size: far more than a calm machine ever shows
_MOST_WAITED = 0.75  # of the runs: what is left is taken for the model's in any case


@dataclass(frozen=True, slots=True)
class Contention:
    """`why` is empty where the machine was calm. Runs waited for a core for `waited` of their time."""

    why: str = ""
    waited: float = 0.0

    def calm_seconds(self, times: Sequence[float]) -> float:
        """Returns what such runs take without others: their time less the waiting, and no more than the
        shortest."""
        return min(min(times), fmean(times) * (1 - self.waited))


CALM = Contention()


def contention(taken: CpuTaken, spreads: Sequence[float] = ()) -> Contention:
    """`spreads` are those of the runs, one for each size. They are all there is where a machine says nothing
    of others; where it does, wide ones alone say the same."""
    lost = taken.steal + taken.others
    disturbed = lost if taken.waited is None else taken.steal + taken.waited
    waited = min(_MOST_WAITED, 1 - (1 - taken.steal) * (1 - (taken.waited or 0.0)))
    if lost > _TAKEN and disturbed > _WAITED:
        return Contention(f"others took {min(1.0, lost):.0%} of its cores meanwhile", waited)
    usual = median(spreads) if spreads else 0.0
    if usual > _SPREAD:
        return Contention(f"the middle half of the runs lay {usual:.0%} apart")
    return CALM
