"""Which file of a folder is the model, and which backend runs it."""

from __future__ import annotations

from pathlib import Path

from carpool.config.model import ModelConfig
from carpool.errors import ConfigError

# What each backend can run, and the name it looks for when the settings name no file.
SUFFIXES = {
    "onnxruntime": (".onnx",),
    "pytorch": (".pt", ".pt2", ".py", ".pth", ".safetensors"),
    "openvino": (".xml", ".onnx"),
    "python": (".py",),
}
DEFAULT_FILES = ("model.onnx", "model.pt", "model.pt2", "model.xml", "model.py")

_HOME = {".onnx": "onnxruntime", ".pt": "pytorch", ".pt2": "pytorch", ".xml": "openvino", ".py": "python"}
_FOREIGN = {
    ".plan": "a TensorRT engine",
    ".engine": "a TensorRT engine",
    ".graphdef": "a TensorFlow graph",
    ".savedmodel": "a TensorFlow model",
}


def is_model_file(path: Path) -> bool:
    return path.suffix in _HOME


def is_for(config: ModelConfig, path: Path) -> bool:
    """False when the settings name another file that could run here."""
    return config.file in (None, path.name) or Path(str(config.file)).suffix in _FOREIGN


def find_file(folder: Path, config: ModelConfig) -> tuple[Path | None, str]:
    """The model file in one version's folder and the backend for it; no file for a fake model."""
    if config.backend == "fake":
        return None, "fake"
    asked = config.file or config.pytorch.weights
    if asked is not None and Path(asked).suffix not in _FOREIGN:
        return _named(folder, config, asked)
    names = [name for name in DEFAULT_FILES if _fits(config.backend, name)]
    own = _existing(folder, names)
    found = own or _existing(folder, DEFAULT_FILES)
    if not found:
        raise ConfigError(_nothing(folder, config, names or list(DEFAULT_FILES)))
    if config.backend is None and len(found) > 1:
        listed = " and ".join(path.name for path in found)
        raise ConfigError(f"{config.name}: {folder} holds {listed}; choose one by setting the backend")
    return found[0], _backend(config, found[0])


def _fits(backend: str | None, name: str) -> bool:
    return backend in SUFFIXES and Path(name).suffix in SUFFIXES[backend]


def _backend(config: ModelConfig, path: Path) -> str:
    """The backend asked for where it can run the file, else the one at home with it."""
    if config.backend is not None and _fits(config.backend, path.name):
        return config.backend
    return _HOME[path.suffix]


def _existing(folder: Path, names: list[str] | tuple[str, ...]) -> list[Path]:
    return [path for path in (_inner(folder / name) for name in names) if path.is_file()]


def _inner(path: Path) -> Path:
    """A model with its weights beside it may be a folder of the model file's name."""
    return path / path.name if path.is_dir() else path


def _named(folder: Path, config: ModelConfig, name: str) -> tuple[Path, str]:
    path = _inner(folder / name)
    if not path.is_file():
        raise ConfigError(_nothing(folder, config, [name]))
    if path.suffix in _HOME:
        return path, _backend(config, path)
    if config.backend in SUFFIXES:
        return path, config.backend
    endings = ", ".join(sorted(_HOME))
    raise ConfigError(
        f"{config.name}: {path} has none of the endings {endings}; set the backend that runs it"
    )


def _nothing(folder: Path, config: ModelConfig, names: list[str]) -> str:
    message = f"{config.name}: no model file in {folder}: looked for {', '.join(names)}"
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if path.suffix in _FOREIGN:
            return f"{message}; {path.name} is {_FOREIGN[path.suffix]}, which cannot run here: add model.onnx"
    return message
