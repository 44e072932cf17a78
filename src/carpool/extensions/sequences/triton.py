"""This module has Triton's `sequence_batching`, read and written again."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from carpool.config import rules
from carpool.config.model import Mode, ModelConfig, eager_policy
from carpool.core.objectives import FixedBatching, Promise
from carpool.extensions.sequences.settings import (
    CORRID,
    DEFAULT_IDLE_S,
    DIRECT,
    ID_TYPES,
    MAX_CANDIDATES,
    OLDEST,
    ControlInput,
    SequenceSettings,
    StateTensor,
    check_sequences,
    sequence_settings,
)
from carpool.types import DATATYPES

if TYPE_CHECKING:
    from carpool.config.triton_text import TextSource

_AT = "sequence_batching"
_KINDS = ("start", "ready", "end", "corrid")
"""In the order of Triton's numbers."""
_VALUES = {"int32_false_true": "INT32", "fp32_false_true": "FP32", "bool_false_true": "BOOL"}


def read_sequences(source: TextSource) -> SequenceSettings | None:
    """Returns None for a model without. Every mistake names the field, and where it stands."""
    message = source.message
    if not message.HasField(_AT):
        return None
    given = message.sequence_batching
    controls = tuple(
        _control(source, item, control, f"{_AT}.control_input[{n}]")
        for n, item in enumerate(given.control_input)
        for control in _controls(source, item, f"{_AT}.control_input[{n}]")
    )
    settings = SequenceSettings(
        strategy=OLDEST if given.WhichOneof("strategy_choice") == "oldest" else DIRECT,
        max_candidates=given.oldest.max_candidate_sequences,
        idle=given.max_sequence_idle_microseconds / 1e6 or DEFAULT_IDLE_S,
        min_utilization=given.direct.minimum_slot_utilization,
        max_delay=given.direct.max_queue_delay_microseconds / 1e6,
        controls=controls,
        states=tuple(_state(source, item, f"{_AT}.state[{n}]") for n, item in enumerate(given.state)),
    )
    if not 0 <= settings.max_candidates <= MAX_CANDIDATES:
        at = f"{_AT}.oldest.max_candidate_sequences"
        raise source.error(at, f"max_candidate_sequences must be 0 to {MAX_CANDIDATES}")
    if not 0 <= settings.min_utilization <= 1:  # NaN too
        at = f"{_AT}.direct.minimum_slot_utilization"
        raise source.error(at, "minimum_slot_utilization must be 0 to 1")
    return check_sequences(settings, source.where(_AT), [tensor.name for tensor in message.input])


def _controls(source: TextSource, item: Any, path: str) -> Any:
    if not item.name or not item.control:
        raise source.error(path, f"{path} needs a name and a control")
    if len(item.control) > 1:
        raise source.error(
            path, f'control input "{item.name}" has more than one control; give each its own input'
        )
    return item.control


def _control(source: TextSource, item: Any, control: Any, path: str) -> ControlInput:
    owner = f"control input {rules.shown(item.name)}"
    if not 0 <= control.kind < len(_KINDS):
        raise source.error(path, f"{owner} has the unknown kind {control.kind}")
    kind = _KINDS[control.kind]
    values = {name: list(getattr(control, name)) for name in _VALUES if getattr(control, name)}
    if kind == CORRID:
        datatype = _datatype(control)
        if values or datatype not in ID_TYPES:
            listed = ", ".join(f"TYPE_{name}" for name in (*ID_TYPES[:-1], "STRING"))
            raise source.error(path, f"{owner} needs a data_type for the id ({listed}), and no values")
        return ControlInput(item.name, kind, datatype)
    if len(values) != 1 or len(next(iter(values.values()))) != 2:
        raise source.error(
            path, f"{owner} needs the two values of one of {', '.join(_VALUES)}: for no and for yes"
        )
    ((name, (no, yes)),) = values.items()
    return ControlInput(item.name, kind, _VALUES[name], (no, yes))


def _state(source: TextSource, item: Any, path: str) -> StateTensor:
    datatype = _datatype(item)
    if not item.input_name or not item.output_name or not datatype or not item.dims:
        raise source.error(path, f"{path} needs input_name, output_name, data_type and dims")
    where = f"{source.where(path)}: state {rules.shown(item.input_name)}"
    if len(item.initial_state) > 1:
        raise source.error(path, f'state "{item.input_name}" has more than one initial state')
    state = StateTensor(item.input_name, item.output_name, datatype, rules.check_dims(item.dims, where))
    for initial in item.initial_state:
        how = initial.WhichOneof("state_data")
        if how is None or (how == "data_file" and not initial.data_file):
            raise source.error(path, f'the initial state of "{item.input_name}" needs zero_data or data_file')
        if _datatype(initial) != datatype:
            raise source.error(path, f'the initial state of "{item.input_name}" has another data_type')
        file = rules.check_inside(initial.data_file, where) if how == "data_file" else ""
        dims = rules.check_dims(initial.dims, where)
        state = StateTensor(state.input, state.output, datatype, state.dims, dims, file, initial.name)
    return state


