"""The states: where each leads, that abort always leads to stable, and that time is what was spent."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.errors import WrongState
from carpool.extensions.rollout.rollout_states import (
    ACTIONS,
    ENDS,
    NO_VERDICT,
    GuardVerdict,
    Rollout,
    State,
    Traffic,
    act,
    advance,
    duration,
    failed,
)
from carpool.extensions.rollout.settings import GuardSettings, RolloutSettings

PLAN = RolloutSettings(shadow_h=1, canary_h=2, standby_h=3, least=10)
PROVEN = GuardVerdict(proven=True)
BREACH = GuardVerdict("9 of 9 differ", "disagreement")
BEGUN = Rollout("1", "2", since=0.0)


def run(
    rollout: Rollout,
    now: float,
    verdict: GuardVerdict = PROVEN,
    *,
    plan: RolloutSettings = PLAN,
    counted: int = 10,
    loaded: bool = True,
) -> Rollout:
    return advance(rollout, plan, now, verdict, counted, loaded=loaded)


def test_the_whole_way() -> None:
    seen = []
    rollout, now = BEGUN, 0.0
    while not rollout.over:
        before = rollout
        rollout = run(rollout, now)
        if rollout.state is not before.state or rollout.step != before.step:
            seen.append((str(rollout.state), rollout.traffic(PLAN).share, rollout.serving))
        now += 1800.0
    assert seen == [
        ("checked", 0.0, "1"),
        ("shadow", 0.0, "1"),
        ("canary", 0.1, "1"),
        ("canary", 0.5, "1"),
        ("full", 1.0, "2"),
        ("standby", 1.0, "2"),
        ("retired", 0.0, "2"),
        ("done", 0.0, "2"),
    ]
    assert rollout.stable == "2"
    assert "version 2 took over from version 1" in rollout.why


@pytest.mark.parametrize("plan", [replace(PLAN, shadow=0.0), replace(PLAN, shadow_h=0.0)])
def test_without_a_shadow_it_goes_straight_to_the_canary(plan: RolloutSettings) -> None:
    checked = run(BEGUN, 1.0, plan=plan)
    assert run(checked, 1.0, plan=plan).state is State.CANARY


def test_without_steps_it_goes_from_shadow_to_full() -> None:
    plan = replace(PLAN, canary=())
    shadow = BEGUN.moved(State.SHADOW, 0.0, "")
    assert run(shadow, 3600.0, plan=plan).state is State.FULL


@pytest.mark.parametrize(
    ("now", "counted", "verdict", "why"),
    [
        (600.0, 10, PROVEN, "10 min of 1 h"),
        (3600.0, 9, PROVEN, "9 of 10 comparisons"),
        (3600.0, 10, GuardVerdict(waits_for="errors: not proven yet"), "errors: not proven yet"),
    ],
)
def test_it_says_what_it_waits_for(now: float, counted: int, verdict: GuardVerdict, why: str) -> None:
    shadow = run(BEGUN.moved(State.SHADOW, 0.0, ""), now, verdict, counted=counted)
    assert shadow.state is State.SHADOW
    assert shadow.why == why


def test_by_hand_it_waits_for_a_person() -> None:
    plan = replace(PLAN, promote="by-hand")
    waiting = run(BEGUN.moved(State.SHADOW, 0.0, ""), 4000.0, plan=plan)
    assert waiting.state is State.SHADOW
    assert "promote it by hand" in waiting.why
    assert act(waiting, plan, "promote", 4001.0).state is State.CANARY


def test_a_labelled_set_is_waited_for() -> None:
    plan = replace(PLAN, evaluate="coco.json")
    checked = run(run(BEGUN, 0.0, plan=plan), 0.0, plan=plan)
    assert checked.state is State.CHECKED
    assert "coco.json" in checked.why
    assert act(checked, plan, "promote", 1.0).state is State.SHADOW


@pytest.mark.parametrize("state", [State.SHADOW, State.CANARY])
def test_a_breach_leads_back(state: State) -> None:
    rollout = run(BEGUN.moved(state, 0.0, "", 1), 1.0, BREACH)
    assert rollout.state is State.ROLLED_BACK
    assert rollout.why == "9 of 9 differ"
    assert rollout.serving == "1"


@pytest.mark.parametrize("on_breach", ["rollback", "pause"])
@pytest.mark.parametrize("state", [State.SHADOW, State.CANARY, State.FULL, State.STANDBY])
def test_guards_act_while_it_is_paused_by_hand(state: State, on_breach: str) -> None:
    plan = replace(PLAN, guards=GuardSettings(on_breach=on_breach))
    paused = act(Rollout("1", "2", state, int(state is State.CANARY), since=0.0), plan, "pause", 1.0)
    after = run(paused, 2.0, BREACH, plan=plan)
    assert (after.serving, after.traffic(plan)) == ("1", Traffic())
    if on_breach == "pause":
        assert (after.state, after.before, after.held, after.why) == (
            State.PAUSED,
            state,
            True,
            BREACH.breach,
        )
        assert run(after, 3.0, BREACH, plan=plan) is after
    else:
        assert after.state is State.ROLLED_BACK


def test_what_could_not_carry_the_traffic_is_shown_it_and_answers_none_by_itself() -> None:
    slow = GuardVerdict(capacity="version 2 carries 0/s")
    checked = BEGUN.moved(State.CHECKED, 0.0, "")
    for plan in (replace(PLAN, shadow=0.0), replace(PLAN, shadow=0.0, canary=())):
        waits = run(checked, 1.0, slow, plan=plan)
        assert (waits.state, waits.why) == (State.CHECKED, "version 2 carries 0/s: promote it by hand")
        assert act(waits, plan, "promote", 2.0).state in (State.CANARY, State.FULL)
    assert run(checked, 1.0, slow).state is State.SHADOW


def test_what_was_proven_is_said_of_where_it_was() -> None:
    shadow = BEGUN.moved(State.SHADOW, 0.0, "")
    canary = run(shadow, 3600.0)
    assert canary.why == "every guard was proven in the shadow"
    assert run(canary, 2 * 3600.0 + 3600.0).why == "every guard was proven in step 1 of the canary"


def test_a_breach_may_only_pause_and_stable_answers_meanwhile() -> None:
    plan = replace(PLAN, guards=GuardSettings(on_breach="pause"))
    rollout = run(BEGUN.moved(State.CANARY, 0.0, "", 2), 1.0, BREACH, plan=plan)
    assert rollout.state is State.PAUSED
    assert rollout.traffic(plan) == Traffic()
    going = act(rollout, plan, "resume", 5.0)
    assert (going.state, going.step) == (State.CANARY, 2)
    assert going.traffic(plan).share == 0.5


def test_a_pause_by_hand_keeps_the_share_and_stops_the_clock() -> None:
    canary = BEGUN.moved(State.CANARY, 0.0, "", 1)
    paused = act(canary, PLAN, "pause", 100.0)
    assert paused.traffic(PLAN).share == 0.1
    assert run(paused, 1e9) is paused
    assert act(paused, PLAN, "resume", 1e6).elapsed(1e6 + 1.0) == 101.0


def test_an_action_that_does_not_fit_names_those_that_do() -> None:
    with pytest.raises(WrongState, match="possible actions: pause or abort"):
        act(BEGUN, PLAN, "promote", 0.0)
    with pytest.raises(WrongState, match="cannot be promoted"):
        act(act(BEGUN, PLAN, "pause", 0.0), PLAN, "promote", 0.0)


def test_actions_can_be_repeated() -> None:
    paused = act(BEGUN, PLAN, "pause", 0.0)
    assert act(paused, PLAN, "pause", 1.0) is paused
    assert act(BEGUN, PLAN, "resume", 1.0) is BEGUN
    over = act(BEGUN, PLAN, "abort", 0.0)
    assert act(over, PLAN, "abort", 1.0) is over


def test_a_failure_leaves_stable() -> None:
    rollout = failed(BEGUN, 1.0, "it does not load")
    assert (rollout.state, rollout.serving, rollout.wanted) == (State.FAILED, "1", ("1",))
    assert failed(rollout, 2.0, "again") is rollout


@given(
    state=st.sampled_from(State),
    before=st.sampled_from([s for s in State if s not in (*ENDS, State.PAUSED, State.RETIRED)]),
    step=st.integers(1, 2),
    held=st.booleans(),
    spent=st.floats(0, 1e6),
    now=st.floats(0, 1e6),
)
def test_from_every_state_abort_leads_to_stable_in_one_step(
    state: State, before: State, step: int, held: bool, spent: float, now: float
) -> None:
    paused = state is State.PAUSED
    rollout = Rollout(
        "1", "2", state, step, spent, 0.0, before if paused else None, held and paused, "whatever"
    )
    if state in (State.RETIRED, State.DONE):
        rollout = replace(rollout, stable="2")
    aborted = act(rollout, PLAN, "abort", now)
    assert aborted.serving == rollout.stable
    assert aborted.wanted == (rollout.stable,)
    assert aborted.traffic(PLAN) == Traffic()
    assert aborted.over or aborted.state is State.RETIRED


@given(
    st.lists(st.sampled_from(["promote", "pause", "resume", "abort", "tick", "breach", "fail"]), max_size=40)
)
def test_whatever_happens_somebody_serves(events: list[str]) -> None:
    rollout, now = BEGUN, 0.0
    for event in events:
        now += 1000.0
        if event in ("tick", "breach"):
            rollout = run(rollout, now, BREACH if event == "breach" else PROVEN)
        elif event == "fail":
            rollout = failed(rollout, now, "it fails")
        else:
            try:
                rollout = act(rollout, PLAN, event, now)
            except WrongState:
                assert event not in ACTIONS[rollout.state] or rollout.before is State.LOADING
        assert rollout.serving in rollout.wanted
        assert rollout.wanted[0] == rollout.serving
        traffic = rollout.traffic(PLAN)
        assert 0.0 <= traffic.share <= 1.0
        if traffic.share or traffic.mirrored:
            assert "2" in rollout.wanted
        if rollout.over:
            assert traffic == Traffic()


def test_what_is_written_down_goes_on_under_another_clock() -> None:
    shadow = BEGUN.moved(State.SHADOW, 1000.0, "")
    kept = shadow.stopped(1600.0)
    assert kept.elapsed(9e9) == 600.0
    assert kept.going(5.0).elapsed(65.0) == 660.0
    assert kept.going(5.0).going(50.0).elapsed(65.0) == 660.0


def test_a_clock_that_jumps_back_takes_nothing_away() -> None:
    assert BEGUN.moved(State.SHADOW, 1000.0, "").elapsed(10.0) == 0.0


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(5, "5 s"), (65, "1 min 5 s"), (3600, "1 h"), (11400, "3 h 10 min"), (900, "15 min")],
)
def test_durations(seconds: float, said: str) -> None:
    assert duration(seconds) == said


def test_no_verdict_is_not_proven() -> None:
    assert not NO_VERDICT.proven
