"""The HTTP client on loopback: kept connections, lost ones, silence, nonsense, and every kind of end."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import pytest

from carpool.lab.load.generator import run
from carpool.lab.load.http_client import HttpTarget
from carpool.lab.load.load_plan import Closed, Open, Phase, Plan
from carpool.lab.load.load_report import LoadReport
from carpool.lab.load.tally import Slice
from carpool.sim.arrivals import Constant
from lab.load.stub import ANSWER, TIMING, Exchange, Handle, Stub, fine, in_loop

REQUEST = b"POST /infer HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\nbody"


def target(port: int, connections: int = 64) -> HttpTarget:
    return HttpTarget("127.0.0.1", port, lambda _ticket: (REQUEST, b""), connections=connections, name="stub")


def ran(plan: Plan, handle: Handle, connections: int = 64) -> tuple[LoadReport, Stub]:
    async def work() -> tuple[LoadReport, Stub]:
        async with Stub(handle).serve() as stub:
            return await run(plan, target(stub.port, connections)), stub

    return in_loop(work())


def closed(requests: int, clients: int = 1, **rest: float) -> Plan:
    return Plan(Closed(clients, requests=requests), **rest)  # type: ignore[arg-type]


def answering(status: int, body: bytes) -> Handle:
    async def handle(exchange: Exchange) -> None:
        exchange.say(status, body)

    return handle


def test_a_closed_loop_sends_so_many_over_so_many_connections() -> None:
    report, stub = ran(closed(50, 5, slo=60.0), fine)
    total = report.total
    assert (total.offered, total.sent, total.answered, total.good) == (50, 50, 50, 50)
    assert (len(stub.seen), stub.connections, report.generator.connections) == (50, 5, 5)
    assert {exchange.body for exchange in stub.seen} == {b"body"}
    assert (total.batch.mean, total.queue_ms.mean, total.infer_ms.mean) == (3, 2.0, 4.0)
    assert total.outside_ms.count == total.answered
    assert report.loop == "closed"
    assert not report.stopped_early


def test_an_open_loop_sends_its_whole_schedule() -> None:
    phases = (Phase(200, 0.1, warmup=True), Phase(200, 0.1), Phase(400, 0.1))
    report, stub = ran(Plan(Open(phases, Constant())), fine)
    assert [phase.offered for phase in report.phases] == [20, 20, 40]
    assert report.total.offered == report.total.answered == 60
    assert len(stub.seen) == 80
    assert report.total.offered_rps == pytest.approx(300)
    assert (report.loop, report.phases[0].name) == ("open", "warm-up")


@pytest.mark.parametrize(
    ("handle", "refused", "failed"),
    [
        (answering(429, b'{"error":"no","reason":"overload"}'), {"overload": 5}, {}),
        (answering(503, b""), {"http-503": 5}, {}),
        (answering(500, b'{"error":"no","reason":"model-error"}'), {}, {"model-error": 5}),
        (answering(404, b"nothing here"), {}, {"http-404": 5}),
    ],
)
def test_refusals_and_failures_by_reason(
    handle: Handle, refused: dict[str, int], failed: dict[str, int]
) -> None:
    report, stub = ran(closed(5), handle)
    assert (report.total.refused, report.total.failed, report.total.answered) == (refused, failed, 0)
    assert report.total.refusal_ms.count == sum(refused.values())
    assert stub.connections == 1


def test_nonsense_is_malformed_and_costs_the_connection() -> None:
    async def nonsense(exchange: Exchange) -> None:
        exchange.writer.write(b"SSH-2.0-hello\r\n")

    report, stub = ran(closed(3), nonsense)
    assert report.total.failed == {"malformed": 3}
    assert stub.connections == 3


def test_an_answer_that_breaks_off() -> None:
    async def half(exchange: Exchange) -> None:
        exchange.writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf")
        exchange.close()

    assert ran(closed(3), half)[0].total.failed == {"broken-off": 3}


def test_a_server_that_closes_without_a_word() -> None:
    async def silent(exchange: Exchange) -> None:
        exchange.close()

    report, _ = ran(closed(3), silent)
    assert report.total.failed == {"closed": 3}
    assert report.generator.resent == 0


def test_an_answer_that_says_close_is_followed_by_a_new_connection() -> None:
    async def once(exchange: Exchange) -> None:
        exchange.say(200, ANSWER, b"Connection: close\r\n")
        exchange.close()

    report, stub = ran(closed(5), once)
    assert report.total.answered == 5
    assert stub.connections == 5
    assert report.generator.reconnects >= 4


def test_a_kept_connection_that_the_server_closed_meanwhile_is_opened_anew_and_asked_again() -> None:
    async def forgetful(exchange: Exchange) -> None:
        if exchange.of_connection == 0:
            exchange.say(200, ANSWER)
        else:  # as if its idle time had run out just before this request came
            exchange.close()

    report, stub = ran(closed(4), forgetful)
    assert report.total.answered == 4
    assert not report.total.failed
    assert report.generator.resent == 3
    assert stub.connections == 4


def test_a_request_that_is_not_answered_is_given_up_and_its_connection_is_not_used_again() -> None:
    async def first_is_lost(exchange: Exchange) -> None:
        if exchange.number:
            exchange.say(200, ANSWER)

    report, stub = ran(closed(4, timeout=2.0), first_is_lost)
    assert (report.total.timed_out, report.total.answered) == (1, 3)
    assert stub.connections == 2


def test_what_is_open_at_the_end_is_unanswered() -> None:
    async def never(exchange: Exchange) -> None:
        return

    plan = Plan(Open((Phase(100, 0.1),), Constant()), timeout=60.0, drain=0.5)
    total = ran(plan, never, connections=4)[0].total
    assert (total.offered, total.unanswered, total.sent) == (10, 10, 4)


def test_nobody_at_the_address() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]

        async def work() -> LoadReport:
            return await run(closed(6, 2), target(port))

        total = in_loop(work()).total
    assert total.failed == {"cannot-connect": 6}
    assert total.sent == 0


def gate(opens_after: int) -> tuple[Handle, Callable[[], int]]:
    """Answers nobody until so many have come, then everybody."""
    waiting: list[Exchange] = []
    most = 0

    async def handle(exchange: Exchange) -> None:
        nonlocal most
        waiting.append(exchange)
        most = max(most, len(waiting))
        if exchange.number + 1 >= opens_after:
            while waiting:
                waiting.pop().say(200, ANSWER)

    return handle, lambda: most


def test_busy_connections_make_it_open_more() -> None:
    handle, most = gate(20)
    report, stub = ran(Plan(Open((Phase(400, 0.1),), Constant())), handle, connections=64)
    assert report.total.answered == 40
    assert most() >= 20
    assert stub.connections >= 20


def test_a_request_that_finds_no_connection_waits_and_its_wait_counts() -> None:
    """Two connections are held until nothing more is due: all others wait, as only response times show."""
    released = asyncio.Event()

    async def held(exchange: Exchange) -> None:
        if exchange.number < 2:
            await released.wait()
        exchange.say(200, ANSWER, TIMING)

    def release(elapsed: float, _seen: Slice) -> None:
        if elapsed > 0.35:  # on the run's own clock, however slow the machine is
            released.set()

    async def work() -> LoadReport:
        async with Stub(held).serve() as stub:
            plan = Plan(Open((Phase(200, 0.2),), Constant()))
            return await run(plan, target(stub.port, 2), watch=release)

    report = in_loop(work())
    total, lag = report.total, report.generator
    assert total.answered == 40
    assert lag.connections == 2
    # 38 requests were due before 0.2 and sent after 0.35: that is the test's doing, not the machine's.
    assert lag.send_lag_ms.p50 > 150
    assert total.response_ms.p50 > total.service_ms.p50
    assert report.generator_late
    assert "Give more --connections" in " ".join(report.late_because)


def test_it_can_be_stopped_early_and_still_reports() -> None:
    stop = asyncio.Event()
    seen = 0

    async def handle(exchange: Exchange) -> None:
        nonlocal seen
        seen += 1
        exchange.say(200, ANSWER)
        if seen == 10:
            stop.set()

    async def work() -> LoadReport:
        async with Stub(handle).serve() as stub:
            return await run(Plan(Open((Phase(100, 600.0),))), target(stub.port), stop=stop)

    report = in_loop(work())
    assert report.stopped_early
    assert 10 <= report.total.offered < 60_000
    assert report.total.answered == report.total.offered
    assert 0 < report.total.seconds < 600


def test_a_target_that_breaks_ends_the_run_with_its_error() -> None:
    def broken(_ticket: object) -> tuple[bytes, bytes]:
        raise ZeroDivisionError

    async def work() -> LoadReport:
        async with Stub(fine).serve() as stub:
            bad = HttpTarget("127.0.0.1", stub.port, broken, connections=1, name="bad")
            return await run(closed(3), bad)

    with pytest.raises(ZeroDivisionError):
        in_loop(work())
