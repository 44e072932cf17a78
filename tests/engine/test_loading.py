"""Loading: measured once, checked the next time, measured anew when that no longer fits. In scripted time."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from backends import onnx_models
from carpool.backends.backend import Placement
from carpool.config.fingerprint import PROVISIONAL
from carpool.config.model import (
    InstanceGroup,
    ModelConfig,
    ModelSignature,
    OnnxruntimeSettings,
    TensorSignature,
)
from carpool.config.repository import ModelVersion, with_promise
from carpool.core.objectives import Promise
from carpool.engine.loading.loading import Loading, Ready
from carpool.engine.profile.hardware import CpuTaken
from carpool.engine.profile.layouts import Layout
from carpool.engine.profile.model_profile import ProfileStore
from carpool.errors import ConfigError, ModelError
from carpool.types import Array
from engine.timed import Clock, Timed
from link.redis_server import redis_server
from waiting import until

SECRET = "sixteen characters"


@dataclass
class Workshop:
    """A model file, and a machine with two cores on which it takes what the test says."""

    folder: Path
    clock: Clock = field(default_factory=Clock)
    factor: float = 1.0
    takes: Callable[[int, int], float] = lambda images, threads: (0.004 + 0.002 * images) / threads**0.8
    loads: list[Timed] = field(default_factory=list)
    fails: bool = False
    kind: type[Timed] = Timed
    taken: CpuTaken = field(default_factory=CpuTaken)  # by others, while times are measured
    cache: str = "cache"
    shared: str = ""  # where replicas share profiles
    restarted: bool = False  # the engine

    def read(self) -> CpuTaken:
        return self.taken

    def load(self, _config: ModelConfig, _version: ModelVersion, placement: Placement) -> Timed:
        made = self.kind(
            self.clock,
            lambda images, _: self.factor * self.takes(images, placement.threads or 0),
            fails=self.fails,
        )
        self.loads.append(made)
        return made

    def prepare(self, slo_ms: float | None = 100.0, *, grows: bool = False, **settings: object) -> Ready:
        config = ModelConfig(name="m", path=self.folder, backend="onnxruntime", **settings)  # type: ignore[arg-type]
        if slo_ms is not None:
            config = replace(with_promise(config, slo_ms)[0], slo_may_grow=grows)
        version = ModelVersion(1, self.folder / "1" / "model.onnx")
        told: list[str] = []
        cache, restarted = self.folder.parent / self.cache, self.restarted
        profiles = ProfileStore.of(cache, self.shared, SECRET, looks_again=True, restarted=restarted)
        loading = Loading(config, version, profiles, self.clock, watch=lambda: self)
        ready = loading.prepare(told.append)
        assert told
        assert [backend.closed for backend in ready.backends] == [False] * len(ready.backends)  # type: ignore[attr-defined]
        ready.close()
        assert all(backend.closed for backend in self.loads), "an instance was left open"
        return ready

    @property
    def runs(self) -> int:
        return sum(len(backend.sizes) for backend in self.loads)


@pytest.fixture(name="shop")
def a_workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workshop:
    shop = Workshop(tmp_path / "m")
    (shop.folder / "1").mkdir(parents=True)
    (shop.folder / "1" / "model.onnx").write_bytes(b"weights")
    tensor = (TensorSignature("x", "FP32", (-1, 2)),)
    monkeypatch.setattr("carpool.backends.load", shop.load)
    monkeypatch.setattr(
        "carpool.backends.read_signature",
        lambda *_: ModelSignature(tensor, (TensorSignature("y", "FP32", (-1, 2)),)),
    )
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    return shop


def events(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [str(record.msg).split()[0] for record in caplog.records]


def test_what_was_measured_is_checked_the_next_time(shop: Workshop, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "carpool"):
        first = shop.prepare()
        measured = shop.runs
        shop.factor = 1.1
        second = shop.prepare()
    assert shop.runs - measured < measured / 2
    assert second.curve.points == first.curve.points
    assert second.profile.layout == first.profile.layout
    assert "batches take 1.1 × what it says" in second.choices[-1]
    assert [e for e in events(caplog) if e.startswith("profile")] == ["profile-measured", "profile-reused"]
    assert caplog.text.count("choice ") == len(first.choices) + len(second.choices)


@pytest.fixture(params=["file", "remote", "redis"])
def shared_place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "file":
        yield f"file:{tmp_path / 'volume'}"
    elif request.param == "remote":
        yield f"memory://{tmp_path}/profiles"
    else:
        (tmp_path / "redis").mkdir()
        with redis_server(tmp_path / "redis") as server:
            yield server.url


def test_a_second_replica_measures_nothing(
    shop: Workshop, shared_place: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop.shared = shared_place
    with caplog.at_level(logging.DEBUG, "carpool"):
        first = shop.prepare()
        shop.cache = "another"
        second = shop.prepare()
        monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2})
        shop.prepare()  # of other hardware: its fingerprint is another
    told = [event for event in events(caplog) if event.startswith("profile")]
    assert told == ["profile-measured", "profile-reused", "profile-measured"]
    assert second.curve.points == first.curve.points


def test_a_profile_of_another_replica_that_does_not_fit_is_looked_into_later(
    shop: Workshop, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shop.shared = f"file:{tmp_path / 'volume'}"
    with caplog.at_level(logging.DEBUG, "carpool"):
        shop.prepare()
        shop.cache, shop.factor = "another", 2.0
        second = shop.prepare()
    assert events(caplog).count("profile-measured") == 1
    assert second.profile.provisional == "batches took 2 × what another replica measured"
    assert second.config.parameters[PROVISIONAL] == second.profile.provisional


def test_a_load_of_a_graph_without_an_end_ends_when_it_is_given_up(tmp_path: Path) -> None:
    file = onnx_models.endless(tmp_path / "m" / "1" / "model.onnx")
    config = ModelConfig(name="m", path=tmp_path / "m", backend="onnxruntime")
    loading = Loading(config, ModelVersion(1, file), None)
    errors: list[Exception] = []

    def load() -> None:
        try:
            loading.prepare(lambda _: None)
        except ModelError as error:
            errors.append(error)

    thread = threading.Thread(target=load)
    thread.start()
    until(lambda: len(loading._opener.backends) > 0, "an instance is open, and soon runs")
    loading.abort()
    thread.join()
    assert [error.reason for error in errors] == ["aborted"]


def test_a_restarted_engine_measures_nothing_although_the_machine_is_busy(
    shop: Workshop, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "carpool"):
        shop.prepare()
        shop.factor, shop.restarted, measured = 3.0, True, shop.runs
        second = shop.prepare()
    assert events(caplog).count("profile-measured") == 1
    assert shop.runs - measured <= 8  # a run or two of each instance and size
    assert second.profile.provisional == "batches took 3 × what the last engine measured"


def test_what_another_replica_says_is_believed_only_if_it_can_be(
    shop: Workshop, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever can write to the shared place could else keep a model from loading, or start thousands of
    threads."""
    shop.shared = f"file:{tmp_path / 'volume'}"
    honest = shop.prepare()
    (file,) = (tmp_path / "volume" / "profiles").iterdir()
    whole = json.loads(file.read_bytes())
    for number, (what, lie) in enumerate(
        (
            ("layout", {"is": "Layout", "instances": 256, "threads": 16}),
            ("layout", {"is": "Layout", "instances": 1, "threads": 3}),
            ("measured", slower(whole["profile"]["measured"], 1000.0)),
            ("measured", slower(whole["profile"]["measured"], 1e-3)),
            ("layout_reason", "\x1b[2J"),
            ("memory", {"is": "RunMemory", "measuring": 0, "service": 1 << 60}),
        )
    ):
        file.write_text(json.dumps(whole | {"profile": whole["profile"] | {what: lie}}))
        shop.cache = f"cache-{number}"
        del shop.loads[:]
        ready = shop.prepare()
        assert (ready.profile.layout, ready.curve.points) == (honest.profile.layout, honest.curve.points)
        assert len(shop.loads) < 10
        assert "Another replica" not in " ".join(ready.choices), what
    assert caplog.text.count("profile-implausible") == 2
    assert caplog.text.count("profile-unreadable") == 2


