"""SavedModels for the contract: TensorFlow writes them, in a process of its own, all at once."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from carpool.types import DATATYPES

_TYPES = {name: datatype.dtype.name for name, datatype in DATATYPES.items()}
_TYPES |= {"BF16": "bfloat16", "BYTES": "string"}
_PATIENCE_S = 300.0


def saved(kind: str) -> Path:
    """The file saved_model.pb of "arithmetic", "endless", or the name of a datatype: the identity of it."""
    return _written() / kind / "saved_model.pb"


@functools.cache
def _written() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="saved-models-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-m", "backends.tensorflow_models", str(folder)]
    subprocess.run(command, env=environment, check=True, timeout=_PATIENCE_S)
    return folder


def _write(folder: Path) -> None:
    import tensorflow as tf

    def save(kind: str, compute: object, datatype: str = "float32") -> None:
        spec = tf.TensorSpec([None, 3], tf.dtypes.as_dtype(datatype), name="x")
        module = tf.Module()
        module.call = tf.function(compute, input_signature=[spec])
        tf.saved_model.save(module, str(folder / kind), signatures=module.call)

    save("arithmetic", lambda x: {"double": x + x, "total": tf.reduce_sum(x, axis=1, keepdims=True)})
    save(
        "endless", lambda x: {"y": tf.while_loop(lambda x: x[0, 0] < float("inf"), lambda x: [x + 0], [x])[0]}
    )
    for name, datatype in _TYPES.items():
        save(name, lambda x: {"y": tf.identity(x)}, datatype)


if __name__ == "__main__":
    _write(Path(sys.argv[1]))
