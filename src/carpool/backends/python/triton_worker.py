"""Runs the process of a model that was written for Triton's Python backend: like python_worker.py, with a
list of requests for every batch, an answer to each of them, and a way to ask other models of the server."""

from __future__ import annotations

import inspect
import itertools
import json
import socket
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from carpool.backends.python import triton_python_backend_utils as pb_utils
from carpool.backends.python.python_worker import (
    AnswerChannel,
    Channel,
    Made,
    Newcomer,
    connect,
    explain,
    import_model,
    requests_of,
    serve,
)
from carpool.errors import ModelError
from carpool.memory.batch_region import BatchRegion
from carpool.observe.output import Printed
from carpool.types import Array

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

_SHOWN = 2000  # characters of an error's text that are passed on
_LOOK_S = 0.02  # between two looks for new requests, while no answer is sent


class TritonModel:
    """Wraps the user's class, and `execute` of it from tensors to tensors."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        kind = _class_of(settings)
        self.file = Path(settings["file"])
        self._model = kind()
        self._execute = getattr(self._model, "execute", None)
        if not callable(self._execute):
            raise ModelError("its class TritonPythonModel has no method execute")
        self._loop: AbstractEventLoop | None = None
        if inspect.iscoroutinefunction(self._execute):
            import asyncio  # a quarter of what this process would import, and few models need it

            self._loop = asyncio.new_event_loop()
        initialize = getattr(self._model, "initialize", None)
        if initialize is not None:
            initialize(dict(settings["arguments"]))

    def run(self, requests: Sequence[pb_utils.InferenceRequest]) -> list[pb_utils.InferenceResponse]:
        """Returns one answer to each request."""
        answered = self.execute(requests)
        if answered is None:
            answered = [None] * len(requests)
        if not isinstance(answered, Sequence) or len(answered) != len(requests):
            found = len(answered) if isinstance(answered, Sequence) else f"a {type(answered).__name__}"
            raise ModelError(f"execute must return a list of {len(requests)} responses, not {found}")
        return [_response(*pair) for pair in zip(requests, answered, strict=True)]

    def execute(self, requests: Sequence[pb_utils.InferenceRequest]) -> Any:
        assert self._execute is not None
        answered = self._execute(requests)
        return answered if self._loop is None else self._loop.run_until_complete(answered)

    def finalize(self) -> None:
        finalize = getattr(self._model, "finalize", None)
        if finalize is not None:
            finalize()


def read_requests(batch: Mapping[str, Any], inputs: BatchRegion) -> list[pb_utils.InferenceRequest]:
    # A model may keep what it was given: the next batch is written over the memory it came in.
    return [
        _request({name: array.copy() for name, array in given.items()}, names, said)
        for given, said, names in zip(*requests_of(batch, inputs), batch["wanted"], strict=True)
    ]


def _request(given: Mapping[str, Array], names: list[str], said: bytes) -> pb_utils.InferenceRequest:
    tensors = [pb_utils.Tensor(name, array) for name, array in given.items()]
    return pb_utils.InferenceRequest(inputs=tensors, requested_output_names=names, **_said(said))


_FLAGS = {
    "sequence_start": pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START,
    "sequence_end": pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END,
}


def _said(details: bytes) -> dict[str, Any]:
    """Returns what a request says of itself, under the names of Triton's arguments. What Carpool itself
    understands is no parameter of the model's."""
    if not details:
        return {}
    document = json.loads(details)
    parameters: dict[str, Any] = dict(document.get("parameters", {}))
    said: dict[str, Any] = {
        "request_id": document.get("id", ""),
        "correlation_id": parameters.pop("sequence_id", 0),
        "flags": sum(flag for name, flag in _FLAGS.items() if parameters.pop(name, False)),
        "timeout": round(parameters.pop("timeout", 0)),
    }
    own = ("priority", "source", "latest")
    return {**said, "parameters": {name: it for name, it in parameters.items() if name not in own}}


def _response(request: pb_utils.InferenceRequest, returned: object) -> pb_utils.InferenceResponse:
    """Returns what was returned for a request, or else is sent for it."""
    if returned is None and request.sender is not None:
        returned = request.sender.answer.result()
    if not isinstance(returned, pb_utils.InferenceResponse):
        raise ModelError(f"execute returned a {type(returned).__name__} in place of an InferenceResponse")
    return returned


def _class_of(settings: Mapping[str, Any]) -> Any:
    file = Path(settings["file"])
    sys.path.append(str(file.parent.parent))  # models import `1.helper` as well as `helper`
    module = import_model(file)
    kind = getattr(module, "TritonPythonModel", None)
    if kind is None:
        raise ModelError("it has no class TritonPythonModel")
    return kind


# ---- models that give any number of answers ----------------------------------------------------------------


