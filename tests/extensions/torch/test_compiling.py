"""Compiling beside batches: imports leave room for others, a zygote that touched a device is noticed, and
batches run in a larger size that is compiled where that takes less."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from carpool.backends.backend import CompiledSize
from carpool.core.curve import BatchCurve
from carpool.engine.profile.layouts import Layout
from carpool.engine.profile.measuring import Measured, Point
from carpool.engine.profile.model_profile import Profile
from carpool.extensions.torch import runner_process
from carpool.extensions.torch.compile_behind import CompileBehind
from carpool.extensions.torch.compiled_file import compiled_point
from carpool.extensions.torch.runner_process import Pauses, imports_in_pieces
from carpool.extensions.torch.torch_programs import Programs
from carpool.extensions.torch.zygote import device_is_used


def test_a_zygote_that_has_initialised_cuda_is_noticed(tmp_path: Path) -> None:
    assert not device_is_used()
    (tmp_path / "0").symlink_to("/dev/null")
    assert not device_is_used(tmp_path)
    (tmp_path / "1").symlink_to("/dev/nvidia-uvm")
    assert device_is_used(tmp_path)


def test_imports_sleep_in_between_and_everything_is_as_it_was_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("first_in_pieces", "second_in_pieces"):
        (tmp_path / f"{name}.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    slept: list[float] = []
    monkeypatch.setattr(runner_process.time, "sleep", slept.append)
    monkeypatch.setattr(runner_process, "_SLICE_S", 0.0)
    before = sys.getswitchinterval(), list(sys.meta_path)
    busy = [True, False]
    with imports_in_pieces(lambda: busy.pop(0)):
        import first_in_pieces  # type: ignore[import-not-found] # noqa: F401
        import second_in_pieces  # type: ignore[import-not-found] # noqa: F401
    assert len(slept) == 1, "only while batches run"
    assert not busy
    assert 0 <= slept[0] <= 0.5
    assert (sys.getswitchinterval(), sys.meta_path) == before


def test_a_batch_takes_less_by_what_the_device_saves_for_every_instance() -> None:
    plain = Point(8, 0.010)
    two = [CompiledSize(8, 0.004, 0.002), CompiledSize(8, 0.004, 0.002)]
    found = compiled_point(plain, two)
    assert found is not None
    assert found.seconds == pytest.approx(0.006)
    assert compiled_point(plain, [CompiledSize(8)]) is None
    (least,) = [compiled_point(Point(8, 0.004), two)]
    assert least is not None
    assert least.seconds == pytest.approx(0.002), "never faster than the device alone"


def test_the_curve_follows_sizes_that_run_in_a_larger_compiled_one() -> None:
    points = (Point(1, 0.001), Point(8, 0.008), Point(16, 0.016))
    adopted: list[BatchCurve] = []
    trend = SimpleNamespace(
        profile=BatchCurve.measured([(p.size, p.seconds) for p in points], 16, (1, 8, 16))
    )
    scheduler = SimpleNamespace(trend=trend, replanned=lambda curve, _now: adopted.append(curve))
    behind: Any = object.__new__(CompileBehind)
    behind._served = SimpleNamespace(profile=Profile(Layout(1, 1), measured=Measured(points)))
    behind._runtime = SimpleNamespace(driver=SimpleNamespace(scheduler=scheduler))
    behind._plain = points
    behind._plan_with((Point(16, 0.004),))
    (curve,) = adopted
    assert [curve.times[size] for size in (1, 8, 16)] == [0.001, 0.004, 0.004]
    assert behind._served.profile.compiled == (Point(16, 0.004),)


def test_batches_of_a_plain_size_run_in_a_compiled_one_that_takes_less() -> None:
    programs: Any = object.__new__(Programs)
    programs.sizes = (1, 8, 16)
    programs._seconds = {1: 0.001, 8: 0.008, 16: 0.004}
    programs._fast = {16}
    programs._instead = programs._cheaper()
    assert [programs.padded(count) for count in (1, 2, 8, 9)] == [1, 16, 16, 16]
    programs._fast.add(8)
    programs._seconds[8] = 0.002
    programs._instead = programs._cheaper()
    assert programs.padded(5) == 8


def test_the_compiler_is_imported_once_and_the_log_says_how_long_it_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a_compiler_of_its_own.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    caplog.set_level("INFO")
    names = ("a_compiler_of_its_own", "none_of_that_name")
    runner_process.import_compiler(Pauses(lambda: False), names)
    assert "a_compiler_of_its_own" in sys.modules
    assert caplog.text.count("compiler-imported") == 1
    runner_process.import_compiler(Pauses(lambda: False), names[:1])
    assert caplog.text.count("compiler-imported") == 1


def test_a_collection_that_keeps_batches_waiting_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(runner_process, "_LONG_COLLECTION_S", -1.0)
    with imports_in_pieces(lambda: False):
        gc.collect()
    assert "long-collections" in caplog.text
    assert not any(isinstance(one, runner_process._Collections) for one in gc.callbacks)


def test_a_module_that_works_for_long_is_interrupted_while_batches_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "one_that_works_for_long.py").write_text("for number in range(2000):\n    abs(number)\n")
    monkeypatch.syspath_prepend(tmp_path)
    slept: list[float] = []
    monkeypatch.setattr(runner_process.time, "sleep", slept.append)
    monkeypatch.setattr(runner_process, "_SLICE_S", 0.0)
    runner_process.import_compiler(Pauses(lambda: True), ("one_that_works_for_long",))
    assert len(slept) >= 2000 // 32
    assert sys.getprofile() is None
