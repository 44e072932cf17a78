"""Backends whose libraries are not installed here, with stand-ins that answer as the libraries would."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from backends.cases import load, settings
from carpool import backends
from carpool.backends import Backend
from carpool.backends.backend import Placement
from carpool.config.backend_kinds import kind_of
from carpool.config.repository import ModelVersion, find_models
from carpool.errors import ConfigError, ModelError, Unsupported
from carpool.extension import importable

Opened = Callable[[Backend], Backend]
Install = Callable[..., None]

TENSORFLOW = """
    import types, numpy as np

    def ignore(_): pass
    threading = types.SimpleNamespace(
        set_intra_op_parallelism_threads=ignore, set_inter_op_parallelism_threads=ignore)
    config = types.SimpleNamespace(threading=threading)

    class Tensor:
        def __init__(self, array): self.array = array
        def numpy(self): return self.array
    constant = Tensor

    def spec(shape, dtype="float32"):
        sized = types.SimpleNamespace(rank=len(shape), as_list=lambda: shape)
        return types.SimpleNamespace(shape=sized, dtype=types.SimpleNamespace(name=dtype))

    class Double:
        structured_input_signature = ((), {"inputs": spec([None, 3])})
        structured_outputs = {"double": spec([None, 3]), "words": spec([None, 1], "string")}
        def __call__(self, inputs):
            words = np.full((len(inputs.array), 1), b"word", object)
            return {"double": Tensor(inputs.array * 2), "words": Tensor(words)}

    def load(folder):
        import pathlib
        assert (pathlib.Path(folder) / "saved_model.pb").is_file()
        return types.SimpleNamespace(signatures={"other": None, "serving_default": Double()})
    saved_model = types.SimpleNamespace(load=load)
"""
TENSORRT = """
    import enum, torch
    __version__ = "10.0"

    class Logger:
        ERROR = 1
        def __init__(self, level): pass

    class TensorIOMode(enum.Enum):
        INPUT, OUTPUT = 1, 2

    class Type(enum.Enum):
        FLOAT, HALF = 1, 2

    class Context:
        def set_input_shape(self, name, shape):
            self.shape = shape
            return shape[0] <= 8
        def get_tensor_shape(self, name): return self.shape
        def set_tensor_address(self, name, address): setattr(self, name, torch.MEMORY[address])
        def execute_async_v3(self, stream):
            self.y[:] = self.x * 2
            return stream == 7

    class Engine:
        num_io_tensors = 2
        def get_tensor_name(self, index): return "xy"[index]
        def get_tensor_mode(self, name): return TensorIOMode.INPUT if name == "x" else TensorIOMode.OUTPUT
        def get_tensor_shape(self, name): return (-1, 3)
        def get_tensor_dtype(self, name): return Type.FLOAT if name == "x" else Type.HALF
        def create_execution_context(self): return Context()

    class Runtime:
        def __init__(self, logger): pass
        def deserialize_cuda_engine(self, plan): return Engine() if plan == b"plan" else None
"""
TORCH = """
    import types, numpy as np
    MEMORY = {}
    float32, float16 = np.float32, np.float16
    stream = types.SimpleNamespace(cuda_stream=7, synchronize=lambda: None)
    cuda = types.SimpleNamespace(
        is_available=lambda: True, set_device=lambda device: None, current_stream=lambda: stream)

    class Tensor:
        def __init__(self, array): self.array = array
        def to(self, device):
            assert device == "cuda:1"
            return self
        def cpu(self): return self
        def numpy(self): return self.array
        def data_ptr(self):
            MEMORY[id(self)] = self.array
            return id(self)

    from_numpy = Tensor
    def empty(shape, dtype, device): return Tensor(np.empty(shape, dtype))
"""
TRANSFORMERS = """
    import torch
    __version__ = "5.0"

    class SmallForImageClassification(torch.nn.Module):
        @classmethod
        def from_pretrained(cls, folder, **told):
            assert told == {"use_safetensors": True, "local_files_only": True, "trust_remote_code": False}
            return cls()
        def forward(self, pixel_values, return_dict):
            return {"logits": pixel_values.mean(dim=(2, 3)), "hidden_states": (pixel_values,)}
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("PYTHONPATH", str(site))

    def put(**modules: str) -> None:
        for name, code in modules.items():
            (site / f"{name}.py").write_text(textwrap.dedent(code))
        importable.cache_clear()

    return put


def model(folder: Path, file: str, content: str = "") -> Path:
    path = folder / "m" / "1" / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    return path


def test_a_saved_model_runs(tmp_path: Path, install: Install, opened: Opened) -> None:
    file = model(tmp_path, "model.savedmodel/saved_model.pb")
    (tmp_path / "m" / "config.pbtxt").write_text('platform: "tensorflow_savedmodel"')
    install(tensorflow=TENSORFLOW)
    [source], warnings = find_models([tmp_path / "m"])
    assert (source.config.backend, source.config.file, warnings) == ("tensorflow", "model.savedmodel", [])
    assert source.versions == (ModelVersion(1, file),)
    backend = opened(load(source.config, file))
    tensors = [(t.name, t.datatype, t.shape) for t in (*backend.signature.inputs, *backend.signature.outputs)]
    assert tensors == [
        ("inputs", "FP32", (-1, 3)),
        ("double", "FP32", (-1, 3)),
        ("words", "BYTES", (-1, 1)),
    ]
    x = np.ones((2, 3), np.float32)
    answer = backend.run({"inputs": x}, [])
    np.testing.assert_array_equal(answer["double"], x * 2)
    assert answer["words"].tolist() == [[b"word"], [b"word"]]


