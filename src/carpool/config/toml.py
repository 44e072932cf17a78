"""model.toml → ModelConfig. Every key is known, typed and in range, or the error names it."""

from __future__ import annotations

import tomllib
from pathlib import Path

from carpool.config import rules
from carpool.config.backend_kinds import kinds
from carpool.config.model import (
    DATATYPES,
    AllVersions,
    InstanceGroup,
    Kind,
    LatestVersions,
    Mode,
    ModelConfig,
    SpecificVersions,
    TensorConfig,
    VersionPolicy,
    eager_policy,
    task_names,
)
from carpool.config.table import Table
from carpool.config.toml_pytorch import pytorch
from carpool.config.toml_sections import classify, detect, embed, fake, image, onnxruntime, segment
from carpool.core.policy import Knobs, Promise, QueueLimits, TimeoutAction
from carpool.errors import ConfigError

MAX_VERSION = 10**18


def read_toml(path: Path, name: str | None = None) -> ModelConfig:
    """The settings in one model.toml; `name` is for a file that gives none, by default its folder's."""
    return toml_config(rules.read_settings(path), path, name)


def toml_config(text: str, path: Path, name: str | None = None) -> ModelConfig:
    """The same from text; `path` names the file in messages and its folder is the model's."""
    try:
        data = tomllib.loads(text)
    except RecursionError:
        raise ConfigError(f"{path}: nested too deep") from None
    except ValueError as error:  # also what int() says about thousands of digits
        raise ConfigError(f"{path}: {error}") from None
    return _model(Table.checked(str(path), "", "", data), path, name or path.parent.name)


def _model(top: Table, path: Path, name: str) -> ModelConfig:
    max_batch = top.integer("max_batch", 0, rules.MAX_BATCH)
    mode, policy = _policy(top)
    timeout_ms = top.number("execution_timeout_ms", 0)
    task = top.text("task", task_names()) if top.has("task") else None
    fake_settings = fake(top.table("fake"))
    config = ModelConfig(
        name=rules.check_name(top.text("name") or name, top.where("name")),
        path=path.parent,
        backend=_backend(top),
        task=next((known for known in task_names() if known == task), None),
        inputs=_tensors(top, "input", max_batch),
        outputs=_tensors(top, "output", max_batch),
        mode=mode,
        policy=policy,
        slo_may_grow=_may_grow(top, mode),
        instances=_instances(top),
        versions=_versions(top),
        file=_inside(top, "file"),
        labels=_inside(top, "labels"),
        execution_timeout=None if timeout_ms is None else timeout_ms / 1e3,
        response_cache=top.flag("response_cache", False),
        device_weight=_weight(top),
        parameters=_parameters(top),
        onnxruntime=onnxruntime(top.table("onnxruntime")),
        pytorch=pytorch(top.table("pytorch")),
        image=image(top.table("image")),
        detect=detect(top.table("detect")),
        classify=classify(top.table("classify")),
        segment=segment(top.table("segment")),
        embed=embed(top.table("embed")),
        fake=fake_settings,
    )
    if max_batch is None:
        return config
    return rules.with_max_batch(config, max_batch, top.where("batching"))


def _backend(top: Table) -> str | None:
    """As it is named, or as the table of one tells: [fake] and [pytorch] say things that no other runs."""
    backend = top.text("backend", kinds())
    for name in (kind.name for kind in kinds().values() if kind.table and top.has(kind.name)):
        if backend not in (None, name):
            raise ConfigError(
                f'{top.file}: [{name}] and backend = "{backend}" contradict each other; remove one'
            )
        backend = name
    return backend


def _weight(top: Table) -> float:
    weight = top.number("device_weight", 0, above=True)
    if weight is not None and not 0.001 <= weight <= 1000:
        raise top.error("device_weight", "must be between 0.001 and 1000: twice another's is twice its time")
    return 1.0 if weight is None else weight


def _inside(table: Table, key: str) -> str | None:
    name = table.text(key)
    return None if name is None else rules.check_inside(name, table.where(key))


def _policy(top: Table) -> tuple[Mode, Promise | Knobs]:
    slo_ms = top.number("slo_ms", 0, above=True)
    batching = top.table("batching")
    if slo_ms is not None and batching is not None:
        raise ConfigError(
            f"{top.file}: slo_ms and [batching] are two ways to run a model; keep slo_ms for a promise, "
            "or [batching] to set the knobs yourself"
        )
    if slo_ms is not None:
        return Mode.PROMISE, Promise(slo=slo_ms / 1e3, max_batch=1)
    if batching is not None:
        return Mode.KNOBS, _knobs(batching)
    return Mode.EAGER, eager_policy()


def _may_grow(top: Table, mode: Mode) -> bool:
    grows = top.flag("slo_may_grow", False)
    if grows and mode is not Mode.PROMISE:
        raise top.error("slo_may_grow", "needs slo_ms: without a promise nothing can grow")
    return grows


