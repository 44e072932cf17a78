"""Runs models in a process beside the engine."""

from __future__ import annotations

from carpool.config.model import ModelConfig
from carpool.config.repository import ModelVersion
from carpool.extensions.torch.hosted_model import HostedLoading
from carpool.extensions.torch.runner_client import Runner


class ModelRunner(Runner):
    """Implements `ModelProcess` with the runner."""

    def loading(self, config: ModelConfig, version: ModelVersion) -> HostedLoading:
        """Returns how instances of this model are made in the runner."""
        self.keep_zygote()
        return HostedLoading(self, next(self.loadings), config, version)


make_process = ModelRunner
