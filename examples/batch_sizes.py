"""Which batches form? Several clients send one request after the other; the server's statistics say the rest.

    carpool serve examples/batching                     # in another terminal
    python examples/batch_sizes.py plain --clients 16

See docs/scheduling.md. Needs tritonclient[http] with aiohttp.
"""

from __future__ import annotations

import argparse
import asyncio
from collections import Counter
from time import perf_counter
from typing import Any

import numpy as np
from tritonclient.http import InferInput
from tritonclient.http.aio import InferenceServerClient


async def batches_so_far(client: Any, model: str) -> Counter[int]:
    document = await client.get_inference_statistics(model)
    batches = document["model_stats"][0]["batch_stats"]
    return Counter({batch["batch_size"]: batch["compute_infer"]["count"] for batch in batches})


async def one_client(client: Any, model: str, requests: int, length: int) -> list[float]:
    """How long each answer took."""
    x = InferInput("x", [1, length], "UINT8")
    x.set_data_from_numpy(np.zeros((1, length), np.uint8))
    seconds = []
    for _ in range(requests):
        began = perf_counter()
        await client.infer(model, [x])
        seconds.append(perf_counter() - began)
    return seconds


async def measure(given: argparse.Namespace) -> None:
    async with InferenceServerClient(given.url, conn_limit=given.clients) as client:
        before = await batches_so_far(client, given.model)
        lengths = [16 + number % given.shapes for number in range(given.clients)]
        runs = [one_client(client, given.model, given.requests, length) for length in lengths]
        ended = await asyncio.gather(*runs)
        after = await batches_so_far(client, given.model)
    show(after - before, sorted(second for seconds in ended for second in seconds))


def show(batches: Counter[int], seconds: list[float]) -> None:
    executions, images = batches.total(), sum(size * count for size, count in batches.items())
    for size, count in sorted(batches.items()):
        bar = "█" * round(40 * count / executions)
        print(f"batch of {size:<3} {count:>5} times  {bar}".rstrip())
    median = 1e3 * seconds[len(seconds) // 2]
    print(f"{images} images in {executions} batches, {images / executions:.1f} each; median {median:.0f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description="Show the batches that some clients' requests form.")
    parser.add_argument("model", help="plain, delay, preferred, instances, capped or shapes")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--requests", type=int, default=50, help="of each client")
    parser.add_argument("--shapes", type=int, default=1, help="different lengths of the input (model shapes)")
    parser.add_argument("--url", default="localhost:8000")
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