def _knobs(batching: Table) -> Knobs:
    priorities = batching.table("priorities")
    levels, default = 0, 0
    if priorities is not None:
        levels = priorities.integer("levels", 1, rules.MAX_PRIORITY_LEVELS) or 0
        default = priorities.integer("default", 1, rules.MAX_PRIORITY_LEVELS) or 0
        if not levels or not default:
            raise batching.error("priorities", "needs both levels and default")
    knobs = Knobs(
        max_batch=1,
        preferred=tuple(sorted(set(batching.integers("preferred", 1, rules.MAX_BATCH) or ()))),
        max_delay=(batching.number("max_delay_ms", 0) or 0.0) / 1e3,
        priority_levels=levels,
        default_priority=default,
        limits=_limits(batching),
        level_limits=_level_limits(batching),
        preserve_ordering=batching.flag("preserve_ordering", False),
    )
    return rules.check_knobs(knobs, f"{batching.file}: {batching.path}")


def _limits(table: Table) -> QueueLimits:
    action = table.text("timeout_action", [action.value for action in TimeoutAction])
    return QueueLimits(
        max_size=table.integer("max_queue_size", 0, 2**32 - 1) or 0,
        timeout=(table.number("timeout_ms", 0) or 0.0) / 1e3,
        allow_override=table.flag("allow_timeout_override", False),
        action=TimeoutAction(action) if action else TimeoutAction.REJECT,
    )


def _level_limits(batching: Table) -> dict[int, QueueLimits]:
    """[batching.level.N]: N is the level, so these keys are numbers and not names."""
    levels = batching.data.get("level", {})
    if not isinstance(levels, dict):
        raise batching.error("level", "holds one table per priority level, like [batching.level.1]")
    limits = {}
    for key, data in levels.items():
        if not key.isascii() or not key.isdigit() or len(key) > 5:
            raise batching.error("level", f"holds one table per priority level, not {rules.shown(key)}")
        path = f"{batching.name('level')}.{key}"
        limits[int(key)] = _limits(Table.checked(batching.file, path, "batching.level", data))
    return limits


def _instances(top: Table) -> tuple[InstanceGroup, ...]:
    if isinstance(top.data.get("instances"), list):
        groups = tuple(_instance(table) for table in top.tables("instances"))
        if not groups:
            raise top.error("instances", "must name at least one group")
        return groups
    count = top.integer("instances", 1, rules.MAX_INSTANCES)
    return (InstanceGroup(given=False) if count is None else InstanceGroup(count),)


def _instance(table: Table) -> InstanceGroup:
    kind = Kind(table.text("kind", list(Kind)) or Kind.AUTO)
    gpus = table.integers("gpus", 0, 1023) or ()
    if gpus and kind in (Kind.CPU, Kind.MODEL):
        raise table.error("gpus", f'does not go with kind = "{kind}"')
    return InstanceGroup(table.integer("count", 1, rules.MAX_INSTANCES) or 1, kind, gpus)


def _versions(top: Table) -> VersionPolicy:
    value = top.data.get("versions")
    if value is None:
        return LatestVersions()
    if value == "all":
        return AllVersions()
    if isinstance(value, list):
        versions = top.integers("versions", 1, MAX_VERSION) or ()
        if versions:
            return SpecificVersions(tuple(sorted(set(versions))))
    if isinstance(value, dict):
        table = Table.checked(top.file, "versions", "versions", value)
        latest = table.integer("latest", 1, MAX_VERSION)
        if latest:
            return LatestVersions(latest)
    raise top.error("versions", 'must be "all", a list like [1, 3], or { latest = 2 }')


def _parameters(top: Table) -> dict[str, str]:
    """Free names for the model's own use, so only the types are checked; numbers are passed on as written."""
    data = top.data.get("parameters", {})
    if not isinstance(data, dict):
        raise top.error("parameters", "must be a table")
    for key, value in data.items():
        if not isinstance(value, str | int | float):
            raise top.error(f"parameters.{key[:64]}", "must be a string, a number, true or false")
    return {key: str(value).lower() if isinstance(value, bool) else str(value) for key, value in data.items()}


def _tensors(top: Table, key: str, max_batch: int | None) -> tuple[TensorConfig, ...]:
    tensors = [_tensor(table, max_batch) for table in top.tables(key)]
    return rules.check_distinct(tensors, f"{top.file}: {key}")


def _tensor(table: Table, max_batch: int | None) -> TensorConfig:
    name, datatype = table.text("name"), table.text("datatype", DATATYPES)
    shape = table.integers("shape", -1, 2**62)
    if not name or not datatype or shape is None:
        raise ConfigError(f"{table.file}: {table.path} needs name, datatype and shape")
    reshape = table.integers("reshape", -1, 2**62)
    tensor = TensorConfig(
        name=name,
        datatype=datatype,
        dims=rules.check_dims(shape, table.where("shape")),
        reshape=None if reshape is None else rules.check_dims(reshape, table.where("reshape")),
        labels=_inside(table, "labels"),
        optional=table.flag("optional", False),
        layout=table.text("layout", ("nchw", "nhwc")),
    )
    return rules.check_tensor(tensor, f"{table.file}: {table.path}", max_batch)
