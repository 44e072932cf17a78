"""The rules by which replicas come to know the same: in any order of reading, writing and dying."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.extensions.rollout.rollout_file import Mark, Record
from carpool.extensions.rollout.rollout_guards import Counts, Side
from carpool.extensions.rollout.rollout_states import Rollout, State, after
from carpool.extensions.rollout.settings import RolloutSettings
from carpool.extensions.rollout.shared_state import (
    NewerFormat,
    Part,
    SharedRollout,
    as_bytes,
    from_bytes,
    merged,
    of_record,
    on_top,
    rank,
)
from later import many

PLAN = RolloutSettings(canary=(0.1, 0.5))
STATES = (
    Rollout("1", "2"),
    Rollout("1", "2", State.SHADOW),
    Rollout("1", "2", State.CANARY, 1),
    Rollout("1", "2", State.CANARY, 2),
    Rollout("1", "2", State.PAUSED, 1, before=State.CANARY, held=True),
    Rollout("1", "2", State.STANDBY),
    Rollout("2", "2", State.DONE),
    Rollout("1", "2", State.FAILED, why="it does not load"),
    Rollout("1", "2", State.ROLLED_BACK, why="by hand"),
)


def counts(compared: int = 0, differ: int = 0, answers: int = 0) -> Counts:
    return Counts(candidate=Side(answers=answers), compared=compared, compared_here=compared, differ=differ)


parts = st.builds(
    Part, st.integers(0, 3), st.booleans(), st.builds(counts, st.integers(2, 9), st.integers(0, 2))
)
shared_rollouts = st.builds(
    SharedRollout,
    st.builds(Mark, st.integers(1, 2), st.sampled_from("ab"), st.integers(0, 2), st.just("1")),
    st.just(PLAN),
    st.sampled_from(STATES).flatmap(
        lambda one: st.floats(0, 9).map(lambda spent: replace(one, spent=round(spent, 3)))
    ),
    st.just(False),
    st.just({"2": "b"}),
    st.builds(counts, st.integers(2, 9), st.integers(0, 2)),
    st.dictionaries(st.sampled_from("xyz"), parts, max_size=3),
)


@given(shared_rollouts, shared_rollouts, shared_rollouts)
@settings(max_examples=many(200))
def test_in_whatever_order_they_are_told_the_same_comes_out(
    one: SharedRollout, two: SharedRollout, three: SharedRollout
) -> None:
    assert merged(one, two) == merged(two, one)
    assert merged(merged(one, two), three) == merged(one, merged(two, three))
    assert merged(one, one) == one
    assert merged(one, None) == merged(None, one) == one


@given(shared_rollouts)
@settings(max_examples=many(100))
def test_what_is_written_is_read(one: SharedRollout) -> None:
    data = as_bytes(one)
    assert from_bytes(data) == one
    assert as_bytes(from_bytes(data)) == data, "whoever reads it has nothing to write"


@given(st.data())
@settings(max_examples=many(100))
def test_half_of_it_or_anything_else_is_a_value_error(data: st.DataObject) -> None:
    whole = as_bytes(data.draw(shared_rollouts))
    place = data.draw(st.integers(0, len(whole) - 1))
    damaged = data.draw(st.sampled_from([whole[:place], b"", b"null", b"[]", b'{"format":1}']))
    with pytest.raises(ValueError):  # noqa: PT011
        from_bytes(damaged)
    newer = orjson.dumps({**orjson.loads(whole), "format": 2})
    with pytest.raises(NewerFormat):
        from_bytes(newer)


def begun(run: int = 1) -> SharedRollout:
    return SharedRollout(Mark(run, "s", 0, "1"), PLAN, Rollout("1", "2"), digests={"2": "b"})


def test_what_replicas_counted_adds_up_and_goes_on_over_states() -> None:
    one = begun().noted("x", Part(1, True, counts(5, 1, 7)), 3.0).noted("y", Part(4, True, counts(2, 1)), 2.0)
    assert one.rollout.spent == 3.0
    total = one.counted()
    assert (total.compared, total.differ, total.candidate.answers) == (7, 2, 7)
    assert one.counted(without="x").compared == 2
    then = one.went(after(one.rollout, PLAN, 0.0, "proven"), {"x"})
    assert then.counted().compared == 7
    assert (then.counted().compared_here, then.counted().candidate.answers) == (0, 0)
    assert set(then.parts) == {"x"}, "who is gone has no part any more, and what he counted is kept"
    assert then.went(then.rollout, {"x"}, forget=True).counted().compared == 0


def test_an_abort_beats_everything_of_its_rollout_and_nothing_of_a_later_one() -> None:
    for state in STATES:
        one = replace(begun(), mark=Mark(1, "s", 9, "1"), rollout=state)
        back = on_top(one, Mark(1, "s", 2, "1"), Rollout("1", "2", State.ROLLED_BACK, why="stop"), ())
        assert (back.rollout.state, back.rollout.stable, back.rollout.wanted) == (
            State.ROLLED_BACK,
            "1",
            ("1",),
        )
        further = replace(one, mark=Mark(1, "s", 99, "1"))
        assert from_bytes(as_bytes(merged(back, further) or further)).rollout.state is State.ROLLED_BACK
        later = replace(begun(2), mark=Mark(2, "t", 0, "1"))
        assert on_top(later, Mark(1, "s", 2, "1"), back.rollout, ()) == later
        assert merged(back, later) == later


def test_one_that_failed_here_does_not_undo_what_all_others_have_done() -> None:
    done = replace(begun(), mark=Mark(1, "s", 9, "1"), rollout=Rollout("2", "2", State.DONE))
    for state in (State.FAILED, State.PAUSED):
        assert on_top(done, done.mark, Rollout("1", "2", state), ()) == done
    going = replace(begun(), rollout=STATES[3])
    assert on_top(going, going.mark, Rollout("1", "2", State.FAILED), ()).rollout.state is State.FAILED
    held = on_top(going, going.mark, Rollout("1", "2", State.PAUSED, held=True, why="broken"), ()).rollout
    assert (held.state, held.before, held.step, held.held, held.why) == (
        State.PAUSED,
        State.CANARY,
        2,
        True,
        "broken",
    )


def test_replicas_that_come_and_go_do_not_make_it_grow_for_ever() -> None:
    many_parts = {f"r{number:04d}": Part(1, True, counts(number)) for number in range(2000)}
    kept = from_bytes(as_bytes(replace(begun(), parts=many_parts)))
    assert len(kept.parts) == 500
    assert kept.counted().compared == sum(range(1500, 2000))


def test_a_record_from_before_it_was_shared_is_lower_than_any_that_is() -> None:
    alone = of_record(Record("m", PLAN, Rollout("1", "2", State.ROLLED_BACK), digests={"2": "b"}), 0.0)
    assert merged(alone, begun()) == begun()
    assert from_bytes(as_bytes(alone)) == alone


# ---- replicas that read, write, decide and die


@dataclass
class Replica:
    name: str
    known: SharedRollout | None = None
    kept: SharedRollout | None = None  # on its own disk
    decided: list[tuple[Mark, Rollout]] = field(default_factory=list)
    state: SharedRollout | None = None  # what it does
    beat: int = 0


@dataclass
class World:
    """One place, and replicas that do to it what the engine does, one step at a time."""

    place: SharedRollout | None = None
    replicas: dict[str, Replica] = field(default_factory=lambda: {name: Replica(name) for name in "abc"})
    away: set[str] = field(default_factory=set)
    published: set[tuple[int, str]] = field(default_factory=set)  # rollouts whose abort lay in the place
    runs: int = 0

    def exchange(self, one: Replica, go_on: bool = False) -> None:
        if one.name in self.away:
            return
        shared = merged(one.known, self.place)
        if shared is None:
            return
        for mark, then in one.decided:
            shared = on_top(shared, mark, then, set(self.replicas))
        same = one.state is not None and shared.rank == one.state.rank
        if go_on and same and not (shared.rollout.over or shared.rollout.state is State.PAUSED):
            then = after(shared.rollout, PLAN, 0.0, "proven")
            shared = shared.went(replace(then, since=None), set(self.replicas))
        if not shared.rollout.over:
            one.beat += 1
            shared = shared.noted(one.name, Part(one.beat, True, counts(one.beat)), 0.0)
        self.place = one.known = shared
        one.decided = []
        if shared.rollout.state is State.ROLLED_BACK:
            self.published.add(shared.mark[:2])
        one.state = one.kept = shared

    def event(self, what: str, who: str) -> None:
        one = self.replicas[who]
        if what == "start" and who not in self.away:
            self.exchange(one)
            if self.place is None or self.place.rollout.over:
                run = 1 if self.place is None else self.place.mark.run + 1
                self.runs += 1
                self.place = replace(begun(run), mark=Mark(run, f"s{self.runs}", 0, "1"))
                self.exchange(one)
        elif what in ("abort", "fail", "hold") and one.state is not None and not one.state.rollout.over:
            states = {"abort": State.ROLLED_BACK, "fail": State.FAILED, "hold": State.PAUSED}
            mark, held = one.state.mark, what == "hold"
            then = replace(one.state.rollout, state=states[what], step=0, before=None, held=held, why=what)
            one.decided.append((mark, then))
            local = on_top(one.state, mark, then, ())
            one.state = one.kept = local
        elif what == "dies":
            one.known, one.decided, one.state = one.kept, [], one.kept
        elif what == "lost":
            self.place = None  # Redis without a disk was started again
        elif what == "away":
            self.away ^= {who}
        else:
            self.exchange(one, go_on=what == "go on")


EVENTS = ["start", "look", "go on", "go on", "abort", "fail", "hold", "dies", "lost", "away"]


@given(st.lists(st.tuples(st.sampled_from(EVENTS), st.sampled_from("abc")), max_size=40))
@settings(max_examples=many(600))
def test_any_interleaving_ends_with_all_agreeing_and_aborted_is_never_brought_back(
    events: list[tuple[str, str]],
) -> None:
    world = World()
    for what, who in events:
        before = {name: one.state for name, one in world.replicas.items()}
        world.event(what, who)
        for name, one in world.replicas.items():
            was = before[name]
            assert one.state is None or was is None or one.state.rank[:3] >= was.rank[:3], "only upwards"
            if was is not None and was.rollout.state is State.ROLLED_BACK and one.state is not None:
                same_rollout = one.state.mark[:2] == was.mark[:2]
                assert not same_rollout or one.state.rollout.serving == "1"
    world.away.clear()
    for _ in range(2):
        for one in world.replicas.values():
            world.exchange(one)
    ends = [one.state for one in world.replicas.values()]
    assert len({None if end is None else rank(end.mark, end.rollout) for end in ends}) == 1
    assert len({None if end is None else end.rollout.alike(ends[0].rollout) for end in ends if ends[0]}) <= 1
    final = ends[0]
    if final is not None and final.mark[:2] in world.published:
        assert final.rollout.state is State.ROLLED_BACK
        assert final.rollout.serving == "1"


@given(st.permutations("abc"), st.integers(0, 4))
def test_counts_are_the_same_for_all_and_nothing_is_counted_twice(order: list[str], again: int) -> None:
    world = World()
    world.event("start", order[0])
    for name in order:
        world.event("look", name)
    for _ in range(again):
        world.event("look", order[1])
    world.event("look", order[0])
    assert world.place is not None
    assert world.place.counted().compared == sum(one.beat for one in world.replicas.values())
