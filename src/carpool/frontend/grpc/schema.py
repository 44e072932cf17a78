"""Protocol-buffer messages from tables, without generated code.

They live in a pool of their own: a process that also uses a Triton client has messages of the same names in
the default pool, and protobuf allows a name only once per pool.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
)
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from carpool.frontend.grpc import health_tables, model_config_tables, service_tables

_SCALARS = {
    name: getattr(FieldDescriptorProto, f"TYPE_{name.upper()}")
    for name in ("double", "float", "int32", "int64", "uint32", "uint64", "bool", "string", "bytes")
}
_INFERENCE = "inference"
_HEALTH = "grpc.health.v1"


class _File:
    """One .proto file in the making. A field is `number name type [of oneof]` or `number name map key value`.

    A `*` behind the type means repeated. A type that is not a scalar is named from the package down.
    """

    def __init__(
        self, name: str, package: str, enums: Mapping[str, str], messages: Mapping[str, str], *needs: str
    ) -> None:
        self.proto = FileDescriptorProto(name=name, package=package, syntax="proto3", dependency=needs)
        self._package = package
        self._enums = set(enums)
        self._made: dict[str, DescriptorProto] = {}
        for message, fields in messages.items():
            self._add_message(message, fields)
        for enum, values in enums.items():
            self._add_enum(enum, values)

    def _add_message(self, path: str, fields: str) -> None:
        """Outer messages come before those that lie in them."""
        outer, _, name = path.rpartition(".")
        home = self._made[outer].nested_type if outer else self.proto.message_type
        message = self._made[path] = home.add(name=name)
        for line in filter(None, map(str.split, fields.split(","))):
            number, field, kind, *rest = line
            if kind == "map":
                self._add_map(message, path, int(number), field, rest[0], rest[1])
            else:
                self._add_field(message, int(number), field, kind, rest[1] if rest else "")

    def _add_field(self, message: DescriptorProto, number: int, name: str, kind: str, oneof: str) -> None:
        repeated = kind.endswith("*")
        label = FieldDescriptorProto.LABEL_REPEATED if repeated else FieldDescriptorProto.LABEL_OPTIONAL
        field = message.field.add(name=name, number=number, label=label)
        self._set_type(field, kind.removesuffix("*"))
        if oneof:
            known = [choice.name for choice in message.oneof_decl]
            if oneof not in known:
                message.oneof_decl.add(name=oneof)
                known.append(oneof)
            field.oneof_index = known.index(oneof)

    def _set_type(self, field: FieldDescriptorProto, kind: str) -> None:
        if kind in _SCALARS:
            field.type = _SCALARS[kind]
            return
        field.type_name = f".{self._package}.{kind}"
        is_enum = kind in self._enums
        field.type = FieldDescriptorProto.TYPE_ENUM if is_enum else FieldDescriptorProto.TYPE_MESSAGE

    def _add_map(
        self, message: DescriptorProto, path: str, number: int, name: str, key: str, value: str
    ) -> None:
        """A map is a repeated message of keys and values with a name that follows from the field's."""
        entry = "".join(word.capitalize() for word in name.split("_")) + "Entry"
        pair = message.nested_type.add(name=entry)
        pair.options.map_entry = True
        self._add_field(pair, 1, "key", key, "")
        self._add_field(pair, 2, "value", value, "")
        self._add_field(message, number, name, f"{path}.{entry}*", "")

    def _add_enum(self, path: str, values: str) -> None:
        """Their numbers always count from 0."""
        outer, _, name = path.rpartition(".")
        home = self._made[outer].enum_type if outer else self.proto.enum_type
        enum: EnumDescriptorProto = home.add(name=name)
        for number, value in enumerate(values.split()):
            enum.value.add(name=value, number=number)


def _pool() -> DescriptorPool:
    pool = DescriptorPool()
    config, service, health = model_config_tables, service_tables, health_tables
    for file in (
        _File("model_config.proto", _INFERENCE, config.ENUMS, config.MESSAGES),
        _File("grpc_service.proto", _INFERENCE, {}, service.MESSAGES, "model_config.proto"),
        _File("health.proto", _HEALTH, health.ENUMS, health.MESSAGES),
    ):
        pool.AddSerializedFile(file.proto.SerializeToString())
    return pool


POOL = _pool()


def message_class(name: str, package: str = _INFERENCE) -> type[Any]:
    """The class of a message by its name in the package; its fields are not known to type checkers."""
    found: type[Message] = GetMessageClass(POOL.FindMessageTypeByName(f"{package}.{name}"))
    return found


def health_class(name: str) -> type[Any]:
    return message_class(name, _HEALTH)
