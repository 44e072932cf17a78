"""Every field of Triton's ModelConfig is used, refused or warned about: none is ignored in silence."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from tritonclient.grpc.model_config_pb2 import ModelConfig

from absent import ABSENT, rows
from carpool.config.triton import NO_EFFECT, UNSUPPORTED, pbtxt_config
from carpool.errors import ConfigError

FILE = Path("/models/net/config.pbtxt")
BATCHING = "max_batch_size: 8 "
INPUT = 'input { name: "x" data_type: TYPE_FP32 dims: [ 3, 4, 5 ] '
OUTPUT = 'output { name: "y" data_type: TYPE_FP32 dims: [ 4 ] '
QUEUE = BATCHING + "dynamic_batching { default_queue_policy { default_timeout_microseconds: 9 "
LEVELS = BATCHING + "dynamic_batching { priority_levels: 3 default_priority_level: 2 "
LEVEL = LEVELS + "priority_queue_policy { key: 1 value { default_timeout_microseconds: 9 "

STEPS = BATCHING + (
    'input { name: "x" data_type: TYPE_FP32 dims: 3 } output { name: "y" data_type: TYPE_FP32 dims: 3 } '
    'ensemble_scheduling { step { model_name: "m" input_map { key: "a" value: "x" } '
    'output_map { key: "b" value: "y" } '
)
TWO = STEPS.replace('value: "y"', 'value: "mid"') + (
    '} step { model_name: "n" input_map { key: "a" value: "mid" } output_map { key: "b" value: "y" } } }'
)

CONTROL = 'sequence_batching { control_input { name: "c" control { kind: CONTROL_SEQUENCE_START '
CORRID = 'sequence_batching { control_input { name: "c" control { kind: CONTROL_SEQUENCE_CORRID '
INT32 = CONTROL + "int32_false_true: [ 0, 1 ] } } }"
STATE = 'sequence_batching { state { input_name: "a" output_name: "b" data_type: TYPE_FP32 dims: 2 '
INITIAL = STATE + "initial_state { data_type: TYPE_FP32 dims: 2 zero_data: true "
OPEN = INITIAL.replace("dims: 2", "dims: -1", 1)
OLDEST = "sequence_batching { oldest { "
DIRECT = "sequence_batching { direct { "

USED = {
    "sequence_batching.max_sequence_idle_microseconds": (
        "sequence_batching { }",
        "sequence_batching { max_sequence_idle_microseconds: 7 }",
    ),
    "sequence_batching.control_input.name": (INT32, INT32.replace('"c"', '"d"')),
    "sequence_batching.control_input.control.kind": (INT32, INT32.replace("START", "END")),
    "sequence_batching.control_input.control.int32_false_true": (INT32, INT32.replace("1 ]", "2 ]")),
    "sequence_batching.control_input.control.fp32_false_true": (INT32, INT32.replace("int32", "fp32")),
    "sequence_batching.control_input.control.bool_false_true": (
        INT32,
        CONTROL + "bool_false_true: [ false, true ] } } }",
    ),
    "sequence_batching.control_input.control.data_type": (
        CORRID + "data_type: TYPE_UINT64 } } }",
        CORRID + "data_type: TYPE_STRING } } }",
    ),
    "sequence_batching.direct.max_queue_delay_microseconds": (
        DIRECT + "} }",
        DIRECT + "max_queue_delay_microseconds: 9 } }",
    ),
    "sequence_batching.direct.minimum_slot_utilization": (
        DIRECT + "} }",
        DIRECT + "minimum_slot_utilization: 0.5 } }",
    ),
    "sequence_batching.oldest.max_candidate_sequences": (
        OLDEST + "} }",
        OLDEST + "max_candidate_sequences: 3 } }",
    ),
    "sequence_batching.oldest.preferred_batch_size": (
        "max_batch_size: 8 " + OLDEST + "} }",
        "max_batch_size: 8 " + OLDEST + "preferred_batch_size: 4 } }",
    ),
    "sequence_batching.oldest.max_queue_delay_microseconds": (
        OLDEST + "} }",
        OLDEST + "max_queue_delay_microseconds: 9 } }",
    ),
    "sequence_batching.oldest.preserve_ordering": (OLDEST + "} }", OLDEST + "preserve_ordering: true } }"),
    "sequence_batching.state.input_name": (STATE + "} }", STATE.replace('"a"', '"c"') + "} }"),
    "sequence_batching.state.output_name": (STATE + "} }", STATE.replace('"b"', '"c"') + "} }"),
    "sequence_batching.state.data_type": (STATE + "} }", STATE.replace("FP32", "INT8") + "} }"),
    "sequence_batching.state.dims": (STATE + "} }", STATE.replace("dims: 2", "dims: 3") + "} }"),
    "sequence_batching.state.initial_state.name": (INITIAL + "} } }", INITIAL + 'name: "i" } } }'),
    "sequence_batching.state.initial_state.data_type": (
        INITIAL + "} } }",
        INITIAL.replace("FP32", "INT8") + "} } }",
    ),
    "sequence_batching.state.initial_state.dims": (
        OPEN + "} } }",
        OPEN.replace("dims: 2", "dims: 3") + "} } }",
    ),
    "sequence_batching.state.initial_state.zero_data": (STATE + "} }", INITIAL + "} } }"),
    "sequence_batching.state.initial_state.data_file": (
        INITIAL + "} } }",
        INITIAL.replace("zero_data: true", 'data_file: "f"') + "} } }",
    ),
    "ensemble_scheduling.step.model_name": (STEPS + "} }", STEPS.replace('"m"', '"n"') + "} }"),
    "ensemble_scheduling.step.model_version": (STEPS + "} }", STEPS + "model_version: 3 } }"),
    "ensemble_scheduling.step.input_map.key": (STEPS + "} }", STEPS.replace('"a"', '"c"') + "} }"),
    "ensemble_scheduling.step.input_map.value": (TWO, TWO.replace('"mid"', '"other"')),
    "ensemble_scheduling.step.output_map.key": (STEPS + "} }", STEPS.replace('"b"', '"c"') + "} }"),
    "ensemble_scheduling.step.output_map.value": (TWO, TWO.replace('"mid"', '"third"')),
    "ensemble_scheduling.max_inflight_requests": (STEPS + "} }", STEPS + "} max_inflight_requests: 4 }"),
    "name": ("", 'name: "other"'),
    "platform": ("", 'platform: "onnxruntime_onnx"'),
    "backend": ("", 'backend: "python"'),
    "version_policy.latest.num_versions": ("", "version_policy { latest { num_versions: 3 } }"),
    "version_policy.all": ("", "version_policy { all { } }"),
    "version_policy.specific.versions": ("", "version_policy { specific { versions: [ 2, 5 ] } }"),
    "max_batch_size": ("", BATCHING),
    "model_transaction_policy.decoupled": (
        'backend: "python"',
        'backend: "python" model_transaction_policy { decoupled: true }',
    ),
    "response_cache.enable": ("", "response_cache { enable: true }"),
    "input.name": (INPUT + "}", INPUT.replace('"x"', '"z"') + "}"),
    "input.data_type": (INPUT + "}", INPUT.replace("FP32", "INT8") + "}"),
    "input.format": (INPUT + "}", INPUT + "format: FORMAT_NHWC }"),
    "input.dims": (INPUT + "}", INPUT.replace("5", "6") + "}"),
    "input.reshape.shape": (INPUT + "}", INPUT + "reshape { shape: [ 60 ] } }"),
    "input.optional": (INPUT + "}", INPUT + "optional: true }"),
    "output.name": (OUTPUT + "}", OUTPUT.replace('"y"', '"z"') + "}"),
    "output.data_type": (OUTPUT + "}", OUTPUT.replace("FP32", "INT8") + "}"),
    "output.dims": (OUTPUT + "}", OUTPUT.replace("4", "6") + "}"),
    "output.reshape.shape": (OUTPUT + "}", OUTPUT + "reshape { shape: [ 2, 2 ] } }"),
    "output.label_filename": (OUTPUT + "}", OUTPUT + 'label_filename: "l.txt" }'),
    "dynamic_batching.preferred_batch_size": (
        BATCHING + "dynamic_batching { }",
        BATCHING + "dynamic_batching { preferred_batch_size: 4 }",
    ),
    "dynamic_batching.max_queue_delay_microseconds": (
        BATCHING + "dynamic_batching { }",
        BATCHING + "dynamic_batching { max_queue_delay_microseconds: 7 }",
    ),
    "dynamic_batching.preserve_ordering": (
        BATCHING + "dynamic_batching { }",
        BATCHING + "dynamic_batching { preserve_ordering: true }",
    ),
    "dynamic_batching.priority_levels": (LEVELS + "}", LEVELS.replace("3", "4") + "}"),
    "dynamic_batching.default_priority_level": (LEVELS + "}", LEVELS.replace("2", "1") + "}"),
    "dynamic_batching.default_queue_policy.timeout_action": (
        QUEUE + "} }",
        QUEUE + "timeout_action: DELAY } }",
    ),
    "dynamic_batching.default_queue_policy.default_timeout_microseconds": (
        QUEUE + "} }",
        QUEUE.replace("9", "8") + "} }",
    ),
    "dynamic_batching.default_queue_policy.allow_timeout_override": (
        QUEUE + "} }",
        QUEUE + "allow_timeout_override: true } }",
    ),
    "dynamic_batching.default_queue_policy.max_queue_size": (QUEUE + "} }", QUEUE + "max_queue_size: 5 } }"),
    "dynamic_batching.priority_queue_policy.key": (
        LEVEL + "} } }",
        LEVEL.replace("key: 1", "key: 3") + "} } }",
    ),
    "dynamic_batching.priority_queue_policy.value.timeout_action": (
        LEVEL + "} } }",
        LEVEL + "timeout_action: DELAY } } }",
    ),
    "dynamic_batching.priority_queue_policy.value.default_timeout_microseconds": (
        LEVEL + "} } }",
        LEVEL.replace("9", "8") + "} } }",
    ),
    "dynamic_batching.priority_queue_policy.value.allow_timeout_override": (
        LEVEL + "} } }",
        LEVEL + "allow_timeout_override: true } } }",
    ),
    "dynamic_batching.priority_queue_policy.value.max_queue_size": (
        LEVEL + "} } }",
        LEVEL + "max_queue_size: 5 } } }",
    ),
    "instance_group.name": ("instance_group { }", 'instance_group { name: "a" }'),
    "instance_group.kind": ("instance_group { }", "instance_group { kind: KIND_CPU }"),
    "instance_group.count": ("instance_group { }", "instance_group { count: 2 }"),
    "instance_group.gpus": ("instance_group { }", "instance_group { gpus: [ 1 ] }"),
    "default_model_filename": ("", 'default_model_filename: "a.onnx"'),
    "parameters.key": ("", 'parameters { key: "a" value { } }'),
    "parameters.value.string_value": (
        'parameters { key: "a" value { } }',
        'parameters { key: "a" value { string_value: "b" } }',
    ),
}


def every_field(message: Descriptor, above: str = "") -> Iterator[tuple[str, FieldDescriptor]]:
    """The fields of Triton's own schema that stand for themselves: what is below a refused or an idle one
    goes with it."""
    for field in message.fields:
        path = above + field.name
        if (
            field.message_type is None
            or path in UNSUPPORTED
            or path in NO_EFFECT
            or not field.message_type.fields
        ):
            yield path, field
        else:
            yield from every_field(field.message_type, f"{path}.")


FIELDS = dict(every_field(ModelConfig.DESCRIPTOR))
OTHERS = [*UNSUPPORTED, *sorted(NO_EFFECT)]


def text_of(path: str) -> str:
    """The field in the text format, with a value that asks for something."""
    outer = path.split(".")
    field = FIELDS[path]
    inside = {
        "input": 'name: "x" data_type: TYPE_FP32 dims: 3 ',
        "output": 'name: "y" data_type: TYPE_FP32 dims: 3 ',
    }
    values = {FieldDescriptor.CPPTYPE_STRING: '"a"', FieldDescriptor.CPPTYPE_BOOL: "true"}
    text = f"{outer[-1]} {{ }}" if field.message_type else f"{outer[-1]}: {values.get(field.cpp_type, '1')}"
    for name in reversed(outer[:-1]):
        text = f"{name} {{ {inside.get(name, '')}{text} }}"
    return text


def test_the_walk_covers_what_is_declared_as_used() -> None:
    assert set(FIELDS) - set(OTHERS) == set(USED)
    assert set(OTHERS) <= set(FIELDS)


OWNERS = {"sequence_batching": "sequences", "ensemble_scheduling": "ensembles", "response_cache": "cache"}


@pytest.mark.parametrize("path", [one for one in USED if OWNERS.get(one.partition(".")[0]) not in ABSENT])
def test_a_used_field_changes_the_settings(path: str) -> None:
    without, with_it = (pbtxt_config(text, FILE)[0] for text in USED[path])
    assert without != with_it


@pytest.mark.parametrize("path", OTHERS)
def test_the_others_are_refused_or_warned_about(path: str) -> None:
    text = text_of(path)
    if path in UNSUPPORTED:
        with pytest.raises(ConfigError, match="is not supported"):
            pbtxt_config(text, FILE)
    else:
        assert pbtxt_config(text, FILE)[1] == [f"{FILE}: no effect here: {path}"]


def test_a_cache_that_is_switched_off_is_nothing_to_warn_about() -> None:
    assert pbtxt_config("response_cache { enable: false }", FILE)[1] == []


@pytest.mark.parametrize(
    ("backend", "idle"),
    [
        ("onnxruntime", ["parameters.enable_mem_arena"]),
        *rows("torch", ("pytorch", ["parameters.enable_mem_arena", "parameters.intra_op_thread_count"])),
        ("python", []),
    ],
)
def test_parameters_that_a_runtime_does_not_know(backend: str, idle: list[str]) -> None:
    text = (
        f'backend: "{backend}"'
        ' parameters { key: "intra_op_thread_count" value { string_value: "1" } }'
        ' parameters { key: "enable_mem_arena" value { string_value: "1" } }'
    )
    expected = [f"{FILE}: no effect here: {', '.join(idle)}"] if idle else []
    assert pbtxt_config(text, FILE)[1] == expected
