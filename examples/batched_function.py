"""A function over a list gathers its own batches, from asyncio or from plain threads.

python examples/batched_function.py
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

import carpool

WEIGHTS = np.linspace(-1, 1, 64 * 10, dtype=np.float32).reshape(64, 10)
batches: list[int] = []


@carpool.batched(max_batch=32, max_delay_ms=5)
def classify(images: list[NDArray[np.float32]]) -> list[int]:
    """Called with as many images as were waiting; answers one class for each."""
    batches.append(len(images))
    return [int(best) for best in (np.stack(images) @ WEIGHTS).argmax(axis=1)]


async def from_asyncio() -> list[int]:
    images = [np.full(64, value, np.float32) for value in np.linspace(-1, 1, 100)]
    return await asyncio.gather(*(classify(image) for image in images))


def from_a_thread(value: float) -> int:
    return classify(np.full(64, value, np.float32)).result(timeout=30)


def main() -> None:
    classes = asyncio.run(from_asyncio())
    print(f"asyncio: {len(classes)} answers in {len(batches)} batches")
    with ThreadPoolExecutor(8) as pool:
        print("threads:", list(pool.map(from_a_thread, [-1.0, -0.5, 0.5, 1.0])))


if __name__ == "__main__":
    main()
