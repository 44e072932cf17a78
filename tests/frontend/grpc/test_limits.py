"""What a call may bring: messages as long as some model takes them, and not too many at once."""

from __future__ import annotations

import threading

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb

from carpool.config.server import ServerSettings
from carpool.frontend.grpc import grpc_server
from carpool.frontend.grpc import grpc_service as service
from carpool.frontend.grpc.grpc_server import largest_message
from carpool.link.door import Catalog
from carpool.types import Datatype
from frontend.fake_door import FakeDoor, FakeModel, echo
from frontend.grpc.front_end import FrontEnd, channel, front_end, image_request, infer, refusal, send
from frontend.http.front_end import image_model
from frontend.http.harness import until
from frontend.picture_models import classifier

Code = grpc.StatusCode
ROOM = 64 << 20
SETTINGS = ServerSettings()


def catalog(*models: FakeModel) -> Catalog:
    return FakeDoor(*models).catalog


def test_the_longest_message_is_what_some_model_takes() -> None:
    small, large = image_model("small"), echo("large", Datatype.FP32, (3, 224, 224), max_batch=32)
    assert largest_message(Catalog(), SETTINGS) == 4 << 20
    assert largest_message(catalog(small), SETTINGS) == 4 << 20
    assert largest_message(catalog(echo("one", Datatype.FP32, (200_000,), max_batch=0)), SETTINGS) == 8 << 20
    everything = SETTINGS.max_body_bytes + SETTINGS.max_header_bytes
    for other in (large, echo("any", Datatype.UINT8), echo("text", Datatype.BYTES, (1,)), classifier()):
        assert largest_message(catalog(small, other), SETTINGS) == everything
    explicit = ServerSettings(model_control_mode="explicit")
    assert largest_message(catalog(small), explicit) == everything  # models come in messages, too


def is_served(connected: grpc.Channel) -> bool:
    try:
        return bool(infer(connected, image_request()).model_name == "image")
    except grpc.RpcError:
        return False


def test_a_message_that_no_model_takes_is_refused_by_its_length_until_one_does() -> None:
    request = pb.ModelInferRequest(model_name="later")
    request.inputs.add(name="x", datatype="UINT8", shape=[1, 5 << 20])
    request.raw_input_contents.append(bytes(5 << 20))
    message = request.SerializeToString()
    with front_end(image_model("image"), max_body_bytes=ROOM) as front:
        with channel(front) as connected:
            code, sentence, metadata = refusal(lambda: send(connected, message))
            assert (code, metadata) == (Code.RESOURCE_EXHAUSTED, {})
            assert "larger than max" in sentence
            later = echo("later", Datatype.UINT8)
            front.door.models["later", "1"] = later
            fresh = FakeDoor(image_model("image"), later, table=front.table).catalog
            front.run(lambda: front.door.renew(entries=fresh.entries, newest=fresh.newest))
            until(lambda: front.server._largest > 5 << 20)
            until(lambda: is_served(connected))  # a call that meets the change is cancelled
        with channel(front, **{"grpc.max_receive_message_length": -1}) as connected:
            until(lambda: not front.server._retiring)
            assert len(infer(connected, request).raw_output_contents[0]) == 5 << 20


def listeners(front: FrontEnd) -> int:
    found = grpc_server.listening([front.url])
    for sock in found:
        sock.close()
    return len(found)


@pytest.mark.parametrize("heard_late", [1, 4])
def test_no_call_fails_while_larger_messages_come_to_be_allowed(
    heard_late: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor where connections last longer than they should, as on a machine that has too much to do."""
    monkeypatch.setattr(grpc_server, "_AGE_S", 0.5)
    monkeypatch.setattr(grpc_server, "_LOOK_S", 0.01)
    as_meant = grpc_server.options

    def options(settings: ServerSettings, largest: int) -> list[tuple[str, int]]:
        late = {"grpc.max_connection_age_ms": heard_late * 500}
        return [*({**dict(as_meant(settings, largest)), **late}).items()]

    monkeypatch.setattr(grpc_server, "options", options)
    failed: list[str] = []
    over = threading.Event()

    def ask_again_and_again() -> None:
        with channel(front) as connected:
            while not over.is_set():
                try:
                    infer(connected, image_request())
                except grpc.RpcError as error:
                    failed.append(f"{error.code()}: {error.details()}")

    with front_end(image_model("image"), max_body_bytes=ROOM, model_control_mode="poll") as front:
        clients = [threading.Thread(target=ask_again_and_again, daemon=True) for _ in range(4)]
        for client in clients:
            client.start()
        for elements in (200_000, 400_000, 800_000):
            before = front.server._largest
            larger = echo("later", Datatype.FP32, (elements,), max_batch=0)
            fresh = FakeDoor(image_model("image"), larger, table=front.table).catalog
            front.run(lambda given=fresh: front.door.renew(entries=given.entries, newest=given.newest))
            until(lambda least=before: front.server._largest > least)
            until(lambda: listeners(front) == 1)  # at once: its predecessor takes nobody new
            until(lambda: len(front.server._servers) == 1)
        over.set()
        for client in clients:
            client.join()
        assert not failed


def test_calls_outlive_the_server_that_took_them() -> None:
    with front_end(image_model("image"), max_body_bytes=ROOM) as front, channel(front) as connected:
        front.door.held = True
        method = connected.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        waiting = method.future(image_request().SerializeToString(), timeout=30)
        call = front.wait_for_calls()[0]
        fresh = FakeDoor(image_model("image"), echo("later", Datatype.UINT8), table=front.table).catalog
        front.run(lambda: front.door.renew(entries=fresh.entries, newest=fresh.newest))
        until(lambda: front.server._largest > 5 << 20)
        front.run(call.finish)
        assert pb.ModelInferResponse.FromString(waiting.result()).model_name == "image"


def test_metadata_ends_where_the_documentation_says() -> None:
    with front_end() as front, channel(front) as connected:
        message = image_request().SerializeToString()
        send(connected, message, metadata=[("x-a", "y" * 60_000)])
        for much in ([("x-a", "y" * 66_000)], [(f"x-{number}", "y" * 1000) for number in range(66)]):
            code, _, _ = refusal(lambda given=much: send(connected, message, metadata=given))
            assert code is Code.RESOURCE_EXHAUSTED


def test_bytes_under_way_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    message = image_request().SerializeToString()
    monkeypatch.setattr(service, "MOST_BYTES_IN_FLIGHT", len(message) + 10)
    with front_end() as front, channel(front) as connected:
        front.door.held = True
        method = connected.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        first = method.future(message, timeout=30)
        call = front.wait_for_calls()[0]
        code, sentence, metadata = refusal(lambda: send(connected, message))
        assert (code, metadata["carpool-reason"]) == (Code.UNAVAILABLE, "busy")
        monkeypatch.setattr(service, "MOST_BYTES_IN_FLIGHT", len(message) - 1)  # full: told at the head
        assert refusal(lambda: send(connected, message))[1] == sentence
        front.run(call.finish)
        first.result()
        front.door.held = False
        assert infer(connected, image_request()).model_name == "image"
        assert front.server.service.in_flight == 0
