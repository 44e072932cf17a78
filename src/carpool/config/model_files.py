"""Which file of a folder is the model, and which backend runs it."""

from __future__ import annotations

from pathlib import Path

from carpool.config.backend_kinds import default_files, home_of, kind_of
from carpool.config.model import ModelConfig
from carpool.errors import ConfigError

_FOREIGN = {
    ".plan": "a TensorRT engine",
    ".engine": "a TensorRT engine",
    ".graphdef": "a TensorFlow graph",
    ".savedmodel": "a TensorFlow model",
}


def is_model_file(path: Path) -> bool:
    return home_of(path.suffix) is not None


def is_for(config: ModelConfig, path: Path) -> bool:
    """False when the settings name another file that could run here."""
    return config.file in (None, path.name) or Path(str(config.file)).suffix in _FOREIGN


def find_file(folder: Path, config: ModelConfig) -> tuple[Path | None, str]:
    """The model file in one version's folder and the backend for it; no file for a fake model."""
    if config.backend is not None and not kind_of(config.backend).needs_file:
        return None, config.backend
    asked = config.file or config.pytorch.weights
    if asked is not None and Path(asked).suffix not in _FOREIGN:
        return _named(folder, config, asked)
    names = [name for name in default_files() if _fits(config.backend, name)]
    own = _existing(folder, names)
    found = own or _existing(folder, default_files())
    if not found:
        raise ConfigError(_nothing(folder, config, names or list(default_files())))
    if config.backend is None and len(found) > 1:
        listed = " and ".join(path.name for path in found)
        raise ConfigError(f"{config.name}: {folder} holds {listed}; choose one by setting the backend")
    return found[0], _backend(config, found[0])


def _fits(backend: str | None, name: str) -> bool:
    return Path(name).suffix in kind_of(backend).suffixes


def _backend(config: ModelConfig, path: Path) -> str:
    """The backend asked for where it can run the file, else the one at home with it."""
    if config.backend is not None and _fits(config.backend, path.name):
        return config.backend
    return str(home_of(path.suffix))


def _existing(folder: Path, names: list[str] | tuple[str, ...]) -> list[Path]:
    return [path for path in (_inner(folder / name) for name in names) if path.is_file()]


def _inner(path: Path) -> Path:
    """A model with its weights beside it may be a folder of the model file's name."""
    return path / path.name if path.is_dir() else path


def _named(folder: Path, config: ModelConfig, name: str) -> tuple[Path, str]:
    path = _inner(folder / name)
    if not path.is_file():
        raise ConfigError(_nothing(folder, config, [name]))
    if is_model_file(path):
        return path, _backend(config, path)
    if config.backend is not None and kind_of(config.backend).suffixes:
        return path, config.backend
    endings = ", ".join(sorted(name.removeprefix("model") for name in default_files()))
    raise ConfigError(
        f"{config.name}: {path} has none of the endings {endings}; set the backend that runs it"
    )


def _nothing(folder: Path, config: ModelConfig, names: list[str]) -> str:
    message = f"{config.name}: no model file in {folder}: looked for {', '.join(names)}"
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if path.suffix in _FOREIGN:
            return f"{message}; {path.name} is {_FOREIGN[path.suffix]}, which cannot run here: add model.onnx"
    return message
