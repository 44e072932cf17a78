"""Settings in Triton's JSON form mean what the same settings mean in config.pbtxt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from absent import rows
from carpool.config.model import AllVersions, Mode, ModelConfig, SpecificVersions
from carpool.config.triton import pbtxt_config, read_override
from carpool.config.triton_document import config_document
from carpool.core.objectives import FixedBatching, TimeoutAction
from carpool.errors import ConfigError

FOLDER = Path("/models/m")


def read(document: Any, name: str = "m") -> ModelConfig:
    return read_override(document if isinstance(document, str) else json.dumps(document), FOLDER, name)[0]


def refused(document: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        read(document)
    return caught.value.message


PBTXT = """
name: "m" backend: "onnxruntime" max_batch_size: 16
input [{ name: "x" data_type: TYPE_FP32 format: FORMAT_NCHW dims: [3, 224, -1] }]
output [{
  name: "y" data_type: TYPE_STRING dims: [10] label_filename: "labels.txt" reshape { shape: [10, 1] }
}]
dynamic_batching {
  preferred_batch_size: [4, 8] max_queue_delay_microseconds: 5000 priority_levels: 3 default_priority_level: 2
  default_queue_policy { timeout_action: DELAY default_timeout_microseconds: 200 max_queue_size: 9 }
  priority_queue_policy { key: 1 value { max_queue_size: 3 allow_timeout_override: true } }
}
instance_group [{ count: 2 kind: KIND_CPU }, { kind: KIND_GPU gpus: [0, 1] name: "g" }]
version_policy { specific { versions: [2, 1] } }
parameters { key: "intra_op_thread_count" value { string_value: "3" } }
response_cache { enable: true }
default_model_filename: "net.onnx"
model_transaction_policy { decoupled: false }
optimization { graph { level: 1 } }
"""
JSON = {
    "name": "m",
    "backend": "onnxruntime",
    "max_batch_size": 16,
    "input": [{"name": "x", "data_type": "TYPE_FP32", "format": "FORMAT_NCHW", "dims": [3, 224, -1]}],
    "output": [
        {
            "name": "y",
            "data_type": "TYPE_STRING",
            "dims": ["10"],
            "label_filename": "labels.txt",
            "reshape": {"shape": [10, 1]},
        }
    ],
    "dynamic_batching": {
        "preferred_batch_size": [4, 8],
        "max_queue_delay_microseconds": "5000",
        "priority_levels": 3,
        "default_priority_level": 2,
        "default_queue_policy": {
            "timeout_action": "DELAY",
            "default_timeout_microseconds": 200,
            "max_queue_size": 9,
        },
        "priority_queue_policy": {"1": {"max_queue_size": 3, "allow_timeout_override": True}},
    },
    "instance_group": [{"count": 2, "kind": "KIND_CPU"}, {"kind": 1, "gpus": [0, 1], "name": "g"}],
    "version_policy": {"specific": {"versions": [2, 1]}},
    "parameters": {"intra_op_thread_count": {"string_value": "3"}},
    "response_cache": {"enable": True},
    "default_model_filename": "net.onnx",
    "model_transaction_policy": {"decoupled": False},
    "optimization": {"graph": {"level": 1}},
}


def test_the_same_settings_in_both_forms() -> None:
    from_text, warnings = pbtxt_config(PBTXT, FOLDER / "config.pbtxt", "m")
    from_json, same = read_override(json.dumps(JSON), FOLDER, "m")
    assert from_json == from_text
    assert [warning.partition(": ")[2] for warning in same] == [w.partition(": ")[2] for w in warnings]
    assert from_json.versions == SpecificVersions((1, 2))
    assert isinstance(from_json.policy, FixedBatching)
    assert from_json.policy.limits.action is TimeoutAction.DELAY


def test_what_the_server_says_of_a_model_can_be_sent_back() -> None:
    config = read(JSON)
    document = config_document(config)
    again, warnings = read_override(json.dumps(document), FOLDER, "m")
    assert config_document(again) == document
    assert warnings == [f"{FOLDER}/config: no effect here: optimization"]


def test_names_in_camel_case_are_the_same_names() -> None:
    assert read({"maxBatchSize": 4, "versionPolicy": {"all": {}}}) == read(
        {"max_batch_size": 4, "version_policy": {"all": {}}}
    )
    assert read({"versionPolicy": {"all": {}}}).versions == AllVersions()


def test_null_leaves_a_field_out_and_the_name_is_the_models() -> None:
    assert read({"max_batch_size": None, "dynamic_batching": None}) == read({})
    assert read({}).name == "m"
    assert read({"dynamic_batching": {}}).mode is Mode.FIXED


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ("", "config: not valid JSON"),
        ("[]", "must be an object"),
        ("3", "must be an object"),
        ({"max_batch_sice": 3}, 'config.max_batch_sice: unknown field "max_batch_sice"; did you mean'),
        ({"input": [{"name": "x", "dimms": [1]}]}, 'config.input[0].dimms: unknown field "input.dimms"'),
        ({"max_batch_size": "many"}, "config.max_batch_size: takes a whole number"),
        (
            {"max_batch_size": 1.5},
            "to 2147483647: Couldn't parse integer: 1.5",
        ),
        ({"max_batch_size": True}, "config.max_batch_size: takes a whole number"),
        ({"max_batch_size": [3]}, "config.max_batch_size: takes one value, not a list"),
        ({"max_batch_size": {"a": 3}}, "config.max_batch_size: takes one value"),
        ({"max_batch_size": -1}, "must be 0 to"),
        ({"max_batch_size": 2**40}, "from -2147483648 to 2147483647: Value out of range"),
        ({"max_batch_size": 2, "maxBatchSize": 3}, "config.max_batch_size: is given twice"),
        ({"instance_group": [{"kind": 7}]}, 'config.instance_group[0].kind: kind cannot be "7"'),
        ({"input": {"name": "x"}}, "config.input: takes a list"),
        ({"input": [3]}, "config.input[0]: takes an object with the fields of a ModelInput"),
        ({"input": [None]}, "config.input[0]: takes an object"),
        ({"instance_group": [{"kind": "KIND_TPU"}]}, "config.instance_group[0].kind: cannot be"),
        ({"parameters": ["a"]}, "config.parameters: takes an object"),
        ({"parameters": {"a": "b"}}, "config.parameters.a: takes an object"),
        ({"backend": 3}, "config.backend: takes a string"),
        ({"sequence_batching": {"iterative_sequence": True}}, "iterative_sequence is not supported"),
        ({"model_transaction_policy": {"decoupled": 1}}, "decoupled"),
        *rows(
            "ensembles",
            ({"platform": "ensemble"}, 'config.platform: platform "ensemble" needs ensemble_scheduling'),
        ),
        ({"name": "other"}, 'config.name: "other" is not the model to be loaded, "m"'),
        ({"default_model_filename": "../secret"}, "must be a file inside"),
        ({"version_policy": {"all": {}, "latest": {"num_versions": 1}}}, 'multiple "policy_choice"'),
        ({"instance_group": [{"gpus": [0] * 100_001}]}, "more than 100000 values"),
        ('{"a": "' + "x" * (1 << 20) + '"}', "larger than"),
        ('{"a":' * 2000 + "1" + "}" * 2000, "not valid JSON"),
    ],
)
def test_mistakes_are_named_with_their_place(document: Any, words: str) -> None:
    assert words in refused(document)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
known = st.sampled_from(
    [
        *JSON,
        "dims",
        "kind",
        "batch_input",
        "sequence_batching",
        "metric_tags",
        "model_warmup",
        "dynamicBatching",
    ]
)


@given(st.dictionaries(known | st.text(max_size=8), values, max_size=5))
def test_nothing_but_a_config_error_comes_of_any_json(document: dict[str, Any]) -> None:
    try:
        text = json.dumps(document)
        text.encode()
        read(text)
    except (ConfigError, UnicodeEncodeError):
        pass
