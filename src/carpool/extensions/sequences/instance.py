"""Runs models whose requests belong together in sequences: what the server gives them beside what clients
send, and what it keeps for them from one request of a sequence to the next."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from carpool.backends.backend import AnswersEach, Around, Backend, RunsAnywhere, StatefulRow
from carpool.config.model import ModelConfig
from carpool.config.rules import read_bytes
from carpool.errors import CarpoolError, ConfigError, ModelError, without_stack
from carpool.extensions.sequences.settings import (
    CORRID,
    DIRECT,
    END,
    INITIAL_STATE,
    READY,
    START,
    ControlInput,
    SequenceSettings,
    StateTensor,
    sequence_settings,
)
from carpool.types import DATATYPES, Array

_LARGEST_STATE = 1 << 30
Request = tuple[Mapping[str, Array], Sequence[str]]
Answered = Mapping[str, Array] | CarpoolError


class _Alone:
    """Stands for a request that is its own sequence: the model is only tried."""

    slot = 0
    name: int | str = 0
    start = end = True


_ALONE: StatefulRow = _Alone()


def wrap(backend: Backend, config: ModelConfig) -> Backend:
    """Returns the same instance for requests of sequences: row by row only where the model sees requests, or
    where states of different shapes do not stack."""
    settings = sequence_settings(config)
    if settings is None:
        return backend
    if isinstance(backend, AnswersEach) or any(-1 in state.dims for state in settings.states):
        return Sequenced(backend, config, settings)
    return SequencedRows(backend, config, settings)


class _SequencedInstance(Around):
    """Represents one instance, which gets with each request the slot of its sequence. A batch that fails is
    not retried in halves: the model may have changed its state."""

    def __init__(self, backend: Backend, config: ModelConfig, settings: SequenceSettings) -> None:
        super().__init__(backend)
        self._model = config.name
        self._settings = settings
        self._batched = bool(config.max_batch)
        self._direct = settings.strategy == DIRECT and self._batched
        self._outputs = tuple(tensor.name for tensor in config.outputs)
        self._kept = tuple(state.output for state in settings.states)
        self._initial = {state.input: _initial(config, state) for state in settings.states}
        self._controls = tuple(_Control(control, batched=self._batched) for control in settings.controls)
        self.device: str = getattr(backend, "device", "")  # that it shares with other models

    def run(self, inputs: Mapping[str, Array], wanted: Sequence[str]) -> Mapping[str, Array]:
        """Runs a batch as if each row were a sequence of one request."""
        count = len(next(iter(inputs.values()))) if self._batched and inputs else 1
        given = {
            **inputs,
            **self._said([_ALONE] * count),
            **self._stacked([self._initial] * count),
        }
        outputs = self._backend.run(given, wanted)
        return {name: array for name, array in outputs.items() if name in (wanted or self._outputs)}

    def _said(self, rows: Sequence[StatefulRow | None]) -> dict[str, Array]:
        return {control.name: control.of(rows) for control in self._controls}

    def _stacked(self, states: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
        if not self._batched:
            return dict(states[0])
        return {name: np.stack([state[name] for state in states]) for name in self._initial}

    def _check_state(self, state: StateTensor, array: Array | None) -> Array:
        """Checks a state of one row, or of several."""
        if array is None or array.dtype != DATATYPES[state.datatype].dtype or not len(array):
            raise ModelError(f'{self._model} did not return the state "{state.output}" as it is declared')
        shape = array.shape[1:] if self._batched else array.shape
        if len(shape) != len(state.dims) or any(
            want not in (-1, got) for want, got in zip(state.dims, shape, strict=True)
        ):
            raise ModelError(
                f'{self._model} returned the state "{state.output}" with shape {list(shape)}, but '
                f"{list(state.dims)} is declared"
            )
        return array


class SequencedRows(_SequencedInstance):
    """Serves models that see rows: what is done for sequences is done once for each batch."""

    def __init__(self, backend: Backend, config: ModelConfig, settings: SequenceSettings) -> None:
        super().__init__(backend, config, settings)
        self.in_any_thread = isinstance(backend, RunsAnywhere) and backend.in_any_thread
        # By slot. They grow with the slots that are used, of which the first that is free is taken.
        self._states = {name: array[None][:0] for name, array in self._initial.items()}

    def run_rows(
        self, inputs: Mapping[str, Array], rows: Sequence[StatefulRow], wanted: Sequence[str]
    ) -> Mapping[str, Array]:
        """With the direct strategy each has the row of its slot, and the rows between them are not ready."""
        slots = [row.slot for row in rows] if self._kept or self._direct else []
        given = inputs
        if self._controls or self._kept:
            given = {**inputs, **self._said(rows), **self._gathered(slots, rows)}
        spread = self._direct and slots != list(range(len(rows)))
        if spread:
            given = self._spread(given, rows, slots)
        names = wanted if not self._kept else [*(n for n in wanted if n not in self._kept), *self._kept]
        outputs = self._backend.run(given, names)
        if spread:
            most = max(slots)
            for name, array in outputs.items():
                if len(array) <= most:
                    raise ModelError(f'{self._model} returned {len(array)} rows of "{name}" for {most + 1}')
            outputs = {name: array[slots] for name, array in outputs.items()}
        if not self._kept:
            return outputs
        self._keep(slots, outputs)
        return {name: outputs[name] for name in wanted if name in outputs}

    def _spread(
        self, given: Mapping[str, Array], rows: Sequence[StatefulRow], slots: Sequence[int]
    ) -> dict[str, Array]:
        count = max(slots) + 1
        by_slot: list[StatefulRow | None] = [None] * count
        for row in rows:
            by_slot[row.slot] = row
        spread = self._said(by_slot)
        for name, array in given.items():
            if name not in spread:
                spread[name] = wide = _empty((count, *array.shape[1:]), array.dtype)
                wide[slots] = array
        return spread

    def _gathered(self, slots: Sequence[int], rows: Sequence[StatefulRow]) -> dict[str, Array]:
        """Returns what is kept for these; what a slot has of another sequence ends where one starts."""
        if not self._kept:
            return {}
        starts = [number for number, row in enumerate(rows) if row.start]
        gathered: dict[str, Array] = {}
        for name, initial in self._initial.items():
            states = self._states[name]
            if max(slots) >= len(states):
                self._states[name] = states = _grown(states, initial, max(slots) + 1)
            gathered[name] = array = states[slots]
            if starts:
                array[starts] = initial
            if not self._batched:
                gathered[name] = array[0]
        return gathered

    def _keep(self, slots: Sequence[int], outputs: Mapping[str, Array]) -> None:
        """The states are the next ones', if all of them are as they should be."""
        found = [self._check_state(state, outputs.get(state.output)) for state in self._settings.states]
        for state, array in zip(self._settings.states, found, strict=True):
            if self._batched and len(array) != len(slots):
                raise ModelError(
                    f'{self._model} returned {len(array)} rows of "{state.output}" for {len(slots)}'
                )
            self._states[state.input][slots] = array


