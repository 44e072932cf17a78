"""Guards: broken, proven, or waiting; and how often a good candidate is sent back."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from random import Random

import pytest

from carpool.extensions.rollout.rollout_guards import (
    RARE,
    Counts,
    GuardResult,
    Side,
    comparisons_needed,
    look,
    read_counts,
    together,
)
from carpool.extensions.rollout.rollout_states import State
from carpool.extensions.rollout.settings import GuardSettings, RolloutSettings

PLAN = RolloutSettings()


def guard(
    name: str, counts: Counts, state: State = State.CANARY, plan: RolloutSettings = PLAN
) -> GuardResult:
    return next(found for found in look(plan, state, counts) if found.name == name)


def test_without_traffic_it_waits() -> None:
    verdict = together(look(PLAN, State.CANARY, Counts()))
    assert not verdict.breach
    assert not verdict.proven
    assert "nothing was compared yet" in verdict.waits_for


def test_eight_comparisons_of_nonsense_are_enough() -> None:
    found = guard("disagreement", Counts(compared=8, differ=8))
    assert found.verdict == "breach"
    assert "8 of 8 differ" in found.sentence


def test_no_difference_proves_it_in_time() -> None:
    assert guard("disagreement", Counts(compared=20)).verdict == "waits"
    assert guard("disagreement", Counts(compared=500)).verdict == "proven"


@pytest.mark.parametrize("name", ["errors", "late"])
def test_whose_was_it(name: str) -> None:
    counts = Counts(Side(900, 0, 0), Side(100, 0, 0))
    setattr(counts.candidate, name, 8)
    assert guard(name, counts).verdict == "breach"
    setattr(counts.stable, name, 72)
    assert guard(name, counts).verdict == "waits"


def test_a_server_that_refuses_everybody_is_not_the_candidate_s_fault() -> None:
    assert guard("late", Counts(Side(9000, late=4500), Side(1000, late=500))).verdict != "breach"


def test_nothing_happens_to_anybody() -> None:
    assert guard("errors", Counts(Side(900), Side(100))).verdict == "waits"
    found = guard("errors", Counts(Side(9000), Side(1000)))
    assert found.verdict == "proven"
    assert "at most" in found.sentence


def test_nobody_complains() -> None:
    assert guard("feedback", Counts(Side(10), Side(10))).verdict == "proven"
    bad = Counts(Side(900, complaints=1), Side(100, complaints=20))
    assert guard("feedback", bad).verdict == "breach"
    ahead = guard(
        "feedback", Counts(Side(6), Side(2, complaints=4))
    )  # of answers that are counted just after
    assert "feedback: 4 of 4, stable 0 of 6" in ahead.sentence


def test_what_is_waited_for_where_nothing_happens() -> None:
    found = guard("errors", Counts(Side(100), Side(100)))
    assert (found.verdict, found.high) == ("waits", inf)
    assert found.rare is not None
    assert RARE < found.rare < 0.1
    assert found.sentence.endswith("% of the candidate's responses, proven at 2 %")


def test_the_queue_of_a_shadow_is_not_judged() -> None:
    assert guard("late", Counts(candidate=Side(100, late=100)), State.SHADOW).verdict == "proven"


def test_a_guard_that_is_off_says_so() -> None:
    plan = RolloutSettings(guards=GuardSettings(disagreement=None))
    found = guard("disagreement", Counts(compared=9, differ=9), plan=plan)
    assert found.verdict == "off"
    assert found.as_document()["high"] is None


def test_a_candidate_that_carries_too_little_is_not_proven() -> None:
    good = Counts(Side(9000), Side(1000), compared=1000)
    guards = look(PLAN, State.CANARY, good)
    assert together(guards).proven
    verdict = together(guards, "in full it would refuse 13 %")
    assert not verdict.proven
    assert verdict.waits_for == "in full it would refuse 13 %"


def test_it_says_how_many_more_are_needed_and_why_none_came() -> None:
    assert comparisons_needed(PLAN, State.SHADOW, Counts()) == [
        "500 more comparisons are needed, if none of them differs",
        "no request was received that could be compared",
    ]
    busy = Counts(compared=3, seen=4, skipped={"busy": 900, "thinned": 20, "unheard-of": 5000})
    more, lost = comparisons_needed(PLAN, State.CANARY, busy)
    count = int(more.split()[0])
    assert guard("disagreement", Counts(compared=3 + count)).verdict == "proven"
    assert guard("disagreement", Counts(compared=2 + count)).verdict == "waits"
    assert lost == "920 requests were not compared, 900 of them because the device had no free time"
    assert comparisons_needed(PLAN, State.CANARY, Counts(compared=5000)) == []
    assert comparisons_needed(PLAN, State.STANDBY, busy) == []


def test_counts_come_back_from_json() -> None:
    counts = Counts(Side(5, 1, 2, 3), Side(4), 10, 2, 5, 7, {"busy": 3}, 1)
    assert read_counts(counts.as_document()) == counts
    for wrong in ({"compared": 1}, {"differ": -1}, {"seen": 1.5}, {"fallbacks": True}):
        with pytest.raises(ValueError, match=r"cannot differ|is no count"):
            read_counts({**counts.as_document(), **wrong})


def test_a_new_stage_counts_sides_anew_and_keeps_comparisons() -> None:
    counts = Counts(Side(5), Side(4), 10, 2, 5)
    counts.new_stage(State.FULL)
    assert (counts.stable, counts.candidate) == (Side(5), Side()), (
        "what stable did is what it is held against"
    )
    counts.new_stage(State.CANARY)
    assert (counts.stable, counts.candidate, counts.compared, counts.compared_here) == (Side(), Side(), 10, 0)
    counts.forget()
    assert counts.compared == 0


def test_a_candidate_exactly_at_the_limit_is_rarely_sent_back() -> None:
    """200 seeds, looked at after every 50th of 5,000 comparisons."""
    back = 0
    for seed in range(200):
        random, counts = Random(seed), Counts()
        for _ in range(100):
            counts.compared += 50
            counts.differ += sum(random.random() < 0.05 for _ in range(50))
            if guard("disagreement", counts).verdict == "breach":
                back += 1
                break
    assert back <= 2


@pytest.mark.parametrize("state", [State.FULL, State.STANDBY])
def test_a_candidate_that_took_over_is_held_against_what_stable_did(state: State) -> None:
    good = Counts(Side(2000, 4), Side(9000, 15))
    assert guard("errors", good, state=state).verdict == "proven"
    assert guard("errors", Counts(Side(2000, 4), Side(900, 60)), state=state).verdict == "breach"
    alone = guard("errors", Counts(candidate=Side(200, 60)), state=state)
    assert (alone.verdict, alone.limit) == ("breach", 2.0)
    assert "since stable has none" in alone.sentence
    assert guard("errors", Counts(candidate=Side(2000)), state=state).verdict == "proven"


def test_slower_is_off_and_asks_for_the_middle_of_the_times() -> None:
    assert guard("slower", Counts(candidate=Side(timed=500, slow=500))).verdict == "off"
    plan = replace(PLAN, guards=replace(PLAN.guards, slower=1.5))

    def asked(timed: int, slow: int, state: State = State.CANARY) -> GuardResult:
        counts = Counts(candidate=Side(timed, timed=timed, slow=slow))
        return next(one for one in look(plan, state, counts) if one.name == "slower")

    assert (asked(0, 0).verdict, asked(10, 5).verdict) == ("waits", "waits")
    assert asked(300, 30).verdict == "proven"
    breach = asked(300, 280)
    assert breach.verdict == "breach"
    assert "280 of 300 took more than 1.5 times as long as stable usually does" in breach.sentence
    assert asked(300, 280, State.STANDBY).verdict == "breach"
    assert asked(300, 280, State.SHADOW).verdict == "proven", "a shadow is last in the queue by design"


def test_without_comparisons_it_says_why() -> None:
    assert guard("disagreement", Counts()).sentence == "nothing was compared yet"
    busy = guard("disagreement", Counts(skipped={"busy": 900, "late": 20}))
    assert busy.sentence == "nothing was compared yet, mostly because the device had no free time"
