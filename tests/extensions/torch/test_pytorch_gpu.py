"""What only a GPU can show: graphs, streams and memory. Skipped without one."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from carpool.backends import device_memory
from carpool.backends.backend import Placement
from carpool.backends.device_memory import ledger_of, limit_device_memory
from carpool.errors import ModelError
from carpool.extensions.torch.torch_backend import TorchBackend
from carpool.extensions.torch.torch_device import Captured, CudaDevice
from extensions.torch import torch_models as tm
from extensions.torch.torch_models import CODE, INPUT, OUTPUTS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

HALF = 'precision = "fp16"\n'
WORKSPACES = 256 << 20  # what libraries keep for the next model


def load(place: Path) -> TorchBackend:
    config, version = tm.described(place, gpus=1)
    assert version.file is not None
    return TorchBackend(config, version.file, CudaDevice(0), Placement())


def script(tmp_path: Path, more: str = "", name: str = "m", max_batch: int = 8) -> Path:
    text = f'max_batch = {max_batch}\n{INPUT}{OUTPUTS}[pytorch]\ndevice = "cuda:0"\n{more}'
    return tm.folder(tmp_path, text, {"model.pt": tm.write_script}, name)


def check(backend: TorchBackend, count: int, tolerance: float, seed: int = 0) -> None:
    values = tm.floats(count, seed)
    found = backend.run_parts([{"pixels": value[None]} for value in values], [1] * count, ())
    for name, expected in tm.answers(values).items():
        np.testing.assert_allclose(found[name], expected, atol=tolerance)


@pytest.mark.parametrize(
    ("precision", "tolerance"), [("fp32", 1e-5), ("tf32", 5e-3), ("fp16", 5e-3), ("bf16", 4e-2)]
)
def test_graphs_answer_as_the_cpu_does_at_every_size(
    precision: str, tolerance: float, tmp_path: Path
) -> None:
    backend = load(script(tmp_path, f'precision = "{precision}"\n'))
    assert backend._programs is not None
    assert all(isinstance(program, Captured) for program in backend._programs._ready.values())
    assert set(backend._programs._ready) == {1, 2, 4, 8}
    for count in range(1, 9):
        check(backend, count, tolerance, count)
    backend.close()


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # of the compiler's own modules
@pytest.mark.filterwarnings("ignore:TensorFloat32:UserWarning")  # which precision is for the settings to say
@pytest.mark.parametrize("kind", ["module", "exported"])
def test_compiled_networks_answer_the_same(kind: str, tmp_path: Path) -> None:
    exported = kind == "exported"
    text = f"max_batch = 2\n{INPUT}{OUTPUTS}[pytorch]\ncompile = true\n{'' if exported else HALF}"
    text += "" if exported else 'module = "model.py"\n'
    files = {"model.pt2": tm.write_exported} if exported else {"model.pt": tm.write_weights, "model.py": CODE}
    backend = load(tm.folder(tmp_path, text, files))
    assert backend._programs is not None
    assert backend._programs.network.is_compiled
    check(backend, 2, 5e-3)
    backend.close()


def test_a_model_is_loaded_beside_one_that_runs(tmp_path: Path) -> None:
    first = load(script(tmp_path, HALF, "first"))
    stop, faults, batches = threading.Event(), [], []

    def serve() -> None:
        while not stop.is_set():
            try:
                check(first, 1 + len(batches) % 8, 5e-3, len(batches) % 10)
            except BaseException as error:
                faults.append(error)
                return
            batches.append(1)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        for number in range(3):
            other = load(script(tmp_path, HALF, f"other{number}"))
            check(other, 5, 5e-3)
            other.close()
    finally:
        stop.set()
        thread.join(60)
    assert not faults
    assert batches
    first.close()


def test_instances_of_one_model_run_side_by_side(tmp_path: Path) -> None:
    place = script(tmp_path, HALF)
    instances = [load(place) for _ in range(3)]
    faults: list[BaseException] = []

    def serve(instance: TorchBackend, seed: int) -> None:
        try:
            for turn in range(30):
                check(instance, 1 + (turn + seed) % 8, 5e-3, seed)
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=serve, args=(one, seed)) for seed, one in enumerate(instances)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not faults
    for instance in instances:
        instance.close()


def test_large_batches_of_two_instances_compute_in_the_order_of_their_launch() -> None:
    """Told by what they find: the second reads what the first writes at its end, after a long sleep."""
    first, second = CudaDevice(0), CudaDevice(0)
    shared, found = (torch.zeros(1, device="cuda:0") for _ in range(2))

    def write() -> dict[str, torch.Tensor]:
        torch.cuda._sleep(200_000_000)  # about a tenth of a second
        return {"y": shared.fill_(1.0)}

    def read() -> dict[str, torch.Tensor]:
        return {"y": found.copy_(shared)}

    writing, reading = first.capture(write), second.capture(read)
    for _ in range(3):
        shared.zero_()
        torch.cuda.synchronize()
        first.enter()
        first.launch(writing, 64)
        second.enter()
        second.launch(reading, 64)
        second.wait()
        assert found.item() == 1.0
    first.wait()
    first.close()
    second.close()


def test_large_batches_of_several_instances_are_answered_right(tmp_path: Path) -> None:
    place = script(tmp_path, HALF + "buckets = [1, 32, 64]\n", max_batch=64)
    instances = [load(place) for _ in range(3)]
    faults: list[BaseException] = []

    def serve(instance: TorchBackend, seed: int) -> None:
        try:
            for turn in range(20):
                check(instance, (1, 20, 33, 64)[(turn + seed) % 4], 5e-3, seed)
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=serve, args=(one, seed)) for seed, one in enumerate(instances)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not faults
    for instance in instances:
        instance.close()


def test_a_network_that_cannot_be_captured_runs_without_a_graph(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    code = CODE.replace(
        "features = self.conv", "assert pixels.sum().item() > -1\n        features = self.conv"
    )
    text = f'max_batch = 2\n{INPUT}{OUTPUTS}[pytorch]\nmodule = "model.py"\n'
    backend = load(tm.folder(tmp_path, text, {"model.pt": tm.write_weights, "model.py": code}))
    assert "without a graph" in caplog.text
    check(backend, 2, 1e-4)
    other = load(script(tmp_path, HALF, "after"))  # nothing is left of the failed capture
    check(other, 3, 5e-3)
    backend.close()
    other.close()


def test_memory_is_counted_refused_and_given_back(tmp_path: Path) -> None:
    device_memory._ledgers.clear()
    limit_device_memory(4.0)
    try:
        warm = load(script(tmp_path, HALF, "warm"))
        warm.close()
        gc.collect()
        before = torch.cuda.memory_reserved(0)
        backend = load(script(tmp_path, HALF, "m", max_batch=256))
        device = CudaDevice(0)
        assert ledger_of(device).by_model()["m"] > 0
        assert set(backend._programs.footprint) == {1 << power for power in range(9)}
        backend.close()
        assert torch.cuda.memory_reserved(0) <= before + WORKSPACES
        assert ledger_of(device).used == 0
        wide = f"[3, {tm.SIDE}, {tm.SIDE}]"
        huge = script(tmp_path, HALF, "huge", max_batch=65536)
        text = (huge / "model.toml").read_text().replace(wide, "[3, 512, 512]")
        (huge / "model.toml").write_text(text)
        with pytest.raises(ModelError) as caught:
            load(huge)
        assert caught.value.reason == "device-memory"
        assert torch.cuda.memory_reserved(0) <= before + WORKSPACES
    finally:
        limit_device_memory(None)
        device_memory._ledgers.clear()
        torch.cuda.set_per_process_memory_fraction(1.0, 0)
