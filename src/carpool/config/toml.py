"""Reads model.toml. Every key is known, typed and in range, or the error names it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from carpool.config import rules
from carpool.config.backend_kinds import backend_of_platform, home_of, kinds
from carpool.config.declared_keys import ReadKey, Said, read_declared
from carpool.config.known_keys import SECTIONS
from carpool.config.model import (
    LAYOUTS,
    AllVersions,
    ImageSettings,
    InstanceGroup,
    InstanceKind,
    LatestVersions,
    Mode,
    ModelConfig,
    SpecificVersions,
    TensorConfig,
    VersionPolicy,
    eager_policy,
    task_names,
)
from carpool.config.presets import PRESETS, preset_fields, with_preset
from carpool.config.settings_part import read_extra, settled_by_toml
from carpool.config.table import TomlTable
from carpool.config.toml_text import parse_toml
from carpool.core.objectives import FixedBatching, Promise, QueueLimits, TimeoutAction
from carpool.errors import ConfigError
from carpool.types import DATATYPES

MAX_VERSION = 10**18
BUILD = "build"  # the function that a module file has, where none is named
_MODULE = re.compile(r"(?P<file>[^:]+\.py)(?::(?P<function>[A-Za-z_]\w*))?")


# ---- the file as a whole --------------------------------------------------------------------------------


def read_toml(path: Path, name: str | None = None) -> ModelConfig:
    """The settings in one model.toml; `name` is for a file that gives none, by default its folder's."""
    return toml_config(rules.read_settings(path), path, name)


def toml_config(text: str, path: Path, name: str | None = None) -> ModelConfig:
    """The same from text; `path` names the file in messages and its folder is the model's."""
    data = parse_toml(text, str(path))
    return _model(TomlTable.checked(str(path), "", "", data), path, name or path.parent.name)


def _model(top: TomlTable, path: Path, name: str) -> ModelConfig:
    max_batch = top.integer("max_batch", 0, rules.MAX_BATCH)
    mode, policy = _policy(top)
    timeout_ms = top.number("execution_timeout_ms", 0)
    task = top.text("task", task_names())
    inputs, outputs = _tensors(top, "input", max_batch), _tensors(top, "output", max_batch)
    preset = top.text("preset", PRESETS)
    usual = ImageSettings().resize if preset is None else preset_fields(preset, task)["resize"]
    config = ModelConfig(
        name=rules.check_name(top.text("name") or name, top.where("name")),
        path=path.parent,
        backend=_backend(top),
        task=next((known for known in task_names() if known == task), None),
        preset=preset,
        image_keys=None if (image := top.table("image")) is None else tuple(image.data),
        inputs=inputs,
        outputs=outputs,
        mode=mode,
        policy=policy,
        slo_may_grow=top.flag("slo_may_grow"),
        instances=_instances(top),
        versions=read_versions(top),
        file=top.inside("file"),
        labels=top.inside("labels"),
        execution_timeout=None if timeout_ms is None else timeout_ms / 1e3,
        decoupled=top.flag("decoupled"),
        max_open=_max_open(top),
        device_weight=_weight(top),
        parameters=_parameters(top),
        **{name: _section(table, usual) for name in SECTIONS if (table := top.table(name)) is not None},
        extra=read_extra(top),
    )
    config = with_preset(settled_by_toml(top, config))
    if config.image is not None and "scale" not in (config.image_keys or ()):
        _check_units(top, config.image)
    if max_batch is None:
        return config
    return rules.with_max_batch(config, max_batch, top.where("batching"))


def _check_units(top: TomlTable, image: ImageSettings) -> None:
    """Numbers of up to 1 are those of pixels from 0 to 1, larger ones those of pixels from 0 to 255; a mean
    of 0 and a std of 1 are those of both."""
    mean, std = max(map(abs, image.mean)), [one for one in image.std if one != 1.0]
    if not mean or not std or (mean <= 1.0) == (max(std) <= 1.0):
        return
    small, large = ("mean", "std") if mean <= 1.0 else ("std", "mean")
    found = f"{small} {list(getattr(image, small))} is of pixels from 0 to 1, and {large} "
    found += f"{list(getattr(image, large))} of pixels from 0 to 255"
    raise top.error("image.mean", f"and image.std mix two units: {found}; write both in one, or set scale")


