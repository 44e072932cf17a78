"""Convolutions that are fused with what stands behind them answer as they did, or stay as they were."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn

from backends import onnx_models
from backends.cases import settings
from carpool.extensions.torch.torch_device import Device, Program
from carpool.extensions.torch.torch_fusion import FusedConvolution, fusion_of
from carpool.extensions.torch.torch_onnx import open_onnx
from carpool.extensions.torch.torch_programs import Network
from extensions.torch import torch_models as tm

SIDE = tm.SIDE


def shaken(network: nn.Module) -> nn.Module:
    """With statistics as training leaves them: none is 0 or 1."""
    torch.manual_seed(3)
    for layer in network.modules():
        if isinstance(layer, nn.BatchNorm2d):
            assert layer.running_mean is not None
            assert layer.running_var is not None
            layer.running_mean.normal_()
            layer.running_var.uniform_(0.5, 2.0)
            layer.weight.data.uniform_(0.5, 1.5)
            layer.bias.data.normal_()
    return network.eval()


class Block(nn.Module):
    """The residual block that everybody uses."""

    def __init__(self, channels: int, wider: bool, in_place: bool) -> None:
        super().__init__()
        out = 2 * channels if wider else channels
        self.conv1 = nn.Conv2d(channels, out, 3, 2 if wider else 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=in_place)
        self.down = (
            nn.Sequential(nn.Conv2d(channels, out, 1, 2, bias=False), nn.BatchNorm2d(out)) if wider else None
        )
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        beside = x if self.down is None else self.down(x)
        found = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        if self.in_place:
            found += beside
        else:
            found = beside + found
        return self.relu(found)  # type: ignore[no-any-return]


class Residual(nn.Module):
    def __init__(self, in_place: bool = True) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU())
        self.blocks = nn.Sequential(Block(4, False, in_place), Block(4, True, in_place))
        self.line = nn.Linear(8, 4)

    def forward(self, pixels: Tensor) -> dict[str, Tensor]:
        features = self.blocks(self.stem(pixels)).mean((2, 3))
        return {"scores": self.line(features), "features": features[:, :2]}


class Holder(nn.Module):
    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network


def both(network: nn.Module, x: Tensor) -> tuple[Any, Any, nn.Module]:
    """The answers of the plain and of the fused form, which is left in place."""
    holder = Holder(network)
    fusion = fusion_of(holder, "network")
    assert fusion is not None
    with torch.inference_mode():
        plain = holder.network(x.clone())
        fusion.use(fused=True)
        fused = holder.network(x.clone())
        fusion.use(fused=False)
        torch.testing.assert_close(holder.network(x.clone()), plain)
        fusion.use(fused=True)
    return plain, fused, holder.network


def count(network: nn.Module) -> int:
    return sum(isinstance(layer, FusedConvolution) for layer in network.modules())


def pixels(rows: int = 2) -> Tensor:
    return torch.from_numpy(tm.floats(rows))


@pytest.mark.parametrize("in_place", [False, True])
def test_a_residual_network_answers_the_same(in_place: bool) -> None:
    plain, fused, network = both(shaken(Residual(in_place)), pixels())
    torch.testing.assert_close(fused, plain, rtol=1e-4, atol=1e-5)
    assert count(network) == 5
    assert not any(isinstance(layer, nn.BatchNorm2d | nn.ReLU) for layer in network.modules())
    fused_ones = [layer for layer in network.modules() if isinstance(layer, FusedConvolution)]
    assert fused_ones[0].weight.shape[1] == 4  # the pictures' three and zeros


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
def test_an_exported_program_answers_the_same() -> None:
    program = torch.export.export(
        shaken(Residual()), (pixels(),), dynamic_shapes={"pixels": {0: torch.export.Dim("n", min=1, max=9)}}
    )
    module = program.module(check_guards=False)
    plain, fused, network = both(module, pixels(3))
    torch.testing.assert_close(fused, plain, rtol=1e-4, atol=1e-5)
    assert count(network) == 5


class Wrapped(nn.Module):
    """Its own code depends on values, that of its trunk does not."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = Residual()

    def forward(self, pixels: Tensor, twice: bool = False) -> Tensor:
        scores: Tensor = self.trunk(pixels)["scores"]
        return scores * 2 if twice or scores.sum() > 1e9 else scores


