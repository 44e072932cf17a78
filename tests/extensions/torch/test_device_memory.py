"""A device whose memory is small and pretended: what fits is told before, and what does not is survived."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from carpool.backends import device_memory
from carpool.backends.device_memory import MemoryLedger, in_words, ledger_of, limit_device_memory
from carpool.errors import ModelError
from extensions.torch import torch_models as tm
from extensions.torch.torch_models import INPUT, OUTPUTS, PretendedDevice

ROW = 3 * tm.SIDE * tm.SIDE * 4


@pytest.fixture(autouse=True)
def fresh_ledgers() -> Iterator[None]:
    device_memory._ledgers.clear()
    yield
    device_memory._ledgers.clear()
    limit_device_memory(None)


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    file = tmp_path_factory.mktemp("script") / "model.pt"
    tm.write_script(file)
    return file.read_bytes()


def place(tmp_path: Path, script: bytes, name: str = "m", max_batch: int = 8) -> Path:
    text = f"max_batch = {max_batch}\n{INPUT}{OUTPUTS}[pytorch]\ngraphs = true\n"
    return tm.folder(tmp_path, text, {"model.pt": lambda file: file.write_bytes(script)}, name)


def test_the_budget_is_a_share_of_what_is_free_or_what_is_said() -> None:
    assert ledger_of(PretendedDevice(1000)).most == 900
    device_memory._ledgers.clear()
    limit_device_memory(2.5)
    device = PretendedDevice(10**10)
    assert ledger_of(device).most == 2_500_000_000
    assert device.most == 2_500_000_000
    assert ledger_of(PretendedDevice(5)).most == 2_500_000_000  # the same device: asked once


def test_a_refusal_has_the_numbers() -> None:
    ledger = MemoryLedger("cuda:0", 4 * 10**9)
    ledger.hold(1, "resnet", 10**9)
    ledger.hold(2, "resnet", 500_000_000)
    ledger.hold(3, "vit", 2 * 10**9)
    assert ledger.used == 3_500_000_000
    ledger.check("new", 500_000_000, "it takes")
    with pytest.raises(ModelError) as caught:
        ledger.check("new", 500_000_001, "it would take about")
    assert caught.value.reason == "device-memory"
    assert caught.value.message == (
        "new: it would take about 500.0 MB on cuda:0, and 500.0 MB of the budget of 4.00 GB is left "
        "(resnet 1.50 GB, vit 2.00 GB in use); unload another model, lower max_batch, or allow more "
        "(device_memory_gb)"
    )
    ledger.drop(3)
    ledger.check("new", 500_000_001, "it takes")


def test_sizes_in_words() -> None:
    assert [in_words(n) for n in (12, 250_000, 3_400_000_000)] == ["12 bytes", "0.2 MB", "3.40 GB"]


def test_what_a_model_takes_is_measured_by_batch(tmp_path: Path, script: bytes) -> None:
    device = PretendedDevice(10**6, per_row=1000)
    backend = tm.load(place(tmp_path, script), device)
    buffers = 8 * ROW
    assert backend._programs.footprint == {
        1: buffers + 1000,
        2: buffers + 2000,
        4: buffers + 4000,
        8: buffers + 8000,
    }
    backend.close()


def test_a_load_that_would_not_fit_is_refused_before_it_is_tried(tmp_path: Path, script: bytes) -> None:
    device = PretendedDevice(10**6, per_row=40_000)
    with pytest.raises(
        ModelError, match=r"with batches of 32 it would take about 1\.3 MB on pretended:0"
    ) as caught:
        tm.load(place(tmp_path, script, max_batch=32), device)
    assert caught.value.reason == "device-memory"
    assert device.cached <= 16 * 40_000  # the largest was never run
    assert ledger_of(device).used == 0
    assert tm.load(place(tmp_path, script, "small", max_batch=4), device).alive


def test_inputs_that_would_not_fit_are_never_laid_out(tmp_path: Path, script: bytes) -> None:
    device = PretendedDevice(10**6)
    with pytest.raises(ModelError, match=r"its inputs for batches of 65536 take 28\.3 MB on pretended:0"):
        tm.load(place(tmp_path, script, max_batch=65536), device)
    assert device.held == 0


def test_running_out_all_the_same_is_a_refusal_too(tmp_path: Path, script: bytes) -> None:
    with pytest.raises(
        ModelError, match=r"ran out of memory while it was loaded, with .* of .* left"
    ) as caught:
        tm.load(place(tmp_path, script), PretendedDevice(20_000, per_row=10_000))
    assert caught.value.reason == "device-memory"


def test_a_second_model_hears_of_the_first(tmp_path: Path, script: bytes) -> None:
    device = PretendedDevice(60_000, per_row=1000)
    first = tm.load(place(tmp_path, script, "first"), device)
    held = ledger_of(device).by_model()["first"]
    assert held >= 8 * ROW
    with pytest.raises(ModelError, match=r"first .* in use"):
        tm.load(place(tmp_path, script, "second", max_batch=64), PretendedDevice(60_000, per_row=1000))
    first.close()
    gc.collect()
    assert ledger_of(device).used == 0


def test_a_batch_that_does_not_fit_runs_in_halves_and_the_cap_stays_lower(
    tmp_path: Path, script: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    device = PretendedDevice(10**6, per_row=1000)
    backend = tm.load(place(tmp_path, script), device)
    device.most = device.allocated() + 4500  # somebody else took the rest
    values = tm.floats(7)
    expected = tm.answers(values)["scores"]
    found = backend.run_parts([{"pixels": values[:2]}, {"pixels": values[2:]}], [2, 5], ())
    np.testing.assert_allclose(found["scores"], expected, rtol=1e-4, atol=1e-6)
    assert backend.out_of_memory == 1
    assert "from here on batches end at 4" in caplog.text
    device.most = 10**6
    device.per_row = 0
    np.testing.assert_allclose(backend.run({"pixels": values}, ())["scores"], expected, rtol=1e-4, atol=1e-6)
    assert backend.out_of_memory == 1
    assert backend.alive
    backend.close()


def test_when_nothing_fits_the_batch_fails_and_the_instance_lives(tmp_path: Path, script: bytes) -> None:
    device = PretendedDevice(10**6, per_row=1000)
    backend = tm.load(place(tmp_path, script), device)
    device.most = device.allocated()
    with pytest.raises(ModelError, match="no memory for even the smallest batch") as caught:
        backend.run({"pixels": tm.floats(6)}, ())
    assert caught.value.reason == "device-memory"
    assert backend.alive
    device.most = device.size
    assert backend.run({"pixels": tm.floats(6)}, ())["scores"].shape == (6, 4)
    backend.close()


def test_closing_gives_everything_back(tmp_path: Path, script: bytes) -> None:
    device = PretendedDevice(10**6, per_row=1000)
    backend = tm.load(place(tmp_path, script), device)
    other = tm.load(place(tmp_path, script, "other"), PretendedDevice(10**6))
    assert backend._programs is not None
    network = backend._programs.network
    gone = weakref.ref(network)
    rows = [weakref.ref(tensor) for tensor in backend._programs.inputs.rows(8)]
    del network
    backend.close()
    assert gone() is None
    assert all(row() is None for row in rows)
    assert set(ledger_of(device).by_model()) == {"other"}
    other.close()
    assert device_memory._ledgers[device.name].used == 0
