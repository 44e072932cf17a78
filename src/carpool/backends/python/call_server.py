"""The server's end of the calls that a Python model makes of other models; triton_worker.py is the other."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from carpool.backends.backend import AsksModels
from carpool.backends.python.python_worker import Channel
from carpool.backends.python.triton_python_backend_utils import TritonError
from carpool.errors import (
    Cancelled,
    CarpoolError,
    DeadlineExceeded,
    InvalidInput,
    ModelError,
    NotFound,
    Refused,
    TooLarge,
    Unavailable,
    Unsupported,
)
from carpool.memory.batch_region import MAX_BYTES, BatchRegion
from carpool.types import Array

_CODES: Mapping[type[CarpoolError], TritonError.ErrorCode] = {
    InvalidInput: TritonError.INVALID_ARG,
    TooLarge: TritonError.INVALID_ARG,
    NotFound: TritonError.NOT_FOUND,
    Unavailable: TritonError.UNAVAILABLE,
    Refused: TritonError.UNAVAILABLE,
    DeadlineExceeded: TritonError.UNAVAILABLE,
    Unsupported: TritonError.UNSUPPORTED,
    Cancelled: TritonError.CANCELLED,
}
_MOST_DETAILS = 64 << 10  # bytes: the id and the parameters of a call
_ERRORS: Mapping[int, type[CarpoolError]] = {
    TritonError.NOT_FOUND: NotFound,
    TritonError.INVALID_ARG: InvalidInput,
    TritonError.UNAVAILABLE: Unavailable,
    TritonError.UNSUPPORTED: Unsupported,
    TritonError.ALREADY_EXISTS: InvalidInput,
    TritonError.CANCELLED: Cancelled,
}


def error_of(code: int, message: str) -> CarpoolError:
    """Returns the error that a client is answered with for a TritonError."""
    return _ERRORS.get(code, ModelError)(message)


def code_of(error: CarpoolError) -> TritonError.ErrorCode:
    return next((code for kind, code in _CODES.items() if isinstance(error, kind)), TritonError.INTERNAL)


class CallServer:
    """Reads calls in a thread of its own, and writes answers in another: what the engine's loop hands over
    may be large to copy. The process is not believed: a call that makes no sense ends the connection, and
    with it the calls that are open."""

    def __init__(self, sock: socket.socket, calls: AsksModels, model: str) -> None:
        self._channel = Channel(sock)
        self._socket = sock
        self._calls = calls
        self._answers = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"{model}-answers")
        self._held = 0  # bytes of inputs that are in use
        self._counting = threading.Lock()  # the thread that reads adds, the one that answers subtracts
        threading.Thread(target=self._serve, name=f"{model}-calls", daemon=True).start()

    def close(self) -> None:
        """Ends the reading thread, which tidies up."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _serve(self) -> None:
        try:
            while True:
                message, file = self._channel.receive_with_file()
                self._take(message, file)
        except (EOFError, OSError, ArithmeticError, KeyError, TypeError, ValueError):
            pass  # the instance was closed, its process died, or speaks in riddles
        finally:
            self._calls.leave()
            self._answers.shutdown(wait=True)  # before the number of the socket may become another's
            self._channel.close()

    def _take(self, message: Mapping[str, Any], file: int | None) -> None:
        if file is None:
            raise ValueError("a call without its memory")
        number, size = int(message["call"]), os.fstat(file).st_size
        region = BatchRegion(file)
        try:
            # Memory that can shrink would take this process along.
            if not fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise ValueError("memory that can shrink")
            with self._counting:
                full = self._held + size > MAX_BYTES
                self._held += 0 if full else size
            inputs = {} if full else region.read(message["inputs"])
        finally:
            region.close()  # arrays keep the memory
        if full:
            why = f"the calls of this instance that are open hold {MAX_BYTES} bytes, which is the limit"
            self._answers.submit(self._answer, number, 0, Unavailable(why))
            return

        def answer(outcome: Mapping[str, Array] | CarpoolError) -> None:
            with contextlib.suppress(RuntimeError):  # the instance is gone, and no call waits
                self._answers.submit(self._answer, number, size, outcome)

        model, version, timeout = str(message["model"]), str(message["version"]), float(message["timeout"])
        wanted = [str(name) for name in message["wanted"]]
        details = str(message["details"]).encode()
        if len(details) > _MOST_DETAILS:
            raise ValueError("the details of a request are too long")
        said = b"" if details == b"{}" else details
        self._calls.ask(model, version, inputs, wanted, timeout, answer, said)

    def _answer(self, number: int, size: int, outcome: Mapping[str, Array] | CarpoolError) -> None:
        with self._counting:
            self._held -= size
        with contextlib.suppress(OSError):  # the process is gone
            if not isinstance(outcome, CarpoolError):
                region = BatchRegion.create("carpool-answer")
                try:
                    self._channel.send({"call": number, "outputs": region.write(outcome)}, region.fd)
                    return
                except (ModelError, ValueError) as error:
                    outcome = ModelError(str(error))
                finally:
                    region.close()
            text = outcome.message[:2000]
            self._channel.send({"call": number, "error": text, "code": int(code_of(outcome))})
