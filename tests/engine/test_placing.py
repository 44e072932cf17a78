"""Instances on GPUs: where they go, and how many of them are worth it. No GPU is needed to decide that."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path

import pytest

from carpool.config.model import InstanceGroup, InstanceKind, ModelConfig, ModelSignature
from carpool.engine.profile.gpu_layouts import choose_on_gpus, usual_on_gpus
from carpool.engine.profile.hardware import gpu_count
from carpool.engine.profile.instance_layout import places
from carpool.engine.profile.measuring import Effort, Measuring
from carpool.errors import ConfigError, ModelError
from carpool.types import Array, Datatype, Signature, TensorSpec

SIGNATURE = Signature("m", (TensorSpec("x", Datatype.UINT8, (2,)),), (), 8)


def config(*groups: InstanceGroup) -> ModelConfig:
    return ModelConfig(
        name="m",
        path=Path(),
        backend="pytorch",
        max_batch=8,
        instances=groups or (InstanceGroup(given=False),),
    )


def test_without_settings_there_is_one_on_each_gpu() -> None:
    assert places(config(), (0, 1)) == [0, 1]


def test_groups_say_how_many_and_where() -> None:
    groups = (InstanceGroup(2, InstanceKind.GPU, (1,)), InstanceGroup(1, InstanceKind.AUTO))
    assert places(config(*groups), (0, 1)) == [1, 1, 0, 1]


@pytest.mark.parametrize(
    ("group", "match"),
    [
        (InstanceGroup(1, InstanceKind.GPU, (3,)), "asks for GPU 3"),
        (InstanceGroup(1, InstanceKind.CPU), "not on both"),
    ],
)
def test_what_cannot_be_is_a_mistake_in_the_settings(group: InstanceGroup, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        places(config(InstanceGroup(1, InstanceKind.AUTO), group), (0, 1))


@dataclass
class Gpu:
    """`rates` are the images per second of one, two, three instances, all of them together."""

    rates: Sequence[float]
    room: int = 9
    opened: list[Instance] = field(default_factory=list)
    clock: Clock = field(default_factory=lambda: Clock())
    smallest: int = 99  # batch that was run
    pauses: list[float] = field(default_factory=list)

    def open_one(self, index: int) -> Instance:
        if len(self.opened) >= self.room:
            raise ModelError("m: it would take 1 GB, and 0.5 GB is left")
        made = Instance(self)
        self.opened.append(made)
        assert index == len(self.opened) - 1
        return made

    @property
    def alive(self) -> list[Instance]:
        return [instance for instance in self.opened if instance.alive]

    def measuring(self, opened: Sequence[Instance], effort: Effort) -> Measuring:
        return Measuring(opened, SIGNATURE, effort, now=lambda: self.clock.time, sleep=self.pauses.append)


class Clock(threading.local):
    """Each thread has a time of its own, which only what it runs moves on."""

    time = 0.0


class Instance:
    signature = ModelSignature()

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self.alive = True

    def run(self, inputs: Mapping[str, Array], wanted: Sequence[str]) -> Mapping[str, Array]:
        instances = len(self._gpu.alive)
        self._gpu.smallest = min(self._gpu.smallest, len(inputs["x"]))
        self._gpu.clock.time += len(inputs["x"]) * instances / self._gpu.rates[instances - 1]
        return {}

    def abort(self) -> None: ...

    def close(self) -> None:
        self.alive = False


@pytest.mark.parametrize("slo", [inf, 0.5])
@pytest.mark.parametrize(
    ("rates", "best"), [((100, 104, 900), 1), ((100, 150, 155), 2), ((100, 150, 200, 210), 3)]
)
def test_another_instance_must_bring_a_tenth_more(rates: Sequence[float], best: int, slo: float) -> None:
    gpu = Gpu(rates)
    chosen = choose_on_gpus(config(), [0], slo, gpu.open_one, gpu.measuring)
    assert chosen.layout.instances == best
    assert list(chosen.backends) == gpu.alive == gpu.opened[:best]
    assert "images/s with 1, " in chosen.reason


def test_instances_do_not_run_in_step_when_their_rate_is_measured() -> None:
    """One waits in its second batch until the other has ended three: in step neither would go on."""
    gpu = Gpu((100, 200))
    ahead = threading.Event()

    class Slow(Instance):
        runs = 0

        def run(self, inputs: Mapping[str, Array], wanted: Sequence[str]) -> Mapping[str, Array]:
            self.runs += 1
            if self.runs == 2:
                assert ahead.wait(30)
            return super().run(inputs, wanted)

    class Fast(Slow):
        def run(self, inputs: Mapping[str, Array], wanted: Sequence[str]) -> Mapping[str, Array]:
            self.runs += 1
            if self.runs == 4:
                ahead.set()
            return Instance.run(self, inputs, wanted)

    gpu.opened = [Slow(gpu), Fast(gpu)]
    assert gpu.measuring(gpu.opened, Effort()).rate(4) == pytest.approx(200)
    assert set(gpu.pauses) == {4 * 20e-6}  # as service makes them: an instance waits for its next batch


def test_batches_are_halved_until_they_fit_into_half_of_the_promise() -> None:
    gpu = Gpu((100, 104))  # 8 images take 80 ms
    chosen = choose_on_gpus(config(), [0], 0.1, gpu.open_one, gpu.measuring)
    assert chosen.layout.instances == 1
    assert gpu.smallest == 2  # of two instances, 8 take 154 ms and 2 take 38


def test_memory_may_say_that_one_is_enough() -> None:
    gpu = Gpu((100, 200, 300), room=1)
    chosen = choose_on_gpus(config(), [0], inf, gpu.open_one, gpu.measuring)
    assert chosen.layout.instances == 1
    assert chosen.reason.endswith("no more, since m: it would take 1 GB, and 0.5 GB is left")


def test_if_not_even_the_first_fits_that_is_told() -> None:
    gpu = Gpu((100,), room=0)
    with pytest.raises(ModelError, match=r"0\.5 GB is left"):
        choose_on_gpus(config(), [0], inf, gpu.open_one, gpu.measuring)


@pytest.mark.parametrize(
    ("gpus", "decodes", "room", "kept"),
    [
        ([0], False, 9, 2),
        ([0], True, 9, 3),
        ([0], True, 2, 2),
        ([0], True, 1, 1),
        ([0, 1], True, 9, 6),
        ([0, 1], True, 5, 4),
        ([0, 1], False, 3, 2),
    ],
)
def test_what_is_compiled_behind_traffic_has_as_many_on_each_gpu_as_fit(
    gpus: list[int], decodes: bool, room: int, kept: int
) -> None:
    gpu = Gpu((), room=room)
    chosen = usual_on_gpus(gpus, gpu.open_one, decodes=decodes)
    assert chosen.layout.instances == kept
    assert list(chosen.backends) == gpu.alive == gpu.opened[:kept]
    assert ("decoding" in chosen.reason) == (decodes and room == 9)


def test_what_the_settings_say_is_not_tried() -> None:
    gpu = Gpu(())
    chosen = choose_on_gpus(config(InstanceGroup(2)), [0, 0, 1, 1], inf, gpu.open_one, gpu.measuring)
    assert chosen.layout.instances == 4
    assert not gpu.opened


def test_gpus_are_counted_where_either_folder_shows_them(tmp_path: Path) -> None:
    proc, dev = tmp_path / "proc", tmp_path / "dev"
    dev.mkdir()
    assert gpu_count(proc, dev) == 0
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (dev / name).touch()
    assert gpu_count(proc, dev) == 2
    (proc / "driver" / "nvidia" / "gpus" / "0000:01:00.0").mkdir(parents=True)
    (proc / "driver" / "nvidia" / "gpus" / "0000:01:00.0" / "information").write_text("Model: \t\t X\n")
    assert gpu_count(proc, dev) == 2
