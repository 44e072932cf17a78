"""Runs models written in Python: a file with a class `Model` or a function `predict`, in a process of its
own.

    class Model:
        def setup(self, config):        # optional; name, version, instance, gpu, path, file, parameters, …
            ...
        def predict(self, inputs):      # {"name": array of the whole batch}, valid until predict returns
            return {"scores": scores}

Parameters that are named like the model's inputs get the arrays themselves: `def predict(self, image)`. An
optional input that a request left out is not in `inputs`; a parameter for it needs a default. All requests of
a batch bring the same inputs. An
answer is a dict of arrays, one array where the model has one output, or a list with one result (a value, or a
dict of values) per item of the batch. Arrays go out as they are; plain numbers and lists take the declared
datatype. BYTES are object arrays of bytes, and BF16 is its 16 bits as uint16.

Where the settings say `decoupled = true`, predict is called for each request and yields its answers.

A file with a class `TritonPythonModel` is a model for Triton's Python backend and runs as it is, in the
process of triton_worker.py.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from carpool.backends.backend import Backend, Placement, Rider, aborted, check_wanted
from carpool.backends.python.call_server import CallServer, error_of
from carpool.backends.python.declarations import read_declarations
from carpool.backends.python.worker_process import WorkerDied, WorkerProcess, WorkerTimeout
from carpool.config.completing import complete
from carpool.config.model import ModelConfig, ModelSignature, TensorConfig
from carpool.config.repository import ModelVersion
from carpool.config.settings_part import own_tensors
from carpool.config.triton import read_completed
from carpool.config.triton_document import config_document
from carpool.errors import CarpoolError, DeadlineExceeded, ModelError
from carpool.types import Array

MOST_OPEN = 512
"""Requests that each instance of a decoupled model has under way at once, unless its settings say it."""
SETUP_TIMEOUT = 300.0  # seconds for importing the file and its `setup`: weights may be large and disks slow


def load(config: ModelConfig, version: ModelVersion, placement: Placement) -> Backend:
    kind = TritonBackend if read_declarations(version.file).tritons else PythonBackend
    return kind(config, version, placement, SETUP_TIMEOUT)


def describe(config: ModelConfig, version: ModelVersion) -> ModelConfig:
    """Complete, with the largest batch that the file declares; a model of Triton's may complete it itself."""
    declared = read_declarations(version.file)
    if declared.completes:
        config = _completed(config, version)
    if config.max_batch is None:
        config = replace(config, max_batch=declared.max_batch)
    return complete(config, declared.signature(config.max_batch))


def read_signature(config: ModelConfig, version: ModelVersion) -> ModelSignature:
    return read_declarations(version.file).signature(config.max_batch)


def asks_for_batches(version: ModelVersion) -> bool:
    return (read_declarations(version.file).max_batch or 0) > 1


