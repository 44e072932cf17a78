"""Models written in Python: a file with a class `Model` or a function `predict`, run in a process of its own.

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
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from carpool.backends.backend import Backend, Placement, aborted
from carpool.backends.declarations import read_declarations
from carpool.backends.worker_process import WorkerDied, WorkerProcess, WorkerTimeout
from carpool.config.model import ModelConfig, ModelSignature, TensorConfig
from carpool.config.repository import ModelVersion
from carpool.errors import ModelError
from carpool.types import Array

SETUP_TIMEOUT = 300.0  # seconds for importing the file and its `setup`: weights may be large and disks slow


def load(config: ModelConfig, version: ModelVersion, placement: Placement) -> Backend:
    return PythonBackend(config, version, placement, SETUP_TIMEOUT)


def read_signature(config: ModelConfig, version: ModelVersion) -> ModelSignature:
    return read_declarations(version.file).signature(config.max_batch)


class PythonBackend:
    def __init__(
        self, config: ModelConfig, version: ModelVersion, placement: Placement, setup_timeout: float
    ) -> None:
        self._model = config.name
        self._aborted = False
        self.signature = read_signature(config, version)
        self._process = WorkerProcess(placement.threads)
        try:
            self._start(_settings(config, version, placement), setup_timeout)
        except BaseException:
            self._process.kill()
            self._process.close()
            raise

    @property
    def alive(self) -> bool:
        return not self._aborted and self._process.alive

    @property
    def pid(self) -> int:
        return self._process.pid

    def run(self, inputs: Mapping[str, Array], wanted: Sequence[str]) -> Mapping[str, Array]:
        if not self.alive:
            raise self._died(self._process.end())
        places = self._process.inputs.write(inputs)
        answer = self._ask({"inputs": places, "wanted": list(wanted)})
        if "error" in answer:
            raise ModelError(f"{self._model}: {answer['error']}")
        try:
            outputs = self._process.outputs.read(answer["outputs"])
        except (ArithmeticError, KeyError, TypeError, ValueError) as error:
            self._process.end()
            raise ModelError(f"{self._model}: its process sent a broken answer: {error}") from None
        # The next batch is written over these.
        return {name: array.copy() for name, array in outputs.items()}

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

    def _ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        try:
            self._process.channel.send(message)
            return self._process.channel.receive()
        except WorkerDied as died:
            raise self._died(str(died)) from None
        except (EOFError, OSError):
            raise self._died(self._process.end()) from None
        except (ValueError, RecursionError) as error:
            self._process.end()
            raise ModelError(f"{self._model}: its process sent a broken answer: {error}") from None

    def _died(self, how: str) -> ModelError:
        return (
            aborted(self._model)
            if self._aborted
            else ModelError(f"{self._model}: the model's process died ({how})", reason="model-died")
        )


def _settings(config: ModelConfig, version: ModelVersion, placement: Placement) -> dict[str, Any]:
    """What the model's `setup` gets."""
    return {
        "name": config.name,
        "version": version.number,
        "instance": placement.instance,
        "gpu": placement.gpu,
        "threads": placement.threads,
        "path": str(config.path),
        "file": str(cast(Path, version.file)),
        "max_batch": config.max_batch,
        "inputs": [_tensor(tensor) for tensor in config.inputs],
        "outputs": [_tensor(tensor) for tensor in config.outputs],
        "parameters": dict(config.parameters),
    }


def _tensor(tensor: TensorConfig) -> dict[str, Any]:
    dims = tensor.dims if tensor.reshape is None else tensor.reshape
    return {
        "name": tensor.name,
        "datatype": tensor.datatype,
        "shape": list(dims),
        "optional": tensor.optional,
    }
