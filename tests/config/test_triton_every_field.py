"""Every field of Triton's ModelConfig is used, refused or warned about: none is ignored in silence."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.descriptor import Descriptor
from tritonclient.grpc.model_config_pb2 import ModelConfig

from carpool.config.triton import pbtxt_config
from carpool.config.triton_schema import ENUMS, MESSAGES, FieldSpec, Use, message_fields
from carpool.errors import ConfigError

FILE = Path("/models/net/config.pbtxt")
BATCHING = "max_batch_size: 8 "
INPUT = 'input { name: "x" data_type: TYPE_FP32 dims: [ 3, 4, 5 ] '
OUTPUT = 'output { name: "y" data_type: TYPE_FP32 dims: [ 4 ] '
QUEUE = BATCHING + "dynamic_batching { default_queue_policy { default_timeout_microseconds: 9 "
LEVELS = BATCHING + "dynamic_batching { priority_levels: 3 default_priority_level: 2 "
LEVEL = LEVELS + "priority_queue_policy { key: 1 value { default_timeout_microseconds: 9 "

USED = {
    "name": ("", 'name: "other"'),
    "platform": ("", 'platform: "onnxruntime_onnx"'),
    "backend": ("", 'backend: "python"'),
    "version_policy.latest.num_versions": ("", "version_policy { latest { num_versions: 3 } }"),
    "version_policy.all": ("", "version_policy { all { } }"),
    "version_policy.specific.versions": ("", "version_policy { specific { versions: [ 2, 5 ] } }"),
    "max_batch_size": ("", BATCHING),
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


def every_field(type_: str = "ModelConfig", above: str = "") -> Iterator[tuple[str, FieldSpec]]:
    """The fields that stand for themselves: what is below a refused or an idle one goes with it."""
    for name, spec in (message_fields(type_) or {}).items():
        inner = message_fields(spec.type)
        if spec.use is Use.USED and inner:
            yield from every_field(spec.type, f"{above}{name}.")
        else:
            yield above + name, spec


FIELDS = dict(every_field())
OTHERS = [path for path, spec in FIELDS.items() if spec.use is not Use.USED]


def text_of(path: str) -> str:
    """The field in the text format, with a value that asks for something."""
    outer = path.split(".")
    spec = FIELDS[path]
    inside = {
        "input": 'name: "x" data_type: TYPE_FP32 dims: 3 ',
        "output": 'name: "y" data_type: TYPE_FP32 dims: 3 ',
    }
    text = _value(outer[-1], spec.type)
    for name in reversed(outer[:-1]):
        text = f"{name} {{ {inside.get(name, '')}{text} }}"
    return text


def _value(name: str, type_: str) -> str:
    values = {"string": '"a"', "bool": "true", "double": "1.5"}
    if type_ in values or type_ in ("int32", "int64", "uint32", "uint64"):
        return f"{name}: {values.get(type_, '1')}"
    return f"{name}: {ENUMS[type_][-1]}" if type_ in ENUMS else f"{name} {{ }}"


def test_the_walk_covers_what_is_declared_as_used() -> None:
    assert {path for path, spec in FIELDS.items() if spec.use is Use.USED} == set(USED)


@pytest.mark.parametrize("path", USED)
def test_a_used_field_changes_the_settings(path: str) -> None:
    without, with_it = (pbtxt_config(text, FILE)[0] for text in USED[path])
    assert without != with_it


@pytest.mark.parametrize("path", OTHERS)
def test_the_others_are_refused_or_warned_about(path: str) -> None:
    text = text_of(path)
    if FIELDS[path].use is Use.UNSUPPORTED:
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
        ("pytorch", ["parameters.intra_op_thread_count", "parameters.enable_mem_arena"]),
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


def test_the_table_has_every_field_of_tritons_own() -> None:
    """As Triton's client has it; what is below a refused field need not be known."""
    checked = []

    def check(descriptor: Descriptor, type_: str) -> None:
        specs = message_fields(type_)
        if specs is None:
            return
        checked.append(type_)
        assert set(specs) == {field.name for field in descriptor.fields}, type_
        for field in descriptor.fields:
            if field.message_type is not None and specs[field.name].use is not Use.UNSUPPORTED:
                check(field.message_type, specs[field.name].type)

    check(ModelConfig.DESCRIPTOR, "ModelConfig")
    assert set(MESSAGES) <= set(checked)
