"""The process in which one Python model lives; the server starts it and talks to it (worker_process.py)."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

from carpool.backends.python.user_model import UserModel, explain
from carpool.backends.python.worker_channel import Channel
from carpool.memory.batch_region import BatchRegion


def main(arguments: list[str]) -> int:
    control, inputs, outputs, lifeline = (int(fd) for fd in arguments)
    for fd in (control, inputs, outputs, lifeline):
        os.set_inheritable(fd, False)
    tie_to_server(lifeline)
    channel = Channel(socket.socket(fileno=control))
    try:
        return Worker(channel, BatchRegion(inputs), BatchRegion(outputs)).serve()
    except (EOFError, OSError):  # the server closed the instance, or is gone
        return 0


def tie_to_server(lifeline: int) -> None:
    """Has the kernel kill this process group when the pipe's other end closes, which is when the server ends.

    Neither a thread, which a model that never lets go of the interpreter would stop, nor the parent-death
    signal, which follows the thread that started us rather than the server, can promise that.
    """
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([lifeline], [], [], 0)[0]:  # it closed before we asked to be told
        os._exit(1)


class Worker:
    def __init__(self, channel: Channel, inputs: BatchRegion, outputs: BatchRegion) -> None:
        self._channel = channel
        self._inputs = inputs
        self._outputs = outputs
        self._logged = ""

    def serve(self) -> int:
        settings = self._channel.receive()
        file = Path(settings["file"])
        try:
            model = UserModel(settings)
        except BaseException as error:
            self._channel.send({"error": self._report(error, file)})
            return 1
        self._channel.send({})
        while True:
            request = self._channel.receive()
            self._channel.send(self._answer(model, request, file))

    def _answer(self, model: UserModel, request: dict[str, Any], file: Path) -> dict[str, Any]:
        try:
            outputs = model.run(self._inputs.read(request["inputs"]), request["wanted"])
            return {"outputs": self._outputs.write(outputs)}
        except BaseException as error:  # a model that calls sys.exit has failed this batch, not the server
            return {"error": self._report(error, file)}

    def _report(self, error: BaseException, file: Path) -> str:
        """The cause in one line; the whole traceback goes to the log, once for a row of equal errors."""
        text = explain(error, file)
        if text != self._logged:
            self._logged = text
            traceback.print_exception(error)
        return text


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
