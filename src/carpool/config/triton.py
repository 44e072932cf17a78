"""Translates Triton's ModelConfig to ours, with Triton's meaning for every field that is used."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from carpool.config import rules
from carpool.config.backend_kinds import backend_of_platform
from carpool.config.model import (
    AllVersions,
    InstanceGroup,
    InstanceKind,
    LatestVersions,
    Mode,
    ModelConfig,
    OnnxruntimeSettings,
    SpecificVersions,
    TensorConfig,
    VersionPolicy,
    eager_policy,
)
from carpool.config.presets import PRESETS, with_preset
from carpool.config.settings_part import known_parameters, read_triton_extra, settled
from carpool.config.triton_document import TRITON_TYPES
from carpool.core.objectives import FixedBatching, Promise, QueueLimits, TimeoutAction
from carpool.errors import ConfigError

if TYPE_CHECKING:
    from carpool.config.triton_text import TextSource

PRESET = "carpool_preset"
_RAGGED = "requests of different shapes are never in one batch here"
_TENSORRT_ONLY = "it exists for TensorRT engines only"
# Ignoring these would change answers, so they are errors.
UNSUPPORTED: Mapping[str, str] = {
    "batch_input": _RAGGED,
    "batch_output": _RAGGED,
    "input.allow_ragged_batch": _RAGGED,
    "input.is_shape_tensor": _TENSORRT_ONLY,
    "input.is_non_linear_format_io": _TENSORRT_ONLY,
    "output.is_shape_tensor": _TENSORRT_ONLY,
    "output.is_non_linear_format_io": _TENSORRT_ONLY,
    "sequence_batching.iterative_sequence": "a model cannot put its own request into the queue again here",
    "sequence_batching.state.use_growable_memory": "states keep the shape that is declared for them",
    "sequence_batching.state.use_same_buffer_for_input_output": "a state is kept when its batch has ended",
    "ensemble_scheduling.step.model_namespace": "every model has its own name here",
    "instance_group.passive": "an instance without requests would only use memory",
    "cc_model_filenames": "use default_model_filename for the file to run",
    "model_operations": "custom operators cannot be loaded here",
    "model_repository_agents": "this check is not supported",
}
# Tuning for other runtimes: the answers stay the same without it.
NO_EFFECT = frozenset(
    (
        *("runtime", "optimization", "instance_group.rate_limiter", "instance_group.secondary_devices"),
        *("instance_group.profile", "instance_group.host_policy", "metric_tags", "model_warmup"),
        "model_metrics",
    )
)
_LAYOUTS = {"FORMAT_NHWC": "nhwc", "FORMAT_NCHW": "nchw"}
_V2_TYPES = {triton: name for name, triton in TRITON_TYPES.items()}


def read_pbtxt(path: Path, name: str | None = None) -> tuple[ModelConfig, list[str]]:
    """Returns the settings in one config.pbtxt, and at most one warning: the fields that have no effect here.

    `name` is for a file that gives none; by default its folder's name.
    """
    return pbtxt_config(rules.read_settings(path), path, name)


def pbtxt_config(text: str, path: Path, name: str | None = None) -> tuple[ModelConfig, list[str]]:
    """The same from text; `path` names the file in messages and its folder is the model's."""
    from carpool.config.triton_text import read_text  # protobuf, which takes its time to load

    return _read(read_text(text, str(path)), path, name or path.parent.name)


def read_override(text: str, folder: Path, name: str) -> tuple[ModelConfig, list[str]]:
    """Returns the same from the JSON that came with a request to load the model of this name."""
    from carpool.config.triton_text import read_json

    config, warnings = _read(read_json(text), folder / "config", name)
    if config.name != name:
        raise ConfigError(
            f"config.name: {rules.shown(config.name)} is not the model to be loaded, {rules.shown(name)}",
            field="config",
        )
    return config, warnings