def _max_open(top: TomlTable) -> int:
    most = top.integer("max_open", 1, rules.MAX_OPEN)
    if most is not None and not top.flag("decoupled"):
        raise top.error("max_open", "is for models with decoupled = true")
    return most or 0


def _backend(top: TomlTable) -> str | None:
    """Returns the backend as it is named, or as the table of one implies: [fake] and [pytorch] say things
    that no other runs."""
    backend = top.text("backend")
    if backend is not None and backend not in kinds():
        meant = backend_of_platform(backend) or home_of(f".{backend}")
        advice = f'did you mean "{meant}"?' if meant else rules.nearest(backend, kinds())
        raise top.error("backend", f"cannot be {rules.shown(backend)}; {advice}")
    for kind in (kind for kind in kinds().values() if kind.table and top.has(kind.name)):
        if backend is None:
            backend = kind.name
        elif kinds()[backend].home != kind.home:  # those with the same home take the same settings
            raise ConfigError(
                f'{top.file}: [{kind.name}] and backend = "{backend}" contradict each other; remove one'
            )
    return backend


def _weight(top: TomlTable) -> float:
    weight = top.number("device_weight", 0, above=True)
    if weight is not None and not 0.001 <= weight <= 1000:
        raise top.error(
            "device_weight", "must be between 0.001 and 1000: a weight twice as large gets twice the time"
        )
    return 1.0 if weight is None else weight


def _sizes(table: TomlTable, key: str) -> tuple[int, ...]:
    """Returns sizes of batches."""
    return tuple(sorted(set(table.integers(key, 1, rules.MAX_BATCH) or ())))


def _policy(top: TomlTable) -> tuple[Mode, Promise | FixedBatching]:
    slo_ms = top.number("slo_ms", 0, above=True)
    batching = top.table("batching")
    if slo_ms is not None and batching is not None:
        raise ConfigError(
            f"{top.file}: slo_ms and [batching] exclude each other; keep slo_ms for an SLO, or [batching] "
            "for fixed settings"
        )
    if slo_ms is not None:
        return Mode.PROMISE, Promise(slo=slo_ms / 1e3, max_batch=1)
    if top.flag("slo_may_grow"):
        raise top.error("slo_may_grow", "needs slo_ms: without an SLO there is nothing to raise")
    if batching is not None:
        return Mode.FIXED, _fixed(batching)
    return Mode.EAGER, eager_policy()


def _fixed(batching: TomlTable) -> FixedBatching:
    priorities = batching.table("priorities")
    levels, default = 0, 0
    if priorities is not None:
        levels = priorities.integer("levels", 1, rules.MAX_PRIORITY_LEVELS) or 0
        default = priorities.integer("default", 1, rules.MAX_PRIORITY_LEVELS) or 0
        if not levels or not default:
            raise batching.error("priorities", "needs both levels and default")
    fixed = FixedBatching(
        max_batch=1,
        preferred=_sizes(batching, "preferred"),
        max_delay=(batching.number("max_delay_ms", 0) or 0.0) / 1e3,
        priority_levels=levels,
        default_priority=default,
        limits=_limits(batching),
        level_limits=_level_limits(batching),
        preserve_ordering=batching.flag("preserve_ordering"),
    )
    return rules.check_fixed(fixed, f"{batching.file}: {batching.path}")


def _limits(table: TomlTable) -> QueueLimits:
    action = table.text("timeout_action", [action.value for action in TimeoutAction])
    return QueueLimits(
        max_size=table.integer("max_queue_size", 0, 2**32 - 1) or 0,
        timeout=(table.number("timeout_ms", 0) or 0.0) / 1e3,
        allow_override=table.flag("allow_timeout_override"),
        action=TimeoutAction(action) if action else TimeoutAction.REJECT,
    )


def _level_limits(batching: TomlTable) -> dict[int, QueueLimits]:
    """[batching.level.N]: N is the level, so these keys are numbers and not names."""
    levels = batching.data.get("level", {})
    if not isinstance(levels, dict):
        raise batching.error("level", "holds one table per priority level, like [batching.level.1]")
    limits = {}
    for key, data in levels.items():
        if not key.isascii() or not key.isdigit() or len(key) > 5:
            raise batching.error("level", f"holds one table per priority level, not {rules.shown(key)}")
        path = f"{batching.name('level')}.{key}"
        limits[int(key)] = _limits(TomlTable.checked(batching.file, path, "batching.level", data))
    return limits


