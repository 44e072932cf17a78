"""What makes instances fast is prepared behind those that are waited for, and is tried more than once."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from carpool.extensions.torch import runner_process as later_module
from carpool.extensions.torch.runner_messages import imported_names, imported_packages
from carpool.extensions.torch.runner_process import Later
from carpool.extensions.torch.zygote_start import cache_folders
from carpool.link.zygote_process import import_all

WAIT_S = 30.0


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(later_module, "_QUIET_S", 0.0)
    monkeypatch.setattr(later_module, "_FIRST_PAUSE_S", 0.001)


def test_nothing_is_prepared_while_somebody_waits_for_an_instance() -> None:
    later, used, began = Later(), threading.Event(), threading.Event()

    def load() -> Any:
        began.set()
        return "backend"

    with later.held():
        later.add("m", load, lambda _backend: used.set())
        assert not began.wait(0.05)
    assert used.wait(WAIT_S)


def test_one_after_the_other_and_again_where_it_fails(caplog: pytest.LogCaptureFixture) -> None:
    later, done = Later(), threading.Event()
    tries: list[str] = []

    def fails_once() -> Any:
        tries.append("first")
        if len(tries) == 1:
            raise RuntimeError("no memory yet")
        return "backend"

    later.add("first", fails_once, lambda _backend: None)
    later.add("second", lambda: tries.append("second"), lambda _backend: done.set())  # type: ignore[func-returns-value, return-value, arg-type]
    assert done.wait(WAIT_S)
    assert tries == ["first", "first", "second"]


def test_what_takes_less_time_is_prepared_first_for_all() -> None:
    later, done = Later(), threading.Event()
    order: list[str] = []

    def prepares(what: str) -> Any:
        return lambda: order.append(what)

    with later.held():
        for model in ("a", "b"):
            later.add(model, prepares(f"{model} captured"), lambda _backend: None, whole=False)
            later.add(model, prepares(f"{model} whole"), lambda _backend: len(order) == 4 and done.set())  # type: ignore[arg-type, return-value]
    assert done.wait(WAIT_S)
    assert order == ["a captured", "b captured", "a whole", "b whole"]


def test_what_never_works_is_given_up_and_the_next_one_has_its_turn() -> None:
    later, done = Later(), threading.Event()

    def fails() -> Any:
        raise RuntimeError("never")

    later.add("first", fails, lambda _backend: None)
    later.add("second", lambda: None, lambda _backend: done.set())  # type: ignore[return-value, arg-type]
    assert done.wait(WAIT_S)


def test_packages_are_told_and_what_is_no_name_is_not_passed_on(tmp_path: Any) -> None:
    found = imported_packages()
    assert "numpy" in found
    assert "carpool" not in found
    assert "os" not in found
    assert imported_names(["torch", "torch._dynamo", "-c", "a b", 7, "x;y"]) == ["torch", "torch._dynamo"]
    assert imported_names("torch") == []
    assert cache_folders(None) == {}
    assert set(cache_folders(tmp_path)) == {"TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"}


@pytest.mark.parametrize("aside", [True, False])
def test_who_stands_by_imports_aside_and_then_works_as_fast_as_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, aside: bool
) -> None:
    name = f"heavy_{'aside' if aside else 'now'}"
    module = "import os, threading\nnice = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())\n"
    (tmp_path / f"{name}.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    import_all([name, "not_there_at_all"], aside=aside)
    found = sys.modules.pop(name).nice
    assert (found > own or own >= 10) if aside else found == own
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == own
