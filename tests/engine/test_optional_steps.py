"""An optional step on one device with the step before it: the device knows which of them goes first."""

from __future__ import annotations

from carpool.core.arbiter import Arbiter
from carpool.core.curve import BatchCurve
from carpool.core.objectives import Promise
from carpool.core.remaining import Step
from carpool.core.scheduler import Scheduler
from carpool.engine.models.stepped_runtime import _mark_optional


def test_the_two_models_are_marked_where_they_share_a_device() -> None:
    cheap, big, alone = (Scheduler(BatchCurve.linear(0.004, 0.001), Promise(0.1, 16)) for _ in range(3))
    arbiter = Arbiter()
    turns = [arbiter.join(core, list(core.instances)) for core in (cheap, big)]
    leaves = [Step(cheap), Step(big, (0,), 0.3, optional=True)]
    _mark_optional({"animals"}, leaves[1], leaves)
    assert [turn.cheap_of for turn in turns] == [{"animals"}, set()]
    assert [turn.big_of for turn in turns] == [set(), {"animals"}]
    assert turns[0].goes_before(turns[1])
    assert not turns[1].goes_before(turns[0])
    _mark_optional({"animals"}, Step(alone, (0,), 0.3, optional=True), leaves)  # on no shared device
