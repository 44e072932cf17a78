"""Finds the models to serve at paths from the command line, with the versions chosen and every file found."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from carpool.config import rules
from carpool.config.backend_kinds import files_of, home_of, kind_of, kinds
from carpool.config.model import (
    AllVersions,
    InstanceGroup,
    InstanceKind,
    LatestVersions,
    Mode,
    ModelConfig,
)
from carpool.config.settings_part import as_in_folder, check_extra, other_files, read_beside, read_model_of
from carpool.core.objectives import Promise
from carpool.errors import ConfigError
from carpool.extensions import installed

_FOREIGN = {
    ".plan": "a TensorRT engine",
    ".engine": "a TensorRT engine",
    ".graphdef": "a TensorFlow graph",
    ".savedmodel": "a TensorFlow model",
}
"""What may be there that nothing here runs, or nothing until a package is installed."""

PBTXT = "config.pbtxt"
TOML = "model.toml"
WEIGHTS = "model.safetensors"
_NOT_BARE = (".py", ".xml")  # files of these kinds are many things beside models

VERSION = re.compile(r"[1-9][0-9]{0,17}")
_NOT_VERSIONS = ("warmup", "initial_state", "configs", "__pycache__")


@dataclass(frozen=True, slots=True)
class ModelVersion:
    number: int
    file: Path | None  # None for a fake model
    backend: str | None = None  # that runs its file, where it is not that of the settings


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Represents one model to serve. `config.backend` and `config.file` are those of the newest version,
    versions rise."""

    config: ModelConfig
    versions: tuple[ModelVersion, ...]

    def config_of(self, version: ModelVersion) -> ModelConfig:
        """Returns the settings with which this version runs: its file may need another backend."""
        if version.backend is None or version.file is None:
            return self.config
        return replace(self.config, backend=version.backend, file=_shown(version.file))


ReadSettings = Callable[[Path, str], tuple[ModelConfig, list[str]]]
"""Takes a model's folder and the name it has if its settings give none; returns them and the warnings."""


def find_models(
    paths: Sequence[Path],
    *,
    gpus: int = 0,
    only: Collection[str] | None = None,
    some: bool = True,
    mistakes: dict[str, ConfigError] | None = None,
) -> tuple[list[ModelSource], list[str]]:
    """Returns every model under these paths (repositories, model folders or model files) and the warnings.

    With `only`, the models of these names; without `some`, a repository may be empty. `mistakes` gets what is
    wrong with single models, by name, which otherwise is raised.
    """
    places, warnings = find_places(paths, some=some and only is None)
    sources = []
    for name in places if only is None else dict.fromkeys(only):
        try:
            source, notes = read_place(the_place(name, places), gpus=gpus)
        except ConfigError as error:
            if mistakes is None or name not in places:
                raise
            mistakes[name] = error
            continue
        warnings += notes
        sources.append(source)
    return sources, warnings


Places = Mapping[str, tuple[Path, ...]]
"""Where the models lie, by name: a folder or a file each. More than one place is a mistake of the user."""


def find_places(
    paths: Sequence[Path], known: Places | None = None, *, some: bool = False
) -> tuple[dict[str, tuple[Path, ...]], list[str]]:
    """Where the models under these paths lie, and the warnings; the settings of folders are not read.

    `known` is what was found the last time: a file keeps the name it had, and may have gone since. With
    `some`, a path without a model is an error.
    """
    found: dict[str, tuple[Path, ...]] = {}
    warnings: list[str] = []
    names = {place: name for name, places in (known or {}).items() for place in places}
    for path in map(_full, paths):
        with _reading(path):
            under = _places_under(path, names)
            if path.is_dir() and not is_model_folder(path):
                strays = ", ".join(f.name for f in _folders(path) if not is_model_folder(f))
                warnings += (
                    [f"{path}: these folders have no model and are ignored: {strays}"] if strays else []
                )
        if some and not under:
            looked = ", ".join((PBTXT, TOML, *other_files(), *files_of(None)))
            raise ConfigError(f"{path}: no models: looked for {looked} and numbered version folders")
        for name, place in under.items():
            found[name] = tuple(dict.fromkeys((*found.get(name, ()), place)))
    return found, warnings


def _places_under(path: Path, names: Mapping[Path, str]) -> dict[str, Path]:
    if path in names and is_model_file(path):
        return {names[path]: path} if path.is_file() else {}
    unpacked = _unpacked(path)
    if unpacked is not None:
        return {unpacked.name: unpacked}
    if path.is_file():
        return {read_model_file(path)[0].config.name: path}
    if not path.is_dir():
        raise ConfigError(f"{path}: no such file or folder")
    if is_model_folder(path):
        return {path.name: path}
    archives = filter(None, map(_unpacked, sorted(path.iterdir())))
    found = {folder.name: folder for folder in (*_folders(path), *archives) if is_model_folder(folder)}
    return found or {file.stem: file for file in _bare_files(path)}


