"""Whatever becomes of a request between two versions, its memory comes back."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from carpool.frontend.link_client import LinkClient
from extensions.rollout.staged import staged
from waiting import until

CANARY = "shadow = 0\ncanary = [0.5]\ncanary_h = 24\n"
SHADOW = "shadow = 1.0\nshadow_h = 24\n"


def slots_used() -> int:
    gc.collect()
    return sum(door.arena.slots_used for door in gc.get_objects() if isinstance(door, LinkClient))


SOME = {(CANARY, "raise"), (CANARY, "1"), (SHADOW, "7")}  # the others take longer, and say the same
CASES = [
    pytest.param(plan, value, marks=() if (plan, value) in SOME else pytest.mark.conformance)
    for plan in (CANARY, SHADOW)
    for value in ("1", "7", "raise", "sleep 3")
]


@pytest.mark.parametrize(("plan", "value"), CASES)
def test_no_slot_is_lost(tmp_path: Path, plan: str, value: str) -> None:
    before = slots_used()
    with staged(tmp_path, plan, {1: "1", 2: value}, head="slo_ms = 1000") as one:
        one.until("canary" if plan is CANARY else "shadow")
        for number in range(40):
            one.infer(f"camera-{number}")  # a busy machine may refuse: that must cost no slot either
        until(lambda: slots_used() <= before, "slots are still held")
