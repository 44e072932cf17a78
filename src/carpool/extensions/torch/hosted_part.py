"""Defines how another extension loads and runs its models in the runner: without batches, for one."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, cast

from carpool.config.asked_extensions import asked_extensions
from carpool.config.model import ModelConfig
from carpool.config.repository import ModelVersion
from carpool.engine.loading.loading import Ready, ReportStep
from carpool.extensions.torch.runner_instance import Arenas
from carpool.link.catalog import ModelEntry


class LoadsHere(Protocol):
    """Defines how the instances of a version are made in the runner, as `Loading` does it for batches."""

    @property
    def threads(self) -> int | None:
        """Returns those of an instance."""

    def prepare(self, tell: ReportStep) -> Ready:
        """Returns warm and measured instances."""

    def resume(self, config: ModelConfig, threads: int | None) -> None:
        """Prepares for more instances of what a runner before this one has loaded and measured."""

    def backend(self, index: int, count: int, tell: ReportStep) -> Any:
        """Returns one more instance, of `count`; it has `close`."""


class ServesHere(Protocol):
    """Defines an instance that serves in the runner."""

    def abort(self) -> None:
        """Ends what runs as soon as possible. It is called from another thread."""


Serve: TypeAlias = Callable[[Any, Ready, ModelEntry, Arenas, socket.socket, Callable[[], None]], ServesHere]
"""Lets an instance serve: what `backend` returned, what is known of its model, where front ends' memory is
found, the socket of the engine, and what to call when it has ended."""


@dataclass(frozen=True, slots=True)
class HostedPart:
    """Lists what an extension does in the runner for models that ask for it. A module of the extension holds
    one, at the place that the manifest names as `hosted`."""

    loading: Callable[[ModelConfig, ModelVersion], LoadsHere]
    serve: Serve


def hosted_part(config: ModelConfig) -> HostedPart | None:
    """Returns the part of the extension that runs this model; None: it runs in batches."""
    places = (extension for extension in asked_extensions(config) if extension.hosted)
    return next((cast(HostedPart, one.part(one.hosted)) for one in places), None)