_COMPLETED = (
    *("name", "backend", "max_batch_size", "input", "output", "dynamic_batching", "model_transaction_policy"),
)


def read_completed(config: ModelConfig, text: str) -> ModelConfig:
    """Returns the settings with what a model's own code added to their document: tensors and batching.

    What a user has written stays.
    """
    from carpool.config.triton_text import read_json

    document = json.loads(text)
    given = json.dumps({key: document[key] for key in _COMPLETED if key in document})
    told, _ = _read(read_json(given), config.path / "config", config.name)
    if config.mode is Mode.EAGER and "dynamic_batching" in document:
        config = replace(config, mode=told.mode, policy=told.policy)
    names = {tensor.name for tensor in config.inputs + config.outputs}
    return replace(
        config,
        inputs=config.inputs + tuple(tensor for tensor in told.inputs if tensor.name not in names),
        outputs=config.outputs + tuple(tensor for tensor in told.outputs if tensor.name not in names),
        max_batch=told.max_batch,
        decoupled=config.decoupled or told.decoupled,
    )


def _read(source: TextSource, path: Path, name: str) -> tuple[ModelConfig, list[str]]:
    idle: dict[str, None] = {}  # the fields that ask for something and get nothing, in their order
    for field, numbered in source.given(_LOOKED_INTO):
        if field in UNSUPPORTED:
            raise source.error(numbered, f"{field} is not supported: {UNSUPPORTED[field]}")
        if field in NO_EFFECT:
            idle[field] = None
    batching = source.message.dynamic_batching
    if batching.priority_queue_policy and not batching.priority_levels:  # as in Triton
        idle["dynamic_batching.priority_queue_policy"] = None
    config = _model(source, path, name)
    _account_for_accelerators(source, config, idle)
    # A Python model reads its parameters itself; those for a runtime do what it knows, or nothing.
    known = known_parameters(config)
    if known is not None:
        ours = (*known, PRESET)
        idle |= {f"parameters.{key[:64]}": None for key in config.parameters if key not in ours}
    return config, [f"{path}: no effect here: {', '.join(idle)}"] if idle else []


_LOOKED_INTO = {
    path[:end] for path in (*UNSUPPORTED, *NO_EFFECT) for end in range(len(path)) if path[end] == "."
}


_ACCELERATORS = {
    "gpu_execution_accelerator": {"tensorrt": "TensorrtExecutionProvider"},
    "cpu_execution_accelerator": {"openvino": "OpenVINOExecutionProvider"},
}
"""By device and Triton's name: what onnxruntime calls it. Others are for other runtimes."""


def _accelerators(source: TextSource) -> tuple[str, ...]:
    if _backend(source) not in (None, "onnxruntime"):
        return ()
    asked = source.message.optimization.execution_accelerators
    found = (
        known.get(accelerator.name)
        for kind, known in _ACCELERATORS.items()
        for accelerator in getattr(asked, kind)
    )
    return tuple(dict.fromkeys(filter(None, found)))


def _account_for_accelerators(source: TextSource, config: ModelConfig, idle: dict[str, None]) -> None:
    """Leaves in `idle` what has no effect, where accelerators are all that `optimization` holds and
    onnxruntime has each."""
    optimization = source.message.optimization
    asked = [one for kind in _ACCELERATORS for one in getattr(optimization.execution_accelerators, kind)]
    if len(optimization.ListFields()) == 1 and 0 < len(asked) == len(config.accelerators):
        del idle["optimization"]
        if any(one.parameters for one in asked):
            idle["optimization.execution_accelerators: their parameters"] = None


