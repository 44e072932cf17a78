"""The model as the peers call it: one session, threads that sleep instead of spinning.

Runs inside the peers' own environments, beside `fastapi_app.py` and `triton_model.py`; it imports nothing
of the project. Environment: BENCH_MODEL (the ONNX file), BENCH_THREADS (threads within one run).
"""

import os
from collections.abc import Callable

import numpy as np
import onnxruntime


def load() -> Callable[[np.ndarray], np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = int(os.environ["BENCH_THREADS"])
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = onnxruntime.InferenceSession(
        os.environ["BENCH_MODEL"], options, providers=["CPUExecutionProvider"]
    )
    name = session.get_inputs()[0].name

    def run(batch: np.ndarray) -> np.ndarray:
        return np.asarray(session.run(None, {name: batch})[0])

    return run
