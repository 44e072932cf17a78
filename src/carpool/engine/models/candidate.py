"""A model as it lies in its folder, or came with a request, at the moment when it is to be loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from carpool.config.model import LatestVersions, ModelConfig
from carpool.config.repository import (
    Fingerprint,
    ModelSource,
    ModelVersion,
    read_place,
    take_fingerprint,
    the_place,
)
from carpool.config.triton import read_override
from carpool.engine.hardware import gpu_count
from carpool.engine.models.uploads import Upload
from carpool.errors import CarpoolError, Unavailable
from carpool.observe.logs import logger

log = logger("engine")


@dataclass(frozen=True, slots=True)
class Override:
    """What a request to load says instead of the model's own folder."""

    config: str | None = None  # Triton's JSON form
    files: Mapping[str, bytes] | None = None  # by name, like 1/model.onnx: all that the model has


@dataclass(slots=True)
class Candidate:
    """Read at one moment, and worthless if the files change before all of it is loaded."""

    source: ModelSource
    fingerprint: Fingerprint
    _place: Path
    upload: Upload | None = None

    def identity(self, version: ModelVersion) -> object:
        """Equal for a version that need not be loaded again. Which other versions there are is no matter."""
        return replace(self.source.config, versions=LatestVersions()), self.fingerprint.of(version.number)

    def check_unchanged(self) -> None:
        now, then = take_fingerprint(self._place), self.fingerprint
        used = [version.number for version in self.source.versions]
        if now.settings != then.settings or any(now.of(number) != then.of(number) for number in used):
            raise Unavailable(
                f"{self.source.config.name}: its files changed while it was being loaded; load it again",
                reason="changed-while-loading",
            )

    def explained(self, cause: Exception) -> CarpoolError:
        """Why it did not load. Half of a file is no model, but that is not what the user has to know."""
        try:
            self.check_unchanged()
        except CarpoolError as change:
            return change
        return as_known(self.source.config.name, cause)

    def close(self) -> None:
        if self.upload is not None:
            self.upload.leave()


def as_known(name: str, cause: Exception) -> CarpoolError:
    if isinstance(cause, CarpoolError):
        return cause
    return CarpoolError(f"{name}: loading it failed: {type(cause).__name__}: {cause}")


def fingerprint_of(places: Sequence[Path]) -> Fingerprint:
    """Also of what cannot be loaded, since it was looked at: an empty one where even that fails."""
    try:
        return take_fingerprint(places[0]) if places else Fingerprint()
    except CarpoolError:
        return Fingerprint()


def read_candidate(
    name: str,
    places: Sequence[Path],
    override: Override | None,
    with_promise: Callable[[ModelConfig], ModelConfig],
) -> Candidate:
    """Its settings, versions and files; not for the loop's thread."""
    upload = Upload(name, override.files) if override is not None and override.files else None
    try:
        place = the_place(name, {name: tuple(places)}) if upload is None else upload.folder
        fingerprint = take_fingerprint(place)
        source, warnings = _read(name, place, None if override is None else override.config)
        for warning in warnings:
            log.warning("config", message=warning)
        source = replace(source, config=with_promise(source.config))
        return Candidate(source, fingerprint, place, upload)
    except BaseException:
        if upload is not None:
            upload.leave()
        raise


def _read(name: str, place: Path, config: str | None) -> tuple[ModelSource, list[str]]:
    if config is None:
        return read_place(place, gpus=gpu_count())
    return read_place(
        place, gpus=gpu_count(), settings=lambda folder, _name: read_override(config, folder, name)
    )
