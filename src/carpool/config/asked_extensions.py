"""Says which extensions a model asks for."""

from __future__ import annotations

from collections.abc import Iterator

from carpool.config.backend_kinds import kind_of
from carpool.config.model import ModelConfig
from carpool.extension import Extension
from carpool.extensions import installed


def asked_extensions(config: ModelConfig) -> Iterator[Extension]:
    """Yields the extensions that a model's settings or its backend ask for, in the order of the one list."""
    names = {kind_of(config.backend).extension, *config.extra}
    for extension in installed().values():
        if extension.name in names or any(getattr(config, field) for field in extension.fields):
            yield extension