def _model(source: TextSource, path: Path, name: str) -> ModelConfig:
    message, extra = source.message, read_triton_extra(source)
    max_batch = _max_batch(source)
    outputs = _tensors(source, "output", max_batch)
    parameters = {key: message.parameters[key].string_value for key in sorted(message.parameters)}
    mode, policy = _policy(source)
    file, where = message.default_model_filename, source.where("default_model_filename")
    config = ModelConfig(
        name=rules.check_name(message.name or name, source.where("name")),
        path=path.parent,
        backend=_backend(source),
        inputs=_tensors(source, "input", max_batch),
        outputs=outputs,
        mode=mode,
        policy=policy,
        instances=tuple(
            _instance(source, group, f"instance_group[{n}]") for n, group in enumerate(message.instance_group)
        )
        or (InstanceGroup(given=False),),
        versions=_versions(source),
        file=rules.check_inside(file, where) if file else None,
        labels=next((t.labels for t in outputs if t.labels), None),
        decoupled=message.model_transaction_policy.decoupled,
        parameters=parameters,
        onnxruntime=OnnxruntimeSettings(
            intra_op_threads=_threads(parameters, "intra_op_thread_count", source),
            inter_op_threads=_threads(parameters, "inter_op_thread_count", source),
        ),
        accelerators=_accelerators(source),
        extra=extra,
    )
    config = settled(source, with_preset(replace(config, preset=_preset(parameters, source))))
    if max_batch is None:
        return config
    return rules.with_max_batch(config, max_batch, source.where("dynamic_batching"))


def _preset(parameters: Mapping[str, str], source: TextSource) -> str | None:
    """Returns whose pixels the model was trained with, which Triton has no field for."""
    preset = parameters.get(PRESET)
    if preset is not None and preset not in PRESETS:
        wrong = f'parameter "{PRESET}" cannot be {rules.shown(preset)}; {rules.nearest(preset, PRESETS)}'
        raise source.error("parameters", wrong)
    return preset


def _max_batch(source: TextSource) -> int | None:
    """As in Triton, 0 equals absent: no batching where tensors are declared, else the model decides."""
    size: int = source.message.max_batch_size
    if not 0 <= size <= rules.MAX_BATCH:
        raise source.error("max_batch_size", f"max_batch_size must be 0 to {rules.MAX_BATCH}, not {size}")
    if size == 0:
        return 0 if source.message.input and source.message.output else None
    return size


def _backend(source: TextSource) -> str | None:
    platform, backend = source.message.platform, source.message.backend
    known = backend_of_platform(platform) or platform
    if platform and backend and known != backend:
        raise source.error(
            "backend", f'backend "{backend}" does not run platform "{platform}"; keep one of them'
        )
    return backend or known or None


def _chosen(source: TextSource, message: Any, name: str, path: str) -> str:
    """Returns the name of an enum's value: numbers that mean nothing pass the parser."""
    choices = message.DESCRIPTOR.fields_by_name[name].enum_type
    number = getattr(message, name)
    if number not in choices.values_by_number:
        hint = rules.nearest(str(number), choices.values_by_name)
        raise source.error(path, f'{name} cannot be "{number}"; {hint}')
    return str(choices.values_by_number[number].name)


def _tensors(source: TextSource, kind: str, max_batch: int | None) -> tuple[TensorConfig, ...]:
    listed = enumerate(getattr(source.message, kind))
    tensors = [_tensor(source, item, kind, f"{kind}[{n}]", max_batch) for n, item in listed]
    return rules.check_distinct(tensors, f"{source.where(kind)}: {kind}")


def _tensor(source: TextSource, item: Any, kind: str, path: str, max_batch: int | None) -> TensorConfig:
    owner = f"{kind} {rules.shown(item.name)}"
    datatype = _V2_TYPES.get(_chosen(source, item, "data_type", f"{path}.data_type"))
    for key, given in (("name", item.name), ("data_type", datatype), ("dims", item.dims)):
        if not given:
            raise source.error(path, f"{owner} has no {key}")
    where = f"{source.where(f'{path}.dims')}: {owner}"
    labels = item.label_filename if kind == "output" else ""
    reshaped = item.HasField("reshape")
    tensor = TensorConfig(
        name=item.name,
        datatype=str(datatype),
        dims=rules.check_dims(item.dims, where),
        reshape=rules.check_dims(item.reshape.shape, where) if reshaped else None,
        labels=rules.check_inside(labels, source.where(f"{path}.label_filename")) if labels else None,
        optional=kind == "input" and item.optional,
        layout=_LAYOUTS.get(_chosen(source, item, "format", f"{path}.format")) if kind == "input" else None,
    )
    return rules.check_tensor(tensor, where, max_batch)