def _instances(top: TomlTable) -> tuple[InstanceGroup, ...]:
    if isinstance(top.data.get("instances"), list):
        groups = tuple(_instance(table) for table in top.tables("instances"))
        if not groups:
            raise top.error("instances", "must name at least one group")
        return groups
    count = top.integer("instances", 1, rules.MAX_INSTANCES)
    return (InstanceGroup(given=False) if count is None else InstanceGroup(count),)


def _instance(table: TomlTable) -> InstanceGroup:
    kind = InstanceKind(table.text("kind", list(InstanceKind)) or InstanceKind.AUTO)
    gpus = table.integers("gpus", 0, 1023) or ()
    if gpus and kind in (InstanceKind.CPU, InstanceKind.MODEL):
        raise table.error("gpus", f'does not go with kind = "{kind}"')
    return InstanceGroup(table.integer("count", 1, rules.MAX_INSTANCES) or 1, kind, gpus)


def read_versions(top: TomlTable) -> VersionPolicy:
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
        table = TomlTable.checked(top.file, "versions", "versions", value)
        latest = table.integer("latest", 1, MAX_VERSION)
        if latest:
            return LatestVersions(latest)
    raise top.error("versions", 'must be "all", a list like [1, 3], or { latest = 2 }')


def _parameters(top: TomlTable) -> dict[str, str]:
    """Free names for the model's own use, so only the types are checked; numbers are passed on as written."""
    data = top.data.get("parameters", {})
    if not isinstance(data, dict):
        raise top.error("parameters", "must be a table")
    for key, value in data.items():
        if not isinstance(value, str | int | float):
            raise top.error(f"parameters.{key[:64]}", "must be a string, a number, true or false")
    return {key: str(value).lower() if isinstance(value, bool) else str(value) for key, value in data.items()}


def _tensors(top: TomlTable, key: str, max_batch: int | None) -> tuple[TensorConfig, ...]:
    tensors = [_tensor(table, max_batch) for table in top.tables(key)]
    return rules.check_distinct(tensors, f"{top.file}: {key}")


def _tensor(table: TomlTable, max_batch: int | None) -> TensorConfig:
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
        labels=table.inside("labels"),
        optional=table.flag("optional"),
        layout=table.text("layout", LAYOUTS),
    )
    return rules.check_tensor(tensor, f"{table.file}: {table.path}", max_batch)


# ---- tables that describe pictures and runtimes ------------------------------------------------------------


def _section(table: TomlTable, usual_resize: str) -> Any:
    kind = SECTIONS[table.section]
    for each in fields(kind):
        ways, resize = each.metadata.get("resize"), table.data.get("resize", usual_resize)
        if ways is not None and table.has(each.name) and resize not in ways:
            listed = " or ".join(f'"{way}"' for way in ways)
            raise table.error(each.name, f'goes with resize = {listed}, not with "{resize}"')
    return read_declared(table, kind, _OWN_WAYS.get(table.section, {}))


def _keypoints(table: TomlTable, key: str, said: Said) -> tuple[int, ...] | None:
    keypoints = table.integers(key, *said["within"])
    if keypoints is not None and (len(keypoints) != 2 or keypoints[1] not in (2, 3)):
        raise table.error(key, "must be the number of keypoints and 2 or 3 numbers for each, like [17, 3]")
    return keypoints


def _compile(table: TomlTable, key: str, _: Said) -> str:
    if isinstance(table.data.get(key), str):
        return table.text(key, ("default", "max-autotune", "before-ready")) or "off"
    return "default" if table.flag(key) else "off"


def _module(table: TomlTable, key: str, _: Said) -> str | None:
    """Returns a file of the version's folder and a function in it."""
    text = table.text(key)
    if text is None:
        return None
    found = _MODULE.fullmatch(text)
    if found is None:
        raise table.error(
            key, f'must name a file and a function, like "model.py:build", not {rules.shown(text)}'
        )
    return f"{rules.check_inside(found['file'], table.where(key))}:{found['function'] or BUILD}"


_OWN_WAYS: Mapping[str, Mapping[str, ReadKey]] = {
    "pose": {"keypoints": _keypoints},
    "pytorch": {
        "buckets": lambda table, key, _: tuple(sorted({*(table.integers(key, 1, rules.MAX_BATCH) or ())})),
        "compile": _compile,
        "module": _module,
        "weights": lambda table, key, _: table.inside(key),
    },
}
"""Keys whose type does not say how they are read, by table."""