class Sequenced(_SequencedInstance):
    """Implements sequences for models that see requests, and for states whose shape may differ from one
    sequence to the next."""

    def __init__(self, backend: Backend, config: ModelConfig, settings: SequenceSettings) -> None:
        super().__init__(backend, config, settings)
        self._each = backend if isinstance(backend, AnswersEach) else None
        self._states: dict[int, Mapping[str, Array]] = {}  # by slot: there are only so many

    def run_row_each(
        self, requests: Sequence[Request], rows: Sequence[StatefulRow], details: Sequence[bytes]
    ) -> list[Answered]:
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

    def _run_rows(self, requests: Sequence[Request], rows: Sequence[StatefulRow]) -> list[Answered]:
        """Returns all in one batch. With the direct strategy each has the row of its slot, and the rows
        between them are not ready."""
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
        spread: list[StatefulRow | None] = [None] * count
        kept: list[Mapping[str, Array]] = [{name: np.zeros_like(a) for name, a in states[0].items()}] * count
        for place, row, state in zip(places, rows, states, strict=True):
            spread[place], kept[place] = row, state
        inputs |= self._said(spread) | self._stacked(kept)
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
        rows: Sequence[StatefulRow],
        details: Sequence[bytes],
    ) -> list[Answered]:
        """Runs requests for a model that sees requests: each with its own controls and states."""
        given: list[Request] = []
        for (inputs, wanted), row in zip(requests, rows, strict=True):
            own = self._said([row]) | self._stacked([self._state(row)])
            given.append(({**inputs, **own}, list(dict.fromkeys([*(wanted or self._outputs), *self._kept]))))
        try:
            answers = backend.run_each(given, details)
        except CarpoolError as error:
            return [without_stack(error)] * len(rows)
        return [
            one if isinstance(one, CarpoolError) else self._keep(row, one, wanted)
            for one, row, (_, wanted) in zip(answers, rows, requests, strict=True)
        ]

    # ---- states ---------------------------------------------------------------------------------------

    def _state(self, row: StatefulRow) -> Mapping[str, Array]:
        """Returns the state by input. What a slot kept of another sequence ends here."""
        if row.start or row.slot not in self._states:
            self._states[row.slot] = self._initial
        return self._states[row.slot]

    def _keep(self, row: StatefulRow, outputs: Mapping[str, Array], wanted: Sequence[str]) -> Answered:
        """Returns the outputs for the client. The state is the next one's, if all of it is as it should
        be."""
        kept: dict[str, Array] = {}
        try:
            for state in self._settings.states:
                array = self._check_state(state, outputs.get(state.output))
                kept[state.input] = (array[0] if self._batched else array).copy()
        except ModelError as error:
            return without_stack(error)
        if kept:
            self._states[row.slot] = kept
        if row.end:
            self._states.pop(row.slot, None)
        return {name: array for name, array in outputs.items() if name in (wanted or self._outputs)}


_SAYS: Mapping[str, Callable[[StatefulRow], bool]] = {
    START: lambda row: row.start,
    END: lambda row: row.end,
    READY: lambda _row: True,
}


class _Control:
    """One control input, for the rows of a batch; None is a row that is not ready."""

    def __init__(self, control: ControlInput, *, batched: bool) -> None:
        self.name = control.name
        self._says = _SAYS.get(control.kind, _SAYS[READY])
        self._batched = batched
        self._text = control.datatype == "BYTES"
        self._dtype = DATATYPES[control.datatype].dtype
        self._values = np.array(control.values, self._dtype) if control.kind != CORRID else None

    def of(self, rows: Sequence[StatefulRow | None]) -> Array:
        shape = (len(rows), 1) if self._batched else (1,)
        if self._values is not None:
            says = self._says
            return self._values[[int(row is not None and says(row)) for row in rows]].reshape(shape)
        ids = [0 if row is None else row.name for row in rows]
        if not self._text:
            return np.array(ids, self._dtype).reshape(shape)
        texts = np.empty(len(ids), object)
        texts[:] = [b"" if name == 0 else str(name).encode() for name in ids]
        return texts.reshape(shape)


def _grown(states: Array, initial: Array, least: int) -> Array:
    grown = np.zeros((max(least, 2 * len(states)), *initial.shape), initial.dtype)
    grown[: len(states)] = states
    return grown


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
