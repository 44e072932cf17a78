"""ModelConfig → the JSON document that Triton's clients read at /v2/models/{model}/config."""

from __future__ import annotations

from carpool.config.backend_kinds import kind_of
from carpool.config.model import (
    AllVersions,
    InstanceGroup,
    LatestVersions,
    ModelConfig,
    TensorConfig,
    VersionPolicy,
)
from carpool.config.triton_schema import TRITON_TYPES
from carpool.core.policy import Knobs, QueueLimits

Document = dict[str, object]


def config_document(config: ModelConfig) -> Document:
    """Triton's field names and defaults; whole numbers stay numbers, as in Triton's own answer."""
    backend = config.backend or ""
    document: Document = {
        "name": config.name,
        "platform": next(iter(kind_of(backend).platforms), ""),
        "backend": backend,
        "runtime": "",
        "version_policy": _versions(config.versions),
        "max_batch_size": config.max_batch or 0,
        "input": [_input(tensor) for tensor in config.inputs],
        "output": [_output(tensor) for tensor in config.outputs],
        "batch_input": [],
        "batch_output": [],
        "optimization": _optimization(),
        "instance_group": [_instance(group, n, config.name) for n, group in enumerate(config.instances)],
        "default_model_filename": config.file or "",
        "cc_model_filenames": {},
        "metric_tags": {},
        "parameters": {key: {"string_value": value} for key, value in config.parameters.items()},
        "model_warmup": [],
        "model_transaction_policy": {"decoupled": False},
        "response_cache": {"enable": config.response_cache},
    }
    if config.max_batch:
        document["dynamic_batching"] = _batching(config)
    return document


def _optimization() -> Document:
    return {
        "priority": "PRIORITY_DEFAULT",
        "input_pinned_memory": {"enable": True},
        "output_pinned_memory": {"enable": True},
        "gather_kernel_buffer_threshold": 0,
        "eager_batching": False,
    }


def _versions(policy: VersionPolicy) -> Document:
    if isinstance(policy, LatestVersions):
        return {"latest": {"num_versions": policy.count}}
    if isinstance(policy, AllVersions):
        return {"all": {}}
    return {"specific": {"versions": list(policy.versions)}}


def _input(tensor: TensorConfig) -> Document:
    return {
        **_tensor(tensor),
        "format": f"FORMAT_{tensor.layout.upper()}" if tensor.layout else "FORMAT_NONE",
        "allow_ragged_batch": False,
        "optional": tensor.optional,
    }


def _output(tensor: TensorConfig) -> Document:
    return {**_tensor(tensor), "label_filename": tensor.labels or ""}


def _tensor(tensor: TensorConfig) -> Document:
    document: Document = {
        "name": tensor.name,
        "data_type": TRITON_TYPES[tensor.datatype],
        "dims": list(tensor.dims),
        "is_shape_tensor": False,
        "is_non_linear_format_io": False,
    }
    if tensor.reshape is not None:
        document["reshape"] = {"shape": list(tensor.reshape)}
    return document


def _batching(config: ModelConfig) -> Document:
    """A promise gathers requests too, so it is reported as a batcher at its defaults."""
    knobs = config.policy if isinstance(config.policy, Knobs) else Knobs(max_batch=config.policy.max_batch)
    document: Document = {
        "preferred_batch_size": list(knobs.preferred) or [knobs.max_batch],
        "max_queue_delay_microseconds": _microseconds(knobs.max_delay),
        "preserve_ordering": knobs.preserve_ordering,
        "priority_levels": knobs.priority_levels,
        "default_priority_level": knobs.default_priority,
        "priority_queue_policy": {str(n): _limits(limits) for n, limits in knobs.level_limits.items()},
    }
    if knobs.limits != QueueLimits():
        document["default_queue_policy"] = _limits(knobs.limits)
    return document


def _limits(limits: QueueLimits) -> Document:
    return {
        "timeout_action": limits.action.name,
        "default_timeout_microseconds": _microseconds(limits.timeout),
        "allow_timeout_override": limits.allow_override,
        "max_queue_size": limits.max_size,
    }


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)


def _instance(group: InstanceGroup, number: int, model: str) -> Document:
    return {
        "name": group.name or f"{model}_{number}",
        "kind": f"KIND_{group.kind.upper()}",
        "count": group.count,
        "gpus": list(group.gpus),
        "secondary_devices": [],
        "profile": [],
        "passive": False,
        "host_policy": "",
    }
