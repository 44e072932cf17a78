"""Figures of GPUs, from a management library that the test pretends to have."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from carpool.observe.counters import Table, table_bytes
from carpool.observe.gpu_readings import Gpus
from carpool.observe.prometheus import Exposition


class NVMLError(Exception):
    pass


def refuse(_: object) -> Any:
    raise NVMLError("not supported")


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    pretended = SimpleNamespace(
        NVMLError=NVMLError,
        opened=0,
        energy=5_000,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetUUID=lambda handle: b"GPU-0" if handle == 0 else "GPU-1",
        nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=37, memory=0),
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(total=1000, used=250),
        nvmlDeviceGetPowerUsage=lambda handle: 71_500,
        nvmlDeviceGetPowerManagementLimit=refuse,
    )

    def init() -> None:
        pretended.opened += 1

    pretended.nvmlInit = init
    pretended.nvmlDeviceGetTotalEnergyConsumption = lambda handle: pretended.energy
    monkeypatch.setitem(sys.modules, "pynvml", pretended)
    return pretended


def page(gpus: Gpus) -> str:
    return Exposition(Table(bytearray(table_bytes(1))), "1.0", gpus=gpus).page().decode()


def test_every_gpu_has_a_line_in_tritons_words(library: SimpleNamespace, tmp_path: Path) -> None:
    gpus = Gpus(tmp_path)
    page(gpus)
    library.energy += 2_500
    lines = page(gpus).splitlines()
    for line in (
        'nv_gpu_utilization{gpu_uuid="GPU-0"} 0.37',
        'nv_gpu_memory_total_bytes{gpu_uuid="GPU-1"} 1000',
        'nv_gpu_memory_used_bytes{gpu_uuid="GPU-1"} 250',
        'nv_gpu_power_usage{gpu_uuid="GPU-0"} 71.5',
        'nv_energy_consumption{gpu_uuid="GPU-0"} 2.5',
    ):
        assert line in lines
    assert not any(line.startswith("nv_gpu_power_limit{") for line in lines)
    assert library.opened == 1


def test_without_a_driver_the_library_is_not_even_opened(library: SimpleNamespace, tmp_path: Path) -> None:
    assert "nv_gpu" not in page(Gpus(tmp_path / "absent"))
    assert library.opened == 0


def test_without_the_package_there_are_no_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert Gpus(tmp_path).read() == []
