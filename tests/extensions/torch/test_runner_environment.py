"""What the process in which PyTorch models run finds in its environment."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from carpool.config.server import ServerSettings
from carpool.extensions.torch import runner_client
from carpool.extensions.torch.runner_client import Runner
from carpool.link.child_process import Child


def test_the_runner_has_as_many_queues_as_a_gpu_offers(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the driver's eight, decoding waits behind whole batches of a model on another stream."""
    given: dict[str, Any] = {}

    class Started(Exception):
        pass

    def child(*_: object, **options: Any) -> Child:
        given.update(options["environment"])
        raise Started

    monkeypatch.setattr(runner_client, "Child", child)

    async def start() -> None:
        with pytest.raises(Started):
            Runner(ServerSettings())._new_child("now")

    asyncio.run(start())
    assert given["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"