class PythonBackend:
    def __init__(
        self,
        config: ModelConfig,
        version: ModelVersion,
        placement: Placement,
        setup_timeout: float,
        *,
        code: str = "",
    ) -> None:
        """`code` is a module with the class Model that runs the file, which is then no Python file; what
        that module reports about its tensors is stored in `told`."""
        self._model = config.name
        self._answers_many = config.decoupled
        self._max_open = config.max_open
        self._max_batch = config.max_batch or 0
        self._timeout = config.execution_timeout if config.decoupled else None  # from answer to answer
        self._aborted = False
        self.signature = ModelSignature() if code else read_signature(config, version)
        self.told: Any = None
        self._process = self._open(placement)
        try:
            self._start({**self._settings(config, version, placement), "code": code}, setup_timeout)
        except BaseException:
            self._process.kill()
            self.close()
            raise

    def _open(self, placement: Placement) -> WorkerProcess:
        return WorkerProcess(placement.threads)

    def _settings(self, config: ModelConfig, version: ModelVersion, placement: Placement) -> dict[str, Any]:
        """Returns what `setup` gets."""
        self._outputs = [tensor.name for tensor in config.outputs]
        return {
            "name": config.name,
            "version": version.number,
            "instance": placement.instance,
            "gpu": placement.gpu,
            "threads": placement.threads,
            "path": str(config.path),
            "file": str(cast(Path, version.file)),
            "max_batch": config.max_batch,
            "inputs": [_in_words(tensor) for tensor in config.inputs] + _own(config, inputs=True),
            "outputs": [_in_words(tensor) for tensor in config.outputs] + _own(config, inputs=False),
            "parameters": dict(config.parameters),
            "decoupled": config.decoupled,
        }

    @property
    def alive(self) -> bool:
        return not self._aborted and self._process.alive

    def run(self, inputs: Mapping[str, Array], wanted: Sequence[str]) -> Mapping[str, Array]:
        if self._answers_many:
            return self._first_of_many(inputs, wanted)
        return self._run(inputs, list(wanted))[0]

    def _run(self, inputs: Mapping[str, Array], wanted: Any) -> tuple[dict[str, Array], dict[str, Any]]:
        """Returns the outputs, and all that was answered."""
        if not self.alive:
            raise self._died(self._process.end())
        answer = self._ask({"inputs": self._process.inputs.write(inputs), "wanted": wanted})
        if "error" in answer:
            raise ModelError(f"{self._model}: {answer['error']}")
        return self._outputs_of(answer), answer

    def _outputs_of(self, answer: Mapping[str, Any]) -> dict[str, Array]:
        try:
            outputs = self._process.outputs.read(answer["outputs"])
        except (ArithmeticError, KeyError, TypeError, ValueError) as error:
            raise self._broken(error) from None
        # The next batch is written over these.
        return {name: array.copy() for name, array in outputs.items()}

    @property
    def most_open(self) -> int:
        """Returns how many requests may be open: without a setting, one if the model's batches are of one."""
        return self._max_open or (MOST_OPEN if self._max_batch > 1 else 1)

    def run_many(self, riders: Sequence[Rider], more: Callable[[], Sequence[Rider]]) -> None:
        """Runs these requests until all have ended. The process sends one answer at a time; each reply names
        the requests whose clients have gone, and new requests. The process may also ask for that alone."""
        if not self.alive:
            raise self._died(self._process.end())
        aboard = Aboard()
        said = self._next(self._boarding(aboard, riders))
        while (moved := "part" in said or "ended" in said) or "look" in said:
            try:
                if "part" in said:
                    aboard.hand_over(int(said["part"]), self._outputs_of(said), last=bool(said["last"]))
                elif moved:
                    aboard.end(int(said["ended"]), self._failure_in(said["error"]))
            except (KeyError, TypeError, ValueError) as error:
                raise self._broken(error) from None
            said = self._next({"gone": aboard.gone(), **self._boarding(aboard, more())}, renews=moved)
        if "error" in said:
            raise ModelError(f"{self._model}: {said['error']}")

    def _boarding(self, aboard: Aboard, riders: Sequence[Rider]) -> dict[str, Any]:
        """Returns the message that announces new requests to the process. It has taken over their inputs
        when it sends its next message, so that those of later requests may be written over them."""
        if not riders:
            return {}
        try:
            written = self._process.inputs.write(_numbered(riders))
        except CarpoolError as error:  # too large, all together
            for rider in riders:
                rider.end(error)
            return {"inputs": [], "wanted": [], "first": aboard.count}
        first = aboard.take(riders)
        return {"inputs": written, "wanted": [list(one.outputs) for one in riders], "first": first}

    def _failure_in(self, told: Any) -> CarpoolError | None:
        if told is None:
            return None
        code, message = told
        return self._failure(code, str(message))

    def _next(self, message: Mapping[str, Any], *, renews: bool = True) -> dict[str, Any]:
        """With `renews`, it has all of its time again for what comes next."""
        if renews:
            self._process.deadline = None if not self._timeout else time.monotonic() + self._timeout
        try:
            return self._ask(message)
        except WorkerTimeout:
            self._process.end()
            late = f"{self._model} gave no response within {(self._timeout or 0.0) * 1e3:.0f} ms"
            raise DeadlineExceeded(late, reason="execution-timeout") from None

    def _failure(self, _code: int, message: str) -> CarpoolError:
        return ModelError(f"{self._model}: {message}")

    def _first_of_many(self, inputs: Mapping[str, Array], wanted: Sequence[str]) -> Mapping[str, Array]:
        """Returns the first answer only, which is all that a warm-up needs."""
        first = FirstAnswer(inputs, list(wanted) or self._outputs)
        self.run_many([first], tuple)
        if first.error is not None:
            raise first.error
        return first.answer

    def abort(self) -> None:
        self._aborted = True
        self._process.kill()

    def close(self) -> None:
        self._process.close()

    def _start(self, settings: dict[str, Any], timeout: float) -> None:
        self._process.deadline = time.monotonic() + timeout
        try:
            answer = self._ask(settings)
        except WorkerTimeout:
            raise ModelError(
                f"{self._model}: {settings['file']} was not ready after {timeout:g} s of loading"
            ) from None
        self._process.deadline = None
        if "error" in answer:
            raise ModelError(f"{self._model}: {settings['file']} cannot be loaded: {answer['error']}")
        self.told = answer.get("tensors")

    def _ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        try:
            self._process.channel.send(message)
            return self._process.channel.receive()
        except WorkerDied as died:
            raise self._died(str(died)) from None
        except (EOFError, OSError):
            raise self._died(self._process.end()) from None
        except (ValueError, RecursionError) as error:
            raise self._broken(error) from None

    def _broken(self, error: Exception) -> ModelError:
        self._process.end()
        return ModelError(f"{self._model}: its process sent an invalid message: {error}")

    def _died(self, how: str) -> ModelError:
        return (
            aborted(self._model)
            if self._aborted
            else ModelError(f"{self._model}: the model's process died ({how})", reason="model-died")
        )


