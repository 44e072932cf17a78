"""Finds what was compiled for a model before: by an earlier start of this server, or by another one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from carpool.config.model import ModelConfig
from carpool.config.repository import ModelVersion
from carpool.engine.profile.model_profile import Key, Profile, ProfileStore
from carpool.errors import CarpoolError
from carpool.extensions.torch.compiled_file import (
    CompiledFile,
    compiled_key,
    find_compiled,
    load_artifacts,
    name_of,
)
from carpool.extensions.torch.shared_artifacts import artifacts_of
from carpool.observe.logs import logger

_log = logger("engine")


class FoundCompiled:
    """Implements `Compiled` with a file that was checked."""

    def __init__(self, file: CompiledFile) -> None:
        self.file = file
        self._parts = file.parts

    @property
    def profile(self) -> Profile | None:
        return self.file.profile

    @property
    def sizes(self) -> Sequence[int]:
        return self.file.sizes

    def bring(self) -> None:
        parts, self._parts = self._parts, ()
        if parts:
            load_artifacts(parts)


def found_compiled(
    config: ModelConfig, version: ModelVersion, kept_as: Key | None, profiles: ProfileStore | None
) -> FoundCompiled | None:
    """Returns None where nothing fits; `kept_as` is the key of the model's profile."""
    if config.pytorch.compile == "off":
        return None
    try:
        key = compiled_key(config, version)
    except (OSError, CarpoolError):
        return None
    if key is None:
        return None
    cache_dir = None if profiles is None else profiles.cache_dir
    find = partial(find_compiled, config, version, key, kept_as, cache_dir)
    found = find()
    if found is None and _fetched(config, key, profiles):
        found = find()
    if found is None:
        return None
    _log.info("compiled-found", model=config.name, file=str(found.path))
    return FoundCompiled(found)


def _fetched(config: ModelConfig, key: Key, profiles: ProfileStore | None) -> bool:
    """Returns whether what another replica compiled is in the cache folder now. Artifacts are code: they are
    fetched only for a model that brings code of its own."""
    shared, _ = artifacts_of(profiles)
    if profiles is None or shared is None or profiles.cache_dir is None or config.pytorch.module is None:
        return False
    return shared.fetch(name_of(key), profiles.cache_dir, config.name)