def _unpacked(file: Path) -> Path | None:
    """Returns the folder of the model that this file holds, if an extension unpacks such files."""
    for extension in installed().values():
        place = extension.archives.get(file.suffix)
        if place is not None and file.is_file():
            folder: Path = extension.part(place)(file)
            return folder
    return None


def _bare_files(folder: Path) -> list[Path]:
    """Returns model files side by side, each of which is a model of its own."""
    return [
        file
        for file in sorted(folder.iterdir())
        if is_model_file(file) and file.suffix not in _NOT_BARE and file.is_file()
    ]


def the_place(name: str, places: Places) -> Path:
    found = places.get(name, ())
    if not found:
        raise ConfigError(f"there is no model {rules.shown(name)}; {rules.nearest(name, places)}")
    if len(found) > 1:
        where = " and ".join(map(str, found))
        raise ConfigError(f'two models are called "{name}": {where}; rename one of them')
    return found[0]


def read_place(
    place: Path, *, gpus: int = 0, settings: ReadSettings | None = None
) -> tuple[ModelSource, list[str]]:
    """The model there; `settings` reads them from elsewhere than the files beside it."""
    read = read_model_file if place.is_file() else read_model
    return read(place, gpus=gpus, settings=settings)


def _full(path: Path) -> Path:
    """Absolute, so that the folder has a name; symbolic links keep theirs."""
    full = path.absolute()
    return full.resolve() if ".." in full.parts else full


def is_model_folder(path: Path) -> bool:
    """Returns True for a folder with settings, a model file or numbered versions directly inside; and for one
    that is a model: TensorFlow's, or one of transformers."""
    if any((path / name).exists() for name in (PBTXT, TOML, *other_files(), *files_of(None))):
        return True
    if _as_a_whole(path) is not None:
        return True
    return any(VERSION.fullmatch(folder.name) for folder in _folders(path))


def _as_a_whole(folder: Path) -> tuple[Path, str] | None:
    """Returns the file to open and the backend, where a folder is one model by the names of what lies in
    it."""
    for kind in kinds().values():
        beside = kind.suffixes if kind.beside and (folder / kind.beside).is_file() else ()
        for file in (folder / f"model{suffix}" for suffix in beside):
            if file.is_file():
                return file, kind.name
        if kind.inside and (folder / kind.inside).is_file():
            return folder / kind.inside, kind.name
    return None


def _folders(path: Path) -> list[Path]:
    return sorted(p for p in path.iterdir() if p.is_dir() and not p.name.startswith("."))


def read_model(
    folder: Path, *, gpus: int = 0, settings: ReadSettings | None = None
) -> tuple[ModelSource, list[str]]:
    """One model's folder: its settings, the versions its policy chooses, and their files."""
    folder = _full(folder)
    with _reading(folder):
        config, warnings = (settings or folder_settings)(folder, folder.name)
        if config.name != folder.name:
            raise ConfigError(
                f'{folder}: unexpected folder name "{folder.name}" for model "{config.name}": '
                "the two must be equal"
            )
        others = ", ".join(
            f.name for f in _folders(folder) if f.name not in _NOT_VERSIONS and not VERSION.fullmatch(f.name)
        )
        if others:  # they look as if they were meant to be versions
            warnings.append(
                f"{folder}: these folders are ignored, because a version is a number without "
                f"leading zeros: {others}"
            )
        chosen, missing = _choose(config, version_folders(folder) or {1: folder})
        source, notes = _source(config, chosen, gpus)
    return source, warnings + missing + notes


def read_model_file(
    path: Path, *, gpus: int = 0, settings: ReadSettings | None = None
) -> tuple[ModelSource, list[str]]:
    """Reads one model file; settings beside it count, and so do its number and its name in a repository."""
    path = _full(path)
    if not is_model_file(path):
        raise ConfigError(f"{path}: not a model file; it should end like {', '.join(files_of(None))}")
    with _reading(path):
        # A number above the file is a version only where the rest looks like a model's folder too.
        above = path.parent.parent
        like_a_model = path.stem == "model" or (above / PBTXT).exists() or (above / TOML).exists()
        versioned = bool(VERSION.fullmatch(path.parent.name)) and like_a_model
        folder = above if versioned else path.parent
        name = folder.name if versioned or path.stem == "model" else path.stem
        config, warnings = (settings or folder_settings)(folder, name)
        if config.file not in (None, path.name) and not _is_foreign(str(config.file)):
            warnings = [f"{path}: served without the settings beside it, which are for {config.file}"]
            config = ModelConfig(name=rules.check_name(name, str(path)), path=folder)
        number = int(path.parent.name) if versioned else 1
        source, notes = _source(replace(config, file=path.name), {number: path.parent}, gpus)
    return source, warnings + notes


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None


