"""What one client does over gRPC is charged to its account, and leaves room for the others."""

from __future__ import annotations

import asyncio
import gzip
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import pytest
import tritonclient.grpc.service_pb2 as pb

from carpool.config.server import ServerSettings
from carpool.frontend.clients.accounts import MOST_BYTES, Accounts
from carpool.frontend.clients.fair_queue import EVEN_S
from carpool.frontend.clients.loop_turns import StreamTurns
from carpool.frontend.grpc import grpc_handlers
from carpool.frontend.grpc import h2_frames as h2
from carpool.frontend.grpc.grpc_infer import GrpcCall
from carpool.frontend.grpc.h2_frames import BlockReader
from carpool.frontend.grpc.rpc_heads import HeadReader, Status
from carpool.types import Datatype
from frontend.fake_door import echo
from frontend.grpc.front_end import SERVICE, FrontEnd, channel, front_end, image_request, models
from frontend.grpc.test_frames import ask, is_good, later
from frontend.grpc.wire import Wire, block, data, framed, head, wire
from waiting import until

OTHER = "127.0.0.2"
HEALTH = "/grpc.health.v1.Health/"
LIMIT = 8192


@pytest.fixture
def front() -> Iterator[FrontEnd]:
    with front_end() as running:
        yield running


@contextmanager
def elsewhere(front: FrontEnd, opening: bytes | None = None) -> Iterator[Wire]:
    """A connection of another client."""
    given: Any = {} if opening is None else {"opening": opening}
    with wire(front, source=OTHER, **given) as client:
        yield client


def called(client: Wire, number: int, path: str) -> int:
    client.send(head(number, path=path), data(number, framed(b"")))
    return client.answer(number).status


# ── heads ──


def bomb(times: int) -> tuple[bytes, bytes]:
    """A block that puts 4,000 bytes into the table, and one that names them so many times."""
    value = b"y" * 4000
    entry = b"\x40" + b"\x01x" + b"\x7f" + bytes([(4000 - 127) & 127 | 128, (4000 - 127) >> 7]) + value
    return block() + entry, block() + b"\xbe" * times


def test_a_list_over_the_limit_keeps_no_field_and_teaches_the_table() -> None:
    reader = BlockReader(LIMIT)
    first, second = bomb(500)
    assert reader.read(first)[0]
    fields, size = reader.read(second + b"\x40\x01n\x01v")
    assert fields == []
    assert size > 500 * 4000
    assert (b"n", b"v") in reader.read(block() + b"\xbe")[0]


def test_heads_that_are_remembered_are_counted_by_their_bytes() -> None:
    heads = HeadReader(1 << 16)
    first, _ = bomb(0)
    heads.read(first)
    for number in range(200):
        heads.read(block(x_number=str(number)) + b"\xbe" * 5)
        assert sum(one.size for one in heads._known.values()) <= 32 * 1024
    assert heads._known
    over = HeadReader(LIMIT)
    over.read(first)
    assert over.read(bomb(500)[1]).size > LIMIT
    assert not over._known


def test_header_bombs_cost_the_credit_of_their_connection(front: FrontEnd) -> None:
    first, second = bomb(500)
    with wire(front) as client, elsewhere(front) as honest:
        client.send(h2.frame(h2.HEADERS, h2.END_HEADERS, 1, first))
        for number in range(3, 200, 2):
            client.send(h2.frame(h2.HEADERS, h2.END_HEADERS | h2.END_STREAM, number, second))
        assert client.goaway() is h2.Code.ENHANCE_YOUR_CALM
        assert is_good(ask(honest))
    until(lambda: front.server.service.accounts.bytes == 0)


# ── calls ──


def test_silent_calls_of_one_client_do_not_lock_others_out() -> None:
    with front_end(max_connections=64) as front, wire(front) as silent, elsewhere(front) as honest:
        for number in range(1, 401, 2):
            silent.send(head(number, path=SERVICE + "ModelStreamInfer"))
        until(lambda: front.server.service.accounts.calls >= 50)
        for number in range(1, 21, 2):
            assert is_good(ask(honest, number))
        assert called(honest, 101, SERVICE + "ServerLive") == Status.OK


def test_health_is_answered_whoever_has_all_calls() -> None:
    with front_end(max_connections=8) as front, wire(front) as client:
        front.door.held = True
        for number in range(1, 17, 2):
            client.send(head(number), data(number, framed(image_request().SerializeToString())))
        front.wait_for_calls(7)
        for number, path in enumerate((SERVICE + "ServerLive", SERVICE + "ServerReady", HEALTH + "Check")):
            assert called(client, 101 + 2 * number, path) == Status.OK
        front.door.held = False
        for call in front.door.calls:
            front.run(call.finish)


