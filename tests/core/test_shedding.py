from __future__ import annotations

from carpool.core.job import Job, Reason
from carpool.core.shedding import batch_size, reason_to_give_up


def test_what_is_wanted_fits() -> None:
    assert batch_size(Job(0.0), room=20, want=12, smaller=20, keeps_up=False) == 12


def test_a_smaller_batch_will_do_while_it_keeps_up() -> None:
    assert batch_size(Job(0.0), room=8, want=12, smaller=7, keeps_up=True) == 7


def test_a_large_request_is_not_cut() -> None:
    assert batch_size(Job(0.0, images=8), room=8, want=12, smaller=4, keeps_up=True) == 8


def test_who_would_drag_the_others_down_is_given_up() -> None:
    assert batch_size(Job(0.0), room=8, want=12, smaller=8, keeps_up=False) == 0


def test_who_cannot_make_it_is_given_up_even_at_leisure() -> None:
    assert batch_size(Job(0.0, images=3), room=2, want=12, smaller=2, keeps_up=True) == 0


def test_the_reason_tells_the_clock_from_the_choice() -> None:
    job = Job(0.0, deadline=1.0)
    assert reason_to_give_up(job, 0.5) is Reason.GIVEN_UP
    assert reason_to_give_up(job, 1.0) is Reason.DEADLINE
