"""Describes the settings of an extension: which keys they have in model.toml, and how they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

from carpool.config.asked_extensions import asked_extensions
from carpool.config.backend_kinds import kind_of
from carpool.config.known_keys import extension_of, owners
from carpool.config.model import ModelConfig, ModelSignature, TensorConfig
from carpool.errors import ConfigError
from carpool.extensions import installed

if TYPE_CHECKING:
    from carpool.config.table import TomlTable
    from carpool.config.triton_text import TextSource


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonPart:
    """Reads the same settings from the fields of config.pbtxt that the manifest names as `triton`."""

    read: Callable[[TextSource], object | None] = lambda _: None  # where one of the fields is given
    document: Callable[[ModelConfig], Mapping[str, object]]  # the fields that Triton's clients read
    settle: Callable[[TextSource, ModelConfig], ModelConfig] | None = None
    """Returns the settings as these fields change others of them."""
    parameters: tuple[str, ...] | None = None  # those that have an effect; None: those of its backend


class OwnTensors(NamedTuple):
    """Lists tensors of a model that its clients neither send nor get: the server fills them in and keeps
    them."""

    purpose: str  # what they are for, in words
    inputs: tuple[TensorConfig, ...]
    outputs: tuple[TensorConfig, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsPart:
    """Reads the settings of one extension. A module of the extension holds it, at the place that the manifest
    names as `settings`."""

    kind: type[object] = object  # of what stands in `ModelConfig.extra`
    tables: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # keys of its tables, by their paths
    read: Callable[[TomlTable], object | None] = lambda _: None
    """Gets the top of the file, of which it reads the keys that it owns; None: they switch nothing on."""
    settle: Callable[[TomlTable, ModelConfig], ModelConfig] | None = None
    """Gets the top of the file and all settings, and returns them as its own change others of them."""
    model: Callable[[Path, str], ModelConfig] | None = None
    """Reads the file that the manifest names as `file`: all settings of the model of this name."""
    triton: TritonPart | None = None
    in_folder: Callable[[ModelConfig, Path], ModelConfig] | None = None
    """Gets the settings and the folder that holds the model, and returns them as that folder changes them."""
    beside: Callable[[Path, ModelConfig], object] | None = None
    """Reads the file that the manifest names as `beside`, given its path and what config.pbtxt says."""
    check: Callable[[ModelConfig], None] | None = None
    """Raises what does not go with it, when the backend is known and again when the tensors are."""
    own_tensors: Callable[[ModelConfig], OwnTensors] | None = None
    usual: object | None = None
    """The settings of a model whose file alone asks for the extension, by `known_inputs` of its manifest."""
    seen: Callable[[ModelConfig, ModelSignature], ModelSignature] | None = None
    """Returns the tensors that the model file has as clients see them, without what is filled for them."""
    remembers: Callable[[ModelConfig], bool] | None = None
    """Returns whether the model itself keeps something of a request for the next one: to ask it twice changes
    what it answers."""
    reloads: bool = True  # False: versions that are loaded go on where nothing but these changes
    changes_answers: bool = False  # other settings, other answers: what was cached under these counts no more


def part_of(name: str) -> SettingsPart:
    """Returns how an extension's settings are read; its module is imported now."""
    extension = installed()[name]
    return cast(SettingsPart, extension.part(extension.settings))


def read_extra(top: TomlTable) -> dict[str, object]:
    """Returns the settings of all extensions whose keys stand in this file."""
    asked = dict.fromkeys(owner.name for key, owner in owners().items() if top.has(key))
    return _given({name: part_of(name).read(top) for name in asked})


def read_triton_extra(source: TextSource) -> dict[str, object]:
    """Returns the settings of all extensions whose fields are given in this config.pbtxt."""
    given = {descriptor.name for descriptor, _ in source.message.ListFields()}
    given.add(f"platform={source.message.platform}")
    asked = [name for name, extension in installed().items() if given.intersection(extension.triton)]
    parts = {name: part_of(name).triton for name in asked}
    return _given({name: triton.read(source) for name, triton in parts.items() if triton is not None})


def as_in_folder(config: ModelConfig, folder: Path) -> ModelConfig:
    """Returns a model's settings as its folder changes them for the extensions that they ask for."""
    for change in [part_of(name).in_folder for name in config.extra]:
        config = config if change is None else change(config, folder)
    return config


