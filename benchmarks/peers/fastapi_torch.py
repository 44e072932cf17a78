"""A baseline: what a team writes with FastAPI around a PyTorch model on a GPU, with an asyncio batcher.

The JPEG is the raw body; opencv decodes it in a thread, the batcher gathers up to BENCH_MAX_BATCH pictures
for at most BENCH_WAIT_MS, and the model runs in a thread. Environment: BENCH_PORT, BENCH_NETWORK,
BENCH_MAX_BATCH, BENCH_WAIT_MS, BENCH_WORKERS. It imports nothing of the project.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import cv2
import numpy as np
import torch
import torchvision
import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.concurrency import run_in_threadpool

MAX_BATCH = int(os.environ["BENCH_MAX_BATCH"])
WAIT_S = float(os.environ["BENCH_WAIT_MS"]) / 1e3
SIDE = 224
Waiting = tuple[np.ndarray, asyncio.Future[list[dict[str, float]]]]


class Batcher:
    """Gathers what comes within a few milliseconds."""

    def __init__(self) -> None:
        network = getattr(torchvision.models, os.environ["BENCH_NETWORK"])(weights=None)
        self._model = network.eval().cuda().half().to(memory_format=torch.channels_last)
        self._mean = torch.tensor((0.485, 0.456, 0.406), device="cuda").view(1, 3, 1, 1)
        self._std = torch.tensor((0.229, 0.224, 0.225), device="cuda").view(1, 3, 1, 1)
        self._queue: asyncio.Queue[Waiting] = asyncio.Queue()

    async def classify(self, image: np.ndarray) -> list[dict[str, float]]:
        answer: asyncio.Future[list[dict[str, float]]] = asyncio.get_running_loop().create_future()
        await self._queue.put((image, answer))
        return await answer

    async def work(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            batch = [await self._queue.get()]
            end = loop.time() + WAIT_S
            while len(batch) < MAX_BATCH and (left := end - loop.time()) > 0:
                try:
                    batch.append(await asyncio.wait_for(self._queue.get(), left))
                except TimeoutError:
                    break
            answers = await run_in_threadpool(self.run, [image for image, _ in batch])
            for (_, waiting), answer in zip(batch, answers, strict=True):
                if not waiting.done():
                    waiting.set_result(answer)

    def run(self, images: list[np.ndarray]) -> list[list[dict[str, float]]]:
        with torch.inference_mode():
            pixels = torch.from_numpy(np.stack(images)).cuda().permute(0, 3, 1, 2)
            values = ((pixels.float() / 255 - self._mean) / self._std).half()
            scores = self._model(values.contiguous(memory_format=torch.channels_last)).float().softmax(1)
            best, classes = scores.topk(5)
            pairs = zip(best.cpu().tolist(), classes.cpu().tolist(), strict=True)
        return [
            [{"class_id": c, "score": s} for s, c in zip(scores, classes, strict=True)]
            for scores, classes in pairs
        ]


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    cv2.setNumThreads(1)
    app.state.batcher = batcher = Batcher()
    for size in (1, 8, MAX_BATCH):
        batcher.run([np.zeros((SIDE, SIDE, 3), np.uint8)] * size)
    worker = asyncio.create_task(batcher.work())
    yield
    worker.cancel()


app = FastAPI(lifespan=lifespan)


def prepare(body: bytes) -> np.ndarray:
    picture = cv2.imdecode(np.frombuffer(body, np.uint8), cv2.IMREAD_COLOR)
    if picture is None:
        raise HTTPException(400, "no picture")
    small = cv2.resize(picture, (SIDE, SIDE), interpolation=cv2.INTER_AREA)
    return cv2.cvtColor(small, cv2.COLOR_BGR2RGB)


@app.get("/v2/health/ready")
async def ready() -> dict[str, bool]:
    return {"ready": True}


@app.post("/predict")
async def predict(request: Request) -> dict[str, object]:
    image = await run_in_threadpool(prepare, await request.body())
    return {"classes": await request.app.state.batcher.classify(image)}


if __name__ == "__main__":
    uvicorn.run(
        "fastapi_torch:app",
        port=int(os.environ["BENCH_PORT"]),
        workers=int(os.environ["BENCH_WORKERS"]),
        log_level="warning",
        access_log=False,
    )