class OpenRequest:
    """Implements `Answers`. Threads of the model race for the one way to the server, and for the end: all
    that is here is only changed by who has the lock, which all requests of an instance share."""

    def __init__(self, number: int, wanted: Sequence[str], open_requests: OpenRequests) -> None:
        self._number = number
        self._wanted = wanted
        self._all = open_requests
        self._lock = open_requests.lock
        self.over = False
        self.error: tuple[int, str] | None = None
        self._gone = False  # when it was looked at last, or ended

    @property
    def gone(self) -> bool:
        with self._lock:
            if not self.over:
                self._all.parts.look()
                self._gone = self._number in self._all.parts.gone
            return self._gone

    def send(self, response: pb_utils.InferenceResponse | None, *, last: bool) -> None:
        with self._lock:
            if self.over:
                raise pb_utils.TritonModelException("a response is sent after the last of its request")
            if response is not None and self.error is None and self._number not in self._all.parts.gone:
                self._send(response, last=last)
            if last:
                self._end()
            self._all.tell_ended()

    def _send(self, response: pb_utils.InferenceResponse, *, last: bool) -> None:
        error = response.error()
        if error is not None:
            self.error = (int(error.code()), error.message()[:_SHOWN])
            return
        tensors = {
            tensor.name(): np.asarray(tensor.as_numpy())
            for tensor in response.output_tensors()
            if tensor.name() in self._wanted
        }
        parts = self._all.parts
        parts.send(self._number, parts.write(tensors), last=last)

    def forsaken(self) -> None:
        with self._lock:
            if not self.over:
                self._end("the model dropped a request without completing it")

    def fail(self, text: str) -> None:
        with self._lock:
            if not self.over:
                self._end(text)

    def _end(self, text: str = "") -> None:
        if text and self.error is None:
            self.error = (int(pb_utils.TritonError.INTERNAL), text)
        self.over = True
        self._gone = self._number in self._all.parts.gone
        self._all.ended.append((self._number, self.error))
        self._lock.notify_all()


