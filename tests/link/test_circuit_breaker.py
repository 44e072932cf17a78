"""When a server is left alone, and when it is looked at again; the time is an argument."""

from __future__ import annotations

from carpool.link.circuit_breaker import FIRST_PAUSE_S, LONGEST_PAUSE_S, TIMEOUTS, CircuitBreaker


def closed() -> CircuitBreaker:
    breaker = CircuitBreaker()
    assert breaker.may_probe(0.0)
    breaker.close()
    return breaker


def test_a_server_is_seen_before_it_is_asked() -> None:
    breaker = CircuitBreaker()
    assert breaker.is_open
    assert breaker.may_probe(-1e9)
    assert not breaker.may_probe(0.0), "one at a time"
    breaker.close()
    assert not breaker.is_open
    assert not breaker.may_probe(1.0), "nothing to look for"


def test_three_in_a_row_open_it_and_an_answer_between_them_does_not() -> None:
    breaker = closed()
    for _ in range(5):
        assert [breaker.timed_out(1.0) for _ in range(TIMEOUTS - 1)] == [False] * (TIMEOUTS - 1)
        breaker.answered()
    assert not breaker.is_open
    assert [breaker.timed_out(1.0) for _ in range(TIMEOUTS)] == [False] * (TIMEOUTS - 1) + [True]
    assert breaker.is_open
    assert not breaker.timed_out(1.0), "it opens once"


def test_a_lost_connection_opens_it_at_once() -> None:
    breaker = closed()
    breaker.failed(5.0)
    breaker.failed(5.5)  # the same loss, told again
    assert breaker.open_until == 5.0 + FIRST_PAUSE_S


def test_pauses_grow_until_somebody_is_answered() -> None:
    breaker, now, pauses = closed(), 0.0, []
    breaker.failed(now)
    for _ in range(8):
        assert breaker.open_until is not None
        pauses.append(breaker.open_until - now)
        assert not breaker.may_probe(breaker.open_until - 0.001)
        now = breaker.open_until
        assert breaker.may_probe(now)
        breaker.failed(now)
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, LONGEST_PAUSE_S, LONGEST_PAUSE_S, LONGEST_PAUSE_S]
    assert breaker.may_probe(now + LONGEST_PAUSE_S)
    breaker.close()
    breaker.failed(100.0)
    assert breaker.open_until == 100.0 + LONGEST_PAUSE_S, "that it is there is not that it answers"
    assert breaker.may_probe(200.0)
    breaker.close()
    breaker.answered()
    breaker.failed(300.0)
    assert breaker.open_until == 300.0 + FIRST_PAUSE_S
