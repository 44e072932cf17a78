"""Whether a kept profile is still true, by what a few runs took and what else the machine did."""

from __future__ import annotations

import pytest

from carpool.engine.profile.contention import CALM, Contention
from carpool.engine.profile.instance_layout import Layout
from carpool.engine.profile.measuring import Measured
from carpool.engine.profile.model_profile import STILL_TRUE, SURELY_FALSE, Profile, judged

BUSY = Contention("others took 60% of its cores meanwhile", 0.5)


@pytest.mark.parametrize(
    ("off", "busy", "provisional", "elsewhere", "said"),
    [
        (1.2, CALM, "", False, "was used again: batches take 1.2 × what it says."),
        (1.4, CALM, "", False, ""),
        (0.7, CALM, "", False, ""),  # nor is one believed that promises too little
        (1.6, BUSY, "", False, "batches take 1.6 × what it says, since others took 60% of its cores"),
        (3.0, BUSY, "", False, ""),  # waiting for a core does not explain it
        (1.0, CALM, "others ran", False, ""),  # it is measured again as soon as the machine is calm
        (1.0, BUSY, "others ran", False, "was used again"),
        (4.0, CALM, "", True, "Another replica's profile of"),
        (20.0, CALM, "", True, ""),
    ],
)
def test_a_profile_is_used_again_or_not(
    off: float, busy: Contention, provisional: str, elsewhere: bool, said: str
) -> None:
    kept = Profile(Layout(1, 1), measured=Measured(provisional=provisional), elsewhere=elsewhere)
    found = judged(kept, off, busy, model="m", whose="another replica", most=SURELY_FALSE)
    assert (found is not None) == bool(said)
    assert found is None or said in found.reused


def test_what_another_replica_measured_is_doubted_where_it_does_not_fit() -> None:
    kept = Profile(Layout(1, 1), elsewhere=True)
    for off, doubt in ((1.1, ""), (2.0, "batches took 2 × what another replica measured")):
        found = judged(kept, off, CALM, model="m", whose="another replica", most=SURELY_FALSE)
        assert found is not None
        assert (found.provisional, found.elsewhere) == (doubt, False)
    assert judged(kept, 2.0, CALM, model="m", whose="another replica", most=STILL_TRUE) is None
