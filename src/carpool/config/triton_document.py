"""Writes settings as Triton's ModelConfig in JSON: the document that clients read at
/v2/models/{model}/config."""

from __future__ import annotations

from carpool.config.backend_kinds import kind_of
from carpool.config.model import AllVersions, LatestVersions, ModelConfig, TensorConfig, VersionPolicy
from carpool.config.settings_part import extra_document
from carpool.core.objectives import FixedBatching, QueueLimits
from carpool.types import DATATYPES

# A v2 datatype is TYPE_ and its name in Triton's settings, except that BYTES is TYPE_STRING.
TRITON_TYPES = {name: "TYPE_STRING" if name == "BYTES" else f"TYPE_{name}" for name in DATATYPES}
Document = dict[str, object]
_SCHEDULING = {"sequence_batching", "ensemble_scheduling"}
"""Fields of which a model has one, or dynamic_batching."""


def config_document(config: ModelConfig) -> Document:
    """Triton's field names and defaults; whole numbers stay numbers, as in Triton's own answer."""
    backend = "" if config.needs else config.backend or ""
    document: Document = {
        "name": config.name,
        "platform": next(iter(kind_of(backend).platforms), "") if not config.needs else config.backend,
        "backend": backend,
        "runtime": "",
        "version_policy": _versions_document(config.versions),
        "max_batch_size": config.max_batch or 0,
        "input": [
            {
                **_tensor_document(tensor),
                "format": f"FORMAT_{tensor.layout.upper()}" if tensor.layout else "FORMAT_NONE",
                "allow_ragged_batch": False,
                "optional": tensor.optional,
            }
            for tensor in config.inputs
        ],
        "output": [
            {**_tensor_document(tensor), "label_filename": tensor.labels or ""} for tensor in config.outputs
        ],
        "batch_input": [],
        "batch_output": [],
        "optimization": {
            "priority": "PRIORITY_DEFAULT",
            "input_pinned_memory": {"enable": True},
            "output_pinned_memory": {"enable": True},
            "gather_kernel_buffer_threshold": 0,
            "eager_batching": False,
        },
        "instance_group": [
            {
                "name": group.name or f"{config.name}_{n}",
                "kind": f"KIND_{group.kind.upper()}",
                "count": group.count,
                "gpus": list(group.gpus),
                "secondary_devices": [],
                "profile": [],
                "passive": False,
                "host_policy": "",
            }
            for n, group in enumerate(config.instances if not config.needs else ())
        ],
        "default_model_filename": config.file or "",
        "cc_model_filenames": {},
        "metric_tags": {},
        "parameters": {key: {"string_value": value} for key, value in config.parameters.items()},
        "model_warmup": [],
        "model_transaction_policy": {"decoupled": config.decoupled},
        "response_cache": {"enable": False},
        **extra_document(config),
    }
    if config.max_batch and not _SCHEDULING & document.keys():
        document["dynamic_batching"] = _batching(config)
    return document


def _versions_document(policy: VersionPolicy) -> Document:
    if isinstance(policy, LatestVersions):
        return {"latest": {"num_versions": policy.count}}
    if isinstance(policy, AllVersions):
        return {"all": {}}
    return {"specific": {"versions": list(policy.versions)}}


def _tensor_document(tensor: TensorConfig) -> Document:
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
    fixed = (
        config.policy
        if isinstance(config.policy, FixedBatching)
        else FixedBatching(max_batch=config.policy.max_batch)
    )
    document: Document = {
        "preferred_batch_size": list(fixed.preferred) or [fixed.max_batch],
        "max_queue_delay_microseconds": round(fixed.max_delay * 1e6),
        "preserve_ordering": fixed.preserve_ordering,
        "priority_levels": fixed.priority_levels,
        "default_priority_level": fixed.default_priority,
        "priority_queue_policy": {
            str(n): _limits_document(limits) for n, limits in fixed.level_limits.items()
        },
    }
    if fixed.limits != QueueLimits():
        document["default_queue_policy"] = _limits_document(fixed.limits)
    return document


def _limits_document(limits: QueueLimits) -> Document:
    return {
        "timeout_action": limits.action.name,
        "default_timeout_microseconds": round(limits.timeout * 1e6),
        "allow_timeout_override": limits.allow_override,
        "max_queue_size": limits.max_size,
    }