def test_a_new_call_takes_the_place_of_one_that_was_silent_for_long(front: FrontEnd) -> None:
    accounts = front.server.service.accounts
    front.run(lambda: setattr(accounts._counts[1], "most", 4))
    with wire(front) as client:
        for number in (1, 3, 5):
            client.send(head(number, path=SERVICE + "ModelStreamInfer"))
        until(lambda: accounts.calls == 3)
        front.run(lambda: [_age(stake) for one in accounts._accounts.values() for stake in one.stakes[1]])
        for number in range(7, 27, 2):
            assert is_good(ask(client, number))


def _age(stake: Any) -> None:
    stake.since -= 100.0


def test_a_connection_has_few_watches_and_all_share_one_timer(front: FrontEnd) -> None:
    with wire(front) as client:
        for number in range(1, 21, 2):
            client.send(head(number, path=HEALTH + "Watch"), data(number, framed(b"")))
        assert client.answer(19).status == Status.UNAVAILABLE
        shared: Any = front.server._shared
        handlers = shared._find.__self__
        until(lambda: len(handlers._watching) == grpc_handlers.MOST_WATCHES)
        assert handlers._looking is not None
        front.run(lambda: front.door.renew(ready=False))
        assert client.until(h2.DATA).payload.endswith(b"\x08\x02")  # NOT_SERVING
    until(lambda: not handlers._watching)


# ── answers that nobody reads ──


def test_unary_answers_behind_a_closed_window_are_counted_and_end() -> None:
    size = 1 << 20
    closed = h2.PREFACE + h2.settings({h2.INITIAL_WINDOW_SIZE: 0})
    request = pb.ModelInferRequest(model_name="long")
    request.inputs.add(name="x", datatype="UINT8", shape=[1, size])
    request.raw_input_contents.append(bytes(size))
    message = framed(request.SerializeToString())
    with (
        front_end(echo("long", Datatype.UINT8), max_body_bytes=2 * size) as front,
        wire(front, closed) as client,
        elsewhere(front) as other,
    ):
        accounts = front.server.service.accounts
        front.run(lambda: setattr(accounts, "most_bytes", 16 * size))
        for number in range(1, 61, 2):
            for start in range(0, len(message), 1 << 19):
                piece = message[start : start + (1 << 19)]
                ends = h2.END_STREAM if start + (1 << 19) >= len(message) else 0
                client.send(*([head(number)] if not start else []), data(number, piece, ends))
        until(lambda: accounts.unread > 4 * size)
        assert client.is_alive()  # all that it sent was looked at
        assert accounts.bytes <= 9 * size
        assert other.is_alive()
        front.until_slots_are_back()
        later(front, 11.0)
        assert accounts.unread == 0
        assert client.is_alive()


# ── streams ──


def test_a_flood_of_mistakes_ends_its_connection_and_no_other(front: FrontEnd) -> None:
    with wire(front) as client, elsewhere(front) as honest:
        for number in range(1, 41, 2):
            client.send(head(number, path=SERVICE + "ModelStreamInfer"))
            client.send(data(number, framed(b"") * 200, 0))
        assert client.goaway() is h2.Code.ENHANCE_YOUR_CALM
        assert is_good(ask(honest))
    until(lambda: front.server.service.accounts.calls == 0)


