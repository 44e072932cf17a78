"""What happens to the server when a Python model raises, hangs, dies or lies."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from backends.cases import X_TO_Y, python_file, settings
from carpool.backends.backend import Placement
from carpool.backends.python.python_backend import PythonBackend
from carpool.backends.python.worker_process import WorkerProcess
from carpool.config.repository import ModelVersion
from carpool.errors import ModelError

X = np.arange(12, dtype=np.float32).reshape(4, 3)

Load = Callable[..., PythonBackend]


def answer(backend: PythonBackend, x: np.ndarray = X) -> np.ndarray:
    return backend.run({"x": x}, ["y"])["y"]


RAISED = (  # by predict, and what is told, whose %d is its line
    ("return predict(x)", r"RecursionError: .*\(model.py:[4%d]"),
    ("raise ValueError('bad  row\\n3')", r"^model: ValueError: bad row 3 \(model.py:%d, in predict\)$"),
    ("return {}[1]", r"KeyError: 1 \(model.py:%d"),
    ("raise SystemExit(3)", r"SystemExit: 3 \(model.py:%d"),
    ("raise KeyboardInterrupt", r"KeyboardInterrupt \(model.py:%d"),
    ("import numpy; numpy.linalg.inv(x)", r"LinAlgError: .*\(model.py:%d"),
    ("raise ValueError('x' * 9_000_000)", r"ValueError: x{500} \(model.py:%d"),
)


def test_what_predict_raises_is_told_and_survived(model: Load) -> None:
    """What stands in line n is raised for -n. Two lines and that of `def` come before the first of them."""
    lines = range(5, 5 + 2 * len(RAISED), 2)
    tried = "".join(
        f"  if x.min() == -{at}:\n    {code}\n" for at, (code, _) in zip(lines, RAISED, strict=True)
    )
    backend = model(f"def predict(x):\n{tried}  return x")
    for at, (_, cause) in zip(lines, RAISED, strict=True):
        with pytest.raises(ModelError, match=cause % at):
            answer(backend, np.full_like(X, -at))
        assert backend.alive
        np.testing.assert_array_equal(answer(backend), X)


@pytest.mark.parametrize(
    ("death", "how"),
    [
        ("os._exit(3)", "exit status 3"),
        ("ctypes.string_at(0)", "signal 11"),
        ("os.kill(os.getpid(), 9)", "signal 9"),
        ("os.abort()", "signal 6"),
    ],
)
def test_a_dying_process_is_told_at_once(model: Load, death: str, how: str) -> None:
    backend = model(f"import ctypes, os\ndef predict(x): {death}")
    for _ in range(2):
        with pytest.raises(ModelError, match=rf"process died \({how}\)") as caught:
            answer(backend)
        assert caught.value.reason == "model-died"
        assert not backend.alive


def test_a_death_is_seen_though_a_grandchild_holds_the_socket(model: Load) -> None:
    source = """
        import os, signal
        def predict(x):
            if os.fork() == 0:
                signal.pause()
            os._exit(4)
    """
    with pytest.raises(ModelError, match="exit status 4"):
        answer(model(source))


def test_a_process_that_died_between_batches_is_told(model: Load) -> None:
    backend = model("def predict(x): return x")
    answer(backend)
    os.kill(backend._process.pid, signal.SIGKILL)
    with pytest.raises(ModelError, match="signal 9"):
        answer(backend)


def test_abort_kills_a_model_that_keeps_its_interpreter(model: Load, tmp_path: Path) -> None:
    """And it is in the middle of predict when that happens: the model says so before it hangs."""
    fifo = tmp_path / "inside"
    os.mkfifo(fifo)
    source = f"""
        import ctypes
        def predict(x):
            open({str(fifo)!r}, "w").close()
            ctypes.PyDLL(None).sleep(100000)
    """
    backend = model(source)
    errors: list[str] = []

    def run() -> None:
        try:
            answer(backend)
        except ModelError as error:
            errors.append(error.message)

    thread = threading.Thread(target=run)
    thread.start()
    fifo.read_bytes()
    backend.abort()
    thread.join()
    assert errors == ["model: the batch was stopped before it ended"]


def test_an_answer_beyond_the_bound_is_an_error(model: Load) -> None:
    backend = model("import numpy as np\ndef predict(x): return np.broadcast_to(x, (1 << 27, 4, 3))")
    with pytest.raises(ModelError, match=r"6442450944 bytes, more than the 1073741824 allowed"):
        answer(backend)
    assert backend.alive


@pytest.mark.parametrize(
    "lie",
    [
        "[1,2]",
        "not JSON",
        "{}",
        '{"outputs": 3}',
        '{"outputs": [["y", "<f4", [1000000], 0, 4000000]]}',
        '{"outputs": [["y", "<f4", [3], 0, 8]]}',
        '{"outputs": [["y", "<f4", [-3], 0, 12]]}',
        '{"outputs": [["y", "<f4", [3], -8, 12]]}',
        '{"outputs": [["y", "<f4", [1267650600228229401496703205376, 0], 0, 0]]}',
        '{"outputs": [["y", "no dtype", [3], 0, 12]]}',
        '{"outputs": [["y", "|O", [1000], 0, 12]]}',
        '{"outputs": [["y", "|O", [1], 0, 12]]}',
        "[" * 100_000,
    ],
)
def test_lies_of_the_process_are_only_data(model: Load, lie: str) -> None:
    """The model writes to the server's socket itself, before its worker answers for it."""
    source = f"""
        import os, socket, struct
        def predict(x):
            lie = {lie!r}.encode()
            for name in os.listdir("/proc/self/fd"):
                try:
                    socket.socket(fileno=os.dup(int(name))).sendall(struct.pack("<I", len(lie)) + lie)
                except OSError:
                    pass
            return x
    """
    backend = model(source)
    with pytest.raises(ModelError, match="invalid message"):
        answer(backend)
    assert not backend.alive


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("1 / 0", r"cannot be loaded: ZeroDivisionError: .* \(model.py:3, in <module>\)$"),
        ("import no_such_package", r"ModuleNotFoundError: .*no_such_package"),
        (
            "def setup(config): config['mood']\ndef predict(x): pass",
            r"KeyError: 'mood' \(model.py:3, in s",
        ),
        ("class Model:\n def __init__(self, size): pass\n def predict(self, x): pass", "TypeError: .*size"),
        ("class Model: pass", "neither a class Model with a method predict nor a function predict"),
        ("def predict(a, b): pass", "must take one argument"),
        ("def predict(): pass", "must take one argument"),
        ("def predict(x, other): pass", "differ in other"),
        ("import sys; sys.exit(5)", "SystemExit: 5"),
        ("import os; os._exit(5)", r"process died \(exit status 5\)"),
    ],
)
def test_a_model_that_cannot_be_loaded_says_why(model: Load, source: str, cause: str) -> None:
    with pytest.raises(ModelError, match=cause):
        model(source)


