"""What a call may bring: messages as long as some model takes them, and not too many at once."""

from __future__ import annotations

import threading

import grpc
from tritonclient.grpc import service_pb2 as pb

from carpool.config.server import ServerSettings
from carpool.frontend.grpc.grpc_service import largest_message
from carpool.link.catalog import Catalog
from carpool.types import Datatype
from frontend.fake_door import FakeDoor, FakeModel, echo
from frontend.grpc.front_end import FrontEnd, channel, front_end, image_request, infer, refusal, send
from frontend.http.front_end import image_model
from frontend.picture_models import classifier
from waiting import until

Code = grpc.StatusCode
ROOM = 64 << 20
SETTINGS = ServerSettings()


def catalog(*models: FakeModel) -> Catalog:
    return FakeDoor(*models).catalog


def test_the_longest_message_is_what_some_model_takes() -> None:
    small, large = image_model("small"), echo("large", Datatype.FP32, (3, 224, 224), max_batch=64)
    assert largest_message(Catalog(), SETTINGS) == 4 << 20
    assert largest_message(catalog(small), SETTINGS) == 4 << 20
    assert largest_message(catalog(echo("one", Datatype.FP32, (600_000,), max_batch=0)), SETTINGS) == 8 << 20
    everything = SETTINGS.max_body_bytes + SETTINGS.max_header_bytes
    for other in (large, echo("any", Datatype.UINT8), echo("text", Datatype.BYTES, (1,)), classifier()):
        assert largest_message(catalog(small, other), SETTINGS) == everything
    explicit = ServerSettings(model_control_mode="explicit")
    assert largest_message(catalog(small), explicit) == everything  # models come in messages, too


def renew(front: FrontEnd, *models: FakeModel) -> None:
    """The catalogue of the server that runs has these models now."""
    fresh = FakeDoor(*models, table=front.table).catalog
    front.door.models.update({(one.name, one.version): one for one in models})
    front.run(lambda: front.door.renew(entries=fresh.entries, newest=fresh.newest))


def test_a_message_that_no_model_takes_is_refused_by_its_length_until_one_does() -> None:
    request = pb.ModelInferRequest(model_name="later")
    request.inputs.add(name="x", datatype="UINT8", shape=[1, 5 << 20])
    request.raw_input_contents.append(bytes(5 << 20))
    message = request.SerializeToString()
    image, later = image_model("image"), echo("later", Datatype.UINT8)
    unlimited = {"grpc.max_receive_message_length": -1}
    with front_end(image, max_body_bytes=ROOM) as front, channel(front, **unlimited) as connected:
        code, sentence, metadata = refusal(lambda: send(connected, message))
        assert (code, metadata) == (Code.RESOURCE_EXHAUSTED, {})
        assert sentence == f"SERVER: Received message larger than max ({len(message)} vs. {4 << 20})"
        assert infer(connected, image_request()).model_name == "image"
        renew(front, image, later)
        assert len(infer(connected, request).raw_output_contents[0]) == 5 << 20  # on the same connection
        renew(front, image)  # the engine starts again, say: nobody is told that the message is too long
        assert refusal(lambda: send(connected, message))[0] is Code.NOT_FOUND


def test_no_call_fails_while_larger_messages_come_to_be_allowed() -> None:
    """Not even one that is under way."""
    failed: list[str] = []
    over = threading.Event()
    image = image_model("image")

    def ask_again_and_again() -> None:
        with channel(front) as connected:
            while not over.is_set():
                try:
                    infer(connected, image_request())
                except grpc.RpcError as error:
                    failed.append(f"{error.code()}: {error.details()}")

    with front_end(image, max_body_bytes=ROOM, model_control_mode="poll") as front, channel(front) as held:
        clients = [threading.Thread(target=ask_again_and_again, daemon=True) for _ in range(4)]
        for client in clients:
            client.start()
        for elements in (800_000, 1_600_000, 3_200_000):
            before, calls = front.server.service.largest_message, len(front.door.calls)
            renew(front, image, echo("later", Datatype.FP32, (elements,), max_batch=0))
            assert front.server.service.largest_message > before
            front.wait_for_calls(calls + 20)
        over.set()
        for client in clients:
            client.join()
        assert not failed
        front.door.held, calls = True, len(front.door.calls)
        waiting = held.unary_unary("/inference.GRPCInferenceService/ModelInfer").future(
            image_request().SerializeToString(), timeout=30
        )
        call = front.wait_for_calls(calls + 1)[-1]
        renew(front, image, echo("later", Datatype.UINT8))
        front.run(call.finish)
        assert pb.ModelInferResponse.FromString(waiting.result()).model_name == "image"


def test_calls_that_bring_no_tensors_bring_few_fields() -> None:
    """What comes of them is counted before a parser makes an object of each."""
    setting = pb.TraceSettingRequest()
    setting.settings["trace_rate"].value.extend([""] * 20_000)
    load = pb.RepositoryModelLoadRequest(model_name="m")
    for number in range(1100):
        load.parameters[f"file:{number}"].bytes_param = b"x"
    value = b"\x12\x28" + b"\x28\x01" * 20  # unknown fields, in the value of a parameter
    longer = b"\x1a" + bytes([len(value)]) + value
    with front_end() as front, channel(front) as connected:
        for method, message, said in (
            ("TraceSetting", setting.SerializeToString(), "at most 16,384 bytes"),
            ("RepositoryIndex", b"\x18\x01" * 10_000, "at most 16,384 bytes"),
            ("SystemSharedMemoryRegister", b"\x0a\x00" * 10_000, "at most 16,384 bytes"),
            ("LogSettings", b"\x0a\x00" * 10_000, "at most 16,384 bytes"),
            ("RepositoryModelLoad", load.SerializeToString(), "more than 1,040 fields"),
            ("RepositoryModelLoad", b"\x12\x01m" + longer, "more than 16 fields"),
        ):
            code, sentence, metadata = refusal(lambda: send(connected, message, method))  # noqa: B023
            assert (code, metadata["carpool-field"]) == (Code.INVALID_ARGUMENT, "body"), method
            assert said in sentence
        code, sentence, _ = refusal(
            lambda: connected.unary_unary("/grpc.health.v1.Health/Check")(bytes(20_000), timeout=30)
        )
        assert (code, sentence) == (
            Code.INVALID_ARGUMENT,
            "the message of Health may have at most 16,384 bytes",
        )
        index = pb.RepositoryIndexResponse.FromString(send(connected, b"", "RepositoryIndex"))
        assert index.models


def test_metadata_ends_where_the_documentation_says() -> None:
    with front_end() as front, channel(front) as connected:
        message = image_request().SerializeToString()
        send(connected, message, metadata=[("x-a", "y" * 60_000)])
        for much in ([("x-a", "y" * 66_000)], [(f"x-{number}", "y" * 1000) for number in range(66)]):
            code, _, _ = refusal(lambda given=much: send(connected, message, metadata=given))
            assert code is Code.RESOURCE_EXHAUSTED


def test_bytes_under_way_are_bounded() -> None:
    message = image_request().SerializeToString()
    with front_end() as front, channel(front) as connected:
        front.server.service.accounts.most_bytes = len(message) + 10
        front.door.held = True
        method = connected.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        first = method.future(message, timeout=30)
        call = front.wait_for_calls()[0]
        code, _, metadata = refusal(lambda: send(connected, message))
        assert (code, metadata["carpool-reason"]) == (Code.UNAVAILABLE, "busy")
        front.run(call.finish)
        first.result()
        front.door.held = False
        assert infer(connected, image_request()).model_name == "image"
        until(lambda: front.server.service.accounts.bytes == 0)
