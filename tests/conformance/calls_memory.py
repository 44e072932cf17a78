"""Tensors in the client's shared memory."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from tritonclient.utils import shared_memory as memory

from conformance.flavours import INVALID, UNSUPPORTED, Session
from conformance.table import Server, case, expect

_SENT = np.array([[1, 2, 3]], np.float32)
_BYTES = _SENT.nbytes
_HANDLE = base64.b64encode(bytes(64))  # as clients send what the CUDA driver gave them


def _key(session: Session, name: str) -> str:
    return f"/carpool-conformance-{session.http_url.partition(':')[2]}-{session.flavour.value}-{name}"


@contextlib.contextmanager
def _region(session: Session, name: str) -> Iterator[Any]:
    """A region of one row, registered; gone on both sides afterwards."""
    handle = memory.create_shared_memory_region(name, _key(session, name), _BYTES)
    try:
        session.call("register_system_shared_memory", name, _key(session, name), _BYTES)
        yield handle
    finally:
        session.call("unregister_system_shared_memory", name)
        memory.destroy_shared_memory_region(handle)


def _regions(session: Session) -> dict[str, Any]:
    found = session.call("get_system_shared_memory_status")
    if session.flavour.is_http:
        return {region["name"]: region for region in found}
    return dict(found.get("regions", {}))


def _place(session: Session, result: Any) -> str:
    """The region that the answer names in place of the output's bytes."""
    output = result.get_output("double")
    if session.flavour.is_http:
        return str(output["parameters"]["shared_memory_region"])
    return str(output.parameters["shared_memory_region"].string_param)


@case(
    "register_system_shared_memory", "two regions: a tensor there, the answer back", "no bytes in either body"
)
def both_ways(session: Session) -> str:
    with _region(session, "there") as there, _region(session, "back") as back:
        memory.set_shared_memory_region(there, [_SENT])
        tensor = session.flavour.module.InferInput("x", [1, 3], "FP32")
        tensor.set_shared_memory("there", _BYTES)
        wanted = session.output("double")
        wanted.set_shared_memory("back", _BYTES)
        result = session.call("infer", "numbers", [tensor], outputs=[wanted])
        expect(memory.get_contents_as_numpy(back, np.float32, [1, 3]).tolist(), [[2, 4, 6]])
        expect(_place(session, result), "back")
    return "double [2, 4, 6] in the region"


@case("register_system_shared_memory", "a name twice", "refused, 400 / INVALID_ARGUMENT")
def twice(session: Session) -> str:
    with _region(session, "twice"):
        key = _key(session, "twice")
        return session.refused(INVALID, "twice", "register_system_shared_memory", "twice", key, _BYTES)


@case("register_system_shared_memory", "a key that is not there", "refused, 400 / INVALID_ARGUMENT")
def no_such_key(session: Session) -> str:
    key = _key(session, "absent")
    return session.refused(INVALID, "absent", "register_system_shared_memory", "absent", key, _BYTES)


@case("get_system_shared_memory_status", "with a region, after it is unregistered", "key and size; nothing")
def status(session: Session) -> str:
    with _region(session, "shown"):
        shown = _regions(session)["shown"]
        expect(shown["key"], _key(session, "shown"))
        expect(int(shown["byte_size"]), _BYTES)
    expect(_regions(session), {})
    return f"{_BYTES} bytes; none"


@case("unregister_system_shared_memory", "a name, an unknown one, all", "gone; no error")
def unregister(session: Session) -> str:
    with _region(session, "leaving"):
        session.call("unregister_system_shared_memory", "leaving")
        expect(_regions(session), {})
        session.call("unregister_system_shared_memory", "leaving")
        session.call("unregister_system_shared_memory")
        tensor = session.flavour.module.InferInput("x", [1, 3], "FP32")
        tensor.set_shared_memory("leaving", _BYTES)
        said = session.refused(INVALID, "leaving", "infer", "numbers", [tensor])
    return f"gone; a request that names it: {said}"


# ---- with the default settings


@case("register_system_shared_memory", "not allowed", "refused, 501 / UNIMPLEMENTED", server=Server.PLAIN)
def not_allowed(session: Session) -> str:
    key = _key(session, "refused")
    return session.refused(
        UNSUPPORTED, "allow-client-shm", "register_system_shared_memory", "refused", key, 8
    )


@case("get_system_shared_memory_status", "not allowed", "empty", server=Server.PLAIN)
def none_registered(session: Session) -> str:
    expect(_regions(session), {})
    return "empty"


@case("unregister_system_shared_memory", "not allowed", "no error", server=Server.PLAIN)
def nothing_to_unregister(session: Session) -> str:
    session.call("unregister_system_shared_memory")
    return "no error"


# ---- CUDA


@case("register_cuda_shared_memory", "any", "refused, 501 / UNIMPLEMENTED")
def register_cuda(session: Session) -> str:
    return session.refused(UNSUPPORTED, "CUDA", "register_cuda_shared_memory", "gpu", _HANDLE, 0, 8)


@case("get_cuda_shared_memory_status", "", "empty")
def cuda_status(session: Session) -> str:
    found = session.call("get_cuda_shared_memory_status")
    assert found in ([], {}, {"regions": {}}), found
    return "empty"


@case("unregister_cuda_shared_memory", "all", "no error")
def unregister_cuda(session: Session) -> str:
    session.call("unregister_cuda_shared_memory")
    return "no error"
