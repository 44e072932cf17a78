"""Triton's ModelConfig as a table: which fields there are, what type they have and what they do here."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from carpool.config.model import DATATYPES


class Use(enum.Enum):
    USED = "used"
    NO_EFFECT = "no effect"  # tuning for other runtimes: the answers stay the same without it
    UNSUPPORTED = "unsupported"  # ignoring it would change answers, so it is an error


@dataclass(frozen=True, slots=True)
class FieldSpec:
    """`type` is a scalar or a key of MESSAGES or ENUMS; `why` completes the error of an unsupported field."""

    type: str
    repeated: bool = False
    use: Use = Use.USED
    why: str = ""


def _one(type_: str, use: Use = Use.USED, why: str = "") -> FieldSpec:
    return FieldSpec(type_, False, use, why)


def _many(type_: str, use: Use = Use.USED, why: str = "") -> FieldSpec:
    return FieldSpec(type_, True, use, why)


def _map(key: str, value: str, use: Use = Use.USED, why: str = "") -> FieldSpec:
    return FieldSpec(f"{key}->{value}", True, use, why)


def message_fields(type_: str) -> Mapping[str, FieldSpec] | None:
    """The fields of a message type, map entries included; None for scalars and enums."""
    if "->" in type_:
        key, value = type_.split("->")
        return {"key": _one(key), "value": _one(value)}
    return MESSAGES.get(type_)


RANGES = {
    "int32": (-(2**31), 2**31 - 1),
    "uint32": (0, 2**32 - 1),
    "int64": (-(2**63), 2**63 - 1),
    "uint64": (0, 2**64 - 1),
}

# In Triton's files a v2 datatype is TYPE_ and its name, except that BYTES is TYPE_STRING.
TRITON_TYPES = {name: "TYPE_STRING" if name == "BYTES" else f"TYPE_{name}" for name in DATATYPES}
V2_TYPES = {triton: name for name, triton in TRITON_TYPES.items()}

ENUMS: Mapping[str, tuple[str, ...]] = {  # in the order of their numbers, from 0
    "DataType": (
        "TYPE_INVALID",
        *(TRITON_TYPES[name] for name in DATATYPES if name not in ("BYTES", "BF16")),
        "TYPE_STRING",
        "TYPE_BF16",
    ),
    "Format": ("FORMAT_NONE", "FORMAT_NHWC", "FORMAT_NCHW"),
    "Kind": ("KIND_AUTO", "KIND_GPU", "KIND_CPU", "KIND_MODEL"),
    "SecondaryDeviceKind": ("KIND_NVDLA",),
    "TimeoutAction": ("REJECT", "DELAY"),
    "ModelPriority": ("PRIORITY_DEFAULT", "PRIORITY_MAX", "PRIORITY_MIN"),
}

_RAGGED = "requests of different shapes are not put into one batch here"
_TENSORRT_ONLY = "it exists for TensorRT engines only"
_SHAPE_FLAGS = {
    "is_shape_tensor": _one("bool", Use.UNSUPPORTED, _TENSORRT_ONLY),
    "is_non_linear_format_io": _one("bool", Use.UNSUPPORTED, _TENSORRT_ONLY),
}

_USED_MESSAGES: dict[str, Mapping[str, FieldSpec]] = {
    "ModelConfig": {
        "name": _one("string"),
        "platform": _one("string"),
        "backend": _one("string"),
        "runtime": _one("string", Use.NO_EFFECT),
        "version_policy": _one("ModelVersionPolicy"),
        "max_batch_size": _one("int32"),
        "input": _many("ModelInput"),
        "output": _many("ModelOutput"),
        "batch_input": _many("BatchInput", Use.UNSUPPORTED, _RAGGED),
        "batch_output": _many("BatchOutput", Use.UNSUPPORTED, _RAGGED),
        "optimization": _one("ModelOptimizationPolicy", Use.NO_EFFECT),
        "dynamic_batching": _one("ModelDynamicBatching"),
        "sequence_batching": _one(
            "ModelSequenceBatching", Use.UNSUPPORTED, "each request is answered on its own here"
        ),
        "ensemble_scheduling": _one("ModelEnsembling", Use.UNSUPPORTED, "ensembles cannot be served yet"),
        "instance_group": _many("ModelInstanceGroup"),
        "default_model_filename": _one("string"),
        "cc_model_filenames": _map(
            "string", "string", Use.UNSUPPORTED, "use default_model_filename for the file to run"
        ),
        "metric_tags": _map("string", "string", Use.NO_EFFECT),
        "parameters": _map("string", "ModelParameter"),
        "model_warmup": _many("ModelWarmup", Use.NO_EFFECT),
        "model_operations": _one(
            "ModelOperations", Use.UNSUPPORTED, "custom operators cannot be loaded here"
        ),
        "model_transaction_policy": _one("ModelTransactionPolicy"),
        "model_repository_agents": _one(
            "ModelRepositoryAgents", Use.UNSUPPORTED, "a check that is skipped would only look like one"
        ),
        "response_cache": _one("ModelResponseCache"),
        "model_metrics": _one("ModelMetrics", Use.NO_EFFECT),
    },
    "ModelInput": {
        "name": _one("string"),
        "data_type": _one("DataType"),
        "format": _one("Format"),
        "dims": _many("int64"),
        "reshape": _one("ModelTensorReshape"),
        "allow_ragged_batch": _one("bool", Use.UNSUPPORTED, _RAGGED),
        "optional": _one("bool"),
        **_SHAPE_FLAGS,
    },
    "ModelOutput": {
        "name": _one("string"),
        "data_type": _one("DataType"),
        "dims": _many("int64"),
        "reshape": _one("ModelTensorReshape"),
        "label_filename": _one("string"),
        **_SHAPE_FLAGS,
    },
    "ModelTensorReshape": {"shape": _many("int64")},
    "ModelVersionPolicy": {"latest": _one("Latest"), "all": _one("All"), "specific": _one("Specific")},
    "Latest": {"num_versions": _one("uint32")},
    "All": {},
    "Specific": {"versions": _many("int64")},
    "ModelDynamicBatching": {
        "preferred_batch_size": _many("int32"),
        "max_queue_delay_microseconds": _one("uint64"),
        "preserve_ordering": _one("bool"),
        "priority_levels": _one("uint64"),
        "default_priority_level": _one("uint64"),
        "default_queue_policy": _one("ModelQueuePolicy"),
        "priority_queue_policy": _map("uint64", "ModelQueuePolicy"),
    },
    "ModelQueuePolicy": {
        "timeout_action": _one("TimeoutAction"),
        "default_timeout_microseconds": _one("uint64"),
        "allow_timeout_override": _one("bool"),
        "max_queue_size": _one("uint32"),
    },
    "ModelInstanceGroup": {
        "name": _one("string"),
        "kind": _one("Kind"),
        "count": _one("int32"),
        "gpus": _many("int32"),
        "rate_limiter": _one("ModelRateLimiter", Use.NO_EFFECT),
        "secondary_devices": _many("SecondaryDevice", Use.NO_EFFECT),
        "profile": _many("string", Use.NO_EFFECT),
        "passive": _one("bool", Use.UNSUPPORTED, "an instance that takes no requests would only hold memory"),
        "host_policy": _one("string", Use.NO_EFFECT),
    },
    "ModelParameter": {"string_value": _one("string")},
    "ModelTransactionPolicy": {
        "decoupled": _one("bool", Use.UNSUPPORTED, "every request has exactly one answer here")
    },
    "ModelResponseCache": {"enable": _one("bool", Use.NO_EFFECT)},
}

# Their names are checked, so that a typing error is still found; their values are dropped.
_IDLE_MESSAGES: dict[str, Mapping[str, FieldSpec]] = {
    "ModelRateLimiter": {"resources": _many("Resource"), "priority": _one("uint32")},
    "Resource": {"name": _one("string"), "global": _one("bool"), "count": _one("uint32")},
    "SecondaryDevice": {"kind": _one("SecondaryDeviceKind"), "device_id": _one("int64")},
    "ModelOptimizationPolicy": {
        "graph": _one("Graph"),
        "priority": _one("ModelPriority"),
        "cuda": _one("Cuda"),
        "execution_accelerators": _one("ExecutionAccelerators"),
        "input_pinned_memory": _one("PinnedMemoryBuffer"),
        "output_pinned_memory": _one("PinnedMemoryBuffer"),
        "gather_kernel_buffer_threshold": _one("uint32"),
        "eager_batching": _one("bool"),
    },
    "Graph": {"level": _one("int32")},
    "Cuda": {
        "graphs": _one("bool"),
        "busy_wait_events": _one("bool"),
        "graph_spec": _many("GraphSpec"),
        "output_copy_stream": _one("bool"),
    },
    "GraphSpec": {
        "batch_size": _one("int32"),
        "input": _map("string", "Shape"),
        "graph_lower_bound": _one("LowerBound"),
    },
    "LowerBound": {"batch_size": _one("int32"), "input": _map("string", "Shape")},
    "Shape": {"dim": _many("int64")},
    "ExecutionAccelerators": {
        "gpu_execution_accelerator": _many("Accelerator"),
        "cpu_execution_accelerator": _many("Accelerator"),
    },
    "Accelerator": {"name": _one("string"), "parameters": _map("string", "string")},
    "PinnedMemoryBuffer": {"enable": _one("bool")},
    "ModelWarmup": {
        "name": _one("string"),
        "batch_size": _one("uint32"),
        "inputs": _map("string", "WarmupInput"),
        "count": _one("uint32"),
    },
    "WarmupInput": {
        "data_type": _one("DataType"),
        "dims": _many("int64"),
        "zero_data": _one("bool"),
        "random_data": _one("bool"),
        "input_data_file": _one("string"),
    },
    "ModelMetrics": {"metric_control": _many("MetricControl")},
    "MetricControl": {
        "metric_identifier": _one("MetricIdentifier"),
        "histogram_options": _one("HistogramOptions"),
    },
    "MetricIdentifier": {"family": _one("string")},
    "HistogramOptions": {"buckets": _many("double")},
}

MESSAGES: Mapping[str, Mapping[str, FieldSpec]] = _USED_MESSAGES | _IDLE_MESSAGES