def test_loading_has_an_end(tmp_path: Path) -> None:
    file = python_file(tmp_path, X_TO_Y + "while True: pass")
    with pytest.raises(ModelError, match=r"model\.py was not ready after 0\.2 s"):
        PythonBackend(settings("python", file), ModelVersion(1, file), Placement(), 0.2)


def test_a_process_that_cannot_start_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(FileNotFoundError):
        WorkerProcess(None)
    assert len(list(Path("/proc/self/fd").iterdir())) <= before  # others may close theirs meanwhile


SERVER = """
import sys, threading
from pathlib import Path
import numpy as np
from carpool import backends
from carpool.config.repository import find_models

(source,), _ = find_models([Path(sys.argv[1])])
config = backends.describe(source.config, source.versions[0])
loaded = []
# Started from a thread that ends: the worker must outlive the thread, but not the server.
loader = threading.Thread(target=lambda: loaded.append(backends.load(config, source.versions[0])))
loader.start()
loader.join()
x = np.zeros((1, 3), np.float32)
worker, child, _ = loaded[0].run({"x": x}, ["y"])["y"][0]
print(int(worker), int(child), flush=True)
loaded[0].run({"x": x + 1}, ["y"])
"""


def test_a_killed_server_leaves_no_processes(tmp_path: Path) -> None:
    """Not the worker, though it never lets go of its interpreter, nor what the worker started."""
    source = """
import ctypes, os, subprocess
child = subprocess.Popen(["sleep", "100000"])
def predict(x):
    if x.max() > 0:
        ctypes.PyDLL(None).sleep(100000)
    return [[os.getpid(), child.pid, 0]]
"""
    file = python_file(tmp_path, X_TO_Y + source)
    command = [sys.executable, "-c", SERVER, str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        pidfds = [os.pidfd_open(int(pid)) for pid in server.stdout.readline().split()]
        server.kill()
    assert len(pidfds) == 2
    for pidfd in pidfds:
        assert select.select([pidfd], [], [], 60)[0], "still running a minute after the server's end"
        os.close(pidfd)
