"""How a Python model is written, and what becomes of its answers."""

from __future__ import annotations

import os
import py_compile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from backends.cases import load, load_python, python_file, settings
from carpool import backends
from carpool.backends.backend import Placement
from carpool.backends.python.python_backend import PythonBackend
from carpool.config.repository import ModelVersion
from carpool.errors import ConfigError, ModelError

X = np.arange(12, dtype=np.float32).reshape(4, 3)

Load = Callable[..., PythonBackend]


def answer(backend: backends.Backend, x: np.ndarray = X) -> np.ndarray:
    return backend.run({"x": x}, ["y"])["y"]


@pytest.mark.parametrize(
    "source",
    [
        "def predict(inputs): return {'y': inputs['x'] + 1}",
        "def predict(inputs): return inputs['x'] + 1",
        "def predict(x): return x + 1",
        "def predict(x): return [row + 1 for row in x]",
        "def predict(x): return [{'y': row + 1} for row in x]",
        "def predict(x): return [[v + 1 for v in row] for row in x.tolist()]",
        "def predict(x, scale=1): return {'y': (x + scale).tolist()}",
        "class Model:\n    def predict(self, batch): return batch['x'] + 1",
        "class Model:\n    def predict(self, x): return x + 1",
    ],
)
def test_the_ways_to_write_a_model(model: Load, source: str) -> None:
    y = answer(model(source))
    assert y.dtype == np.float32
    np.testing.assert_array_equal(y, X + 1)


def test_setup_learns_about_its_place_before_the_first_batch(opened: Callable, tmp_path: Path) -> None:
    source = """
        def setup(config):
            global told
            keys = ("name", "version", "instance", "gpu", "threads", "max_batch")
            told = [config[key] for key in keys]
            told += [config["parameters"]["mood"], config["inputs"][0]["datatype"]]
        def predict(x):
            return [["|".join(map(str, told))] for _ in x]
    """
    file = python_file(tmp_path, source)
    config = settings("python", file, (("x", "FP32", (3,)),), (("y", "BYTES", (1,)),))
    config = replace(config, parameters={"mood": "calm"}, max_batch=8)
    backend = opened(backends.load(config, ModelVersion(7, file), Placement(instance=2, threads=3, gpu=1)))
    assert answer(backend).tolist() == [[b"model|7|2|1|3|8|calm|FP32"]] * 4


