"""LitServe on the pretended device: one worker, its own batching, the image as JSON.

Environment: BENCH_PORT, BENCH_MAX_BATCH, BENCH_MAX_WAIT_MS, and that of `device.py`.
"""

import os
from typing import Any

import device
import litserve
import numpy as np


class Pretended(litserve.LitAPI):
    def setup(self, device_name: str) -> None:
        del device_name
        self.model = device.load()

    def decode_request(self, request: dict[str, Any]) -> np.ndarray:
        return np.array(request["image"], np.uint8)

    def batch(self, inputs: list[np.ndarray]) -> np.ndarray:
        return np.stack(inputs)

    def predict(self, batch: np.ndarray) -> np.ndarray:
        return self.model(batch)

    def unbatch(self, output: np.ndarray) -> list[np.ndarray]:
        return list(output)

    def encode_response(self, row: np.ndarray) -> dict[str, list[float]]:
        return {"output": row.tolist()}


if __name__ == "__main__":
    api = Pretended(
        max_batch_size=int(os.environ["BENCH_MAX_BATCH"]),
        batch_timeout=float(os.environ["BENCH_MAX_WAIT_MS"]) / 1e3,
    )
    server = litserve.LitServer(api, accelerator="cpu", devices=1, workers_per_device=1, timeout=60)
    server.run(
        host="127.0.0.1",
        port=int(os.environ["BENCH_PORT"]),
        num_api_servers=1,
        generate_client_file=False,
        log_level="warning",
        access_log=False,
    )
