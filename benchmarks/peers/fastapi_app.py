"""A baseline: what a team writes with FastAPI when it batches by itself.

An asyncio queue, one worker that gathers a batch for a few milliseconds, the model called on the event
loop, one uvicorn process. The tensor is the raw body, which is the cheapest thing FastAPI can receive.
Environment: BENCH_PORT, BENCH_MAX_BATCH, BENCH_MAX_WAIT_MS, and that of the model, `onnx_session.py` or
with BENCH_LOADER=device `device.py`. BENCH_SHAPE is an image's if it is not 224,224,3, BENCH_IN_THREAD=1
keeps the event loop free while the model runs.
"""

import asyncio
import importlib
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import uvicorn
from fastapi import FastAPI, Request
from fastapi.concurrency import run_in_threadpool

LOADER = importlib.import_module(os.environ.get("BENCH_LOADER", "onnx_session"))
SHAPE = tuple(int(length) for length in os.environ.get("BENCH_SHAPE", "224,224,3").split(","))
IN_THREAD = os.environ.get("BENCH_IN_THREAD") == "1"
Waiting = tuple[np.ndarray, asyncio.Future[list[float]]]


class Batcher:
    """Collects single requests into batches and hands each caller its own row of the result."""

    def __init__(self, max_batch: int, max_wait_s: float) -> None:
        self._max_batch = max_batch
        self._max_wait_s = max_wait_s
        self._queue: asyncio.Queue[Waiting] = asyncio.Queue()
        self._model = LOADER.load()

    async def infer(self, image: np.ndarray) -> list[float]:
        answer: asyncio.Future[list[float]] = asyncio.get_running_loop().create_future()
        await self._queue.put((image, answer))
        return await answer

    async def work(self) -> None:
        while True:
            batch = await self._gather()
            images = np.stack([image for image, _ in batch])
            scores = await run_in_threadpool(self._model, images) if IN_THREAD else self._model(images)
            for (_, answer), row in zip(batch, scores.tolist(), strict=True):
                if not answer.done():
                    answer.set_result(row)

    async def _gather(self) -> list[Waiting]:
        """The first request, all that wait behind it, and more until the batch is full or time is up."""
        batch = [await self._queue.get()]
        give_up = asyncio.get_running_loop().time() + self._max_wait_s
        while len(batch) < self._max_batch:
            if not self._queue.empty():
                batch.append(self._queue.get_nowait())
                continue
            left = give_up - asyncio.get_running_loop().time()
            if left <= 0:
                break
            try:
                batch.append(await asyncio.wait_for(self._queue.get(), left))
            except TimeoutError:
                break
        return batch


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    batcher = Batcher(int(os.environ["BENCH_MAX_BATCH"]), float(os.environ["BENCH_MAX_WAIT_MS"]) / 1e3)
    app.state.batcher = batcher
    worker = asyncio.create_task(batcher.work())
    yield
    worker.cancel()


app = FastAPI(lifespan=lifespan)


@app.post("/infer")
async def infer(request: Request) -> dict[str, list[float]]:
    image = np.frombuffer(await request.body(), np.uint8).reshape(SHAPE)
    return {"output": await request.app.state.batcher.infer(image)}


if __name__ == "__main__":
    uvicorn.run(
        app, host="127.0.0.1", port=int(os.environ["BENCH_PORT"]), log_level="warning", access_log=False
    )
