"""What is said of a model whose requests belong together in sequences, and what follows from that.

Both model.toml and config.pbtxt say it: see toml.py and triton_sequences.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import TYPE_CHECKING, TypeAlias

from carpool.core.objectives import Knobs
from carpool.errors import ConfigError

if TYPE_CHECKING:
    from carpool.config.table import Table

Inside: TypeAlias = "Callable[[Table, str], str | None]"
"""The name of a file in the model's folder, checked."""

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
    """An input of the model that the server fills in, one value for each request. `values` are what stands
    for no and for yes."""

    name: str
    kind: str
    datatype: str
    values: tuple[float, float] = (0, 1)


@dataclass(frozen=True, slots=True)
class StateTensor:
    """What the model answers in `output` it gets as `input` with the next request of the same sequence."""

    input: str
    output: str
    datatype: str
    dims: tuple[int, ...]
    initial_dims: tuple[int, ...] = ()  # of what a sequence starts with; none: `dims`
    file: str = ""  # with its values, in the folder initial_state; none: zeros
    initial_name: str = ""  # for whoever reads the settings


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
    max_wait: float = DEFAULT_WAIT_S  # for a place, of a sequence whose first request says no less
    max_backlog: int = DEFAULT_BACKLOG  # sequences that wait for a place
    max_backlog_bytes: int = DEFAULT_BACKLOG_MB << 20  # of all requests that wait for their turn
    controls: tuple[ControlInput, ...] = ()
    states: tuple[StateTensor, ...] = ()

    def places(self, max_batch: int) -> int:
        """Sequences that one instance has at a time."""
        return (self.max_candidates if self.strategy == OLDEST else 0) or max(1, max_batch)

    def knobs(self, policy: Knobs) -> Knobs:
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
        """The model's, that no client gives."""
        return (*(control.name for control in self.controls), *(state.input for state in self.states))

    def refuses(self, name: int | str) -> str:
        """Why a sequence cannot have this id; empty: it can. The numbers that are told to the model have
        bounds, and so have texts."""
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


def check_sequences(settings: SequenceSettings, where: str, inputs: Sequence[str]) -> SequenceSettings:
    """Raises what contradicts itself, or what else is said about the model: `inputs` are those that it
    declares. An output that is kept as a state may be declared, too: then clients get it."""
    if len(settings.controls) + len(settings.states) > _MOST_TENSORS:
        raise ConfigError(f"{where}: more than {_MOST_TENSORS} controls and states")
    for kind in CONTROL_KINDS:
        if sum(control.kind == kind for control in settings.controls) > 1:
            raise ConfigError(f"{where}: more than one control input says {kind}")
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
            raise ConfigError(f'{where}: control "{control.name}" says the same for no and for yes')
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


# ---- [sequences] of model.toml -----------------------------------------------------------------------------


def read_sequences_table(table: Table, inside: Inside, inputs: Sequence[str]) -> SequenceSettings:
    usual = SequenceSettings()
    strategy = table.text("strategy", STRATEGIES) or OLDEST
    for key, needed in (("max_candidates", OLDEST), ("min_utilization", DIRECT), ("max_delay_ms", DIRECT)):
        if table.has(key) and strategy != needed:
            hint = "; the oldest strategy waits as [batching] says" if key == "max_delay_ms" else ""
            raise table.error(key, f'goes with strategy = "{needed}"{hint}')
    idle_ms = table.number("idle_ms", 0, 1e12, above=True)
    max_wait_ms = table.number("max_wait_ms", 0, 1e12, above=True)
    max_backlog = table.integer("max_backlog", 0, 1 << 20)
    settings = SequenceSettings(
        strategy,
        table.integer("max_candidates", 1, MAX_CANDIDATES) or 0,
        usual.idle if idle_ms is None else idle_ms / 1e3,
        table.number("min_utilization", 0, 1) or 0.0,
        (table.number("max_delay_ms", 0) or 0.0) / 1e3,
        usual.max_wait if max_wait_ms is None else max_wait_ms / 1e3,
        usual.max_backlog if max_backlog is None else max_backlog,
        (table.integer("max_backlog_mb", 1, 1 << 20) or DEFAULT_BACKLOG_MB) << 20,
        tuple(map(_control, table.tables("control"))),
        tuple(_state(one, inside) for one in table.tables("state")),
    )
    return check_sequences(settings, f"{table.file}: [sequences]", inputs)


def _control(table: Table) -> ControlInput:
    name, kind = table.text("name"), table.text("kind", CONTROL_KINDS)
    if not name or not kind:
        raise ConfigError(f"{table.file}: {table.path} needs a name and a kind: {', '.join(CONTROL_KINDS)}")
    if kind == CORRID:
        if table.has("values"):
            raise table.error("values", "does not go with the id of a sequence, which is told as it is")
        return ControlInput(name, kind, table.text("datatype", ID_TYPES) or "UINT64")
    datatype = table.text("datatype", FLAG_TYPES) or "INT32"
    values = table.numbers("values", float("-inf")) or (0, 1)
    if len(values) != 2 or (datatype == "INT32" and any(value != int(value) for value in values)):
        raise table.error("values", "must be two numbers of its datatype, for no and for yes, like [0, 1]")
    return ControlInput(name, kind, datatype, (values[0], values[1]))


def _state(table: Table, inside: Inside) -> StateTensor:
    from carpool.types import DATATYPES  # and numpy, which the command line does without

    given, taken = table.text("input"), table.text("output")
    datatype, shape = table.text("datatype", DATATYPES), table.integers("shape", -1, 2**31)
    if not given or not taken or not datatype or not shape:
        raise ConfigError(f"{table.file}: {table.path} needs input, output, datatype and shape")
    initial = table.integers("initial_shape", 1, 2**31) or ()
    return StateTensor(given, taken, datatype, shape, initial, inside(table, "file") or "")
