"""Rolls out versions in the engine: which are loaded, which one answers, and when it goes on or back."""

from __future__ import annotations

from carpool.engine.engine_parts import EnginePart, EngineServer
from carpool.extensions.rollout.rollout_desk import RolloutDesk


def engine(server: EngineServer) -> EnginePart:
    """Returns what rollouts do in the engine; its state is the `RolloutDesk`."""
    return RolloutDesk(server).part
