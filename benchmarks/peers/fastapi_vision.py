"""A baseline: what a team writes with FastAPI for pictures, with opencv, onnxruntime and its own batches.

The JPEG is the raw body. Decoding and the model run in threads, so that the event loop stays free; one
uvicorn process. Environment: BENCH_PORT, BENCH_TASK (detect or classify), BENCH_MAX_BATCH, BENCH_LABELS, and
BENCH_MODEL and BENCH_THREADS. It imports nothing of the project.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import cv2
import numpy as np
import onnxruntime
import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.concurrency import run_in_threadpool

TASK = os.environ["BENCH_TASK"]
LABELS = Path(os.environ["BENCH_LABELS"]).read_text().splitlines()
MAX_BATCH = int(os.environ["BENCH_MAX_BATCH"])
SIDE = {"detect": 416, "classify": 224}[TASK]
Waiting = tuple[np.ndarray, asyncio.Future[list[np.ndarray]]]


def decode(body: bytes) -> np.ndarray:
    picture = cv2.imdecode(np.frombuffer(body, np.uint8), cv2.IMREAD_COLOR)
    if picture is None:
        raise HTTPException(400, "no picture")
    return picture


def detect_input(picture: np.ndarray) -> tuple[np.ndarray, float]:
    height, width = picture.shape[:2]
    scale = min(SIDE / height, SIDE / width)
    small = cv2.resize(picture, (round(width * scale), round(height * scale)))
    canvas = np.full((SIDE, SIDE, 3), 114, np.uint8)
    canvas[: small.shape[0], : small.shape[1]] = small
    values = (canvas.astype(np.float32) - (103.53, 116.28, 123.675)) / (57.375, 57.12, 58.395)
    return values.transpose(2, 0, 1).astype(np.float32), scale


def detect_answer(outputs: list[np.ndarray], scale: float) -> list[dict[str, object]]:
    boxes, scores = outputs
    best, classes = scores.max(axis=1), scores.argmax(axis=1)
    likely = np.flatnonzero(best > 0.4)
    x1, y1, x2, y2 = (boxes[likely] / scale).T
    corners = np.stack((x1, y1, x2 - x1, y2 - y1), 1)
    kept = cv2.dnn.NMSBoxesBatched(
        corners.tolist(), best[likely].tolist(), classes[likely].tolist(), 0.4, 0.6
    )
    return [
        {
            "label": LABELS[classes[likely[one]]],
            "score": float(best[likely[one]]),
            "box": [float(side[one]) for side in (x1, y1, x2, y2)],
        }
        for one in kept
    ]


def classify_input(picture: np.ndarray) -> tuple[np.ndarray, float]:
    height, width = picture.shape[:2]
    side = int(min(height, width) * 0.875)
    top, left = (height - side) // 2, (width - side) // 2
    small = cv2.resize(
        picture[top : top + side, left : left + side], (SIDE, SIDE), interpolation=cv2.INTER_CUBIC
    )
    values = (cv2.cvtColor(small, cv2.COLOR_BGR2RGB).astype(np.float32) - 127.0) / 128.0
    return values.transpose(2, 0, 1), 1.0


def classify_answer(outputs: list[np.ndarray], _scale: float) -> list[dict[str, object]]:
    logits = outputs[0]
    scores = np.exp(logits - logits.max())
    scores /= scores.sum()
    best = np.argsort(-scores)[:5]
    return [{"label": LABELS[one], "score": float(scores[one])} for one in best]


PREPARE = {"detect": detect_input, "classify": classify_input}[TASK]
ANSWER = {"detect": detect_answer, "classify": classify_answer}[TASK]


class Batcher:
    """All that wait go together, up to the largest batch."""

    def __init__(self) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = int(os.environ["BENCH_THREADS"])
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self._session = onnxruntime.InferenceSession(
            os.environ["BENCH_MODEL"], options, providers=["CPUExecutionProvider"]
        )
        self._name = self._session.get_inputs()[0].name
        self._queue: asyncio.Queue[Waiting] = asyncio.Queue()

    async def infer(self, image: np.ndarray) -> list[np.ndarray]:
        answer: asyncio.Future[list[np.ndarray]] = asyncio.get_running_loop().create_future()
        await self._queue.put((image, answer))
        return await answer

    async def work(self) -> None:
        while True:
            batch = [await self._queue.get()]
            while len(batch) < MAX_BATCH and not self._queue.empty():
                batch.append(self._queue.get_nowait())
            images = np.stack([image for image, _ in batch])
            outputs = await run_in_threadpool(self._session.run, None, {self._name: images})
            for number, (_, answer) in enumerate(batch):
                if not answer.done():
                    answer.set_result([output[number] for output in outputs])


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    cv2.setNumThreads(1)
    app.state.batcher = Batcher()
    worker = asyncio.create_task(app.state.batcher.work())
    yield
    worker.cancel()


app = FastAPI(lifespan=lifespan)


def prepare(body: bytes) -> tuple[np.ndarray, float]:
    return PREPARE(decode(body))


@app.post("/predict")
async def predict(request: Request) -> dict[str, object]:
    image, scale = await run_in_threadpool(prepare, await request.body())
    outputs = await request.app.state.batcher.infer(image)
    return {"results": await run_in_threadpool(ANSWER, outputs, scale)}


if __name__ == "__main__":
    uvicorn.run(
        app, host="127.0.0.1", port=int(os.environ["BENCH_PORT"]), log_level="warning", access_log=False
    )