class Aboard:
    """Whose answers the process of an instance is at, by the numbers that it knows them by."""

    def __init__(self) -> None:
        self._riders: dict[int, Rider] = {}
        self._failed: dict[int, CarpoolError] = {}  # of those: what is wrong with their answers
        self.count = 0  # ever

    def take(self, riders: Sequence[Rider]) -> int:
        """The number of the first of them; the others have those that follow."""
        first = self.count
        self._riders.update(enumerate(riders, first))
        self.count += len(riders)
        return first

    def hand_over(self, number: int, outputs: Mapping[str, Array], *, last: bool) -> None:
        rider = self._riders[number]
        if rider.wanted and number not in self._failed:
            try:
                rider.send(outputs, last=last)
            except CarpoolError as error:
                self._failed[number] = error

    def end(self, number: int, error: CarpoolError | None) -> None:
        self._riders.pop(number).end(self._failed.pop(number, error))

    def gone(self) -> list[int]:
        return [n for n, one in self._riders.items() if n in self._failed or not one.wanted]


class FirstAnswer:
    """Implements `Rider` for a request that needs only its first answer."""

    details = b""

    def __init__(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> None:
        self.inputs = inputs
        self.outputs = outputs
        self.wanted = True
        self.answer: Mapping[str, Array] = {}
        self.error: CarpoolError | None = None

    def send(self, outputs: Mapping[str, Array], *, last: bool = False) -> None:  # noqa: ARG002
        self.wanted, self.answer = False, outputs

    def end(self, error: CarpoolError | None) -> None:
        self.error = error


def _in_words(tensor: TensorConfig) -> dict[str, Any]:
    shape = list(tensor.dims if tensor.reshape is None else tensor.reshape)
    return {"name": tensor.name, "datatype": tensor.datatype, "shape": shape, "optional": tensor.optional}


def _own(config: ModelConfig, *, inputs: bool) -> list[dict[str, Any]]:
    """Returns the tensors that the server fills in and keeps, which clients neither send nor get."""
    return [_in_words(one) for own in own_tensors(config) for one in (own.inputs if inputs else own.outputs)]


# ---- models for Triton's Python backend

_TRITON_WORKER = "carpool.backends.python.triton_worker"
_AT_ONCE = 4096  # tensors in one call of `execute`: the message that lists them has to stay short


class TritonBackend(PythonBackend):
    """Hands over requests instead of rows, and lets the model ask others where its placement has a way."""

    _call_server: CallServer | None = None

    @property
    def most_open(self) -> int:
        """As Triton's: `execute` is called again as soon as it has returned."""
        return self._max_open or MOST_OPEN

    def run(self, inputs: Mapping[str, Array], wanted: Sequence[str]) -> Mapping[str, Array]:
        if self._answers_many:
            return self._first_of_many(inputs, wanted)
        (answer,) = self.run_each([(inputs, check_wanted(self._model, wanted, self._outputs))])
        if isinstance(answer, CarpoolError):
            raise ModelError(f"{self._model}: {answer.message}")
        return answer

    def run_each(
        self, requests: Sequence[tuple[Mapping[str, Array], Sequence[str]]], details: Sequence[bytes] = ()
    ) -> list[Mapping[str, Array] | CarpoolError]:
        answers: list[Mapping[str, Array] | CarpoolError] = []
        step = max(1, _AT_ONCE // (1 + len(requests[0][0]) + len(self._outputs)))
        for start in range(0, len(requests), step):
            answers += self._execute(requests[start : start + step], details[start : start + step])
        return answers

    def _execute(
        self, requests: Sequence[tuple[Mapping[str, Array], Sequence[str]]], details: Sequence[bytes]
    ) -> list[Mapping[str, Array] | CarpoolError]:
        given = _named_by_number([inputs for inputs, _ in requests], details)
        outputs, answer = self._run(given, [list(wanted) for _, wanted in requests])
        answers: list[dict[str, Array] | CarpoolError] = [{} for _ in requests]
        try:
            for key, array in outputs.items():
                number, _, name = key.partition("/")
                cast(dict[str, Array], answers[int(number)])[name] = array
            for number, (code, message) in answer["errors"]:
                answers[number] = error_of(code, str(message))
        except (IndexError, KeyError, TypeError, ValueError) as error:
            raise self._broken(error) from None
        return list(answers)

    def _failure(self, code: int, message: str) -> CarpoolError:
        return error_of(code, message)

    def close(self) -> None:
        super().close()
        if self._call_server is not None:
            self._call_server.close()

    def _open(self, placement: Placement) -> WorkerProcess:
        if placement.calls is None:
            return WorkerProcess(placement.threads, _TRITON_WORKER)
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = WorkerProcess(placement.threads, _TRITON_WORKER, (theirs.fileno(),))
            except BaseException:
                ours.close()
                raise
        self._call_server = CallServer(ours, placement.calls, self._model)
        return process

    def _settings(self, config: ModelConfig, version: ModelVersion, placement: Placement) -> dict[str, Any]:
        self._outputs = [tensor.name for tensor in config.outputs]
        arguments = {
            "model_config": json.dumps(config_document(config)),
            "model_instance_kind": "CPU" if placement.gpu is None else "GPU",
            "model_instance_name": f"{config.name}_{placement.instance}",
            "model_instance_device_id": str(placement.gpu or 0),
            "model_repository": str(config.path),
            "model_version": str(version.number),
            "model_name": config.name,
        }
        return {"file": str(cast(Path, version.file)), "arguments": arguments, "decoupled": config.decoupled}


def _numbered(riders: Sequence[Rider]) -> dict[str, Array]:
    return _named_by_number([one.inputs for one in riders], [one.details for one in riders])


def _named_by_number(inputs: Sequence[Mapping[str, Array]], details: Sequence[bytes]) -> dict[str, Array]:
    given = {f"{number}/{name}": array for number, one in enumerate(inputs) for name, array in one.items()}
    if any(details):
        given["details"] = np.array(details, object)  # no name of an input: those have a number before
    return given


class CompletingBackend(PythonBackend):
    """Starts a process that calls `auto_complete_config` of the model and does nothing else."""

    def completed(self) -> str:
        return json.dumps(self._ask({})["config"])

    def _open(self, placement: Placement) -> WorkerProcess:
        return WorkerProcess(placement.threads, _TRITON_WORKER)

    def _settings(self, config: ModelConfig, version: ModelVersion, _placement: Placement) -> dict[str, Any]:
        document: dict[str, Any] = config_document(config)
        for tensor in document["input"]:
            if not tensor["optional"]:
                del tensor["optional"]  # the settings leave it open: the model may declare it
        if not config.decoupled:
            del document["model_transaction_policy"]
        return {"file": str(cast(Path, version.file)), "complete": document}


def _completed(config: ModelConfig, version: ModelVersion) -> ModelConfig:
    with contextlib.closing(
        CompletingBackend(config, version, Placement(threads=1), SETUP_TIMEOUT)
    ) as backend:
        return read_completed(config, backend.completed())
