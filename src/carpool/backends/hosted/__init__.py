"""Implements runtimes that run in processes of their own, because they cannot be stopped, keep the
interpreter to themselves or take the whole process with them when they fail. The processes are those of
Python models.

Each file here has a class Model for such a process, as has the `program` of an extension's backend:
`setup(settings)` loads, `tensors` then holds the inputs and the outputs, each as (name, datatype, whole
shape), and `predict` runs a batch. Law of these files: a runtime is imported by `setup` alone, so never by
the server.
"""

from __future__ import annotations

from typing import Any

from carpool.backends.backend import Backend, Placement, listed_gpus
from carpool.backends.python.python_backend import SETUP_TIMEOUT, PythonBackend
from carpool.config.backend_kinds import kind_of
from carpool.config.model import ModelConfig, ModelSignature, TensorSignature
from carpool.config.repository import ModelVersion
from carpool.errors import ModelError, Unsupported
from carpool.types import DATATYPES


def load(config: ModelConfig, version: ModelVersion, placement: Placement) -> Backend:
    code = kind_of(config.backend).program or f"{__name__}.{config.backend}_model"
    backend = PythonBackend(config, version, placement, SETUP_TIMEOUT, code=code)
    try:
        backend.signature = _signature(config, backend.told)
    except BaseException:
        backend.abort()
        backend.close()
        raise
    return backend


def read_signature(config: ModelConfig, version: ModelVersion) -> ModelSignature:
    """Returns the signature, which only the runtime knows: one instance is made and closed for it."""
    backend = load(config, version, Placement(threads=1, gpu=next(iter(devices(config)), None)))
    backend.close()
    return backend.signature


def _signature(config: ModelConfig, told: Any) -> ModelSignature:
    try:
        inputs, outputs = (
            tuple(
                TensorSignature(str(name), str(datatype), tuple(map(int, shape)))
                for name, datatype, shape in side
            )
            for side in told
        )
    except (TypeError, ValueError) as error:
        raise ModelError(f"{config.name}: its process sent an invalid message: {error}") from None
    for kind, tensor in (*(("input", t) for t in inputs), *(("output", t) for t in outputs)):
        if tensor.datatype not in DATATYPES:
            what = f'{kind} "{tensor.name}" is {tensor.datatype}'
            raise Unsupported(f"{config.name}: {what}, which this backend does not support")
    return ModelSignature(inputs, outputs)


def devices(config: ModelConfig) -> tuple[int, ...]:
    return listed_gpus(config) if kind_of(config.backend).on_gpus else ()
