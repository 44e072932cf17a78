"""A peer whose HTTP server and batcher are written in Rust: mosec, with the model in its Python workers.

The tensor is the raw body, ten floats come back as bytes. mosec waits for a batch in whole milliseconds, one
at least. Environment: BENCH_WORKERS, BENCH_MAX_BATCH, BENCH_MAX_WAIT_MS, and that of `onnx_session.py`; the
port and the address are mosec's own options.
"""

import os
from typing import Any

import numpy as np
import onnx_session
from mosec import Server, Worker

SHAPE = (224, 224, 3)


class Model(Worker):
    def __init__(self) -> None:
        super().__init__()
        self._model = onnx_session.load()

    def deserialize(self, data: bytes) -> np.ndarray:
        return np.frombuffer(data, np.uint8).reshape(SHAPE)

    def forward(self, data: list[np.ndarray]) -> list[Any]:
        return list(self._model(np.stack(data)))

    def serialize(self, data: np.ndarray) -> bytes:
        return data.astype("<f4").tobytes()


if __name__ == "__main__":
    server = Server()
    server.append_worker(
        Model,
        num=int(os.environ["BENCH_WORKERS"]),
        max_batch_size=int(os.environ["BENCH_MAX_BATCH"]),
        max_wait_time=max(1, round(float(os.environ["BENCH_MAX_WAIT_MS"]))),
    )
    server.run()