def test_parts_are_fused_where_the_whole_cannot_be_traced() -> None:
    plain, fused, network = both(shaken(Wrapped()), pixels())
    torch.testing.assert_close(fused, plain, rtol=1e-4, atol=1e-5)
    assert isinstance(network, Wrapped)
    assert count(network) == 5


def convolution(**more: Any) -> nn.Conv2d:
    return nn.Conv2d(3, 6, 3, **{"padding": 1, **more})


class Shared(nn.Module):
    """Somebody else needs what ReLU is given."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = convolution()

    def forward(self, x: Tensor) -> Tensor:
        found = self.conv(x)
        return torch.relu(found) + found


class Renamed(nn.Module):
    """What is added in place is also known by another name."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        found = kept = self.conv1(x)
        found += x
        found *= 2.0
        return torch.relu(self.conv2(found)) + kept


def test_a_sum_in_place_is_seen_by_whoever_has_the_tensor() -> None:
    plain, fused, network = both(Renamed().eval(), pixels())
    torch.testing.assert_close(fused, plain, rtol=1e-4, atol=1e-5)
    assert count(network) == 1


class Overwritten(nn.Module):
    """Its input changes after the convolution has read it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        found = self.conv(x)
        x.add_(1.0)
        return torch.relu(found)


class Trained(nn.Module):
    """Uses the statistics of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = convolution(), nn.BatchNorm2d(6, track_running_stats=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.conv(x)))


@pytest.mark.parametrize(
    "network",
    [
        nn.Sequential(convolution(groups=3), nn.ReLU()),
        nn.Sequential(convolution(padding="same"), nn.ReLU()),
        nn.Sequential(convolution(padding_mode="reflect"), nn.ReLU()),
        nn.Sequential(convolution(), nn.SiLU()),
        nn.Sequential(nn.Linear(6, 6), nn.ReLU()),
        Shared(),
        Overwritten(),
        Trained(),
    ],
    ids=["groups", "same", "reflect", "silu", "linear", "shared", "overwritten", "batch statistics"],
)
def test_what_cannot_be_fused_stays(network: nn.Module) -> None:
    assert fusion_of(Holder(network.eval()), "network") is None


def write_onnx(path: Path) -> Path:
    """A residual block as exporters write it, whose input is also added at the end."""
    random = np.random.default_rng(0)
    weights = {f"w{at}": random.normal(size=(3, 3, 3, 3)).astype(np.float32) for at in (1, 2)}
    weights |= {f"b{at}": random.normal(size=3).astype(np.float32) for at in (1, 2)}
    pads = [1, 1, 1, 1]
    nodes = [
        onnx.helper.make_node("Conv", ["x", "w1", "b1"], ["a"], pads=pads),
        onnx.helper.make_node("Relu", ["a"], ["b"]),
        onnx.helper.make_node("Conv", ["b", "w2", "b2"], ["c"], pads=pads),
        onnx.helper.make_node("Add", ["x", "c"], ["d"]),
        onnx.helper.make_node("Relu", ["d"], ["e"]),
        onnx.helper.make_node("Conv", ["e", "w1"], ["f"], pads=pads),
        onnx.helper.make_node("Relu", ["f"], ["g"]),
        onnx.helper.make_node("Add", ["f", "g"], ["y"]),
    ]
    shape = ("batch", 3, SIDE, SIDE)
    return onnx_models.write(path, nodes, [("x", "FP32", shape)], [("y", "FP32", shape)], weights)


def test_an_onnx_network_answers_the_same(tmp_path: Path) -> None:
    file = write_onnx(tmp_path / "model.onnx")
    network = open_onnx(settings("onnx_torch", None), file)
    plain, fused, _ = both(network, pixels())
    torch.testing.assert_close(fused["y"], plain["y"], rtol=1e-4, atol=1e-4)
    assert [node.kind for node in network.nodes] == ["ConvRelu", "ConvRelu", "Conv", "Relu", "Add"]
    assert sorted(name for node in network.nodes for name in node.frees) == ["b", "e", "f", "g", "x", "y"][:5]