def _datatype(message: Any) -> str:
    """Returns the datatype; empty where none is given, or an unknown one."""
    names = message.DESCRIPTOR.fields_by_name["data_type"].enum_type.values_by_number
    found = names[message.data_type].name.removeprefix("TYPE_") if message.data_type in names else ""
    found = "BYTES" if found == "STRING" else found
    return found if found in DATATYPES else ""


def with_policy(source: TextSource, config: ModelConfig) -> ModelConfig:
    """Returns the settings with how the oldest of several sequences' requests make up batches."""
    oldest, path = source.message.sequence_batching.oldest, "sequence_batching.oldest"
    if any(size < 1 for size in oldest.preferred_batch_size):
        raise source.error(f"{path}.preferred_batch_size", "a preferred batch must be 1 or more")
    fixed = replace(
        eager_policy(),
        preferred=tuple(sorted(set(oldest.preferred_batch_size))),
        max_delay=oldest.max_queue_delay_microseconds / 1e6,
        preserve_ordering=oldest.preserve_ordering,
    )
    mode = Mode.EAGER if fixed == eager_policy() else Mode.FIXED
    return replace(config, mode=mode, policy=fixed)


# ---- and back ----------------------------------------------------------------------------------------------


def as_document(config: ModelConfig) -> dict[str, object]:
    settings = sequence_settings(config)
    return {} if settings is None else {_AT: sequences_document(settings, config.policy)}


def sequences_document(settings: SequenceSettings, policy: FixedBatching | Promise) -> dict[str, object]:
    """Returns it with the names and defaults of Triton's JSON; the policy's batches are those of the oldest
    strategy."""
    fixed = policy if isinstance(policy, FixedBatching) else FixedBatching(max_batch=policy.max_batch)
    document: dict[str, object] = {
        "max_sequence_idle_microseconds": round(settings.idle * 1e6),
        "control_input": [
            {
                "name": control.name,
                "control": [
                    {
                        "kind": f"CONTROL_SEQUENCE_{control.kind.upper()}",
                        "int32_false_true": _shown(control, "INT32"),
                        "fp32_false_true": _shown(control, "FP32"),
                        "bool_false_true": _shown(control, "BOOL"),
                        "data_type": _triton(control.datatype) if control.kind == CORRID else "TYPE_INVALID",
                    }
                ],
            }
            for control in settings.controls
        ],
        "state": [_state_document(state) for state in settings.states],
    }
    if settings.strategy == OLDEST:
        document["oldest"] = {
            "max_candidate_sequences": settings.max_candidates,
            "preferred_batch_size": list(fixed.preferred),
            "max_queue_delay_microseconds": round(fixed.max_delay * 1e6),
            "preserve_ordering": fixed.preserve_ordering,
        }
    else:
        document["direct"] = {
            "max_queue_delay_microseconds": round(settings.max_delay * 1e6),
            "minimum_slot_utilization": settings.min_utilization,
        }
    return document


def _triton(datatype: str) -> str:
    return "TYPE_STRING" if datatype == "BYTES" else f"TYPE_{datatype}"


def _shown(control: ControlInput, datatype: str) -> list[object]:
    if control.kind == CORRID or control.datatype != datatype:
        return []
    kind = {"INT32": int, "FP32": float, "BOOL": bool}[datatype]
    return [kind(value) for value in control.values]


def _state_document(state: StateTensor) -> dict[str, object]:
    document: dict[str, object] = {
        "input_name": state.input,
        "output_name": state.output,
        "data_type": _triton(state.datatype),
        "dims": list(state.dims),
        "initial_state": [],
        "use_same_buffer_for_input_output": False,
        "use_growable_memory": False,
    }
    if state.initial_dims:
        data = {"data_file": state.file} if state.file else {"zero_data": True}
        dims = list(state.initial_dims)
        document["initial_state"] = [
            {"data_type": _triton(state.datatype), "dims": dims, **data, "name": state.initial_name}
        ]
    return document
