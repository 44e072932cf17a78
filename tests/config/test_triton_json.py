"""The config document that Triton's clients and perf_analyzer read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from google.protobuf.json_format import ParseDict

from absent import ABSENT
from carpool.config.model import ModelConfig
from carpool.config.toml import toml_config
from carpool.config.triton import pbtxt_config
from carpool.config.triton_document import config_document
from carpool.wire.proto import message_class

TEXT = """
backend: "onnxruntime" max_batch_size: 8 default_model_filename: "model.onnx"
input { name: "i" data_type: TYPE_FP32 format: FORMAT_NCHW dims: [3, -1, -1] optional: true }
output { name: "o" data_type: TYPE_STRING dims: 6 reshape { shape: [2, 3] } label_filename: "l.txt" }
dynamic_batching {
  max_queue_delay_microseconds: 123 priority_levels: 2 default_priority_level: 1
  default_queue_policy { max_queue_size: 3 timeout_action: DELAY }
  priority_queue_policy { key: 2 value { default_timeout_microseconds: 7 } }
}
instance_group { count: 2 kind: KIND_GPU gpus: 0 }
version_policy { specific { versions: [1, 2] } }
parameters { key: "k" value { string_value: "v" } }
response_cache { enable: true }
"""


def document(text: str) -> dict[str, Any]:
    config, _ = pbtxt_config(text, Path("models/m/config.pbtxt"))
    result: dict[str, Any] = json.loads(json.dumps(config_document(config)))
    return result


def test_document() -> None:
    found = document(TEXT)
    assert found["name"] == "m"
    assert (found["platform"], found["backend"]) == ("onnxruntime_onnx", "onnxruntime")
    assert found["version_policy"] == {"specific": {"versions": [1, 2]}}
    assert found["max_batch_size"] == 8
    assert found["input"] == [
        {
            "name": "i",
            "data_type": "TYPE_FP32",
            "format": "FORMAT_NCHW",
            "dims": [3, -1, -1],
            "is_shape_tensor": False,
            "allow_ragged_batch": False,
            "optional": True,
            "is_non_linear_format_io": False,
        }
    ]
    assert found["output"] == [
        {
            "name": "o",
            "data_type": "TYPE_STRING",
            "dims": [6],
            "reshape": {"shape": [2, 3]},
            "label_filename": "l.txt",
            "is_shape_tensor": False,
            "is_non_linear_format_io": False,
        }
    ]
    assert found["dynamic_batching"] == {
        "preferred_batch_size": [8],
        "max_queue_delay_microseconds": 123,
        "preserve_ordering": False,
        "priority_levels": 2,
        "default_priority_level": 1,
        "default_queue_policy": {
            "timeout_action": "DELAY",
            "default_timeout_microseconds": 0,
            "allow_timeout_override": False,
            "max_queue_size": 3,
        },
        "priority_queue_policy": {
            "2": {
                "timeout_action": "REJECT",
                "default_timeout_microseconds": 7,
                "allow_timeout_override": False,
                "max_queue_size": 0,
            }
        },
    }
    group = found["instance_group"][0]
    assert (group["name"], group["kind"], group["count"], group["gpus"]) == ("m_0", "KIND_GPU", 2, [0])
    assert found["default_model_filename"] == "model.onnx"
    assert found["model_transaction_policy"] == {"decoupled": False}
    assert found["parameters"] == {"k": {"string_value": "v"}}
    assert found["response_cache"] == {"enable": "cache" not in ABSENT}


def test_every_name_in_the_document_is_triton_s() -> None:
    ParseDict(document(TEXT), message_class("ModelConfig")())


def test_other_modes() -> None:
    promise = config_document(toml_config("slo_ms = 50\nmax_batch = 4", Path("m/model.toml")))
    batching: Any = promise["dynamic_batching"]
    assert batching["preferred_batch_size"] == [4]
    assert "default_queue_policy" not in batching
    unread = config_document(ModelConfig(name="m", path=Path("m")))
    assert "dynamic_batching" not in unread
    assert (unread["max_batch_size"], unread["platform"], unread["backend"]) == (0, "", "")
    assert document("version_policy { all {} }")["version_policy"] == {"all": {}}
    assert document("")["version_policy"] == {"latest": {"num_versions": 1}}
