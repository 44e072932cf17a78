"""What is said of a model whose requests belong together in sequences, and what follows from that.

Both model.toml and config.pbtxt say it: see settings_reader.py and triton.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import TYPE_CHECKING

from carpool.core.objectives import FixedBatching
from carpool.errors import ConfigError

if TYPE_CHECKING:
    from carpool.config.model import ModelConfig

OLDEST, DIRECT = STRATEGIES = ("oldest", "direct")
START, END, READY, CORRID = CONTROL_KINDS = ("start", "end", "ready", "corrid")
FLAG_TYPES = ("INT32", "FP32", "BOOL")
ID_TYPES = ("UINT64", "INT64", "UINT32", "INT32", "BYTES")
INITIAL_STATE = "initial_state"
"""The folder, beside the versions', that files of initial states are in."""
DEFAULT_IDLE_S = 1.0
DEFAULT_WAIT_S = 30.0
DEFAULT_BACKLOG = 4096
DEFAULT_BACKLOG_MB = 256
MAX_CANDIDATES = 65536
MAX_ID_BYTES = 128
_MOST_TENSORS = 64

_BITS = {"UINT64": (0, 2**64), "INT64": (-(2**63), 2**63), "UINT32": (0, 2**32), "INT32": (-(2**31), 2**31)}


@dataclass(frozen=True, slots=True)
class ControlInput:
    """Describes an input of the model that the server fills in, one value for each request. `values` are what
    stands for no and for yes."""

    name: str
    kind: str
    datatype: str
    values: tuple[float, float] = (0, 1)


@dataclass(frozen=True, slots=True)
class StateTensor:
    """Describes a state: what the model answers in `output` it gets as `input` with the next request of the
    same sequence."""

    input: str
    output: str
    datatype: str
    dims: tuple[int, ...]
    initial_dims: tuple[int, ...] = ()  # of what a sequence starts with; none: `dims`
    file: str = ""  # with its values, in the folder initial_state; none: zeros
    initial_name: str = ""  # only shown with the settings


@dataclass(frozen=True, slots=True)
class SequenceSettings:
    """Durations are seconds. `min_utilization` and `max_delay` are of the direct strategy: how many of the
    slots should be in a batch, and for how long it waits for that. With the oldest strategy, batches are
    those of the model's policy."""

    strategy: str = OLDEST
    max_candidates: int = 0  # of each instance; 0: as many as its largest batch has rows
    idle: float = DEFAULT_IDLE_S
    min_utilization: float = 0.0
    max_delay: float = 0.0
    max_wait: float = DEFAULT_WAIT_S  # for a place, unless a sequence's first request sets a shorter wait
    max_backlog: int = DEFAULT_BACKLOG  # sequences that wait for a place
    max_backlog_bytes: int = DEFAULT_BACKLOG_MB << 20  # of all requests that wait for their turn
    controls: tuple[ControlInput, ...] = ()
    states: tuple[StateTensor, ...] = ()

    def places(self, max_batch: int) -> int:
        """Returns the sequences that one instance has at a time."""
        return (self.max_candidates if self.strategy == OLDEST else 0) or max(1, max_batch)

    def fixed(self, policy: FixedBatching) -> FixedBatching:
        """How batches close: not at another shape; and with the direct strategy, when enough of the slots
        have a request, or it has waited for that long enough."""
        policy = replace(policy, across_shapes=True)
        if self.strategy == OLDEST:
            return policy
        places = self.places(policy.max_batch)
        enough = tuple(range(max(1, ceil(self.min_utilization * places)), places + 1))
        return replace(policy, preferred=enough, max_delay=self.max_delay if self.min_utilization else 0.0)

    @property
    def own_inputs(self) -> tuple[str, ...]:
        """Returns the inputs of the model that no client gives."""
        return (*(control.name for control in self.controls), *(state.input for state in self.states))

    def refuses(self, name: int | str) -> str:
        """Returns why a sequence cannot have this id; empty: it can. Numbers that the model gets have bounds,
        and so have texts."""
        if isinstance(name, str) and len(name.encode()) > MAX_ID_BYTES:
            return f"a sequence_id has at most {MAX_ID_BYTES} bytes"
        if isinstance(name, int) and not 0 <= name < 2**64:
            return "a sequence_id that is a number must be 0 to 2^64 - 1"
        for control in self.controls:
            if control.kind != CORRID or control.datatype == "BYTES":
                continue
            if isinstance(name, str):
                return f"the model takes sequence_id as a number ({control.datatype}), not as text"
            least, beyond = _BITS[control.datatype]
            if not least <= name < beyond:
                return f"the model takes sequence_id as {control.datatype}, which cannot hold {name}"
        return ""


def sequence_settings(config: ModelConfig) -> SequenceSettings | None:
    """Returns a model's; None: each of its requests stands alone."""
    settings = config.extra.get("sequences")
    return settings if isinstance(settings, SequenceSettings) else None


def check_sequences(settings: SequenceSettings, where: str, inputs: Sequence[str]) -> SequenceSettings:
    """Raises what contradicts itself, or what else is said about the model: `inputs` are those that it
    declares. An output that is kept as a state may be declared, too: then clients get it."""
    if len(settings.controls) + len(settings.states) > _MOST_TENSORS:
        raise ConfigError(f"{where}: more than {_MOST_TENSORS} controls and states")
    for kind in CONTROL_KINDS:
        if sum(control.kind == kind for control in settings.controls) > 1:
            raise ConfigError(f"{where}: more than one control input is of kind {kind}")
    names = [*settings.own_inputs, *(state.output for state in settings.states)]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f'{where}: "{name}" is named twice among controls and states')
        if name in inputs and name in settings.own_inputs:
            raise ConfigError(
                f'{where}: "{name}" is a control or a state, which clients do not send; '
                "do not declare it among the inputs"
            )
    for control in settings.controls:
        if control.values[0] == control.values[1]:
            raise ConfigError(f'{where}: control "{control.name}" has the same value for no and for yes')
    for state in settings.states:
        _check_state(state, where)
    return settings


def _check_state(state: StateTensor, where: str) -> None:
    if state.datatype == "BYTES":
        raise ConfigError(f'{where}: state "{state.input}" is text, which is not kept here')
    initial = state.initial_dims or state.dims
    if -1 in initial:
        raise ConfigError(
            f'{where}: state "{state.input}" of shape {list(state.dims)} needs an initial state '
            "whose shape has no -1"
        )
    if len(initial) != len(state.dims) or any(
        want not in (-1, got) for want, got in zip(state.dims, initial, strict=True)
    ):
        raise ConfigError(
            f'{where}: state "{state.input}" has the shape {list(state.dims)}, '
            f"and its initial state {list(initial)}"
        )