@pytest.mark.usefixtures("no_large_engines")
def test_a_saved_model_says_what_to_install_or_gives_way(tmp_path: Path) -> None:
    model(tmp_path, "model.savedmodel/saved_model.pb")
    (tmp_path / "m" / "config.pbtxt").write_text('platform: "tensorflow_savedmodel"')
    with pytest.raises(ConfigError) as caught:
        find_models([tmp_path / "m"])
    assert caught.value.message.endswith(
        "model.savedmodel is a TensorFlow model, which cannot run here: add model.onnx, or: "
        'the backend "tensorflow" needs tensorflow, which is not installed: pip install tensorflow'
    )
    model(tmp_path, "model.onnx")
    [source], _ = find_models([tmp_path / "m"])
    assert source.config.backend == "onnxruntime"


def test_a_tensorrt_engine_runs(tmp_path: Path, install: Install, opened: Opened) -> None:
    file = model(tmp_path, "model.plan", "plan")
    install(tensorrt=TENSORRT, torch=TORCH)
    (tmp_path / "m" / "config.pbtxt").write_text(
        'platform: "tensorrt_plan" instance_group { kind: KIND_GPU gpus: 1 }'
    )
    [source], warnings = find_models([tmp_path / "m"], gpus=2)
    assert (source.config.backend, warnings) == ("tensorrt", [])
    assert backends.devices(source.config) == (1,)
    version = ModelVersion(1, file)
    placement = Placement(threads=1, gpu=1)
    backend = opened(backends.load(source.config, version, placement))
    assert [(t.name, t.datatype) for t in backend.signature.outputs] == [("y", "FP16")]
    y = backend.run({"x": np.ones((2, 3), np.float32)}, ["y"])["y"]
    assert (y.dtype, y.tolist()) == (np.float16, [[2, 2, 2], [2, 2, 2]])
    with pytest.raises(ModelError, match=r"not built for x of shape \[9, 3\]"):
        backend.run({"x": np.ones((9, 3), np.float32)}, ["y"])
    file.write_text("another version's")
    with pytest.raises(ModelError, match=r"TensorRT 10\.0 cannot read it: an engine runs only on the kind"):
        backends.load(source.config, version, placement)


def folder_of(tmp_path: Path, config: str) -> Path:
    model(tmp_path, "config.json", config)
    (tmp_path / "m" / "model.toml").write_text('backend = "transformers"\n')
    return model(tmp_path, "model.safetensors")


@pytest.mark.conformance
def test_a_folder_of_transformers_runs(tmp_path: Path, install: Install, opened: Opened) -> None:
    config = '{"architectures": ["SmallForImageClassification"], "image_size": 8}'
    file = folder_of(tmp_path, config)
    install(transformers=TRANSFORMERS)
    [source], warnings = find_models([tmp_path / "m"])
    assert (source.config.backend, source.config.file, warnings) == ("transformers", "model.safetensors", [])
    backend = opened(load(source.config, file))
    tensors = [(t.name, t.datatype, t.shape) for t in (*backend.signature.inputs, *backend.signature.outputs)]
    assert tensors == [("pixel_values", "FP32", (-1, 3, 8, 8)), ("logits", "FP32", (-1, 3))]
    answer = backend.run({"pixel_values": np.full((2, 3, 8, 8), 4, np.float32)}, [])
    assert answer["logits"].tolist() == [[4, 4, 4], [4, 4, 4]]


@pytest.mark.parametrize(
    ("config", "cause"),
    [
        ('{"auto_map": {}, "architectures": ["A"]}', "asks for code of its own"),
        ('{"architectures": []}', "names no architecture"),
        ('{"architectures": ["NoSuchModel"]}', r"transformers 5\.0 has no NoSuchModel"),
        ("[]", "is not an object"),
        ("{", "is not JSON"),
    ],
)
def test_a_folder_that_cannot_run_is_told_why(
    tmp_path: Path, install: Install, config: str, cause: str
) -> None:
    file = folder_of(tmp_path, config)
    install(transformers=TRANSFORMERS)
    with pytest.raises(ModelError, match=cause):
        load(settings("transformers", file), file)


@pytest.mark.usefixtures("no_large_engines")
@pytest.mark.parametrize("name", ["tensorflow", "tensorrt", "transformers"])
def test_a_missing_library_is_named(tmp_path: Path, name: str) -> None:
    file = model(tmp_path, f"model{kind_of(name).suffixes[0]}")
    with pytest.raises(Unsupported, match=f"needs {name}, which is not installed: pip install {name}"):
        load(settings(name, file), file)
