"""Runs models in a process beside the engine."""

from __future__ import annotations

from carpool.extensions.torch.runner_client import Runner

make_process = Runner