def _policy(source: TextSource) -> tuple[Mode, FixedBatching | Promise]:
    if not source.message.HasField("dynamic_batching"):
        return Mode.EAGER, eager_policy()
    batching, path = source.message.dynamic_batching, "dynamic_batching"
    if any(size < 1 for size in batching.preferred_batch_size):
        raise source.error(f"{path}.preferred_batch_size", "a preferred batch must be 1 or more")
    levels = batching.priority_levels
    policies = batching.priority_queue_policy if levels else {}
    fixed = FixedBatching(
        max_batch=1,
        preferred=tuple(sorted(set(batching.preferred_batch_size))),
        max_delay=batching.max_queue_delay_microseconds / 1e6,
        priority_levels=levels,
        default_priority=batching.default_priority_level if levels else 0,
        limits=_limits(source, batching.default_queue_policy, f"{path}.default_queue_policy"),
        level_limits={
            n: _limits(source, policies[n], f"{path}.priority_queue_policy") for n in sorted(policies)
        },
        preserve_ordering=batching.preserve_ordering,
    )
    return Mode.FIXED, rules.check_fixed(fixed, source.where(path))


def _limits(source: TextSource, policy: Any, path: str) -> QueueLimits:
    return QueueLimits(
        max_size=policy.max_queue_size,
        timeout=policy.default_timeout_microseconds / 1e6,
        allow_override=policy.allow_timeout_override,
        action=TimeoutAction[_chosen(source, policy, "timeout_action", f"{path}.timeout_action")],
    )


def _instance(source: TextSource, group: Any, path: str) -> InstanceGroup:
    if not 0 <= group.count <= rules.MAX_INSTANCES:
        raise source.error(f"{path}.count", f"count must be 1 to {rules.MAX_INSTANCES}, not {group.count}")
    kind = InstanceKind(_chosen(source, group, "kind", f"{path}.kind").removeprefix("KIND_").lower())
    gpus = tuple(group.gpus)
    if any(gpu < 0 for gpu in gpus):
        raise source.error(f"{path}.gpus", "GPUs are numbered from 0")
    if gpus and kind in (InstanceKind.CPU, InstanceKind.MODEL):
        raise source.error(f"{path}.gpus", f"KIND_{kind.upper()} does not take gpus")
    return InstanceGroup(group.count or 1, kind, gpus, group.name)


def _versions(source: TextSource) -> VersionPolicy:
    policy, path = source.message.version_policy, "version_policy"
    choice = policy.WhichOneof("policy_choice")
    if choice == "all":
        return AllVersions()
    if choice in (None, "latest"):
        if choice and policy.latest.num_versions < 1:
            raise source.error(f"{path}.latest", f"{path}.latest.num_versions must be 1 or more")
        return LatestVersions(policy.latest.num_versions or 1)
    versions = policy.specific.versions
    if not versions or min(versions) < 1:
        raise source.error(f"{path}.specific", f"{path}.specific.versions must list versions, each 1 or more")
    return SpecificVersions(tuple(sorted(set(versions))))


def _threads(parameters: Mapping[str, str], key: str, source: TextSource) -> int | None:
    """onnxruntime's thread counts; 0 is Triton's way to leave the choice to the runtime."""
    text = parameters.get(key, "0").strip()
    if not text.isascii() or not text.isdigit() or len(text) > 4:
        raise source.error(
            "parameters", f'parameter "{key}" must be a number of threads, not {rules.shown(text)}'
        )
    return int(text) or None
