"""Pictures that were let pass, and of which the engine has not heard."""

from __future__ import annotations

from carpool.frontend.pictures.picture_service import Passed


def test_who_passed_at_its_head_is_ahead_until_the_engine_has_heard_of_it() -> None:
    passed = Passed()
    assert passed.ahead(1.0) == 0
    passed.heads.append(1.000)
    passed.heads.append(1.001)
    assert passed.ahead(1.001) == 2
    assert passed.offered_since(1.001) == 0
    passed.offered(1.005)
    assert passed.ahead(1.002) == 2  # one is still read, one was offered after the engine looked
    assert passed.ahead(1.006) == 1
    passed.offered(1.007)
    assert passed.ahead(1.008) == 0


def test_a_body_that_takes_long_is_not_waited_for() -> None:
    passed = Passed()
    passed.heads.append(1.0)
    assert passed.ahead(1.04) == 1
    assert passed.ahead(1.06) == 0
    passed.offered(1.07)  # it comes after all
    assert passed.ahead(1.065) == 1
    assert passed.ahead(1.071) == 0


def test_the_count_is_bounded() -> None:
    passed = Passed()
    for _ in range(10_000):
        passed.heads.append(1.0)
    assert passed.ahead(1.0) <= 256