def test_a_model_finds_the_files_beside_it(model: Load, tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("VALUE = 5")
    y = answer(model("import neighbour\ndef predict(x): return x * neighbour.VALUE"))
    np.testing.assert_array_equal(y, X * 5)


@pytest.mark.parametrize("own", ["", "ACTIVE"])
def test_threads_that_wait_sleep_unless_the_user_says_otherwise(
    model: Load, monkeypatch: pytest.MonkeyPatch, own: str
) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if own:
        monkeypatch.setenv("OMP_WAIT_POLICY", own)
    source = """
        import os
        def predict(x):
            return x[:, :2] * 0 + len(os.environ["OMP_WAIT_POLICY"])
    """
    assert answer(model(source))[0, 0] == len(own or "PASSIVE")


def test_numeric_libraries_get_the_instances_share_of_threads(
    model: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("MKL_NUM_THREADS", "6")
    source = """
        import os
        def predict(x):
            return x[:, :2] * 0 + [int(os.environ[name + "_NUM_THREADS"]) for name in ("OMP", "MKL")]
    """
    assert answer(model(source))[0].tolist() == [1, 6]


def test_without_a_batch_a_list_is_a_value(model: Load) -> None:
    head = 'INPUTS = {"x": ("FP32", [4, 3])}\nOUTPUTS = {"y": ("INT64", [2])}\nMAX_BATCH = 0\n'
    y = answer(model("def predict(x): return list(x.shape)", head))
    assert (y.dtype, y.tolist()) == (np.int64, [4, 3])


def test_several_inputs_by_their_names(model: Load) -> None:
    source = """
        INPUTS = {"left": ("INT32", [2]), "right": ("INT32", [2])}
        OUTPUTS = {"difference": ("INT32", [2])}
        def predict(right, left):
            return left - right
    """
    inputs = {"left": np.array([[5, 6]], np.int32), "right": np.array([[1, 2]], np.int32)}
    assert model(source, "").run(inputs, [])["difference"].tolist() == [[4, 4]]


def test_answers_are_passed_on_whatever_was_declared(model: Load) -> None:
    y = answer(model("import numpy as np\ndef predict(x): return np.zeros((1, 7), np.float64)"))
    assert (y.shape, y.dtype) == ((1, 7), np.float64)


@pytest.mark.parametrize(
    ("datatype", "value", "dtype"),
    [
        ("UINT8", "[[1, 2], [3, 4]]", "uint8"),
        ("FP16", "[[1, 2], [3, 4]]", "float16"),
        ("BOOL", "[[True, False], [True, True]]", "bool"),
        ("INT64", "[[1.5, 2], [3, 4]]", "float64"),  # would lose the half: the engine says so
        ("BF16", "[[1.5, 2], [3, 4]]", "float64"),
    ],
)
def test_plain_numbers_take_the_declared_datatype(model: Load, datatype: str, value: str, dtype: str) -> None:
    head = f'INPUTS = {{"x": ("FP32", [3])}}\nOUTPUTS = {{"y": ("{datatype}", [2])}}\n'
    assert answer(model(f"def predict(x): return {value}", head), X[:2]).dtype == dtype


NO_TENSORS = (
    ("np.zeros(3, complex)", "'y' is an array of complex128"),
    ("[None] * 4", "'y' holds a NoneType"),
    ("None", "'y' holds a NoneType"),
    ("{'z': x}", "no output 'y'; it has z"),
    ("[1, 2]", "2 results for a batch of 4"),
    ("[[1, 2], [1], [1], [1]]", "inhomogeneous"),
)


def test_answers_that_are_no_tensors_are_named(model: Load) -> None:
    """Number `n` is what it answers for -n."""
    tried = "".join(
        f"    if x.min() == -{number}: return {value}\n"
        for number, (value, _) in enumerate(NO_TENSORS, start=1)
    )
    backend = model(f"import numpy as np\ndef predict(x):\n{tried}    return x")
    for number, (_, cause) in enumerate(NO_TENSORS, start=1):
        with pytest.raises(ModelError, match=cause):
            answer(backend, np.full_like(X, -number))
        np.testing.assert_array_equal(answer(backend), X)


def test_one_array_needs_one_output(model: Load) -> None:
    head = 'INPUTS = {"x": ("FP32", [3])}\nOUTPUTS = {"a": ("FP32", [3]), "b": ("FP32", [3])}\n'
    with pytest.raises(ModelError, match=r"returned a ndarray; return a dict .*a, b"):
        model("def predict(x): return x", head).run({"x": X}, ["a"])


def test_text_goes_both_ways(model: Load) -> None:
    source = """
        INPUTS = {"x": ("BYTES", [1])}
        OUTPUTS = {"y": ("BYTES", [1])}
        def predict(x):
            return [[item.decode("latin-1") + "é"] for item in x[:, 0]]
    """
    x = np.array([[b"a\xff\0"], [b""]], dtype=object)
    assert answer(model(source, ""), x).tolist() == [["aÿ\0é".encode()], ["é".encode()]]


def test_a_file_that_is_not_python_is_named_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"model\.py:2: not a Python file"):
        load_python(tmp_path, "x = 1\ndef predict(:\n")


def test_tensors_must_be_declared_somewhere(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"does not declare its inputs; .* or as INPUTS in model\.py"):
        load_python(tmp_path, "def predict(x): return x")


def test_settings_can_declare_the_tensors(opened: Callable, tmp_path: Path) -> None:
    file = python_file(tmp_path, "def predict(x): return x")
    config = settings("python", file, (("x", "FP32", (3,)),), (("y", "FP32", (3,)),))
    backend = opened(load(config, file))
    np.testing.assert_array_equal(answer(backend), X)
    assert backend.signature.inputs == ()


def test_what_a_model_prints_goes_to_the_servers_log(model: Load, capfd: pytest.CaptureFixture[str]) -> None:
    source = """
        import sys
        def predict(x):
            print("hello")
            print("there", file=sys.stderr)
            return x
    """
    answer(model(source))
    out, err = capfd.readouterr()
    assert out == ""
    assert "hello\nthere" in err


def test_equal_errors_are_logged_once(model: Load, capfd: pytest.CaptureFixture[str]) -> None:
    backend = model("def predict(x): raise ValueError(x.min())")
    for x in (X, X, X + 1):
        with pytest.raises(ModelError):
            answer(backend, x)
    assert capfd.readouterr().err.count("Traceback") == 2


def test_large_batches_grow_the_memory_and_small_ones_follow(model: Load) -> None:
    backend = model("def predict(x): return x")
    for size in (3, 300_000, 5, 3_000_000):
        x = np.full((2, size), size, np.float32)
        np.testing.assert_array_equal(answer(backend, x), x)


def test_an_orderly_end_lets_the_model_clean_up(model: Load, tmp_path: Path) -> None:
    left = tmp_path / "left"
    source = f"""
        import atexit, pathlib
        atexit.register(pathlib.Path({str(left)!r}).touch)
        def predict(x): return x
    """
    model(source).close()
    assert left.exists()


def optional_model(folder: Path, source: str) -> backends.Backend:
    file = python_file(folder, source)
    config = settings("python", file, (("a", "FP32", (1,)), ("b", "FP32", (1,))), (("y", "FP32", (1,)),))
    first, second = config.inputs
    return load(replace(config, inputs=(first, replace(second, optional=True))), file)


@pytest.mark.parametrize(
    "source",
    [
        "def predict(inputs): return inputs['a'] + inputs.get('b', 5)",
        "def predict(a, b=5): return a + b",
    ],
)
def test_what_a_request_left_out_is_not_among_the_inputs(tmp_path: Path, source: str) -> None:
    model = optional_model(tmp_path, source)
    one = np.ones((2, 1), np.float32)
    assert model.run({"a": one}, ["y"])["y"].tolist() == [[6], [6]]
    assert model.run({"a": one, "b": one}, ["y"])["y"].tolist() == [[2], [2]]
    model.close()


def test_a_parameter_for_an_optional_input_needs_a_default(tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match="the input 'b' is optional: give its parameter of predict a default"
    ):
        optional_model(tmp_path, "def predict(a, b): return a + b")


@pytest.mark.parametrize("changed", ["model.py", "neighbour.py", "package/__init__.py"])
def test_a_file_of_the_same_second_and_length_is_compiled_anew(
    model: Load, tmp_path: Path, changed: str
) -> None:
    """Whoever mends a number and loads again gets the mended number, whatever bytecode lies there."""
    (tmp_path / "package").mkdir()
    source = "import neighbour, package\ndef predict(x): return x + 1 + neighbour.B + package.C\n"
    files = {"neighbour.py": "B = 1\n", "package/__init__.py": "C = 1\n"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    np.testing.assert_array_equal(answer(model(source)), X + 3)
    path = tmp_path / changed
    py_compile.compile(str(path), doraise=True)  # as another program would keep it
    before = path.stat()
    text = path.read_text().replace("1", "5", 1)
    if changed == "model.py":
        text = path.read_text().replace("x + 1", "x + 5")
    path.write_text(text)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size
    again = load(settings("python", tmp_path / "model.py"), tmp_path / "model.py")
    try:
        np.testing.assert_array_equal(answer(again), X + 7)
    finally:
        again.close()
    assert not (tmp_path / "package" / "__pycache__").exists() or changed == "package/__init__.py"
