"""A detector and a classifier that only sleep, behind one pipeline."""

from __future__ import annotations

from pathlib import Path

_MODEL = """
import os, time, numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        made = []
        for request in requests:
            images = pb_utils.get_input_tensor_by_name(request, "images").as_numpy()
            slow = 2 if os.path.exists({busy!r}) else 1
            time.sleep({seconds} * {each} * slow)
            made.append(pb_utils.InferenceResponse({outputs}))
        return made
"""
_HEAD = 'backend = "python"\nmax_batch = {most}\nslo_ms = 500\ntask = "{task}"\n'
_INPUT = '[[input]]\nname = "images"\ndatatype = "FP32"\nshape = [3, 32, 32]\n'
_BOXES = "np.tile(np.float32([[0, 0, 16, 32], [16, 0, 32, 32]] * 2), (len(images), 1, 1))"
_SCORES = "np.tile(np.float32([[0.9, 0], [0, 0.8], [0, 0], [0, 0]]), (len(images), 1, 1))"
_PIPELINE = """
slo_ms = 2000
[[step]]
name = "find"
model = "finder"
keep = { score = 0.4, most = 8 }
[[step]]
name = "kind"
model = "namer"
each = "find.boxes"
"""


def output(name: str, *shape: int) -> str:
    return f'[[output]]\nname = "{name}"\ndatatype = "FP32"\nshape = {list(shape)}\n'


def write(folder: Path, busy: Path) -> Path:
    """135 ms a request, then 76 ms a crop; twice that while the file `busy` is there."""

    def one(name: str, task: str, seconds: float, each: str, made: dict[str, str], *outputs: str) -> None:
        (folder / name / "1").mkdir(parents=True)
        listed = ", ".join(f'pb_utils.Tensor("{tensor}", {value})' for tensor, value in made.items())
        text = _MODEL.format(seconds=seconds, each=each, busy=str(busy), outputs=f"[{listed}]")
        (folder / name / "1" / "model.py").write_text(text)
        image = '[image]\nresize = "stretch"\n'
        toml = _HEAD.format(most=8, task=task) + "".join(outputs)
        (folder / name / "model.toml").write_text(toml.replace("[[output", _INPUT + "[[output", 1) + image)

    made = {"boxes": _BOXES, "scores": _SCORES}
    one("finder", "detect", 0.135, "1", made, output("boxes", 4, 4), output("scores", 4, 2))
    logits = "np.zeros((len(images), 3), np.float32)"
    one("namer", "classify", 0.076, "len(images)", {"logits": logits}, output("logits", 3))
    (folder / "street").mkdir()
    (folder / "street" / "pipeline.toml").write_text(_PIPELINE)
    return folder
