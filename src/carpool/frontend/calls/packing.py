"""Requests whose tensors are not simply binary: checked, and made so, before they go through the door.

Long JSON is read in a process of its own. Whoever reads JSON holds the interpreter from its first byte to the
last: 60 MB of it for tenths of a second, in which the loop answers nobody, whichever thread does it. The
process is started for the first long body, serves one after the other, and ends when it has had nothing to do
for a while.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from time import process_time, thread_time
from typing import TypeVar, cast

import carpool.errors
from carpool.errors import CarpoolError, Unavailable
from carpool.link.child_process import belong_to_parent
from carpool.memory.spare_memory import large_blocks_apart
from carpool.types import Datatype, InferRequest, Signature
from carpool.wire.v2 import (
    Buffer,
    RequestHead,
    TensorHead,
    bind,
    check_binary,
    check_tail,
    encode_request,
    raw_head,
    read_head,
    read_header_length,
)

AT_ONCE = 64 * 1024
"""Bytes of JSON or strings to read in the loop: 150,000 numbers take 25 ms, and everybody else would wait."""

LONG = 256 * 1024
LONG_PICTURE = 2 << 20
"""Bytes of JSON that are mostly one string: to read that takes some milliseconds, to start a process many."""

_LONGEST_S = 30.0
_IDLE_S = 10.0
_NICER = 5
_BUFFER = 1 << 20

_BYTES = Datatype.BYTES
_BOOL = Datatype.BOOL
_FEW_STRINGS = 4096

Found = TypeVar("Found")
_Told = tuple[object, tuple[str, str, str | None] | None, float]
"""What was found, or the kind of an error, its sentence and its field; and the seconds that it took."""

Charge = Callable[[bytes | bytearray, float], None]
"""Hears, in any thread, how many seconds of a processor it took to read a body."""


def is_in_place(head: RequestHead) -> bool:
    """Returns whether the tensors can stay where they are, after a look at them that does not take long."""
    if any(tensor.data is not None or tensor.shared_memory is not None for tensor in head.inputs):
        return False
    return sum(math.prod(tensor.shape) for tensor in head.inputs if tensor.datatype is _BYTES) <= _FEW_STRINGS


def takes_long(size: int, header_length: int | None, signature: Signature) -> bool:
    """Returns whether a body is better not read in the loop."""
    if size <= AT_ONCE:
        return False
    json = header_length is None or header_length > AT_ONCE
    return json or any(spec.datatype is _BYTES for spec in signature.inputs)


def check(head: RequestHead, tail: Buffer, model: str) -> None:
    """BYTES lengths must add up and BOOL bytes be 0 or 1; those in regions are looked at later."""
    looked_at = [one for one in _with_it(head) if one.data is None and one.datatype in (_BYTES, _BOOL)]
    if looked_at:
        check_binary(looked_at, tail, model)


def prepare(
    body: bytes | bytearray, header_length: int | None, signature: Signature
) -> tuple[RequestHead, list[Buffer]]:
    """Returns a whole body as a head and the bytes of its tensors, all of them binary. Safe in any thread.

    Inputs in a client's memory stay there, and in the head.
    """
    view = memoryview(body)
    size = len(view)
    end = size
    if header_length is not None:
        end = header_length
        read_header_length(str(end), size)  # what a chunked or compressed body holds is known only now
    head = raw_head(signature, size) if header_length == 0 else read_head(view[:end], signature)
    check_tail(head, size - end, signature.model)
    tail = view[end:]
    check(head, tail, signature.model)
    has_json_data = any(tensor.data is not None for tensor in head.inputs)
    return _pack(head, tail, signature.model) if has_json_data else (head, [tail])


def _with_it(head: RequestHead) -> list[TensorHead]:
    return [tensor for tensor in head.inputs if tensor.shared_memory is None]


def _pack(head: RequestHead, tail: Buffer, model: str) -> tuple[RequestHead, list[Buffer]]:
    tensors = bind(_with_it(head), tail)
    pieces = encode_request(InferRequest(model, tensors)).buffers[1:]
    inputs = [tensor for tensor in head.inputs if tensor.shared_memory is not None]
    offset = 0
    for tensor, piece in zip(tensors, pieces, strict=True):
        inputs.append(TensorHead(tensor.name, tensor.datatype, tensor.shape, offset, len(piece)))
        offset += len(piece)
    binary = RequestHead(head.id, inputs, head.outputs, head.options, head.binary_output, offset, head.batch)
    return binary, pieces


class LongJson:
    """Used by the threads of a front end: one of them at a time, the others wait."""

    def __init__(self, charge: Charge) -> None:
        self._charge = charge
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None

    def prepare(
        self, body: bytes | bytearray, header_length: int | None, signature: Signature
    ) -> tuple[RequestHead, Sequence[Buffer]]:
        """Does the same as the function of this name, for what is long."""
        if (len(body) if header_length is None else header_length) <= LONG:
            return prepare(body, header_length, signature)
        return self.read(_packed, body, header_length, signature)

    def read(
        self, read: Callable[..., Found], body: bytes | bytearray, *more: object, at_most: int = LONG
    ) -> Found:
        """Applies `read` to a body and what else it needs, here if the body is no longer than that. It is a
        function of a module, so that the other process finds it, too."""
        if len(body) <= at_most:
            return read(body, *more)
        with self._lock:
            for _ in range(2):  # one that had nothing to do, or was killed, is replaced
                try:
                    found, failure, seconds = self._ask(read, body, more)
                except (OSError, EOFError):
                    self._end()
                    continue
                self._charge(body, seconds)
                if failure is not None:
                    name, message, field = failure
                    raise getattr(carpool.errors, name)(message, field=field)
                return cast(Found, found)
        raise Unavailable("the body's JSON could not be read; retry", reason="busy")

    def _ask(self, read: Callable[..., object], body: bytes | bytearray, more: tuple[object, ...]) -> _Told:
        pipe = self._pipe or self._start()
        began = thread_time()
        pipe.send((read, more))
        pipe.send_bytes(body)
        if not pipe.poll(_LONGEST_S):
            raise TimeoutError
        told: _Told = pipe.recv()
        found, failure, seconds = told
        return found, failure, seconds + thread_time() - began

    def _start(self) -> Connection:
        ours, theirs = socket.socketpair()
        with theirs:
            for end in (ours, theirs):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
            ours.settimeout(None)
            command = [sys.executable, "-P", "-m", __name__, str(theirs.fileno())]
            self._process = subprocess.Popen(command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL)
        self._pipe = Connection(ours.detach())
        return self._pipe

    def _end(self) -> None:
        pipe, self._pipe = self._pipe, None
        process, self._process = self._process, None
        if pipe is not None:
            pipe.close()
        if process is not None:
            process.kill()
            process.wait()

    def close(self) -> None:
        """Whoever waits for it is told that it cannot be read."""
        process = self._process
        if process is not None:
            process.kill()
        if self._lock.acquire(blocking=False):
            self._end()
            self._lock.release()


def _packed(
    body: bytes, header_length: int | None, signature: Signature
) -> tuple[RequestHead, Sequence[Buffer]]:
    head, pieces = prepare(body, header_length, signature)
    return head, [bytes(piece) for piece in pieces]


def serve(pipe: Connection) -> None:
    while pipe.poll(_IDLE_S):
        _serve_one(pipe)  # which keeps nothing of it while the next is waited for


def _serve_one(pipe: Connection) -> None:
    read, more = pipe.recv()
    began = process_time()
    found, failure = None, None
    try:
        found = read(pipe.recv_bytes(), *more)
    except CarpoolError as error:
        failure = type(error).__name__, error.message, error.field
    told: _Told = found, failure, process_time() - began
    pipe.send(told)


if __name__ == "__main__":
    belong_to_parent()
    os.nice(_NICER)
    large_blocks_apart()
    with contextlib.suppress(EOFError, OSError):
        serve(Connection(int(sys.argv[1])))
