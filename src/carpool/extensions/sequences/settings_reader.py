"""Reads [sequences] of model.toml, and says what does not go with it."""

from __future__ import annotations

from carpool.config.backend_kinds import kind_of
from carpool.config.model import ModelConfig, TensorConfig
from carpool.config.settings_part import OwnTensors, SettingsPart, TritonPart
from carpool.config.table import TomlTable
from carpool.errors import ConfigError
from carpool.extensions.sequences.settings import (
    CONTROL_KINDS,
    CORRID,
    DEFAULT_BACKLOG_MB,
    DIRECT,
    FLAG_TYPES,
    ID_TYPES,
    MAX_CANDIDATES,
    OLDEST,
    STRATEGIES,
    ControlInput,
    SequenceSettings,
    StateTensor,
    check_sequences,
    sequence_settings,
)
from carpool.extensions.sequences.triton import as_document, read_sequences, with_policy
from carpool.types import DATATYPES


def _read(top: TomlTable) -> SequenceSettings | None:
    table = top.table("sequences")
    if table is None:
        return None
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
        tuple(map(_state, table.tables("state"))),
    )
    declared = [str(tensor.text("name")) for tensor in top.tables("input")]
    return check_sequences(settings, f"{table.file}: [sequences]", declared)


def _control(table: TomlTable) -> ControlInput:
    name, kind = table.text("name"), table.text("kind", CONTROL_KINDS)
    if not name or not kind:
        raise ConfigError(f"{table.file}: {table.path} needs a name and a kind: {', '.join(CONTROL_KINDS)}")
    if kind == CORRID:
        if table.has("values"):
            raise table.error("values", "does not apply to the id of a sequence, which is passed as it is")
        return ControlInput(name, kind, table.text("datatype", ID_TYPES) or "UINT64")
    datatype = table.text("datatype", FLAG_TYPES) or "INT32"
    values = table.numbers("values", float("-inf")) or (0, 1)
    if len(values) != 2 or (datatype == "INT32" and any(value != int(value) for value in values)):
        raise table.error("values", "must be two numbers of its datatype, for no and for yes, like [0, 1]")
    return ControlInput(name, kind, datatype, (values[0], values[1]))


def _state(table: TomlTable) -> StateTensor:
    given, taken = table.text("input"), table.text("output")
    datatype, shape = table.text("datatype", DATATYPES), table.integers("shape", -1, 2**31)
    if not given or not taken or not datatype or not shape:
        raise ConfigError(f"{table.file}: {table.path} needs input, output, datatype and shape")
    initial = table.integers("initial_shape", 1, 2**31) or ()
    return StateTensor(given, taken, datatype, shape, initial, table.inside("file") or "")


def _check(config: ModelConfig) -> None:
    """Raises what would take requests away from the state that they need."""
    if kind_of(config.backend).process == "runner":
        raise ConfigError(
            f'{config.name}: sequences are kept for models of the engine, not for backend "{config.backend}";'
            " export it to ONNX, or write a Python model"
        )
    if config.task or config.image:
        raise ConfigError(
            f"{config.name}: sequences do not go with a task for images, or [image]: "
            "its requests bring tensors"
        )


def _own_tensors(config: ModelConfig) -> OwnTensors:
    settings = sequence_settings(config)
    controls = () if settings is None else settings.controls
    states = () if settings is None else settings.states
    flags = (TensorConfig(control.name, control.datatype, (1,)) for control in controls)
    return OwnTensors(
        "its sequences",
        (*flags, *(TensorConfig(state.input, state.datatype, state.dims) for state in states)),
        tuple(TensorConfig(state.output, state.datatype, state.dims) for state in states),
    )


def _keeps_states(config: ModelConfig) -> bool:
    settings = sequence_settings(config)
    return settings is not None and not settings.states


PART = SettingsPart(
    kind=SequenceSettings,
    tables={
        "sequences": (
            *("strategy", "max_candidates", "idle_ms", "min_utilization", "max_delay_ms"),
            *("max_wait_ms", "max_backlog", "max_backlog_mb", "control", "state"),
        ),
        "sequences.control": ("name", "kind", "datatype", "values"),
        "sequences.state": ("input", "output", "datatype", "shape", "initial_shape", "file"),
    },
    read=_read,
    triton=TritonPart(read=read_sequences, document=as_document, settle=with_policy),
    check=_check,
    own_tensors=_own_tensors,
    remembers=_keeps_states,
    changes_answers=True,
)