def folder_settings(folder: Path, name: str) -> tuple[ModelConfig, list[str]]:
    """Returns the settings of the files in a model's folder, and the warnings."""
    pbtxt, toml, others = folder / PBTXT, folder / TOML, other_files()
    there = [name for name in (PBTXT, TOML, *others) if (folder / name).exists()]
    if len(there) > 1:
        raise ConfigError(f"{folder}: both {' and '.join(there)} are here; keep one of them")
    if there and there[0] in others:
        return read_model_of(others[there[0]], folder / there[0], name), []
    if pbtxt.exists():
        from carpool.config.triton import read_pbtxt

        config, warnings = read_pbtxt(pbtxt, name)
        return read_beside(config, folder), warnings
    if toml.exists():
        from carpool.config.toml import read_toml

        return as_in_folder(read_toml(toml, name), folder), []
    return ModelConfig(name=rules.check_name(name, str(folder)), path=folder), []


def version_folders(folder: Path) -> dict[int, Path]:
    return {int(f.name): f for f in _folders(folder) if VERSION.fullmatch(f.name)}


def _choose(config: ModelConfig, present: dict[int, Path]) -> tuple[dict[int, Path], list[str]]:
    policy, wanted = config.versions, sorted(present)
    if isinstance(policy, LatestVersions):
        wanted = wanted[-policy.count :]
    elif not isinstance(policy, AllVersions):
        wanted = list(policy.versions)
    chosen = {number: present[number] for number in wanted if number in present}
    missing = ", ".join(str(number) for number in wanted if number not in present)
    if not chosen:
        raise ConfigError(f"{config.name}: {config.path} has none of the versions asked for: {missing}")
    return chosen, [f"{config.name}: {config.path} has no version {missing}"] if missing else []


def _source(config: ModelConfig, chosen: dict[int, Path], gpus: int) -> tuple[ModelSource, list[str]]:
    for name in (config.labels, *(tensor.labels for tensor in config.outputs)):
        if name is not None and not (config.path / name).is_file():
            raise ConfigError(f"{config.name}: the labels file {config.path / name} is missing")
    found = {number: _find_file(folder, config) for number, folder in chosen.items()}
    backends = sorted({backend for _, backend in found.values()})
    # Other processes place instances and share memory in their own way: one model has one of them.
    if len({kind_of(backend).process for backend in backends}) > 1:
        raise ConfigError(f"{config.name}: its versions need different backends: {', '.join(backends)}")
    backend = found[max(found)][1]
    versions = tuple(
        ModelVersion(number, file, None if own == backend else own) for number, (file, own) in found.items()
    )
    file = versions[-1].file
    instances, reasons = _place(config, gpus)
    if config.backend not in (None, backend) and file is not None:
        reasons.insert(0, f'"{config.backend}" was asked for, but the file found is {_shown(file)}')
    elif config.file is not None and file is not None and _shown(file) != config.file:
        reasons.insert(0, f"{config.file} was asked for, but the file found is {_shown(file)}")
    shown = _shown(file) if file else None
    config = replace(config, backend=backend, file=shown, instances=instances)
    check_extra(config)
    device = "" if gpus else " on the CPU"
    warnings = [f"{config.name}: runs with {backend}{device}: {'; '.join(reasons)}"] if reasons else []
    return ModelSource(config, versions), warnings


def _place(config: ModelConfig, gpus: int) -> tuple[tuple[InstanceGroup, ...], list[str]]:
    """Instances on the devices there are; without a GPU they all run on the CPU."""
    for group in config.instances:
        absent = [gpu for gpu in group.gpus if gpu >= gpus]
        if gpus and absent:
            raise ConfigError(f"{config.name}: an instance asks for GPU {absent[0]}, but there are {gpus}")
    if gpus:
        return config.instances, []
    reasons = []
    if any(group.kind is InstanceKind.GPU for group in config.instances):
        reasons.append("a GPU was asked for, but there is none")
    on_cpu = (
        group if group.kind is InstanceKind.MODEL else replace(group, kind=InstanceKind.CPU, gpus=())
        for group in config.instances
    )
    return tuple(on_cpu), reasons


