"""Reads model.toml. Every key is known, typed and in range, or the error names it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from carpool.config import rules
from carpool.config.backend_kinds import backend_of_platform, home_of, kinds
from carpool.config.drift_settings import LEAST_HOURS, MOST_HOURS, DriftSettings, UncertainSettings, hours_of
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
from carpool.config.registry_settings import RegistrySettings, read_address
from carpool.config.rollout_table import read_rollout
from carpool.config.sequence_settings import (
    CONTROL_KINDS,
    CORRID,
    DEFAULT_BACKLOG_MB,
    DIRECT,
    FLAG_TYPES,
    ID_TYPES,
    MAX_CANDIDATES,
    OLDEST,
    STRATEGIES,
    ControlInput,
    SequenceSettings,
    StateTensor,
    check_sequences,
)
from carpool.config.table import SECTIONS, TomlTable
from carpool.config.toml_text import parse_toml
from carpool.core.objectives import Knobs, Promise, QueueLimits, TimeoutAction
from carpool.errors import ConfigError
from carpool.types import DATATYPES

Said = Mapping[str, Any]
"""Of a key: see `_key` in model.py."""

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
    ttft_ms, per_token_ms = (top.number(key, 0, above=True) for key in ("ttft_ms", "per_token_ms"))
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
        file=_inside(top, "file"),
        labels=_inside(top, "labels"),
        execution_timeout=None if timeout_ms is None else timeout_ms / 1e3,
        decoupled=top.flag("decoupled"),
        max_open=_max_open(top),
        response_cache=top.flag("response_cache"),
        device_weight=_weight(top),
        ttft=None if ttft_ms is None else ttft_ms / 1e3,
        per_token=None if per_token_ms is None else per_token_ms / 1e3,
        parameters=_parameters(top),
        drift=_drift(top.table("drift")),
        rollout=read_rollout(top.table("rollout")),
        sequences=_sequences(top.table("sequences"), inputs),
        **{name: _section(table, usual) for name in SECTIONS if (table := top.table(name)) is not None},
    )
    if config.registry is not None:
        _check_registry(top, config.registry)
    config = with_preset(_checked_generation(top, config))
    if config.image is not None and "scale" not in (config.image_keys or ()):
        _check_units(top, config.image)
    if config.rollout is not None and top.has("versions"):
        raise top.error("versions", "does not go with [rollout], which chooses the versions itself")
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


_NOT_WRITTEN = (
    *("batching", "max_batch", "decoupled", "max_open", "response_cache", "cache", "slo_may_grow"),
    *("rollout", "input", "output", "sequences"),
)
"""What says nothing of a model that writes: its batches are steps, and its tensors are known."""


def _max_open(top: TomlTable) -> int:
    most = top.integer("max_open", 1, rules.MAX_OPEN)
    if most is not None and not top.flag("decoupled"):
        raise top.error("max_open", "is for models with decoupled = true")
    return most or 0


def _checked_generation(top: TomlTable, config: ModelConfig) -> ModelConfig:
    if config.generate is None:
        for key in ("ttft_ms", "per_token_ms", "encoder", "decoder"):
            if top.has(key):
                other = ", or use slo_ms" if key.endswith("_ms") else ""
                raise top.error(key, f"is for models that write token by token: add [generate]{other}")
        return config
    for key, what in (dict.fromkeys(_NOT_WRITTEN, "[generate]") | _beside_pools(top, config)).items():
        if top.has(key):
            raise top.error(key, f"does not go with {what}")
    _check_beside_text(top, config)
    if config.backend not in (None, "pytorch", "fake"):
        raise top.error("backend", f'cannot be "{config.backend}" with [generate]: "pytorch" has such models')
    if config.backend == "fake":
        return config
    return replace(config, backend="pytorch", file=config.file or "model.safetensors")


def _check_beside_text(top: TomlTable, config: ModelConfig) -> None:
    if config.image is not None and config.image.decode == "device":
        raise top.error("image.decode", 'cannot be "device" with [generate]: front ends decode its images')
    if config.pytorch.compile != "off":
        raise top.error("pytorch.compile", "does not go with [generate]: its steps are CUDA graphs already")
    if config.registry is not None and config.registry.candidate:
        raise top.error("registry.candidate", "does not go with [generate], whose responses are not compared")


def _beside_pools(top: TomlTable, config: ModelConfig) -> dict[str, str]:
    """Returns the keys that do not go with pools of encoders and decoders, and what stands in their place."""
    if config.encoder is not None and config.encoder.own_process:
        raise top.error("encoder.own_process", "was removed: encoders are threads beside the decoders")
    return {"instances": "[encoder] and [decoder], which have their own"} if config.apart else {}


def _check_registry(top: TomlTable, registry: RegistrySettings) -> None:
    if not registry.stable:
        raise top.error("registry.stable", 'is needed: an address like "models:/detector@champion"')
    if top.has("versions"):
        raise top.error("versions", "and [registry] contradict each other; the registry chooses the version")
    names = {read_address(address).name for address in (registry.stable, registry.candidate) if address}
    if len(names) > 1:
        raise top.error(
            "registry.candidate", f"must be of the same model as stable: {' and '.join(sorted(names))}"
        )


def _backend(top: TomlTable) -> str | None:
    """Returns the backend as it is named, or as the table of one tells: [fake] and [pytorch] say things that
    no other runs."""
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


def _inside(table: TomlTable, key: str, _: Said | None = None) -> str | None:
    name = table.text(key)
    return None if name is None else rules.check_inside(name, table.where(key))


def _policy(top: TomlTable) -> tuple[Mode, Promise | Knobs]:
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
        return Mode.KNOBS, _knobs(batching)
    return Mode.EAGER, eager_policy()


def _knobs(batching: TomlTable) -> Knobs:
    priorities = batching.table("priorities")
    levels, default = 0, 0
    if priorities is not None:
        levels = priorities.integer("levels", 1, rules.MAX_PRIORITY_LEVELS) or 0
        default = priorities.integer("default", 1, rules.MAX_PRIORITY_LEVELS) or 0
        if not levels or not default:
            raise batching.error("priorities", "needs both levels and default")
    knobs = Knobs(
        max_batch=1,
        preferred=_sizes(batching, "preferred"),
        max_delay=(batching.number("max_delay_ms", 0) or 0.0) / 1e3,
        priority_levels=levels,
        default_priority=default,
        limits=_limits(batching),
        level_limits=_level_limits(batching),
        preserve_ordering=batching.flag("preserve_ordering"),
    )
    return rules.check_knobs(knobs, f"{batching.file}: {batching.path}")


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
        labels=_inside(table, "labels"),
        optional=table.flag("optional"),
        layout=table.text("layout", LAYOUTS),
    )
    return rules.check_tensor(tensor, f"{table.file}: {table.path}", max_batch)


# ---- tables with rules of their own ------------------------------------------------------------------------


def _drift(table: TomlTable | None) -> DriftSettings | None:
    if table is None:
        return None
    usual = DriftSettings()
    sample = table.number("sample", 0.0, 1.0, above=True)
    window_h = table.number("window_h", LEAST_HOURS, MOST_HOURS)
    psi = table.number("psi", 0.0, 100.0, above=True)
    return DriftSettings(
        usual.sample if sample is None else sample,
        usual.window_h if window_h is None else window_h,
        _drift_reference(table) or usual.reference,
        usual.psi if psi is None else psi,
        _uncertain(table.table("uncertain")),
    )


def _drift_reference(table: TomlTable) -> str | None:
    text = table.text("reference")
    if text is None or hours_of(text):
        return text
    if not text.endswith(".json"):
        raise table.error(
            "reference",
            f'must be like "first-24h", with {LEAST_HOURS:g} to {MOST_HOURS:g} hours, or a .json file, '
            f'not "{text[:64]}"',
        )
    return _inside(table, "reference")


def _uncertain(table: TomlTable | None) -> UncertainSettings:
    usual = UncertainSettings()
    if table is None:
        return usual
    folder = table.text("folder") or ""
    if folder and not folder.startswith("/"):
        _inside(table, "folder")
    score = table.numbers("score", 0.0) or usual.score
    if len(score) != 2 or not score[0] <= score[1] <= 1.0:
        raise table.error("score", "must be the lowest and the highest score, like [0.3, 0.5]")
    margin = table.number("margin", 0.0, 1.0)
    mb = table.number("mb", 0.0, 1e6, above=True)
    return UncertainSettings(
        folder,
        (score[0], score[1]),
        usual.margin if margin is None else margin,
        table.integer("per_hour", 1, 100_000) or usual.per_hour,
        usual.mb if mb is None else mb,
    )


def _sequences(table: TomlTable | None, inputs: Sequence[TensorConfig]) -> SequenceSettings | None:
    if table is None:
        return None
    usual = SequenceSettings()
    strategy = table.text("strategy", STRATEGIES) or OLDEST
    for key, needed in (("max_candidates", OLDEST), ("min_utilization", DIRECT), ("max_delay_ms", DIRECT)):
        if table.has(key) and strategy != needed:
            hint = "; the oldest strategy waits as [batching] says" if key == "max_delay_ms" else ""
            raise table.error(key, f'goes with strategy = "{needed}"{hint}')
    idle_ms = table.number("idle_ms", 0, 1e12, above=True)
    max_wait_ms = table.number("max_wait_ms", 0, 1e12, above=True)
    max_backlog = table.integer("max_backlog", 0, 1 << 20)
    settings = SequenceSettings(
        strategy,
        table.integer("max_candidates", 1, MAX_CANDIDATES) or 0,
        usual.idle if idle_ms is None else idle_ms / 1e3,
        table.number("min_utilization", 0, 1) or 0.0,
        (table.number("max_delay_ms", 0) or 0.0) / 1e3,
        usual.max_wait if max_wait_ms is None else max_wait_ms / 1e3,
        usual.max_backlog if max_backlog is None else max_backlog,
        (table.integer("max_backlog_mb", 1, 1 << 20) or DEFAULT_BACKLOG_MB) << 20,
        tuple(map(_control, table.tables("control"))),
        tuple(map(_state, table.tables("state"))),
    )
    return check_sequences(settings, f"{table.file}: [sequences]", [tensor.name for tensor in inputs])


def _control(table: TomlTable) -> ControlInput:
    name, kind = table.text("name"), table.text("kind", CONTROL_KINDS)
    if not name or not kind:
        raise ConfigError(f"{table.file}: {table.path} needs a name and a kind: {', '.join(CONTROL_KINDS)}")
    if kind == CORRID:
        if table.has("values"):
            raise table.error("values", "does not apply to the id of a sequence, which is passed as it is")
        return ControlInput(name, kind, table.text("datatype", ID_TYPES) or "UINT64")
    datatype = table.text("datatype", FLAG_TYPES) or "INT32"
    values = table.numbers("values", float("-inf")) or (0, 1)
    if len(values) != 2 or (datatype == "INT32" and any(value != int(value) for value in values)):
        raise table.error("values", "must be two numbers of its datatype, for no and for yes, like [0, 1]")
    return ControlInput(name, kind, datatype, (values[0], values[1]))


def _state(table: TomlTable) -> StateTensor:
    given, taken = table.text("input"), table.text("output")
    datatype, shape = table.text("datatype", DATATYPES), table.integers("shape", -1, 2**31)
    if not given or not taken or not datatype or not shape:
        raise ConfigError(f"{table.file}: {table.path} needs input, output, datatype and shape")
    initial = table.integers("initial_shape", 1, 2**31) or ()
    return StateTensor(given, taken, datatype, shape, initial, _inside(table, "file") or "")


# ---- tables that describe pictures and runtimes ------------------------------------------------------------


def _section(table: TomlTable, usual_resize: str) -> Any:
    """Returns what is said; the rest is as the settings have it by themselves."""
    values: dict[str, object] = {}
    for key in fields(SECTIONS[table.section]):
        said = key.metadata
        resize = table.data.get("resize", usual_resize)
        if table.has(key.name) and resize not in said.get("resize", [resize]):
            ways = " or ".join(f'"{way}"' for way in said["resize"])
            raise table.error(key.name, f'goes with resize = {ways}, not with "{resize}"')
        kind = str(key.type).removesuffix(" | None")
        read = _OWN_WAYS.get(f"{table.section}.{key.name}") or _BY_TYPE[kind]
        values[key.name] = read(table, key.name, said)
    return SECTIONS[table.section](**{name: value for name, value in values.items() if value is not None})


def _text(table: TomlTable, key: str, said: Said) -> str | None:
    text = table.text(key, said["choices"]) or None
    if text is not None and not re.fullmatch(said.get("pattern", ".*"), text, re.DOTALL):
        raise table.error(key, f"must be {said['form']}, not {rules.shown(text)}")
    return text


def _per_channel(table: TomlTable, key: str, said: Said) -> tuple[float, ...] | None:
    values = table.numbers(key, said["within"][0], above=said.get("above", False))
    if values is not None and len(values) not in (1, 3):
        raise table.error(key, f"must be one number, or one per channel, not {len(values)} numbers")
    return values


def _size(table: TomlTable, key: str, said: Said) -> tuple[int, int] | None:
    """Returns one number for a square, or height and width."""
    if not isinstance(table.data.get(key), list):
        side = table.integer(key, *said["within"])
        return None if side is None else (side, side)
    sides = table.integers(key, *said["within"]) or ()
    if len(sides) != 2:
        raise table.error(key, f"must be one number, or height and width, not {len(sides)} numbers")
    return sides[0], sides[1]


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


_BY_TYPE: Mapping[str, Callable[[TomlTable, str, Said], object]] = {
    "bool": lambda table, key, _: table.switch(key),
    "int": lambda table, key, said: table.integer(key, *said["within"]),
    "float": lambda table, key, said: table.number(key, *said["within"], above=said.get("above", False)),
    "str": _text,
    "tuple[int, int]": _size,
    "tuple[float, ...]": _per_channel,
    "tuple[str, ...]": lambda table, key, _: table.texts(key),
}
_OWN_WAYS: Mapping[str, Callable[[TomlTable, str, Said], object]] = {
    "pose.keypoints": _keypoints,
    "pytorch.buckets": lambda table, key, _: tuple(
        sorted({*(table.integers(key, 1, rules.MAX_BATCH) or ())})
    ),
    "pytorch.compile": _compile,
    "pytorch.module": _module,
    "pytorch.weights": _inside,
}
