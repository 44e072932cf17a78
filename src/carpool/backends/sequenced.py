"""Models whose requests belong together in sequences: what the server gives them beside what clients send,
and what it keeps for them from one request of a sequence to the next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import orjson

from carpool.backends.backend import AnswersEach, Backend
from carpool.config.model import ModelConfig, ModelSignature
from carpool.config.rules import read_bytes
from carpool.config.sequence_settings import (
    CORRID,
    DIRECT,
    END,
    INITIAL_STATE,
    READY,
    START,
    ControlInput,
    SequenceSettings,
    StateTensor,
)
from carpool.errors import CarpoolError, ConfigError, ModelError, without_stack
from carpool.types import DATATYPES, Array

_LARGEST_STATE = 1 << 30
Request = tuple[Mapping[str, Array], Sequence[str]]
Answered = Mapping[str, Array] | CarpoolError


class _Row(NamedTuple):
    """What one request says of its sequence, and which slot that has in this instance."""

    slot: int
    name: int | str
    start: bool
    end: bool


_ALONE = _Row(0, 0, True, True)
"""Of a request that is its own sequence: the model is only tried."""


def _row(details: bytes) -> _Row:
    document = orjson.loads(details)
    said = document["parameters"]
    start, end = said.get("sequence_start", False), said.get("sequence_end", False)
    return _Row(document["slot"], said["sequence_id"], start, end)


class Sequenced:
    """One instance, told of each request which slot its sequence has. A batch that fails is not tried again
    in halves: the model may have changed what it keeps."""

    def __init__(self, backend: Backend, config: ModelConfig, settings: SequenceSettings) -> None:
        self._backend = backend
        self._model = config.name
        self._settings = settings
        self._batched = bool(config.max_batch)
        self._direct = settings.strategy == DIRECT and self._batched
        self._each = backend if isinstance(backend, AnswersEach) else None
        self._outputs = tuple(tensor.name for tensor in config.outputs)
        self._kept = tuple(state.output for state in settings.states)
        self._initial = {state.input: _initial(config, state) for state in settings.states}
        self._states: dict[int, Mapping[str, Array]] = {}  # by slot: there are only so many
        self.device: str = getattr(backend, "device", "")  # that it shares with other models

    @property
    def signature(self) -> ModelSignature:
        return self._backend.signature

    @property
    def alive(self) -> bool:
        return self._backend.alive

    def abort(self) -> None:
        self._backend.abort()

    def close(self) -> None:
        self._backend.close()

    def run(self, inputs: Mapping[str, Array], wanted: Sequence[str]) -> Mapping[str, Array]:
        """As if each row were a sequence of one request."""
        count = len(next(iter(inputs.values()))) if self._batched and inputs else 1
        given = {
            **inputs,
            **self._controls([_ALONE] * count, count),
            **self._stacked([self._initial] * count),
        }
        outputs = self._backend.run(given, wanted)
        return {name: array for name, array in outputs.items() if name in (wanted or self._outputs)}

    def run_each(self, requests: Sequence[Request], details: Sequence[bytes] = ()) -> list[Answered]:
        rows = [_row(said) for said in details]
        if self._each is not None:
            return self._run_requests(self._each, requests, rows, details)
        alike: dict[Any, list[int]] = {}  # states of different shapes do not stack
        for number, row in enumerate(rows):
            shapes = tuple(array.shape for array in self._state(row).values())
            alike.setdefault(shapes, []).append(number)
        answers: dict[int, Answered] = {}
        for numbers in alike.values():
            some = [requests[number] for number in numbers], [rows[number] for number in numbers]
            try:
                found: Sequence[Answered] = self._run_rows(*some)
            except CarpoolError as error:
                found = [without_stack(error)] * len(numbers)
            except Exception as error:  # else all would be run again, in halves
                found = [ModelError(f"{self._model}: {type(error).__name__}: {error}")] * len(numbers)
            answers |= dict(zip(numbers, found, strict=True))
        return [answers[number] for number in range(len(rows))]

    def _run_rows(self, requests: Sequence[Request], rows: Sequence[_Row]) -> list[Answered]:
        """All in one batch. With the direct strategy each has the row of its slot, and the rows between them
        are not ready."""
        places = [row.slot for row in rows] if self._direct else list(range(len(rows)))
        count = max(places) + 1
        states = [self._state(row) for row in rows]
        first, _ = requests[0]
        inputs: dict[str, Array] = {}
        for name, array in first.items():
            if not self._batched:
                inputs[name] = array
                continue
            stacked = _empty((count, *array.shape[1:]), array.dtype)
            for place, (given, _) in zip(places, requests, strict=True):
                stacked[place] = given[name][0]
            inputs[name] = stacked
        spread: list[_Row | None] = [None] * count
        kept: list[Mapping[str, Array]] = [{name: np.zeros_like(a) for name, a in states[0].items()}] * count
        for place, row, state in zip(places, rows, states, strict=True):
            spread[place], kept[place] = row, state
        inputs |= self._controls(spread, count) | self._stacked(kept)
        asked = {name for _, wanted in requests for name in wanted or self._outputs}
        names = [*(name for name in self._outputs if name in asked and name not in self._kept), *self._kept]
        outputs = self._backend.run(inputs, names)
        answers: list[Answered] = []
        for place, row, (_, wanted) in zip(places, rows, requests, strict=True):
            part = slice(place, place + 1) if self._batched else slice(None)
            own = {name: array[part] for name, array in outputs.items()}
            answers.append(self._keep(row, own, wanted))
        return answers

    def _run_requests(
        self,
        backend: AnswersEach,
        requests: Sequence[Request],
        rows: Sequence[_Row],
        details: Sequence[bytes],
    ) -> list[Answered]:
        """For a model that sees requests: each with its own controls and states."""
        given: list[Request] = []
        for (inputs, wanted), row in zip(requests, rows, strict=True):
            own = self._controls([row], 1) | self._stacked([self._state(row)])
            given.append(({**inputs, **own}, list(dict.fromkeys([*(wanted or self._outputs), *self._kept]))))
        try:
            answers = backend.run_each(given, details)
        except CarpoolError as error:
            return [without_stack(error)] * len(rows)
        return [
            one if isinstance(one, CarpoolError) else self._keep(row, one, wanted)
            for one, row, (_, wanted) in zip(answers, rows, requests, strict=True)
        ]

    def _controls(self, rows: Sequence[_Row | None], count: int) -> dict[str, Array]:
        shape = (count, 1) if self._batched else (1,)
        return {control.name: _values(control, rows).reshape(shape) for control in self._settings.controls}

    # ---- states ---------------------------------------------------------------------------------------

    def _state(self, row: _Row) -> Mapping[str, Array]:
        """By input. What a slot kept of another sequence ends here."""
        if row.start or row.slot not in self._states:
            self._states[row.slot] = self._initial
        return self._states[row.slot]

    def _stacked(self, states: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
        if not self._batched:
            return dict(states[0])
        return {name: np.stack([state[name] for state in states]) for name in self._initial}

    def _keep(self, row: _Row, outputs: Mapping[str, Array], wanted: Sequence[str]) -> Answered:
        """The outputs for the client. The state is the next one's, if all of it is as it should be."""
        kept: dict[str, Array] = {}
        for state in self._settings.states:
            array = outputs.get(state.output)
            if array is None or array.dtype != DATATYPES[state.datatype].dtype or not len(array):
                return ModelError(
                    f'{self._model} did not answer the state "{state.output}" as it is declared'
                )
            array = array[0] if self._batched else array
            if array.ndim != len(state.dims) or any(
                want not in (-1, got) for want, got in zip(state.dims, array.shape, strict=True)
            ):
                return ModelError(
                    f'{self._model} answered the state "{state.output}" with shape {list(array.shape)}, '
                    f"declared is {list(state.dims)}"
                )
            kept[state.input] = array.copy()
        if kept:
            self._states[row.slot] = kept
        if row.end:
            self._states.pop(row.slot, None)
        return {name: array for name, array in outputs.items() if name in (wanted or self._outputs)}