# ---- deciding by running both


class PretendedGpu(Device):
    """The CPU, with kernels that compute several layers at once and take as long as they are told to."""

    fuses = True

    def __init__(self, plain: float = 0.0, fused: float = 0.0) -> None:
        super().__init__(1)
        self.times = (plain, fused)
        self.timed = 0

    def seconds(self, program: Program) -> float:
        """They are timed in turn, the plain one first."""
        program.replay()
        self.timed += 1
        return self.times[(self.timed + 1) % 2]


RESIDUAL = """
from extensions.torch.test_torch_fusion import Residual, shaken

def build():
    return shaken(Residual())
"""


def model(tmp_path: Path, precision: str) -> Path:
    text = f'max_batch = 4\n{tm.INPUT}{tm.OUTPUTS}[pytorch]\nprecision = "{precision}"\n'
    text += 'graphs = false\nmodule = "model.py"\n'
    return tm.folder(
        tmp_path,
        text,
        {"model.py": RESIDUAL, "model.pt": lambda file: torch.save(shaken(Residual()).state_dict(), file)},
    )


def network_of(backend: Any) -> Network:
    assert backend._programs is not None
    network: Network = backend._programs.network
    return network


def answers(rows: int) -> Any:
    with torch.inference_mode():
        return shaken(Residual())(pixels(rows))


def test_the_fused_form_is_used_where_it_is_faster(tmp_path: Path) -> None:
    device = PretendedGpu(0.002, 0.001)
    backend = tm.load(model(tmp_path, "bf16"), device)
    network = network_of(backend)
    assert network.fused
    assert count(network.pipeline) == 5
    assert "convolutions fused" in backend._programs.said()
    found = backend.run({"pixels": tm.floats(3)}, ())
    for name, right in answers(3).items():
        np.testing.assert_allclose(found[name], right.numpy(), atol=0.2)
    timed = device.timed
    assert timed > 0
    again = tm.load(tmp_path / "m", device)
    assert network_of(again) is network
    assert device.timed == timed  # another instance tries nothing
    again.close()
    backend.close()


def test_the_plain_form_stays_where_the_fused_one_is_slower(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "carpool")
    backend = tm.load(model(tmp_path, "bf16"), PretendedGpu(0.001, 0.002))
    assert not network_of(backend).fused
    assert count(network_of(backend).pipeline) == 0
    assert "its convolutions are not fused: it is not faster: 2 ms fused, and 1 ms as it is" in caplog.text
    backend.close()


def test_the_plain_form_stays_where_the_fused_one_answers_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "carpool")
    monkeypatch.setattr(FusedConvolution, "forward", lambda self, x, other=None: self.weight.sum() + x)
    backend = tm.load(model(tmp_path, "bf16"), PretendedGpu(0.002, 0.001))
    assert not network_of(backend).fused
    assert "its convolutions are not fused: " in caplog.text
    backend.close()


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_single_precision_is_computed_as_it_was_written(precision: str, tmp_path: Path) -> None:
    backend = tm.load(model(tmp_path, precision), PretendedGpu())
    assert not network_of(backend).fused
    backend.close()


def test_a_cpu_fuses_nothing(tmp_path: Path) -> None:
    backend = tm.load(model(tmp_path, "bf16"))
    assert not network_of(backend).fused
    backend.close()


@pytest.mark.parametrize(("room", "tries"), [(1 << 30, True), (10, False)])
def test_a_device_without_room_for_both_forms_keeps_the_plain_one(
    room: int, tries: bool, tmp_path: Path
) -> None:
    config, version = tm.described(model(tmp_path, "bf16"))
    assert version.file is not None
    ledger: Any = SimpleNamespace(room=room, **dict.fromkeys(("check", "hold", "drop"), lambda *_: None))
    network = Network(config, version.file, PretendedGpu(), ledger)
    assert (network._fusion is not None) == tries
