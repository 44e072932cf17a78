"""A PyTorch model in the engine: gathered by its backend, padded to buckets, measured at them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch

import carpool
from carpool.engine.loading import loading
from carpool.engine.models.served import Served
from carpool.engine.profile.model_profile import profile_key
from carpool.engine.run.model_inputs import signature_of
from carpool.observe import columns
from carpool.types import Datatype
from carpool.vision.plans.settings import describe
from extensions.torch import torch_models as tm


def model(tmp_path: Path, extra: str = "") -> Path:
    text = f'task = "raw"\nslo_ms = 30000\nmax_batch = 6\ninstances = 1\n[image]\nsize = {tm.SIDE}\n'
    text += f"[pytorch]\nbuckets = [1, 4]\n{extra}"
    return tm.folder(tmp_path, text, {"model.pt": tm.write_script})


def test_requests_share_padded_batches(tmp_path: Path) -> None:
    async def story() -> None:
        async with carpool.Engine(model(tmp_path), cache_dir=tmp_path / "cache") as engine:
            pixels = tm.pictures(12)
            found = await asyncio.gather(
                *(engine.infer("m", picture, outputs=["scores"]) for picture in pixels)
            )
            expected = tm.answers(tm.floats(12))["scores"]
            np.testing.assert_allclose(np.stack([f["scores"] for f in found]), expected, rtol=1e-4, atol=1e-6)
            check(engine.find("m"))

    def check(served: Served) -> None:
        curve = served.scheduler.curve
        assert curve.buckets == (1, 4, 6)
        assert curve.times[2] == curve.times[4]
        assert served.profile is not None
        assert {point.size for point in served.profile.points} <= {1, 4, 6}
        assert "On cpu in fp32." in served.choices
        assert served.vision is not None
        image = served.vision.image
        assert (image.scale, image.mean, image.std) == (None, (0.0,), (1.0,))  # front ends leave pixels alone

    asyncio.run(asyncio.wait_for(story(), 60))


def test_a_batch_beyond_the_devices_memory_is_answered_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = tm.PretendedDevice(10**6, per_row=100, name="pretended:engine")
    monkeypatch.setattr("carpool.extensions.torch.torch_backend.Device", lambda _threads: device)

    async def story() -> None:
        async with carpool.Engine(model(tmp_path)) as engine:
            served = engine.find("m")
            assert any("each instance" in sentence for sentence in served.choices)
            device.release()
            device.most = device.allocated() + 450  # somebody else took the rest
            answer = await engine.infer("m", tm.pictures(6), outputs=["scores"])
            np.testing.assert_allclose(
                answer["scores"], tm.answers(tm.floats(6))["scores"], rtol=1e-4, atol=1e-6
            )
            assert engine.table.cells(served.counters.slot)[columns.OUT_OF_MEMORY] == 1
            device.most = device.size

    asyncio.run(asyncio.wait_for(story(), 60))


def test_a_profile_is_for_one_precision_one_compiler_and_these_buckets(tmp_path: Path) -> None:
    keys = []
    for number, extra in enumerate(
        ("", 'precision = "bf16"\n', "compile = true\n", "channels_last = true\n")
    ):
        config, version = tm.described(model(tmp_path / str(number), extra))
        keys.append(profile_key(config, version))
    assert all(key != other for n, key in enumerate(keys) for other in keys[:n])
    key = keys[0]
    assert key is not None
    assert key["backend"][1][0].isdigit()
    assert key["settings"]["pytorch"]["buckets"] == [1, 4, 6]
    assert key["settings"]["pytorch"]["devices"] == []


def test_pictures_are_answered_with_what_the_network_says(tmp_path: Path) -> None:
    config, _ = tm.described(model(tmp_path))
    vision, *_ = describe(config, signature_of(config))
    assert vision is not None
    assert vision.input.datatype is Datatype.UINT8
    assert vision.image.layout == "nchw"


COUNTED = """
from pathlib import Path

import torch

class Scores(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(3, 4)

    def forward(self, pixels):
        return self.line(pixels.float().mean((2, 3)))

def build():
    with (Path(__file__).parents[2] / "built").open("a") as file:
        file.write("x")
    return Scores()
"""


def test_the_network_that_was_tried_is_the_one_that_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Building a network of a hundred million weights takes seconds. With more cores, other numbers of
    threads are tried, each with instances of its own."""
    monkeypatch.setattr(loading, "usable_cores", lambda: 2)
    side = tm.SIDE
    text = f'task = "classify"\nslo_ms = 30000\nmax_batch = 2\ninstances = 2\n[image]\nsize = {side}\n'
    text += f'[[input]]\nname = "pixels"\ndatatype = "UINT8"\nshape = [3, {side}, {side}]\n'
    text += '[[output]]\nname = "scores"\ndatatype = "FP32"\nshape = [4]\n'
    folder = tm.folder(tmp_path, f'{text}[pytorch]\nmodule = "model.py"\n', {"model.py": COUNTED})
    weights = torch.nn.Linear(3, 4).state_dict()
    torch.save({f"line.{name}": tensor for name, tensor in weights.items()}, folder / "1" / "model.pt")

    async def story() -> None:
        async with carpool.Engine(folder) as engine:
            found = await engine.infer("m", tm.pictures(1)[0], outputs=["scores"])
            assert found["scores"].shape == (4,)

    asyncio.run(asyncio.wait_for(story(), 60))
    assert (tmp_path / "built").read_text() == "x"
