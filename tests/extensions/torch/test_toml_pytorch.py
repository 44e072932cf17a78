from __future__ import annotations

from pathlib import Path

import pytest

from absent import needs
from carpool.config.model import ModelConfig, PytorchSettings, values_on_device
from carpool.config.repository import read_model
from carpool.config.toml import toml_config
from carpool.errors import ConfigError


def read(text: str) -> ModelConfig:
    return toml_config(text, Path("m/model.toml"))


def test_without_the_table_everything_is_left_to_choose() -> None:
    assert read("").pytorch == PytorchSettings()
    assert read("").backend is None


def test_every_key() -> None:
    config = read(
        '[pytorch]\ndevice = "cuda:1"\nprecision = "bf16"\nchannels_last = false\ncompile = "max-autotune"\n'
        'graphs = false\nbuckets = [8, 1, 8]\nmodule = "net.py:make"\nweights = "best.safetensors"\n'
    )
    assert config.backend == "pytorch"
    assert config.pytorch == PytorchSettings(
        device="cuda:1",
        precision="bf16",
        channels_last=False,
        compile="max-autotune",
        graphs=False,
        buckets=(1, 8),
        module="net.py:make",
        weights="best.safetensors",
    )
    assert read('[pytorch]\nmodule = "net.py"\n').pytorch.module == "net.py:build"
    assert [read(f"[pytorch]\ncompile = {word}\n").pytorch.compile for word in ("true", "false")] == [
        "default",
        "off",
    ]


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ('device = "gpu"', r'pytorch\.device must be "auto", "cpu", "cuda" or like "cuda:1", not "gpu"'),
        ('device = "cuda:-1"', "device must be"),
        ('precision = "int8"', r"pytorch\.precision cannot be"),
        ("precision = 16", "must be a string"),
        ('compile = "fast"', r"pytorch\.compile cannot be"),
        ("compile = 1", "compile must be true or false"),
        ("graphs = 1", "graphs must be true or false"),
        ("buckets = [0]", "buckets must be 1 to"),
        ("buckets = 4", "must be a list of whole numbers"),
        ('module = "net"', 'like "model.py:build"'),
        ('module = "net.py:a b"', 'like "model.py:build"'),
        ('module = "../net.py"', "inside the model's folder"),
        ('weights = "/etc/passwd"', "inside the model's folder"),
        ("channel_last = true", 'did you mean "channels_last"'),
    ],
)
def test_mistakes_name_the_key(line: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        read(f"[pytorch]\n{line}\n")


def test_onnx_files_that_run_on_pytorch_have_its_table() -> None:
    config = read('backend = "onnx_torch"\n[pytorch]\nprecision = "fp16"\ncompile = true\n')
    assert config.backend == "onnx_torch"
    assert (config.pytorch.precision, config.pytorch.compile) == ("fp16", "default")


def test_another_backend_contradicts_the_table() -> None:
    with pytest.raises(ConfigError, match=r'\[pytorch\] and backend = "onnxruntime" contradict'):
        read('backend = "onnxruntime"\n[pytorch]\n')


@pytest.mark.parametrize(
    ("files", "text", "found"),
    [
        (["model.pt", "model.py"], "[pytorch]\n", "model.pt"),
        (["model.py"], "[pytorch]\n", "model.py"),
        (["best.pth", "net.py"], '[pytorch]\nmodule = "net.py"\nweights = "best.pth"\n', "best.pth"),
        (["model.pt2"], "", "model.pt2"),
    ],
)
def test_the_file_is_found(files: list[str], text: str, found: str, tmp_path: Path) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "model.toml").write_text(text)
    for name in files:
        (tmp_path / "m" / "1" / name).touch()
    source, warnings = read_model(tmp_path / "m")
    assert (source.config.backend, source.config.file, warnings) == ("pytorch", found, [])


@pytest.mark.parametrize(
    ("datatype", "image", "on_device"),
    [
        ("UINT8", "[image]\nscale = 0.01\n", True),
        ("UINT8", "[image]\nmean = [1, 2, 3]\n", True),
        ("UINT8", "[image]\nsize = 8\n", False),
        ("UINT8", "", False),
        ("FP32", "[image]\nscale = 0.01\n", False),
    ],
)
def test_bytes_are_made_values_on_the_device_where_both_are_declared(
    datatype: str, image: str, on_device: bool
) -> None:
    tensor = f'[[input]]\nname = "x"\ndatatype = "{datatype}"\nshape = [3, 8, 8]\n'
    assert values_on_device(read(f'backend = "pytorch"\n{tensor}{image}')) is on_device
    assert not values_on_device(read(f'backend = "onnxruntime"\n{tensor}{image}'))


@needs("text")
def test_a_model_that_writes_is_not_compiled() -> None:
    with pytest.raises(ConfigError, match=r"compile.* does not go with \[generate\]"):
        read("[generate]\n[pytorch]\ncompile = true\n")
    assert read("[generate]\n[pytorch]\ncompile = false\n").pytorch.compile == "off"