def with_promise(config: ModelConfig, slo_ms: float) -> tuple[ModelConfig, list[str]]:
    """Returns the same model under a promise from the command line, and what that replaces, in words."""
    if not 0 < slo_ms < float("inf"):
        raise ConfigError(f"slo_ms must be above 0, not {slo_ms:g}")
    if config.decoupled:
        return config, [f"{config.name} gives any number of responses to a request: it cannot have an SLO"]
    policy = Promise(slo=slo_ms / 1e3, max_batch=config.policy.max_batch)
    warnings = []
    if config.mode is Mode.FIXED:
        warnings.append(f"{config.name}: an SLO of {slo_ms:g} ms replaces its fixed batching settings")
    if isinstance(config.policy, Promise) and config.policy != policy:
        old = config.policy.slo * 1e3
        warnings.append(f"{config.name}: an SLO of {slo_ms:g} ms replaces the {old:g} ms of its settings")
    return replace(config, mode=Mode.PROMISE, policy=policy, slo_may_grow=False), warnings


# ---- which file of a folder is the model, and which backend runs it ----------------------------------------


def is_model_file(path: Path) -> bool:
    return home_of(path.suffix) is not None


def _find_file(folder: Path, config: ModelConfig) -> tuple[Path | None, str]:
    """Returns the model file in one version's folder and the backend for it; no file for a fake model."""
    if config.backend is not None and (config.needs or not kind_of(config.backend).needs_file):
        return None, config.backend
    asked = config.file or config.pytorch.weights
    if asked is not None and not _is_foreign(asked):
        return _named(folder, config, asked)
    names = [name for name in files_of(None) if _fits(config.backend, Path(name))] or files_of(config.backend)
    found = _existing(folder, names) or _existing(folder, files_of(None))
    whole = _as_a_whole(folder)
    if not found and whole is not None and config.backend in (None, whole[1]):
        return whole
    if not found:
        raise _nothing(folder, config, names or files_of(None))
    if config.backend is None and len(found) > 1:
        listed = " and ".join(path.name for path in found)
        raise ConfigError(f"{config.name}: {folder} holds {listed}; choose one by setting the backend")
    return found[0], _backend(config, found[0])


def _is_foreign(name: str) -> bool:
    suffix = Path(name).suffix
    return suffix in _FOREIGN and home_of(suffix) is None


def _fits(backend: str | None, path: Path) -> bool:
    return _suffix(path) in kind_of(backend).suffixes


def _backend(config: ModelConfig, path: Path) -> str:
    """Returns the backend asked for where it can run the file, else the one at home with it."""
    if config.backend is not None and _fits(config.backend, path):
        return config.backend
    return str(home_of(_suffix(path)))


def _existing(folder: Path, names: Sequence[str]) -> list[Path]:
    return [path for path in (_inner(folder / name) for name in names) if path.is_file()]


def _inner(path: Path) -> Path:
    """A model of several files may be a folder of the model file's name."""
    return path / (kind_of(home_of(path.suffix)).inside or path.name) if path.is_dir() else path


def _suffix(path: Path) -> str:
    return Path(_shown(path)).suffix


def _shown(file: Path) -> str:
    """Returns the name that a user knows the model by: a folder's, where it is one whose files have fixed
    names."""
    return file.parent.name if file.name in {kind.inside for kind in kinds().values()} else file.name


def _named(folder: Path, config: ModelConfig, name: str) -> tuple[Path, str]:
    path = _inner(folder / name)
    if not path.is_file():
        raise _nothing(folder, config, [name])
    if home_of(_suffix(path)) is not None:
        return path, _backend(config, path)
    if config.backend is not None and kind_of(config.backend).suffixes:
        return path, config.backend
    endings = ", ".join(sorted(name.removeprefix("model") for name in files_of(None)))
    raise ConfigError(
        f"{config.name}: {path} has none of the endings {endings}; set the backend that runs it"
    )


def _nothing(folder: Path, config: ModelConfig, names: Sequence[str]) -> ConfigError:
    """Returns the error for settings without a model file: as in Triton that is a load that fails, not a
    folder without a model."""
    error = ConfigError(_looked_for(folder, config, names))
    error.while_loading = True
    return error


def _looked_for(folder: Path, config: ModelConfig, names: Sequence[str]) -> str:
    message = f"{config.name}: no model file in {folder}: looked for {', '.join(names)}"
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if _is_foreign(path.name):
            absent = next((kind.missing() for kind in kinds().values() if path.suffix in kind.suffixes), "")
            what = f"{path.name} is {_FOREIGN[path.suffix]}, which cannot run here: add model.onnx"
            return f"{message}; {what}{f', or: {absent}' if absent else ''}"
        if is_model_file(path):
            return f'{message}; to serve {path.name}, set file = "{path.name}" in its model.toml'
    return message


# ---- what a model's files look like from outside: enough to see, without reading them, that they changed --