def test_nothing_is_rejected_for_what_a_file_says(shop: Workshop) -> None:
    shop.factor = 100.0
    with pytest.raises(ConfigError, match="cannot be met"):
        shop.prepare()
    shop.factor = 1.0
    assert "was used again" not in " ".join(shop.prepare().choices)


def slower(measured: dict[str, Any], factor: float) -> dict[str, Any]:
    points = [point | {"seconds": point["seconds"] * factor} for point in measured["points"]]
    return measured | {"points": points}


@pytest.mark.parametrize("shared", ["file:/proc/nowhere", "redis://127.0.0.1:1", "nosuch://place"])
def test_a_shared_place_that_is_gone_costs_a_warning(
    shop: Workshop, shared: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("carpool.engine.profile.shared_profiles._WAIT_S", 0.2)
    shop.shared = shared
    assert shop.prepare().curve.points
    assert "profile-not-stored" in events(caplog)


@pytest.mark.parametrize("factor", [0.5, 1.6])
def test_a_machine_that_changed_is_measured_anew(
    shop: Workshop, factor: float, caplog: pytest.LogCaptureFixture
) -> None:
    one = (InstanceGroup(1),)
    first = shop.prepare(instances=one)
    shop.factor = factor
    again = shop.prepare(instances=one)
    assert again.curve.times[4] == pytest.approx(factor * first.curve.times[4], rel=0.05)
    assert "profile-outdated" in events(caplog)
    with caplog.at_level(logging.DEBUG, "carpool"):
        shop.prepare(instances=one)
    assert "profile-reused" in events(caplog)


def test_another_model_in_its_place_is_measured(shop: Workshop, caplog: pytest.LogCaptureFixture) -> None:
    shop.prepare()
    (shop.folder / "1" / "model.onnx").write_bytes(b"another training")
    with caplog.at_level(logging.DEBUG, "carpool"):
        shop.prepare()
    assert "profile-reused" not in events(caplog)


def test_a_broken_cache_is_no_obstacle(shop: Workshop, caplog: pytest.LogCaptureFixture) -> None:
    shop.prepare()
    for file in (shop.folder.parent / "cache" / "profiles").iterdir():
        file.write_text("{")
    with caplog.at_level(logging.DEBUG, "carpool"):
        shop.prepare()
    assert "profile-unreadable" in events(caplog)
    assert "profile-measured" in events(caplog)


def test_instances_are_chosen_where_nobody_said(shop: Workshop) -> None:
    shop.takes = lambda images, _threads: 0.010 * images  # threads do nothing
    ready = shop.prepare()
    assert ready.profile.layout == Layout(2, 1)
    assert len(ready.backends) == 2
    assert ready.config.instances[0].count == 2
    assert "2 instances × 1 thread" in ready.choices[0]
    assert shop.prepare().profile.layout == Layout(2, 1)  # from the cache


def test_instances_are_not_chosen_where_somebody_said(shop: Workshop) -> None:
    shop.takes = lambda images, _threads: 0.010 * images
    assert shop.prepare(instances=(InstanceGroup(1),)).profile.layout == Layout(1, 1)
    assert shop.prepare(slo_ms=None).profile.layout == Layout(1, 1)  # Triton's meaning: one


def test_only_batches_within_the_promise_are_measured(shop: Workshop) -> None:
    ready = shop.prepare(slo_ms=20.0)
    assert ready.profile.points[-1].seconds > 0.020 >= ready.profile.points[-2].seconds
    assert ready.curve.max_batch == 32


def test_a_promise_that_cannot_be_kept(shop: Workshop) -> None:
    shop.takes = lambda images, _threads: 0.030 * images
    with pytest.raises(ConfigError, match="use at least 66 ms"):
        shop.prepare(slo_ms=20.0)
    assert all(backend.closed for backend in shop.loads)


def test_a_machine_that_was_only_busy_for_a_moment_is_looked_at_again(shop: Workshop) -> None:
    one = (InstanceGroup(1),)
    shop.takes = lambda images, _threads: 0.010 * images * (5 if shop.runs < 5 else 1)
    ready = shop.prepare(slo_ms=40.0, instances=one, onnxruntime=OnnxruntimeSettings(intra_op_threads=1))
    assert ready.curve.times[1] == pytest.approx(0.010)


def test_a_model_that_does_not_take_zeros(shop: Workshop, caplog: pytest.LogCaptureFixture) -> None:
    shop.fails = True
    with pytest.raises(ModelError, match="an SLO needs a measured model"):
        shop.prepare()
    assert all(backend.closed for backend in shop.loads)
    assert shop.prepare(slo_ms=None).choices == (
        "It does not run on noise (m: it does not take zeros) and nothing sets max_batch, so each request "
        "runs alone.",
    )
    assert "warm-up-failed" in events(caplog)
    assert shop.prepare(slo_ms=None, max_batch=8).choices == (
        "Batches were not compared with single requests, since noise fails: m: it does not take zeros.",
    )
    assert "batches-not-proven" in events(caplog)


BUSY = CpuTaken(0.0, 0.6, 0.5)
"""Every run takes twice as long as it would alone."""


def test_a_promise_does_not_grow_because_the_machine_is_busy(shop: Workshop) -> None:
    shop.takes = lambda images, _threads: 0.040 * images
    alone = shop.prepare(slo_ms=100.0, grows=True)
    (shop.folder / "1" / "model.onnx").write_bytes(b"the same, with no profile")
    shop.factor, shop.taken = 2.0, BUSY
    busy = shop.prepare(slo_ms=100.0, grows=True)
    assert busy.profile.provisional == "others took 60% of its cores meanwhile"
    assert busy.config.parameters["carpool_provisional"] == busy.profile.provisional
    assert "carpool_provisional" not in alone.config.parameters
    assert busy.config.policy == alone.config.policy
    assert busy.curve.times[1] == pytest.approx(alone.curve.times[1])
    assert any(sentence.startswith("Provisional: others took 60%") for sentence in busy.choices)


def test_nor_because_more_than_the_waiting_is_the_others_doing(shop: Workshop) -> None:
    """Caches and clocks that are shared cost time that no counter of waiting shows."""
    shop.takes = lambda images, _threads: 0.040 * images
    shop.factor, shop.taken = 3.6, BUSY  # 72 ms are left when the waiting is taken off
    busy = shop.prepare(slo_ms=100.0, grows=True)
    assert busy.curve.times[1] == pytest.approx(0.072)
    assert isinstance(busy.config.policy, Promise)
    assert busy.config.policy.slo == 0.1
    shop.taken, shop.factor = CpuTaken(), 1.8
    calm = shop.prepare(slo_ms=100.0, grows=True)
    assert not calm.profile.provisional, "a provisional profile is not used again on a calm machine"
    assert isinstance(calm.config.policy, Promise)
    assert calm.config.policy.slo == pytest.approx(0.16)
    shop.taken, shop.factor = BUSY, 6.0
    (shop.folder / "1" / "model.onnx").write_bytes(b"the same, with no profile")
    hopeless = shop.prepare(slo_ms=100.0, grows=True)
    assert isinstance(hopeless.config.policy, Promise)
    assert hopeless.config.policy.slo == pytest.approx(0.27), "nobody could be answered within 100 ms"


def test_a_layout_stays_until_another_is_clearly_better(shop: Workshop) -> None:
    """After a change of the machine that made the profile useless."""
    two = Layout(1, 2)
    shop.takes = lambda images, threads: 0.040 * images / threads
    assert shop.prepare(slo_ms=100.0).profile.layout == two
    shop.takes = lambda images, threads: 0.014 * images / threads**0.9
    again = shop.prepare(slo_ms=100.0)
    assert again.profile.layout == two
    assert "so it stays as an earlier start chose" in again.profile.layout_reason
    (shop.folder / "1" / "model.onnx").write_bytes(b"the same, with no profile")
    assert shop.prepare(slo_ms=100.0).profile.layout == Layout(2, 1)


def test_a_busy_machine_is_no_reason_to_forget_a_profile(
    shop: Workshop, caplog: pytest.LogCaptureFixture
) -> None:
    first = shop.prepare()
    shop.factor, shop.taken = 1.8, BUSY
    again = shop.prepare()
    assert again.curve.points == first.curve.points
    assert again.profile.layout == first.profile.layout
    assert "since others took 60% of its cores meanwhile" in again.choices[-1]
    assert "profile-outdated" not in events(caplog)


def test_a_busy_machine_explains_only_so_much(shop: Workshop, caplog: pytest.LogCaptureFixture) -> None:
    shop.prepare()
    shop.factor, shop.taken = 6.0, BUSY
    assert shop.prepare(slo_ms=100.0).profile.provisional
    assert "profile-outdated" in events(caplog)


@dataclass(eq=False)
class Keeping(Timed):
    """It keeps 10 MB for each image of its largest batch."""

    kept: int = 0

    def run(self, inputs: Mapping[str, Array], wanted: Sequence[str]) -> Mapping[str, Array]:
        self.kept = max(self.kept, 10_000_000 * len(inputs["x"]))
        return super().run(inputs, wanted)

    def give_back(self) -> None:
        self.kept = 0

    def close(self) -> None:
        super().close()
        self.kept = 0


def test_measuring_gives_back_what_it_took(shop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    def held() -> int:
        return sum(backend.kept for backend in shop.loads if isinstance(backend, Keeping))

    monkeypatch.setattr("carpool.engine.profile.run_memory.own_bytes", held)
    shop.kind, shop.takes = Keeping, lambda images, _threads: 0.01 * images  # a batch brings nothing
    for _ in range(2):  # measured, and as it was kept
        ready = shop.prepare(100.0, max_batch=8)
        instances = len(ready.backends)
        assert ready.profile.memory.measuring >= 20_000_000 * instances
        assert ready.profile.memory.service == 10_000_000 * instances
        assert ready.piece == 1
        assert held() == 0
