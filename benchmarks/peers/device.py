"""A pretended device for the peers: it takes fixed + per image milliseconds, no CPU, and answers zeros.

Runs inside the peers' own environments; it imports nothing of the project. Environment: BENCH_FIXED_MS and
BENCH_PER_IMAGE_MS.
"""

import os
import time
from collections.abc import Callable

import numpy as np

SCORES = 3


def load() -> Callable[[np.ndarray], np.ndarray]:
    fixed, per_image = (float(os.environ[f"BENCH_{part}_MS"]) / 1e3 for part in ("FIXED", "PER_IMAGE"))

    def run(batch: np.ndarray) -> np.ndarray:
        time.sleep(fixed + per_image * len(batch))
        return np.zeros((len(batch), SCORES), np.float32)

    return run
