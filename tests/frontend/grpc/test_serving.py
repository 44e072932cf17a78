"""Health, ports, limits of the server itself, and its end."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import grpc
import pytest

from carpool.config.server import ServerSettings
from carpool.frontend.grpc.grpc_server import GrpcServer
from carpool.frontend.grpc.grpc_service import largest_message
from carpool.frontend.http.http_server import listen
from carpool.link.catalog import Catalog
from carpool.wire.proto import message_class
from frontend.fake_door import FakeDoor
from frontend.grpc.front_end import (
    SERVICE,
    SUM,
    FrontEnd,
    channel,
    floats,
    front_end,
    image_request,
    infer,
    loop,
    refusal,
    send,
    wait_for,
)
from frontend.http.front_end import models
from frontend.http.harness import PATIENCE
from waiting import until

Code = grpc.StatusCode
Request = message_class("HealthCheckRequest", "grpc.health.v1")
Response = message_class("HealthCheckResponse", "grpc.health.v1")
SERVING, NOT_SERVING, SERVICE_UNKNOWN = 1, 2, 3


def check(connected: grpc.Channel, name: str = "") -> int:
    message = Request(service=name).SerializeToString()
    answer = connected.unary_unary("/grpc.health.v1.Health/Check")(message, timeout=PATIENCE)
    status: int = Response.FromString(answer).status
    return status


def watch(connected: grpc.Channel, name: str = "") -> Any:
    message = Request(service=name).SerializeToString()
    call = connected.unary_stream("/grpc.health.v1.Health/Watch")(message, timeout=PATIENCE)
    return (Response.FromString(answer).status for answer in call)


# ---- health


def test_health_is_that_of_the_server() -> None:
    with front_end() as front, channel(front) as connected:
        assert check(connected) == SERVING
        assert check(connected, "inference.GRPCInferenceService") == SERVING
        front.door.serving = False
        assert check(connected) == NOT_SERVING
        front.door.serving = True
        front.run(lambda: front.door.renew(ready=False))
        assert check(connected) == NOT_SERVING
        assert refusal(lambda: check(connected, "other"))[0] is Code.NOT_FOUND
        broken = connected.unary_unary("/grpc.health.v1.Health/Check")
        assert refusal(lambda: broken(b"\xff", timeout=PATIENCE))[0] is Code.INVALID_ARGUMENT


def test_a_watcher_is_told_every_change_and_the_end() -> None:
    with front_end() as front, channel(front) as connected:
        seen = watch(connected)
        assert next(seen) == SERVING
        front.door.serving = False
        assert next(seen) == NOT_SERVING
        front.door.serving = True
        assert next(seen) == SERVING
        assert next(watch(connected, "other")) == SERVICE_UNKNOWN
        front.stop(1.0)
        assert list(seen) == [NOT_SERVING]


# ---- the end


def held_call(front: FrontEnd, connected: grpc.Channel) -> grpc.Future:
    front.door.held = True
    request = image_request().SerializeToString()
    future = connected.unary_unary(SERVICE + "ModelInfer").future(request, timeout=PATIENCE)
    front.wait_for_calls()
    return future


def test_stopping_finishes_what_has_begun_and_refuses_what_is_new() -> None:
    with front_end() as front, channel(front) as connected:
        future = held_call(front, connected)
        stopping = asyncio.run_coroutine_threadsafe(front.server.stop(PATIENCE), loop())
        front.stopped = True
        until(front.server.service.stopping.is_set)
        assert check(connected) == NOT_SERVING
        front.door.serving = False  # as a door that drains
        status, _, metadata = refusal(lambda: infer(connected, image_request()))
        assert (status, metadata["carpool-reason"]) == (Code.UNAVAILABLE, "not-serving")
        assert not stopping.done()
        front.run(front.door.calls[0].finish)
        assert stopping.result(PATIENCE) == 0
        assert future.result()
    with pytest.raises(OSError, match="refused"), socket.create_connection(("127.0.0.1", front.port), 1.0):
        pass


def test_what_does_not_finish_in_time_is_cut_off_and_counted() -> None:
    with front_end() as front, channel(front) as connected:
        future = held_call(front, connected)
        assert front.stop(0.05) == 1
        assert refusal(future.result)[0] in (Code.UNAVAILABLE, Code.CANCELLED)
        until(lambda: front.door.calls[0].cancelled)


# ---- ports


def test_two_servers_share_a_port() -> None:
    held = listen("127.0.0.1", 0)
    port = held[0].getsockname()[1]
    door = FakeDoor(*models())

    async def start(sockets: list[socket.socket]) -> GrpcServer:
        server = GrpcServer(door, door.table.block(0), ServerSettings())
        await server.start(sockets)
        return server

    first, second = wait_for(start(held)), wait_for(start(listen("127.0.0.1", port)))
    front = FrontEnd(first, door, door.table, port)
    with channel(front) as connected:
        assert floats(infer(connected, image_request())) == SUM
    wait_for(first.stop(1.0))
    with channel(front) as connected:
        assert floats(infer(connected, image_request())) == SUM
    wait_for(second.stop(1.0))
    third = wait_for(start(listen("127.0.0.1", port)))  # after the death of one, the next has the same number
    with channel(front) as connected:
        assert floats(infer(connected, image_request())) == SUM
    wait_for(third.stop(1.0))


# ---- limits


def test_a_message_can_never_be_longer_than_its_length_can_say() -> None:
    settings = ServerSettings(max_body_bytes=1 << 40, model_control_mode="explicit")
    assert largest_message(Catalog(), settings) == 2**31 - 1


def test_the_head_of_a_call_is_bounded() -> None:
    with front_end(max_header_bytes=2048) as front, channel(front) as connected:
        metadata = (("x-filler", "x" * 100_000),)
        status, _, _ = refusal(lambda: infer(connected, image_request(), metadata=metadata))
        assert status is Code.RESOURCE_EXHAUSTED
        assert floats(infer(connected, image_request())) == SUM


def test_more_calls_than_allowed_are_refused() -> None:
    with front_end(max_connections=4) as front, channel(front) as connected:
        front.door.held = True
        call = connected.unary_unary(SERVICE + "ModelInfer")
        futures = [call.future(image_request().SerializeToString(), timeout=PATIENCE) for _ in range(4)]
        front.wait_for_calls(4)
        assert refusal(lambda: infer(connected, image_request()))[0] is Code.RESOURCE_EXHAUSTED
        for held in list(front.door.calls):
            front.run(held.finish)
        for future in futures:
            future.result()


@pytest.mark.parametrize("method", ["ServerLive", "ModelConfig", "RepositoryModelLoad", "LogSettings"])
def test_garbage_in_other_calls_is_an_invalid_argument(method: str) -> None:
    with front_end() as front, channel(front) as connected:
        status, details, metadata = refusal(lambda: send(connected, b"\xff\xff\xff", method))
        assert (status, metadata["carpool-field"]) == (Code.INVALID_ARGUMENT, "body")
        assert details == f"the message is not a {method}Request"
