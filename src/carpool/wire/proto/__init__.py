"""Triton's messages and gRPC's health messages, as classes made from the .proto files in this folder.

In this folder, this writes descriptors.binpb from them (libprotoc 33.5):

    python -m grpc_tools.protoc -I . --descriptor_set_out=descriptors.binpb \\
        model_config.proto grpc_service.proto health.proto

No code is generated, so that any protobuf from 5.27 on can read it. The classes live in a pool of their own:
a process that also uses a Triton client has messages of the same names in the default pool, and protobuf
allows a name only once per pool.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

POOL = DescriptorPool()
for _file in FileDescriptorSet.FromString(Path(__file__).with_name("descriptors.binpb").read_bytes()).file:
    POOL.AddSerializedFile(_file.SerializeToString())


def message_class(name: str, package: str = "inference") -> type[Any]:
    """The class of a message by its name in the package; its fields are not known to type checkers."""
    found: type[Any] = GetMessageClass(POOL.FindMessageTypeByName(f"{package}.{name}"))
    return found


def is_repeated(field: FieldDescriptor) -> bool:
    """Returns whether a field is repeated. Before 6.31 protobuf has only `label` for it; 7 has it no more."""
    if hasattr(field, "is_repeated"):
        return bool(field.is_repeated)
    return bool(field.label == FieldDescriptor.LABEL_REPEATED)
