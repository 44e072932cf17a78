"""config.pbtxt → ModelConfig, with Triton's meaning for every field that is used."""

from __future__ import annotations

from pathlib import Path

from carpool.config import rules
from carpool.config.backend_kinds import backend_of_platform, kind_of
from carpool.config.model import (
    AllVersions,
    InstanceGroup,
    Kind,
    LatestVersions,
    Mode,
    ModelConfig,
    OnnxruntimeSettings,
    SpecificVersions,
    TensorConfig,
    VersionPolicy,
    eager_policy,
)
from carpool.config.pbtxt import Message, parse
from carpool.config.triton_fields import Fields, check_fields
from carpool.config.triton_schema import V2_TYPES
from carpool.core.policy import Knobs, QueueLimits, TimeoutAction
from carpool.errors import ConfigError

PLATFORM_BACKENDS = {  # of those that nothing runs here
    "tensorrt_plan": "tensorrt",
    "tensorflow_graphdef": "tensorflow",
    "tensorflow_savedmodel": "tensorflow",
}
_THREADS = ("intra_op_thread_count", "inter_op_thread_count")
_LAYOUTS = {"FORMAT_NHWC": "nhwc", "FORMAT_NCHW": "nchw"}


def read_pbtxt(path: Path, name: str | None = None) -> tuple[ModelConfig, list[str]]:
    """The settings in one config.pbtxt, and at most one warning: the fields that have no effect here.

    `name` is for a file that gives none; by default its folder's name.
    """
    return pbtxt_config(rules.read_settings(path), path, name)


def pbtxt_config(text: str, path: Path, name: str | None = None) -> tuple[ModelConfig, list[str]]:
    """The same from text; `path` names the file in messages and its folder is the model's."""
    return tree_config(parse(text, str(path)), path, name)


def tree_config(tree: Message, path: Path, name: str | None = None) -> tuple[ModelConfig, list[str]]:
    """The same from a tree, whatever it was read from."""
    fields, idle = check_fields(tree)
    idle += _idle_levels(fields)
    config = _model(fields, path, name or path.parent.name)
    idle += _idle_parameters(config)
    warnings = [f"{path}: no effect here: {', '.join(idle)}"] if idle else []
    return config, warnings


def _model(fields: Fields, path: Path, name: str) -> ModelConfig:
    max_batch = _max_batch(fields)
    outputs = _tensors(fields, "output", max_batch)
    parameters = _parameters(fields)
    mode, policy = _policy(fields)
    cache = fields.message("response_cache")
    config = ModelConfig(
        name=rules.check_name(fields.text("name") or name, str(fields.at("name"))),
        path=path.parent,
        backend=_backend(fields),
        inputs=_tensors(fields, "input", max_batch),
        outputs=outputs,
        mode=mode,
        policy=policy,
        instances=_instances(fields),
        versions=_versions(fields),
        file=_file(fields),
        labels=next((t.labels for t in outputs if t.labels), None),
        response_cache=cache is not None and cache.flag("enable"),
        parameters=parameters,
        onnxruntime=OnnxruntimeSettings(
            intra_op_threads=_threads(parameters, _THREADS[0], fields),
            inter_op_threads=_threads(parameters, _THREADS[1], fields),
        ),
    )
    if max_batch is None:
        return config
    return rules.with_max_batch(config, max_batch, str(fields.at("dynamic_batching")))


def _max_batch(fields: Fields) -> int | None:
    """As in Triton, 0 equals absent: no batching where tensors are declared, else the model decides."""
    size = fields.integer("max_batch_size")
    if not 0 <= size <= rules.MAX_BATCH:
        raise fields.at("max_batch_size").error(f"max_batch_size must be 0 to {rules.MAX_BATCH}, not {size}")
    if size == 0:
        return 0 if fields.has("input") and fields.has("output") else None
    return size


def _backend(fields: Fields) -> str | None:
    platform, backend = fields.text("platform"), fields.text("backend")
    if platform == "ensemble":
        raise fields.at("platform").error("ensembles cannot be served yet")
    known = backend_of_platform(platform) or PLATFORM_BACKENDS.get(platform, platform)
    if platform and backend and known != backend:
        raise fields.at("backend").error(
            f'backend "{backend}" does not run platform "{platform}"; keep one of them'
        )
    return backend or known or None


def _file(fields: Fields) -> str | None:
    name = fields.text("default_model_filename")
    return rules.check_inside(name, str(fields.at("default_model_filename"))) if name else None


def _tensors(fields: Fields, name: str, max_batch: int | None) -> tuple[TensorConfig, ...]:
    tensors = [_tensor(item, name, max_batch) for item in fields.each(name)]
    return rules.check_distinct(tensors, f"{fields.at(name)}: {name}")


