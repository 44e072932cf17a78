"""Our .proto files say exactly what Triton's own descriptors say, and the descriptors what the files say."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor, FileDescriptor
from google.protobuf.json_format import ParseDict
from tritonclient.grpc import model_config_pb2, service_pb2

import carpool.wire.proto
from carpool.frontend.grpc.grpc_handlers import CALLS
from carpool.wire.proto import POOL, message_class


def messages(file: FileDescriptor) -> Iterator[Descriptor]:
    waiting = list(file.message_types_by_name.values())
    while waiting:
        message = waiting.pop()
        yield message
        waiting += message.nested_types


def enums(file: FileDescriptor) -> Iterator[EnumDescriptor]:
    yield from file.enum_types_by_name.values()
    for message in messages(file):
        yield from message.enum_types


FOLDER = Path(carpool.wire.proto.__file__).parent
FILES = (service_pb2.DESCRIPTOR, model_config_pb2.DESCRIPTOR)
MESSAGES = [message for file in FILES for message in messages(file)]
ENUMS = [enum for file in FILES for enum in enums(file)]


def described(field: FieldDescriptor) -> tuple[Any, ...]:
    referred = field.message_type or field.enum_type
    return (
        field.number,
        field.type,
        field.is_repeated,
        field.is_packed,
        field.containing_oneof.name if field.containing_oneof else None,
        referred.full_name if referred else None,
        field.json_name,
    )


def test_messages_are_the_same() -> None:
    for theirs in MESSAGES:
        name = theirs.full_name
        ours = POOL.FindMessageTypeByName(name)
        assert ours is not theirs
        assert {field.name: described(field) for field in ours.fields} == {
            field.name: described(field) for field in theirs.fields
        }, name
        assert {choice.name for choice in ours.oneofs} == {choice.name for choice in theirs.oneofs}, name
        assert ours.GetOptions().map_entry == theirs.GetOptions().map_entry, name
        nested = {message.name for message in theirs.nested_types}
        assert {message.name for message in ours.nested_types} == nested, name


@pytest.mark.parametrize("theirs", ENUMS, ids=lambda enum: enum.full_name)
def test_enums_are_the_same(theirs: EnumDescriptor) -> None:
    ours = POOL.FindEnumTypeByName(theirs.full_name)
    assert {value.name: value.number for value in ours.values} == {
        value.name: value.number for value in theirs.values
    }


@pytest.mark.parametrize("theirs", FILES, ids=lambda file: file.name)
def test_no_message_is_ours_alone(theirs: FileDescriptor) -> None:
    ours = POOL.FindFileByName(theirs.name)
    assert {message.full_name for message in messages(ours)} == {
        message.full_name for message in messages(theirs)
    }


def test_every_call_of_the_service_is_there_with_its_messages() -> None:
    methods = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods
    assert {method.name for method in methods} == {call.name for call in CALLS} | {
        "ModelInfer",
        "ModelStreamInfer",
    }
    for method in methods:
        if method.name != "ModelStreamInfer":
            assert method.input_type.name == f"{method.name}Request"
            assert method.output_type.name == f"{method.name}Response"


def test_health_messages_have_the_numbers_that_everybody_knows() -> None:
    assert (
        message_class("HealthCheckRequest", "grpc.health.v1")(service="x").SerializeToString() == b"\x0a\x01x"
    )
    assert message_class("HealthCheckResponse", "grpc.health.v1")(status=1).SerializeToString() == b"\x08\x01"


def test_a_config_document_makes_a_message() -> None:
    document = {
        "name": "m",
        "version_policy": {"specific": {"versions": [1, 2]}},
        "dynamic_batching": {
            "preferred_batch_size": [4],
            "priority_queue_policy": {"1": {"timeout_action": "DELAY", "max_queue_size": 3}},
        },
        "parameters": {"a": {"string_value": "b"}},
    }
    message = ParseDict(document, message_class("ModelConfig")())
    theirs = model_config_pb2.ModelConfig.FromString(message.SerializeToString())
    assert theirs.dynamic_batching.priority_queue_policy[1].max_queue_size == 3
    assert list(theirs.version_policy.specific.versions) == [1, 2]
    assert theirs.parameters["a"].string_value == "b"
