"""Profiles kept from one start to the next, one JSON file each, in the user's cache folder.

A file is only a hint. One that cannot be read, or was made for another model, machine or setting, is ignored
with a warning; one that fits is checked against a few runs before it is believed.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

from carpool.backends import device_names
from carpool.config.backend_kinds import kind_of
from carpool.config.model import ModelConfig, values_on_device
from carpool.config.repository import ModelVersion, content_digest
from carpool.core.policy import Promise
from carpool.engine.hardware import Hardware, hardware
from carpool.engine.profile.model_profile import Profile
from carpool.observe.logs import logger

log = logger("engine")

FORMAT = 2
MOST_FILES = 256
_MOST_BYTES = 1 << 18
_SUFFIX = ".profile.json"

Key = Mapping[str, Any]


def profile_key(config: ModelConfig, version: ModelVersion, machine: Hardware | None = None) -> Key | None:
    """Everything that a profile depends on, as JSON; None for a model without files. It reads them all."""
    if version.file is None:
        return None
    slo = config.policy.slo if isinstance(config.policy, Promise) else None
    fixed = [[group.count, group.kind.value, list(group.gpus)] for group in config.instances if group.given]
    return {
        "format": FORMAT,
        "model": content_digest(version.file),
        "backend": [config.backend, _version_of(config.backend)],
        "settings": {
            "slo": slo,
            "max_batch": config.max_batch,
            "tensors": [[t.name, t.datatype, list(t.dims)] for t in config.inputs + config.outputs],
            "instances": fixed,
            "onnxruntime": [list(part) if isinstance(part, tuple) else part for part in _runtime(config)],
            "pytorch": _pytorch(config, version.file),
            "on device": _on_device(config),
            "parameters": dict(sorted(config.parameters.items())),
        },
        "hardware": {**asdict(machine := machine or hardware()), "gpus": list(machine.gpus)},
    }


def _runtime(config: ModelConfig) -> tuple[object, ...]:
    used = config.onnxruntime
    return used.providers, used.intra_op_threads, used.inter_op_threads


def _on_device(config: ModelConfig) -> list[str | None]:
    """What is asked of the device besides the model: it takes its time."""
    image, detect = config.image, config.detect
    return [image.decode if image else None, detect.nms if detect else None]


def _pytorch(config: ModelConfig, file: Path) -> dict[str, Any] | None:
    """Its settings as they were settled, the code of its network, and the devices by name."""
    if not kind_of(config.backend).values_on_device:
        return None
    used = asdict(config.pytorch)
    code = None if config.pytorch.module is None else file.parent / config.pytorch.module.partition(":")[0]
    image = config.image if values_on_device(config) else None
    return {
        **used,
        "buckets": list(config.pytorch.buckets),
        "code": content_digest(code) if code is not None and code.is_file() else "",
        "values": [] if image is None else [image.scale, list(image.mean), list(image.std), image.layout],
        "devices": list(device_names(config)),
    }


def _version_of(backend: str | None) -> str:
    try:
        return importlib.metadata.version(kind_of(backend).package or str(backend))
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return platform.python_version()


class ProfileStore:
    """Reads and writes; nothing that goes wrong with it keeps a model from being served."""

    def __init__(self, cache_dir: Path) -> None:
        self._folder = cache_dir / "profiles"

    def read(self, key: Key) -> Profile | None:
        file = self._file(key)
        try:
            if file.stat().st_size > _MOST_BYTES:
                raise ValueError("it is too large")
            document = json.loads(file.read_text("utf-8"))
            if document["key"] != key:
                raise ValueError("it was made for something else")
            return Profile.from_json(document["profile"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            log.warning("profile-unreadable", file=str(file), error=f"{type(error).__name__}: {error}")
            return None

    def write(self, key: Key, profile: Profile) -> None:
        """The whole file at once: whoever reads meanwhile sees the old one or the new one."""
        file = self._file(key)
        text = json.dumps({"key": key, "profile": profile.as_json()}, indent=1)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self._folder, suffix=".part", delete=False) as part:
                part.write(text)
            Path(part.name).replace(file)
            self._keep_few()
        except OSError as error:
            log.warning("profile-not-kept", file=str(file), error=error.strerror or str(error))

    def _file(self, key: Key) -> Path:
        name = sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:40]
        return self._folder / f"{name}{_SUFFIX}"

    def _keep_few(self) -> None:
        """Those written last; and nothing that a killed server left half written."""
        for suffix, most in ((_SUFFIX, MOST_FILES), (".part", 8)):
            found = [(path.stat().st_mtime, path) for path in self._folder.glob(f"*{suffix}")]
            for _, old in sorted(found)[:-most]:
                with suppress(OSError):
                    old.unlink()
