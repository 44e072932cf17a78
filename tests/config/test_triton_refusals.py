"""config.pbtxt fields that are wrong, unknown, without effect or not supported."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from absent import rows
from carpool.config.rules import read_settings
from carpool.config.triton import NO_EFFECT, UNSUPPORTED, pbtxt_config, read_pbtxt
from carpool.config.triton_text import MAX_VALUES
from carpool.errors import ConfigError
from later import many

PATH = Path("models/m/config.pbtxt")


def refused(text: str) -> str:
    with pytest.raises(ConfigError) as error:
        pbtxt_config(text, PATH)
    return str(error.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('name: "a/b"', "cannot be a model's name"),
        ("max_batch_size: -1", "max_batch_size must be 0"),
        (
            'input { name: "x" data_type: TYPE_FP32 dims: [4294967296, 4294967296] }',
            "more than 1099511627776 elements",
        ),
        ("max_batch_size: 70000", "max_batch_size must be 0"),
        ("max_batch_size: 99999999999", "max_batch_size takes a whole number from -2147483648 to 2147483647"),
        ("max_batch_size: 1 max_batch_size: 2", "one value only"),
        ("max_batch_size: 0 max_batch_size: 2", "one value only"),
        ("dynamic_batching {} dynamic_batching {}", "one value only"),
        ("max_batch_size: [1]", "one value only"),
        ("max_batch_size { }", "max_batch_size takes a whole number"),
        ("max_batch_size: 1.5", "whole number"),
        ("name: resnet", "string in quotes"),
        ("input: 5", "takes a message in braces"),
        ("response_cache { enable: yes }", "true or false"),
        ('response_cache { enable: "true" }', "true or false"),
        *rows("ensembles", ('platform: "ensemble"', "needs ensemble_scheduling")),
        ('platform: "onnxruntime_onnx" backend: "python"', "does not run platform"),
        (
            "version_policy { all {} latest { num_versions: 1 } }",
            '"latest" is specified along with',
        ),
        ("version_policy { latest {} }", "num_versions must be 1 or more"),
        ("version_policy { specific {} }", "must list versions"),
        ("version_policy { all { x: 1 } }", "there are no fields here"),
        ("instance_group { count: -1 }", "count must be"),
        ("instance_group { kind: KIND_CPU gpus: 0 }", "KIND_CPU does not take gpus"),
        ("instance_group { gpus: -1 }", "numbered from 0"),
        ("instance_group { kind: 7 }", 'kind cannot be "7"'),
        (
            "instance_group { kind: KIND_TPU }",
            'kind cannot be "KIND_TPU"; did you mean "KIND_GPU"?',
        ),
        ('input { dims: 1 name: "x" dims: x }', "input.dims takes a whole number"),
        ('default_model_filename: "/etc/passwd"', "inside the model's folder"),
        ('parameters { key: "intra_op_thread_count" value { string_value: "many" } }', "number of threads"),
    ],
)
def test_mistakes(text: str, words: str) -> None:
    message = refused(text)
    assert words in message
    assert message.startswith("models/m/config.pbtxt:1:")


def test_unknown_fields_name_place_and_nearest() -> None:
    assert refused('name: "m"\n  max_batchsize: 4') == (
        'models/m/config.pbtxt:2:3: unknown field "max_batchsize"; did you mean "max_batch_size"?'
    )
    assert 'unknown field "dynamic_batching.max_queue_delay"' in refused(
        "dynamic_batching { max_queue_delay: 4 }"
    )
    assert 'did you mean "graph"?' in refused("optimization { grahp {} }")
    assert "valid here: " in refused("q: 1")


def accelerated(text: str, more: str = "") -> tuple[tuple[str, ...], list[str]]:
    config, warnings = pbtxt_config(f"{more} optimization {{ execution_accelerators {{ {text} }} }}", PATH)
    return config.accelerators, warnings


def test_accelerators_are_providers_of_onnxruntime() -> None:
    on_cpu = 'cpu_execution_accelerator: [ { name: "openvino" } ]'
    both = f'gpu_execution_accelerator: [ {{ name: "tensorrt" }} ] {on_cpu}'
    assert accelerated(both) == (("TensorrtExecutionProvider", "OpenVINOExecutionProvider"), [])
    half = '{ name: "tensorrt" parameters { key: "p" value: "FP16" } }'
    taken, (warning,) = accelerated(f"gpu_execution_accelerator: [ {half} ]")
    assert taken == ("TensorrtExecutionProvider",)
    assert "execution_accelerators: their parameters" in warning
    nothing = ["models/m/config.pbtxt: no effect here: optimization"]
    other = '{ name: "auto_mixed_precision" }'
    assert accelerated(f"gpu_execution_accelerator: [ {other} ]") == ((), nothing)
    assert accelerated(f"gpu_execution_accelerator: [ {half}, {other} ]")[1] == nothing
    assert accelerated(both, 'backend: "openvino"') == ((), nothing)


def test_fields_without_effect_share_one_warning() -> None:
    config, warnings = pbtxt_config(
        """
        optimization { cuda { graphs: true graph_spec { batch_size: 1 } } execution_accelerators {
          gpu_execution_accelerator : [ { name : "tensorrt" parameters { key: "p" value: "FP16" } } ] } }
        model_warmup [ { name: "w" inputs { key: "i" value { data_type: TYPE_FP32 dims: 1 } } } ]
        instance_group [ { rate_limiter { priority: 2 } host_policy: "x" }, { rate_limiter {} } ]
        model_metrics { metric_control { histogram_options { buckets: [0.5, 1, 1e3] } } }
        """,
        PATH,
    )
    assert config.name == "m"
    assert warnings == [
        "models/m/config.pbtxt: no effect here: optimization, model_warmup, model_metrics, "
        "instance_group.rate_limiter, instance_group.host_policy"
    ]


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("sequence_batching.iterative_sequence", "sequence_batching { iterative_sequence: true }"),
        ("batch_input", "batch_input [ { } ]"),
        ("batch_output", "batch_output { }"),
        ("cc_model_filenames", "cc_model_filenames { key: '7.5' value: 'm.onnx' }"),
        ("model_operations", "model_operations { op_library_filename: 'x.so' }"),
        ("model_repository_agents", "model_repository_agents { }"),
        ("instance_group.passive", "instance_group { passive: true }"),
        ("input.is_shape_tensor", "input { is_shape_tensor: true }"),
        ("input.is_non_linear_format_io", "input { is_non_linear_format_io: true }"),
        ("input.allow_ragged_batch", "input { allow_ragged_batch: true }"),
        ("output.is_shape_tensor", "output { is_shape_tensor: true }"),
        ("output.is_non_linear_format_io", "output { is_non_linear_format_io: true }"),
    ],
)
def test_what_would_change_answers_is_refused(path: str, text: str) -> None:
    assert f"{path} is not supported: " in refused(text)


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        ('input {\n  name: "x"', "2:9", 'Expected "}"'),
        ("max_batch_size: 1\n}", "2:1", "Expected identifier"),
        ("input <name: 'x'}", "1:17", "Expected identifier"),
        ("max_batch_size 1", "1:16", 'Expected ":"'),
        ("max_batch_size:", "1:16", "max_batch_size takes a whole number"),
        ("input { dims: [1 2] }", "1:18", 'Expected ","'),
        ("input { dims: [1,] }", "1:18", "input.dims takes a whole number"),
        ('name: "open', "1:7", "missing ending quote"),
        ('name: "two\nlines"', "1:7", "missing ending quote"),
        ("\n\n  max_batch_size: 12x", "3:19", "Couldn't parse integer: 12x"),
        ("name: @", "1:7", "name takes a string in quotes"),
        ("[ext]: 1", "1:2", "does not have extensions"),
        (r'name: "\\\400"', "1:10", "unknown escape at \\400"),
        (r'name: "\q"', "1:8", "unknown escape at \\q"),
        (r'name: "\ud800"', "1:7", "name takes a string"),
        (r'name: "\xff"', "1:13", "name takes a string"),
        ("max_batch_size: " + "9" * 5000, "1:17", "takes a whole number"),
        ("input {" * 100_000, "1:8", 'unknown field "input.input"'),
        ("{" * 100_000, "1:1", "Expected identifier"),
        ("# {\nname # why : \n : 'm' q: 1", "3:8", 'unknown field "q"'),
    ],
)
def test_errors_name_the_place(text: str, place: str, words: str) -> None:
    message = refused(text)
    assert message.startswith(f"models/m/config.pbtxt:{place}: ")
    assert words in message
    assert len(message) < 600


def test_the_text_format_in_its_forms() -> None:
    config, _ = pbtxt_config(
        """
        name: "a" 'b' # two pieces
        input: [ < name: 'x', data_type: 11; dims: [ 0x10, 017, -1 ] > ];
        output { name: "y\\303\\244\\x42" data_type: TYPE_FP32 dims: 1 dims: 2 }
        """,
        PATH,
    )
    assert config.name == "ab"
    assert (config.inputs[0].datatype, config.inputs[0].dims) == ("FP32", (16, 15, -1))
    assert (config.outputs[0].name, config.outputs[0].dims) == ("yäB", (1, 2))


def test_number_of_values_is_limited() -> None:
    assert "values" in refused("instance_group { gpus: [" + "1," * MAX_VALUES + "1] }")


@pytest.mark.parametrize(("data", "words"), [(b"\xff\xfe", "not UTF-8"), (b"#" * (1 << 21), "larger than")])
def test_files_that_are_no_settings(tmp_path: Path, data: bytes, words: str) -> None:
    file = tmp_path / "config.pbtxt"
    file.write_bytes(data)
    with pytest.raises(ConfigError, match=words):
        read_pbtxt(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_settings(tmp_path / "missing")


NAMES = st.sampled_from(
    [
        *sorted({name for path in (*UNSUPPORTED, *NO_EFFECT) for name in path.split(".")}),
        *(
            [
                "name",
                "kind",
                "count",
                "gpus",
                "dims",
                "data_type",
                "dynamic_batching",
                "priority_levels",
                "key",
                "value",
            ]
        ),
    ]
)
VALUES = st.sampled_from(
    [": 1", ": -1", ": true", ': "x"', ": TYPE_FP32", ": [1, 2]", ": 1.5", " {}", ": KIND_GPU"]
)
BODIES = st.recursive(
    st.tuples(NAMES, VALUES).map("".join),
    lambda inner: st.tuples(NAMES, st.lists(inner, max_size=4).map(" ".join)).map(
        lambda p: f"{p[0]} {{ {p[1]} }}"
    ),
    max_leaves=8,
)


FRAGMENTS = st.sampled_from([*"{}<>[]:,;-1\"'\\#\n ", "input", "dims", "name", "0x", "1e", "KIND_CPU"])


@settings(max_examples=many(300), deadline=None)
@given(
    st.lists(BODIES, max_size=4).map(" ".join)
    | st.text(max_size=60)
    | st.lists(FRAGMENTS, max_size=40).map("".join)
)
def test_any_text_gives_a_config_or_a_config_error(text: str) -> None:
    try:
        outcome = str(pbtxt_config(text, PATH)[0].path)
    except ConfigError as error:
        outcome = str(error)
    assert outcome == "models/m" or outcome.startswith("models/m/config.pbtxt:")
