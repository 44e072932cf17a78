"""The real gRPC server on a uvloop thread, with a fake door and some models behind it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar

import grpc
import numpy as np
import uvloop
from tritonclient.grpc import service_pb2 as pb

from carpool.config.server import ServerSettings
from carpool.frontend.access.access import Access
from carpool.frontend.clients.loop_turns import Clock
from carpool.frontend.grpc.grpc_server import GrpcServer
from carpool.frontend.http.http_server import listen
from carpool.observe.counters import Table, table_bytes
from carpool.observe.prometheus import Exposition
from frontend.fake_door import FakeCall, FakeDoor, FakeModel
from frontend.http.front_end import IMAGE, models
from frontend.http.harness import PATIENCE
from waiting import until

T = TypeVar("T")

MAX_BODY = 1 << 20
SERVICE = "/inference.GRPCInferenceService/"
SUM = [15.0, 1.0, 2.0, 3.0]


@cache
def loop() -> asyncio.AbstractEventLoop:
    """One for all tests of a process: gRPC's asyncio side is made for one loop."""
    made = uvloop.new_event_loop()
    threading.Thread(target=made.run_forever, daemon=True).start()
    return made


def wait_for(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run it on that loop, and wait."""
    return asyncio.run_coroutine_threadsafe(coroutine, loop()).result(PATIENCE)


@dataclass
class FrontEnd:
    server: GrpcServer
    door: FakeDoor
    table: Table
    port: int
    stopped: bool = False
    access: Access = field(default_factory=lambda: Access(ServerSettings(), loopback=True))

    @property
    def url(self) -> str:
        return f"127.0.0.1:{self.port}"

    def run(self, function: Callable[[], T]) -> T:
        """In the loop's thread."""

        async def inside() -> T:
            return function()

        return wait_for(inside())

    def wait_for_calls(self, count: int = 1) -> list[FakeCall]:
        until(lambda: len(self.door.calls) >= count)
        return self.door.calls

    def until_slots_are_back(self) -> None:
        until(lambda: not self.door.slots_in_use)

    def stop(self, within_s: float = 0.0) -> int:
        self.stopped = True
        return wait_for(self.server.stop(within_s))

    def count(self, model: str, metric: str, **labels: str) -> float:
        """One number of the metrics page, when the loop is done with all that it has answered."""
        page = self.run(Exposition(self.table, "test").page).decode()
        wanted = [f'model="{model}"', *(f'{label}="{value}"' for label, value in labels.items())]
        for line in page.splitlines():
            if line.startswith(f"{metric}{{") and all(label in line for label in wanted):
                return float(line.rpartition(" ")[2])
        raise AssertionError(f"{metric} of {model} is not on the page")


@contextlib.contextmanager
def front_end(
    *given: FakeModel, slots: int = 64, clock: Clock = time.monotonic, **settings: Any
) -> Iterator[FrontEnd]:
    """`clock` is the one by which a connection's turn is over."""
    table = Table(bytearray(table_bytes(1)))
    door = FakeDoor(*(given or models()), slots=slots, table=table)
    sockets = listen("127.0.0.1", 0)
    port = sockets[0].getsockname()[1]

    made = ServerSettings(**{"max_body_bytes": MAX_BODY, **settings})
    access = Access(made, loopback=True, over_grpc=True)

    async def start() -> GrpcServer:
        server = GrpcServer(door, table.block(0), made, access, clock=clock)
        await server.start(sockets)
        return server

    front = FrontEnd(wait_for(start()), door, table, port, access=access)
    try:
        yield front
    finally:
        if not front.stopped:
            front.stop()
    until(lambda: not door.slots_in_use, "slots leaked")  # of clients that left just now


@contextlib.contextmanager
def channel(front: FrontEnd, **options: Any) -> Iterator[grpc.Channel]:
    given = [("grpc.use_local_subchannel_pool", 1), *options.items()]
    with grpc.insecure_channel(front.url, options=given) as made:
        yield made


def send(
    connected: grpc.Channel,
    message: bytes,
    method: str = "ModelInfer",
    timeout: float = PATIENCE,
    **more: Any,
) -> bytes:
    """Bytes in, bytes out."""
    answer: bytes = connected.unary_unary(SERVICE + method)(message, timeout=timeout, **more)
    return answer


def image_request(model: str = "image", **fields: Any) -> Any:
    request = pb.ModelInferRequest(model_name=model, **fields)
    request.inputs.add(name="image", datatype="UINT8", shape=[1, 2, 3])
    request.raw_input_contents.append(IMAGE.tobytes())
    return request


def infer(connected: grpc.Channel, request: Any, **more: Any) -> Any:
    return pb.ModelInferResponse.FromString(send(connected, request.SerializeToString(), **more))


def floats(response: Any, index: int = 0) -> list[float]:
    values: list[float] = np.frombuffer(response.raw_output_contents[index], np.float32).tolist()
    return values


def refusal(call: Callable[[], object]) -> tuple[grpc.StatusCode, str, dict[str, str]]:
    """How a call failed: its status, its sentence, and what came with it."""
    try:
        call()
    except grpc.RpcError as error:
        metadata: Sequence[tuple[str, str]] = error.trailing_metadata() or ()
        return error.code(), error.details() or "", dict(metadata)
    raise AssertionError("it did not fail")
