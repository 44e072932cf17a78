"""A model that only takes time: zeros after as long as its curve says, for load tests without hardware."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence

import numpy as np

from carpool.backends.backend import Backend, Placement, Seen, aborted, check_wanted
from carpool.config.model import (
    DYNAMIC,
    FakeSettings,
    ModelConfig,
    ModelSignature,
)
from carpool.config.repository import ModelVersion
from carpool.core.curve import BatchCurve, CurveError
from carpool.errors import CarpoolError, ConfigError, ModelError
from carpool.types import DATATYPES, Array, Datatype

_LAG_STEP = 5e-6  # seconds; small enough to be no noise, large enough to settle within some dozen batches
_MAX_LAG = 1e-3  # more than this is not the timer but a busy machine, which sleeping less does not cure


def load(config: ModelConfig, version: ModelVersion, placement: Placement) -> Backend:
    del version, placement  # there is no file and no device
    return FakeBackend(config)


def read_signature(config: ModelConfig, version: ModelVersion) -> ModelSignature:
    del config, version
    return ModelSignature()


class FakeBackend:
    """Sleeps, then answers zeros of the declared shapes, with 1 for every length that varies."""

    signature = ModelSignature()

    def __init__(self, config: ModelConfig) -> None:
        self._model = config.name
        self.device = (config.fake or FakeSettings()).device
        self._batched = config.max_batch != 0
        try:
            self._curve = BatchCurve.parse((config.fake or FakeSettings()).curve, config.max_batch or None)
        except CurveError as error:
            raise ConfigError(f"{config.name}: fake.curve: {error}") from None
        self._outputs = {tensor.name: tensor for tensor in config.outputs}
        self._shapes = {
            tensor.name: tuple(1 if dim == DYNAMIC else dim for dim in tensor.dims)
            for tensor in config.outputs
        }
        self._wanted: Sequence[str] = ()  # what was asked for last, and so is answered:
        self._names: Sequence[str] = tuple(self._outputs)
        self._stop = threading.Event()
        self._lag = 0.0

    @property
    def alive(self) -> bool:
        return not self._stop.is_set()

    def run(self, inputs: Mapping[str, Array], wanted: Sequence[str]) -> Mapping[str, Array]:
        start = time.monotonic()
        rows = len(next(iter(inputs.values()))) if self._batched and inputs else 1
        return self._answer(rows, wanted, start)

    def run_encoded(
        self, pictures: Sequence[Seen], wanted: Sequence[str]
    ) -> tuple[Mapping[str, Array], Mapping[int, CarpoolError]]:
        """Behaves as if it had decoded them, without a look at the files."""
        start = time.monotonic()
        return self._answer(len(pictures), wanted, start), {}

    def _answer(self, rows: int, wanted: Sequence[str], start: float) -> dict[str, Array]:
        if wanted != self._wanted:
            self._names = check_wanted(self._model, wanted, self._outputs)
            self._wanted = wanted
        if rows > self._curve.max_batch:
            raise ModelError(
                f"{self._model}: its curve ends at batches of {self._curve.max_batch}, but this batch has "
                f"{rows}"
            )
        outputs: dict[str, Array] = {}
        for name in self._names:
            shape = (rows, *self._shapes[name]) if self._batched else self._shapes[name]
            datatype = DATATYPES[self._outputs[name].datatype]
            if datatype is Datatype.BYTES:
                outputs[name] = np.full(shape, b"", dtype=object)
            else:
                outputs[name] = np.zeros(shape, dtype=datatype.dtype)
        # Timers ring late, by about the same each time: aim earlier by the median of what was seen.
        end = start + self._curve.times[rows]
        if self._stop.wait(max(0.0, end - time.monotonic() - self._lag)):
            raise aborted(self._model)
        step = _LAG_STEP if time.monotonic() > end else -_LAG_STEP
        self._lag = min(max(0.0, self._lag + step), _MAX_LAG)
        return outputs

    def abort(self) -> None:
        self._stop.set()

    close = abort