def _tensor(item: Fields, kind: str, max_batch: int | None) -> TensorConfig:
    for key in ("name", "data_type", "dims"):
        if not item.has(key):
            raise item.place.error(f"{kind} {rules.shown(item.text('name'))} has no {key}")
    where = f"{item.at('dims')}: {kind} {rules.shown(item.text('name'))}"
    datatype = V2_TYPES.get(item.text("data_type"))
    if datatype is None or not item.text("name") or not item.integers("dims"):
        raise ConfigError(f"{where} needs a name, a data_type and dims")
    reshape = item.message("reshape")
    labels = item.text("label_filename")
    tensor = TensorConfig(
        name=item.text("name"),
        datatype=datatype,
        dims=rules.check_dims(item.integers("dims"), where),
        reshape=None if reshape is None else rules.check_dims(reshape.integers("shape"), where),
        labels=rules.check_inside(labels, str(item.at("label_filename"))) if labels else None,
        optional=item.flag("optional"),
        layout=_LAYOUTS.get(item.text("format")),
    )
    return rules.check_tensor(tensor, where, max_batch)


def _policy(fields: Fields) -> tuple[Mode, Knobs]:
    batching = fields.message("dynamic_batching")
    if batching is None:
        return Mode.EAGER, eager_policy()
    where = str(fields.at("dynamic_batching"))
    preferred = batching.integers("preferred_batch_size")
    if any(size < 1 for size in preferred):
        raise batching.at("preferred_batch_size").error("a preferred batch must be 1 or more")
    levels = batching.integer("priority_levels")
    knobs = Knobs(
        max_batch=1,
        preferred=tuple(sorted(set(preferred))),
        max_delay=batching.integer("max_queue_delay_microseconds") / 1e6,
        priority_levels=levels,
        default_priority=batching.integer("default_priority_level") if levels else 0,
        limits=_limits(batching.message("default_queue_policy")),
        level_limits=_level_limits(batching) if levels else {},
        preserve_ordering=batching.flag("preserve_ordering"),
    )
    return Mode.KNOBS, rules.check_knobs(knobs, where)


def _level_limits(batching: Fields) -> dict[int, QueueLimits]:
    entries = batching.each("priority_queue_policy")
    return {entry.integer("key"): _limits(entry.message("value")) for entry in entries}


def _limits(policy: Fields | None) -> QueueLimits:
    if policy is None:
        return QueueLimits()
    return QueueLimits(
        max_size=policy.integer("max_queue_size"),
        timeout=policy.integer("default_timeout_microseconds") / 1e6,
        allow_override=policy.flag("allow_timeout_override"),
        action=TimeoutAction.DELAY if policy.text("timeout_action") == "DELAY" else TimeoutAction.REJECT,
    )


def _idle_levels(fields: Fields) -> list[str]:
    """Triton reads the limits of single levels only where there are levels."""
    batching = fields.message("dynamic_batching")
    if batching is None or batching.integer("priority_levels") or not batching.has("priority_queue_policy"):
        return []
    return ["dynamic_batching.priority_queue_policy"]


def _idle_parameters(config: ModelConfig) -> list[str]:
    """A Python model reads its parameters itself; those for a runtime do what it knows, or nothing."""
    known = kind_of(config.backend).parameters
    return [f"parameters.{key[:64]}" for key in config.parameters if known is not None and key not in known]


def _instances(fields: Fields) -> tuple[InstanceGroup, ...]:
    given = tuple(_instance(group) for group in fields.each("instance_group"))
    return given or (InstanceGroup(given=False),)


def _instance(group: Fields) -> InstanceGroup:
    count = group.integer("count")
    if not 0 <= count <= rules.MAX_INSTANCES:
        raise group.at("count").error(f"count must be 1 to {rules.MAX_INSTANCES}, not {count}")
    kind = Kind((group.text("kind") or "KIND_AUTO").removeprefix("KIND_").lower())
    gpus = tuple(group.integers("gpus"))
    if any(gpu < 0 for gpu in gpus):
        raise group.at("gpus").error("GPUs are numbered from 0")
    if gpus and kind in (Kind.CPU, Kind.MODEL):
        raise group.at("gpus").error(f"KIND_{kind.upper()} does not take gpus")
    return InstanceGroup(count or 1, kind, gpus, group.text("name"))


def _versions(fields: Fields) -> VersionPolicy:
    policy = fields.message("version_policy")
    if policy is None or not policy.places:
        return LatestVersions()
    if len(policy.places) > 1:
        raise policy.place.error(f"version_policy takes one of {', '.join(policy.places)}, not several")
    if policy.has("all"):
        return AllVersions()
    latest, specific = policy.message("latest"), policy.message("specific")
    if latest is not None:
        if latest.integer("num_versions") < 1:
            raise latest.place.error("version_policy.latest.num_versions must be 1 or more")
        return LatestVersions(latest.integer("num_versions"))
    versions = specific.integers("versions") if specific is not None else []
    if not versions or min(versions) < 1:
        raise policy.place.error("version_policy.specific.versions must list versions, each 1 or more")
    return SpecificVersions(tuple(sorted(set(versions))))


def _parameters(fields: Fields) -> dict[str, str]:
    found = {}
    for entry in fields.each("parameters"):
        value = entry.message("value")
        found[entry.text("key")] = value.text("string_value") if value is not None else ""
    return found


def _threads(parameters: dict[str, str], key: str, fields: Fields) -> int | None:
    """onnxruntime's thread counts; 0 is Triton's way to leave the choice to the runtime."""
    text = parameters.get(key, "0").strip()
    if not text.isascii() or not text.isdigit() or len(text) > 4:
        raise fields.at("parameters").error(
            f'parameter "{key}" must be a number of threads, not {rules.shown(text)}'
        )
    return int(text) or None
