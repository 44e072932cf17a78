"""`reshape` in the settings: clients and the model see the same elements in different shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from carpool.backends.backend import Backend
from carpool.config.model import DYNAMIC, ModelConfig, ModelSignature, TensorConfig
from carpool.types import Array

Shape = tuple[int, ...]


def reshaped(backend: Backend, config: ModelConfig) -> Backend:
    """The same instance for those who speak in `dims`; the very one where no tensor has another shape."""
    tensors = (*config.inputs, *config.outputs)
    return Reshaping(backend, config) if any(t.reshape is not None for t in tensors) else backend


class Reshaping:
    def __init__(self, backend: Backend, config: ModelConfig) -> None:
        self._backend = backend
        self._batched = int(bool(config.max_batch))
        self._inputs = _shapes(config.inputs)
        self._outputs = {name: (model, dims) for name, (dims, model) in _shapes(config.outputs).items()}

    @property
    def signature(self) -> ModelSignature:
        return self._backend.signature

    @property
    def alive(self) -> bool:
        return self._backend.alive

    def run(self, inputs: Mapping[str, Array], wanted: Sequence[str]) -> Mapping[str, Array]:
        given = {name: self._changed(array, self._inputs.get(name)) for name, array in inputs.items()}
        answered = self._backend.run(given, wanted)
        return {name: self._changed(array, self._outputs.get(name)) for name, array in answered.items()}

    def abort(self) -> None:
        self._backend.abort()

    def close(self) -> None:
        self._backend.close()

    def _changed(self, array: Array, shapes: tuple[Shape, Shape] | None) -> Array:
        """What does not have the shape that it should is left alone: the engine says so."""
        if shapes is None:
            return array
        before, after = shapes
        batch, rest = array.shape[: self._batched], array.shape[self._batched :]
        if len(rest) != len(before) or any(
            want not in (DYNAMIC, got) for want, got in zip(before, rest, strict=True)
        ):
            return array
        # As in Triton: the lengths that vary keep their order.
        lengths = iter(got for want, got in zip(before, rest, strict=True) if want == DYNAMIC)
        return array.reshape(batch + tuple(next(lengths) if dim == DYNAMIC else dim for dim in after))


def _shapes(tensors: Sequence[TensorConfig]) -> dict[str, tuple[Shape, Shape]]:
    return {t.name: (t.dims, t.reshape) for t in tensors if t.reshape is not None}