class OpenRequests:
    """Holds the open requests of one instance, until none is left. Only the thread that has the lock may
    write to the server.

    A sender may be garbage-collected while its own thread is writing: the request that ends by that is only
    noted, and reported by the next thread that writes; at the latest by the thread that waits here.
    """

    def __init__(self, model: TritonModel, parts: AnswerChannel) -> None:
        self._model = model
        self.parts = parts
        self.lock = threading.Condition(threading.RLock())
        self.ended: list[tuple[int, tuple[int, str] | None]] = []  # not reported yet
        self._open = 0

    def tell_ended(self) -> None:
        while self.ended:
            self.parts.end(*self.ended.pop(0))
            self._open -= 1
        if self.parts.newcomers or not self._open:
            self.lock.notify_all()

    def serve(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Until every request is complete, in whichever of the model's threads. `execute` is called again
        for those that come meanwhile, when it has returned."""
        self.parts.begin(batch)
        while True:
            with self.lock:
                newcomers = self.parts.newcomers[:]
                self.parts.newcomers.clear()
                self._open += len(newcomers)
            if newcomers:
                self._execute(newcomers)
            with self.lock:
                self.tell_ended()
                if not self._open and not self.parts.newcomers:
                    return {}
                if not self.lock.wait_for(self._is_to_do, _LOOK_S):
                    self.parts.look()

    def _is_to_do(self) -> bool:
        return bool(self.ended or self.parts.newcomers or not self._open)

    def _execute(self, newcomers: list[Newcomer]) -> None:
        requests = [_request(one.inputs, one.wanted, one.details) for one in newcomers]
        waiting = [OpenRequest(one.number, one.wanted, self) for one in newcomers]
        newcomers.clear()
        for request, answers in zip(requests, waiting, strict=True):
            request.answers = answers
        try:
            if self._model.execute(requests) is not None:
                raise ModelError("execute of a decoupled model must return None, and send its responses")
            for request, answers in zip(requests, waiting, strict=True):
                if request.sender is None and not answers.over:
                    answers.fail("execute took no response sender for a request")
        except BaseException as error:
            for answers in waiting:
                answers.fail(explain(error, self._model.file))
            traceback.print_exception(error)
        # From here on, senders that the model has not kept are deleted, and their requests fail.


# ---- settings that the model completes ---------------------------------------------------------------------


def completed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings as the model's `auto_complete_config` leaves them."""
    config = pb_utils.ModelConfig(json.dumps(settings["complete"]))
    answered = _class_of(settings).auto_complete_config(config)
    if not isinstance(answered, pb_utils.ModelConfig):
        raise ModelError(f"auto_complete_config must return its argument, not a {type(answered).__name__}")
    return answered.as_dict()


# ---- requests of other models ------------------------------------------------------------------------------


class ServerCalls:
    """Asks the server, any number of times at once and from any thread; one thread reads what it answers.

    Tensors travel in memory files that are made for one way of one call, so that nothing is ever written over
    what is still being read.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._sending = threading.Lock()
        self._numbers = itertools.count(1)
        # Both threads use it, one key at a time, which the interpreter lock makes safe. A call is put in
        # before it is sent, so that its answer always finds it.
        self._open: dict[int, Future[pb_utils.InferenceResponse]] = {}
        self._gone = False
        threading.Thread(target=self._listen, name="answers", daemon=True).start()

    def ask(self, request: pb_utils.InferenceRequest) -> Future[pb_utils.InferenceResponse]:
        number = next(self._numbers)
        answer: Future[pb_utils.InferenceResponse] = Future()
        answer.set_running_or_notify_cancel()  # who gives up waiting must not disturb the listener
        self._open[number] = answer
        region = BatchRegion.create("carpool-call")
        try:
            places = region.write({tensor.name(): tensor.as_numpy() for tensor in request.inputs()})
            message = {
                "call": number,
                "model": request.model_name,
                "version": "" if request.model_version < 0 else str(request.model_version),
                "inputs": places,
                "wanted": request.requested_output_names(),
                "timeout": request.timeout() / 1e6,
                "details": json.dumps(_details(request)),
            }
            with self._sending:
                self._channel.send(message, region.fd)
        except (ModelError, ValueError) as error:
            self._settle(number, _failed(str(error), pb_utils.TritonError.INVALID_ARG))
        except OSError:
            self._gone = True
        finally:
            region.close()
        if self._gone:  # looked at after the call was noted: either we see it, or the listener sees the call
            self._settle(
                number, _failed("the server has closed this instance", pb_utils.TritonError.UNAVAILABLE)
            )
        return answer

    def _settle(self, number: int, response: pb_utils.InferenceResponse) -> None:
        answer = self._open.pop(number, None)
        if answer is not None:
            answer.set_result(response)

    def _listen(self) -> None:
        try:
            while True:
                message, file = self._channel.receive_with_file()
                self._settle(message["call"], _read_answer(message, file))
        except (EOFError, OSError):
            pass
        except Exception:  # callers that wait must not wait for ever
            traceback.print_exc()
        self._gone = True
        for number in list(self._open):
            self._settle(
                number, _failed("the server has closed this instance", pb_utils.TritonError.UNAVAILABLE)
            )


def _details(request: pb_utils.InferenceRequest) -> dict[str, Any]:
    """Returns what a request says of itself, as clients say it of theirs; empty for one that says nothing."""
    parameters = json.loads(request.parameters())
    if request.correlation_id():
        parameters["sequence_id"] = request.correlation_id()
    parameters |= {name: True for name, flag in _FLAGS.items() if request.flags() & flag}
    return (
        {"id": request.request_id(), "parameters": parameters} if request.request_id() or parameters else {}
    )


def _read_answer(message: Mapping[str, Any], file: int | None) -> pb_utils.InferenceResponse:
    if file is None:
        return _failed(message["error"], pb_utils.TritonError.ErrorCode(message["code"]))
    region = BatchRegion(file)
    try:  # the arrays keep the memory when the file is closed
        outputs = region.read(message["outputs"])
    finally:
        region.close()
    return pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in outputs.items()])


def _failed(text: str, code: pb_utils.TritonError.ErrorCode) -> pb_utils.InferenceResponse:
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(text, code))


# ---- the process -------------------------------------------------------------------------------------------


def main(arguments: list[str]) -> int:
    sys.stdout = Printed()
    channel, inputs, outputs, calls = connect(arguments)
    way_out = Channel(socket.socket(fileno=calls[0])) if calls else None  # to other models
    sys.modules["triton_python_backend_utils"] = pb_utils
    sys.modules["c_python_backend_utils"] = pb_utils
    made: list[TritonModel] = []

    def make(settings: dict[str, Any]) -> Made:
        if "complete" in settings:
            config = completed(settings)
            return {}, lambda _: {"config": config}
        if way_out is not None:
            pb_utils.asker = ServerCalls(way_out).ask
        model = TritonModel(settings)
        made.append(model)
        if settings["decoupled"]:
            riders = OpenRequests(model, AnswerChannel(channel, inputs, outputs))
            return {}, riders.serve
        return {}, lambda batch: _answer(model, batch, inputs, outputs)

    status = serve(channel, make)
    for model in made:
        model.finalize()
    return status


def _answer(
    model: TritonModel, batch: Mapping[str, Any], inputs: BatchRegion, outputs: BatchRegion
) -> dict[str, Any]:
    """Outputs are named as inputs are, by the number of their request and their own name."""
    errors: dict[int, tuple[int, str]] = {}
    answers: dict[str, Array] = {}
    for number, response in enumerate(model.run(read_requests(batch, inputs))):
        error = response.error()
        if error is not None:
            errors[number] = (int(error.code()), error.message()[:_SHOWN])
            continue
        for tensor in response.output_tensors():
            if tensor.name() in batch["wanted"][number]:
                answers[f"{number}/{tensor.name()}"] = np.asarray(tensor.as_numpy())
    return {"outputs": outputs.write(answers), "errors": list(errors.items())}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
