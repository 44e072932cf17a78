"""BentoML on the pretended device: one worker, its adaptive batching with the SLO as its latency budget.

Environment: BENCH_MAX_BATCH, BENCH_SLO_MS, and that of `device.py`.
"""

import os

import bentoml
import device
import numpy as np


@bentoml.service(workers=1, traffic={"timeout": 60}, logging={"access": {"enabled": False}})
class Pretended:
    def __init__(self) -> None:
        self.model = device.load()

    @bentoml.api(
        batchable=True,
        max_batch_size=int(os.environ["BENCH_MAX_BATCH"]),
        max_latency_ms=int(os.environ["BENCH_SLO_MS"]),
    )
    def predict(self, images: np.ndarray) -> np.ndarray:
        return self.model(images)
