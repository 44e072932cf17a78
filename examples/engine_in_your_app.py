"""The whole server without sockets: load a model in your own asyncio program and ask it.

python examples/engine_in_your_app.py
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np

import carpool
from carpool.errors import Refused

MODELS = Path(__file__).parent / "python_model"


async def main() -> None:
    async with carpool.Engine(MODELS, slo_ms=500) as engine:
        pictures = [np.full((32, 32, 3), shade, np.uint8) for shade in range(0, 250, 25)]

        # One picture, without a batch dimension: the response has none either.
        answer = await engine.infer("colours", pictures[4])
        print("colour of one:", answer["colour"].tolist())

        # Many at once: requests that wait for the same instance share batches.
        answers = await asyncio.gather(*(engine.infer("colours", picture) for picture in pictures))
        print("red of all:   ", [float(answer["colour"][0]) for answer in answers])

        # Your own batch counts as one request, and only the outputs you name come back.
        batch = {"image": np.stack(pictures[:3])}
        answer = await engine.infer("colours", batch, outputs=["shades"])
        print("shades of 3:  ", answer["shades"].shape)

        # A deadline that cannot be met is rejected at once, with the reason.
        try:
            await engine.infer("colours", pictures[0], deadline_ms=0.001)
        except Refused as no:
            print("rejected:     ", no.reason)


if __name__ == "__main__":
    asyncio.run(main())