def _values(control: ControlInput, rows: Sequence[_Row | None]) -> Array:
    """Of one control, for each row; None is one that is not ready."""
    if control.kind == CORRID:
        ids = [0 if row is None else row.name for row in rows]
        if control.datatype == "BYTES":
            texts = np.empty(len(ids), object)
            texts[:] = [b"" if name == 0 else str(name).encode() for name in ids]
            return texts
        return np.array(ids, DATATYPES[control.datatype].dtype)
    said = {
        START: [row is not None and row.start for row in rows],
        END: [row is not None and row.end for row in rows],
        READY: [row is not None for row in rows],
    }[control.kind]
    return np.array([control.values[flag] for flag in said], DATATYPES[control.datatype].dtype)


def _empty(shape: tuple[int, ...], dtype: Any) -> Array:
    array = np.zeros(shape, dtype)
    if array.dtype.hasobject:
        array.fill(b"")
    return array


def _initial(config: ModelConfig, state: StateTensor) -> Array:
    shape, dtype = state.initial_dims or state.dims, DATATYPES[state.datatype].dtype
    if not state.file:
        return np.zeros(shape, dtype)
    path = config.path / INITIAL_STATE / state.file
    data = read_bytes(path, _LARGEST_STATE, "larger than a state may be")
    needed = int(np.prod(shape)) * np.dtype(dtype).itemsize
    if len(data) != needed:
        raise ConfigError(f"{path}: has {len(data)} bytes, and {state.datatype} {list(shape)} takes {needed}")
    return np.frombuffer(data, dtype).reshape(shape)