def test_streams_take_turns(front: FrontEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    """Time stands still in a turn that is over: the next begins in another turn of the loop."""
    monkeypatch.setattr("carpool.frontend.clients.loop_turns._STREAM_TURN_S", 0.0)
    with channel(front) as connected:
        stream = connected.stream_stream(
            SERVICE + "ModelStreamInfer",
            request_serializer=lambda one: one.SerializeToString(),
            response_deserializer=pb.ModelStreamInferResponse.FromString,
        )
        requests = [image_request() for _ in range(50)]
        answers = list(stream(iter(requests), timeout=60))
        assert len(answers) == 50
        assert not any(one.error_message for one in answers)


def test_an_open_stream_costs_no_task(front: FrontEnd) -> None:
    with wire(front) as client:
        tasks = front.run(lambda: len(asyncio.all_tasks()))
        for number in range(1, 401, 2):
            client.send(head(number, path=SERVICE + "ModelStreamInfer"))
        until(lambda: len(front.server.service.streams) == 200)
        assert front.run(lambda: len(asyncio.all_tasks())) <= tasks + 1
    until(lambda: not front.server.service.streams)
    assert front.server.service.running == 0


def test_few_empty_messages_are_begun_before_their_connection_ends(
    front: FrontEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[object] = []
    begin = GrpcCall.begin

    def counted(call: GrpcCall, message: bytes) -> Any:
        begun.append(call)
        return begin(call, message)

    monkeypatch.setattr(GrpcCall, "begin", counted)
    streams = range(1, 401, 2)
    with wire(front) as client, elsewhere(front) as honest:
        client.send(*(head(number, path=SERVICE + "ModelStreamInfer") for number in streams))
        client.send(*(data(number, framed(b"") * 8, 0) for number in streams))
        assert client.goaway() is h2.Code.ENHANCE_YOUR_CALM
        assert len(begun) <= 90
        assert is_good(ask(honest))
    until(lambda: front.server.service.running == 0)


class Endless:
    """A stream that always has one more message, each of which takes a third of a millisecond."""

    over = False

    def __init__(self, client: str, turns: StreamTurns, log: list[str], clock: list[float]) -> None:
        self.client = client
        self._turns, self._log, self._clock = turns, log, clock

    def go_on(self, _now: float) -> bool:
        self._clock[0] += 0.00034
        self._log.append(self.client)
        self._turns.push(cast(Any, self))
        return False


def test_a_turn_begins_messages_for_a_millisecond_and_clients_have_equal_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, log = [0.0], list[str]()
    monkeypatch.setattr("carpool.frontend.clients.loop_turns.monotonic", lambda: clock[0])

    async def run() -> list[int]:
        turns, a_turn = StreamTurns(Accounts(10)), list[int]()
        for client in ["mallory"] * 200 + ["honest"]:
            turns.push(cast(Any, Endless(client, turns, log, clock)))
        for _ in range(600):
            before = len(log)
            await asyncio.sleep(0)  # the loop turns once
            a_turn.append(len(log) - before)
        return a_turn

    assert max(asyncio.run(run())) == 3
    later = log[len(log) // 2 :]
    assert abs(later.count("honest") - later.count("mallory")) <= 2 * EVEN_S / 0.00034


# ── compressed messages ──


def test_a_message_is_inflated_up_to_what_its_model_takes() -> None:
    large = echo("large", Datatype.UINT8)
    with front_end(*models(), large, max_body_bytes=64 << 20) as front, wire(front) as client:
        service = front.server.service
        small = service.most_of(pb.ModelInferRequest(model_name="image").SerializeToString())
        assert small < 512 << 10
        assert service.most_of(pb.ModelInferRequest(model_name="large").SerializeToString()) > 2 << 20
        assert service.most_of(b"\x2a\x00") == 4 << 20  # it does not begin with its model
        assert service.most_of(pb.ModelInferRequest(model_name="nobody").SerializeToString()) == 4 << 20
        request = image_request()
        request.raw_input_contents[0] = bytes(8 << 20)
        packed = gzip.compress(request.SerializeToString())
        client.send(head(1, grpc_encoding="gzip"), data(1, framed(packed, compressed=True)))
        said = client.answer(1)
        assert said.status == Status.RESOURCE_EXHAUSTED
        assert f"vs. {small}" in said.fields["grpc-message"]


def test_what_comes_out_of_compressed_messages_is_counted(front: FrontEnd) -> None:
    accounts = front.server.service.accounts
    message = gzip.compress(image_request().SerializeToString())
    assert accounts.most_bytes == MOST_BYTES // ServerSettings().front_ends
    front.run(lambda: setattr(accounts, "most_bytes", len(message) + 10))
    with wire(front) as client:
        for number in (1, 3):
            client.send(head(number, grpc_encoding="gzip"), data(number, framed(message, compressed=True)))
        codes = {client.answer(number).status for number in (1, 3)}
        assert codes <= {Status.UNAVAILABLE, Status.OK}
    until(lambda: accounts.bytes == 0)


def test_compressed_messages_that_wait_are_few_and_freed_when_their_client_leaves() -> None:
    large = echo("large", Datatype.UINT8)
    with front_end(*models(), large, max_body_bytes=64 << 20) as front:
        service, go_on = front.server.service, threading.Event()
        front.run(lambda: service._inflaters.submit(OTHER, lambda: go_on.wait(60.0) and None))
        request = pb.ModelInferRequest(model_name="large", raw_input_contents=[bytes(1 << 20)])
        message = framed(gzip.compress(request.SerializeToString()), compressed=True)
        try:
            with elsewhere(front) as client:
                for number in range(1, 401, 2):
                    client.send(head(number, grpc_encoding="gzip"), data(number, message))
                until(lambda: service.inflating.total == 128)
                assert client.answer(399).status == Status.UNAVAILABLE
                assert service.accounts.bytes >= 128 * len(message[5:])
            until(lambda: service.inflating.total == service.accounts.bytes == 0)
            assert not [one for one in service._inflaters._queue if not one.done.done()]
        finally:
            go_on.set()


# ── keys ──


def test_a_client_is_its_key_once_that_is_known(tmp_path: Any) -> None:
    keys = tmp_path / "keys"
    keys.write_text("mallory mallorys-key-1234\nhonest honest-key-22222\n")
    keys.chmod(0o600)
    with front_end(max_connections=64, api_key_file=str(keys)) as front, ExitStack() as held:
        accounts = front.server.service.accounts
        silent, honest = held.enter_context(wire(front)), held.enter_context(wire(front))
        for number in range(1, 401, 2):
            silent.send(head(number, path=SERVICE + "ModelStreamInfer", x_api_key="mallorys-key-1234"))
        until(lambda: "mallory" in accounts._accounts)
        message = data(1, framed(image_request().SerializeToString()))
        honest.send(head(1, x_api_key="honest-key-22222"), message)
        assert honest.answer(1).status == Status.OK
        assert accounts._accounts["mallory"].stakes[1]