def settled_by_toml(top: TomlTable, config: ModelConfig) -> ModelConfig:
    """Returns the settings of a model.toml as extensions change others of them. Raises what their manifests
    say of other keys."""
    for extension in asked_extensions(config):
        for other in (other for other, why in extension.meets.items() if "{key}" in why):
            found = [key for key in top.data if getattr(extension_of(key), "name", "") == other]
            for key in (*found, *([other] if "." in other and config.asks(other) else ())):
                raise ConfigError(f"{top.file}: {why_not(extension.name, other, key)}")
    for settle in [part_of(name).settle for name in config.extra]:
        config = config if settle is None else settle(top, config)
    return config


def settled(source: TextSource, config: ModelConfig) -> ModelConfig:
    """Returns the settings of a config.pbtxt as the fields of extensions change others of them."""
    for triton in [part_of(name).triton for name in config.extra]:
        if triton is not None and triton.settle is not None:
            config = triton.settle(source, config)
    return config


def known_parameters(config: ModelConfig) -> tuple[str, ...] | None:
    """Returns the parameters of a config.pbtxt that have an effect; None: any may."""
    parts = [part_of(name).triton for name in config.extra]
    found = (part.parameters for part in parts if part is not None and part.parameters is not None)
    return next(found, kind_of(config.backend).parameters)


def why_not(name: str, other: str, key: str = "") -> str:
    """Returns why a model does not ask for both extensions; `key` is the other's, as it stands in a file."""
    return installed()[name].meets[other].replace("{key}", key or other)


def check_extra(config: ModelConfig) -> None:
    """Raises what the extensions that a model asks for do not go with."""
    for extension in asked_extensions(config):
        for other in filter(config.asks, extension.meets):
            why = why_not(extension.name, other)
            raise ConfigError(f"{config.name}: {why}", field=(*extension.owns, *extension.fields, None)[0])
        check = part_of(extension.name).check if extension.settings else None
        if check is not None:
            check(config)


def asked_by_file(config: ModelConfig, signature: ModelSignature) -> ModelConfig:
    """Returns the settings with those of extensions that only the names of the file's inputs ask for."""
    names = {tensor.name for tensor in signature.inputs}
    asked = [one.name for one in installed().values() if names.intersection(one.known_inputs)]
    usual = {name: part_of(name).usual for name in asked if name not in config.extra}
    return replace(config, extra={**config.extra, **_given(usual)}) if usual else config


def as_seen(config: ModelConfig, signature: ModelSignature) -> ModelSignature:
    """Returns the tensors of a model file as clients see them."""
    for seen in [part_of(name).seen for name in config.extra]:
        signature = signature if seen is None else seen(config, signature)
    return signature


def own_tensors(config: ModelConfig) -> Iterator[OwnTensors]:
    """Yields the tensors of the model that the server fills in and keeps for extensions."""
    for listed in [part_of(name).own_tensors for name in config.extra]:
        if listed is not None:
            yield listed(config)


def remembers(config: ModelConfig) -> bool:
    """Returns whether the model itself keeps something of a request for the next one."""
    asked = [part_of(name).remembers for name in config.extra]
    return any(keeps is not None and keeps(config) for keeps in asked)


def other_files() -> dict[str, str]:
    """Returns the names of files that stand in place of model.toml, each with its extension's name."""
    return {extension.file: name for name, extension in installed().items() if extension.file}


def read_model_of(name: str, path: Path, model: str) -> ModelConfig:
    """Returns the settings of a model as an extension reads them from a file of its own."""
    read = part_of(name).model
    assert read is not None, f"{name} has a file in place of model.toml, and nothing that reads it"
    return read(path, model)


def read_beside(config: ModelConfig, folder: Path) -> ModelConfig:
    """Returns the settings of a config.pbtxt with those of the files of extensions beside it."""
    found: dict[str, object] = {}
    for name, extension in installed().items():
        if extension.beside and (folder / extension.beside).exists():
            read = part_of(name).beside
            found |= {} if read is None else {name: read(folder / extension.beside, config)}
    return replace(config, extra={**config.extra, **found})


def loaded_with(config: ModelConfig) -> dict[str, object]:
    """Returns the settings of extensions without those that change while a version stays loaded."""
    return {name: settings for name, settings in config.extra.items() if part_of(name).reloads}


def extra_document(config: ModelConfig) -> dict[str, object]:
    """Returns what Triton's clients read of the settings of extensions."""
    document: dict[str, object] = {}
    for triton in (part_of(name).triton for name in config.extra):
        if triton is not None:
            document |= triton.document(config)
    return document


def _given(found: Mapping[str, object | None]) -> dict[str, object]:
    return {name: settings for name, settings in found.items() if settings is not None}
