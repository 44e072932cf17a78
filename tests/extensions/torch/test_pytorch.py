from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool import backends
from carpool.backends.backend import Placement
from carpool.config.model import ImageSettings
from carpool.errors import CarpoolError, ConfigError, InvalidInput, ModelError, Unsupported
from carpool.extensions.torch.torch_backend import TorchBackend
from carpool.extensions.torch.torch_device import Device
from carpool.extensions.torch.torch_programs import Network, Programs
from carpool.types import Array, Datatype
from carpool.vision.geometry import InputForm, lookup_tables
from extensions.torch import torch_models as tm
from extensions.torch.torch_models import CODE, IMAGE, INPUT, OUTPUTS, SIDE
from later import many

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "script": ("", {"model.pt": tm.write_script}),
    "exported": ("", {"model.pt2": tm.write_exported}),
    "weights": ('[pytorch]\nmodule = "model.py:build"\n', {"model.pt": tm.write_weights, "model.py": CODE}),
    "other names": (
        '[pytorch]\nmodule = "net.py"\nweights = "best.pth"\n',
        {"best.pth": tm.write_weights, "net.py": CODE},
    ),
}


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One TorchScript file for all tests that only differ in settings."""
    file = tmp_path_factory.mktemp("script") / "model.pt"
    tm.write_script(file)
    return file


def place(tmp_path: Path, scripted: Path, text: str) -> Path:
    return tm.folder(tmp_path, text, {"model.pt": lambda to: to.write_bytes(scripted.read_bytes())})


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_file_answers_the_same(kind: str, tmp_path: Path) -> None:
    text, files = KINDS[kind]
    backend = tm.load(tm.folder(tmp_path, "max_batch = 8\n" + INPUT + OUTPUTS + text, files))
    values = tm.floats(3)
    found = backend.run({"pixels": values}, ())
    for name, expected in tm.answers(values).items():
        np.testing.assert_allclose(found[name], expected, rtol=1e-5, atol=1e-6)
    assert list(backend.run({"pixels": values}, ["features"])) == ["features"]
    backend.close()


def test_in_a_hurry_nothing_is_prepared_and_the_answers_are_the_same(
    tmp_path: Path, scripted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"max_batch = 4\n{INPUT}{OUTPUTS}[pytorch]\nbuckets = [1, 2, 4]\ngraphs = true\n"
    config, version = tm.described(place(tmp_path, scripted, text))
    for what in ("warm", "capture"):
        monkeypatch.setattr(Device, what, lambda *_: pytest.fail("that takes time"))
    backend = backends.load(config, version, Placement(hurry=True))
    for count in (1, 3, 4):
        values = tm.floats(count)
        found = backend.run({"pixels": values}, ())
        for name, expected in tm.answers(values).items():
            np.testing.assert_allclose(found[name], expected, rtol=1e-5, atol=1e-6)
    backend.close()


def test_a_plain_one_is_captured_and_not_compiled(
    tmp_path: Path, scripted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"max_batch = 4\n{INPUT}{OUTPUTS}[pytorch]\nbuckets = [1, 2, 4]\ngraphs = true\n"
    config, version = tm.described(place(tmp_path, scripted, text))
    monkeypatch.setattr(Network, "compile_for", lambda *_: pytest.fail("that takes time"))
    captured: list[object] = []
    capture = Device.capture
    monkeypatch.setattr(Device, "capture", lambda self, run: captured.append(run) or capture(self, run))
    backends.load(config, version, Placement(plain=True)).close()
    assert len(captured) == 3


def compiling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TorchBackend:
    """One of three sizes that serves plain, with a compiler that changes nothing, and so takes no time."""
    text = f'max_batch = 4\n{INPUT}{OUTPUTS}[pytorch]\nbuckets = [1, 2, 4]\nmodule = "model.py:build"\n'
    files = {"model.pt": tm.write_weights, "model.py": CODE}
    config, version = tm.described(tm.folder(tmp_path, text + "compile = true\n", files))
    monkeypatch.setattr(torch, "compile", lambda pipeline, **_: pipeline)
    monkeypatch.setattr(Programs, "_timed", lambda *_: 1.0)
    backend = backends.load(config, version, Placement(plain=True))
    assert isinstance(backend, TorchBackend)
    return backend


def test_memory_goes_back_once_when_all_sizes_are_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches wait for that. Where memory is short, it goes back before the next size is captured."""
    backend = compiling(tmp_path, monkeypatch)
    released: list[int] = []
    monkeypatch.setattr(Device, "release", lambda _: released.append(1))
    found = [backend.compile(size) for size in (4, 2)]
    assert not released
    found.append(backend.compile(1))
    assert len(released) == 1
    assert [one.why_not for one in found] == [""] * 3
    assert all(list(one.steps)[:3] == ["look", "compile", "warm"] and one.began > 0 for one in found)
    assert [backend.compile(size).steps for size in (4, 2, 1)] == [{}] * 3
    backend.close()
    backend = compiling(tmp_path / "short", monkeypatch)
    released.clear()
    monkeypatch.setattr(Device, "free", lambda _: -1)
    assert backend.compile(4).why_not == ""
    assert len(released) == 1
    backend.close()


def test_kernels_are_tried_for_each_size_when_it_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not where a size is only compiled for other processes: what is found there stays there."""
    tried: list[int] = []

    @contextmanager
    def looking(_: Device, images: int) -> Iterator[None]:
        tried.append(images)
        yield

    monkeypatch.setattr(Device, "looking_for_kernels", looking)
    backend = compiling(tmp_path, monkeypatch)
    for size in (4, 1, 4):
        backend.compile(size)
    assert tried == [4, 1]
    backend.close()
    config, version = tm.described(tmp_path / "m")
    hurried = backends.load(config, version, Placement(hurry=True))
    assert isinstance(hurried, TorchBackend)
    hurried.compile(4)
    assert tried == [4, 1]
    hurried.close()


def test_a_size_that_does_not_fit_into_memory_when_compiled_runs_as_it_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = compiling(tmp_path, monkeypatch)

    def full(*_: object) -> str:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Network, "compile_for", full)
    assert "out of memory" in backend.compile(4).why_not
    values = tm.floats(3)
    found = backend.run({"pixels": values}, ())
    for name, expected in tm.answers(values).items():
        np.testing.assert_allclose(found[name], expected, rtol=1e-5, atol=1e-6)
    assert backend.alive
    assert not backend.broken
    backend.close()


def test_an_exported_file_says_its_tensors(tmp_path: Path) -> None:
    config, _ = tm.described(tm.folder(tmp_path, "", {"model.pt2": tm.write_exported}))
    assert [(t.name, t.datatype, t.dims) for t in config.inputs] == [("pixels", "FP32", (3, SIDE, SIDE))]
    assert [(t.name, t.dims) for t in config.outputs] == [("scores", (4,)), ("features", (2,))]
    assert config.max_batch == 32


def test_with_a_size_of_pictures_nothing_need_be_declared(tmp_path: Path, scripted: Path) -> None:
    config, version = tm.described(place(tmp_path, scripted, f"[image]\nsize = {SIDE}\n"))
    assert [(t.name, t.datatype, t.dims) for t in config.inputs] == [("INPUT__0", "UINT8", (3, SIDE, SIDE))]
    assert [(t.name, t.datatype, t.dims) for t in config.outputs] == [
        ("scores", "FP32", (4,)),
        ("features", "FP32", (2,)),
    ]
    backend = backends.load(config, version)
    found = backend.run({"INPUT__0": tm.pictures(2)}, ("scores",))
    np.testing.assert_allclose(found["scores"], tm.answers(tm.floats(2))["scores"], rtol=1e-4, atol=1e-6)
    backend.close()


def test_without_anything_the_tensors_must_be_declared(tmp_path: Path, scripted: Path) -> None:
    with pytest.raises(ConfigError, match=r"does not declare its inputs; .*declare them"):
        tm.described(place(tmp_path, scripted, ""))


@pytest.mark.parametrize(
    ("precision", "tolerance"), [("fp32", 1e-5), ("tf32", 1e-5), ("bf16", 0.03), ("fp16", 0.004)]
)
def test_precisions_are_inside_and_clients_see_fp32(
    precision: str, tolerance: float, tmp_path: Path, scripted: Path
) -> None:
    text = f'max_batch = 4\n{INPUT}{OUTPUTS}[pytorch]\nprecision = "{precision}"\nchannels_last = true\n'
    backend = tm.load(place(tmp_path, scripted, text))
    values = tm.floats(4)
    found = backend.run({"pixels": values}, ())
    for name, expected in tm.answers(values).items():
        assert found[name].dtype == np.float32
        np.testing.assert_allclose(found[name], expected, atol=tolerance)
    backend.close()


def test_declared_halves_come_and_go_as_such(tmp_path: Path, scripted: Path) -> None:
    outputs = OUTPUTS.replace("FP32", "FP16", 1).replace("FP32", "BF16", 1)
    backend = tm.load(place(tmp_path, scripted, "max_batch = 4\n" + INPUT.replace("FP32", "BF16") + outputs))
    values = torch.from_numpy(tm.floats(2)).bfloat16()
    found = backend.run({"pixels": values.view(torch.uint16).numpy()}, ())
    expected = tm.answers(values.float().numpy())
    assert found["scores"].dtype == np.float16
    np.testing.assert_allclose(found["scores"], expected["scores"], atol=0.002)
    as_floats = (found["features"].astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_allclose(as_floats, expected["features"], atol=0.01)
    backend.close()


# ---- buckets --------------------------------------------------------------------------------------------


def test_sizes_are_powers_of_two_where_they_are_prepared(tmp_path: Path, scripted: Path) -> None:
    config, _ = tm.described(
        place(tmp_path, scripted, f"max_batch = 12\n{INPUT}{OUTPUTS}[pytorch]\ngraphs = true\n")
    )
    assert config.pytorch.buckets == (1, 2, 4, 8, 12)
    assert config.pytorch.device == "cpu"


def test_on_the_cpu_every_size_runs_as_it_comes(tmp_path: Path, scripted: Path) -> None:
    config, _ = tm.described(place(tmp_path, scripted, f"max_batch = 12\n{INPUT}{OUTPUTS}"))
    assert config.pytorch.buckets == ()
    assert config.pytorch.graphs is False


def test_a_bucket_beyond_the_largest_batch_is_a_mistake(tmp_path: Path, scripted: Path) -> None:
    text = f"max_batch = 8\n{INPUT}{OUTPUTS}[pytorch]\nbuckets = [4, 16]\n"
    with pytest.raises(ConfigError, match="buckets has 16, more than max_batch, which is 8"):
        tm.described(place(tmp_path, scripted, text))


@pytest.fixture(scope="module")
def bucketed(tmp_path_factory: pytest.TempPathFactory, scripted: Path) -> TorchBackend:
    text = f"max_batch = 8\n{INPUT}{OUTPUTS}[pytorch]\nbuckets = [1, 3, 8]\ngraphs = true\n"
    return tm.load(place(tmp_path_factory.mktemp("bucketed"), scripted, text))


@settings(max_examples=many(25), deadline=None)
@given(sizes=st.lists(st.integers(1, 3), min_size=1, max_size=4), seed=st.integers(0, 9))
def test_padding_and_gathering_change_no_answer(sizes: list[int], seed: int, bucketed: TorchBackend) -> None:
    sizes = sizes[
        : next((n for n in range(1, len(sizes) + 1) if sum(sizes[:n]) > 8), len(sizes) + 1) - 1
    ] or [1]
    values = tm.floats(sum(sizes), seed)
    ends = np.cumsum(sizes)
    parts = [{"pixels": values[end - size : end]} for end, size in zip(ends, sizes, strict=True)]
    together = bucketed.run_parts(parts, sizes, ())
    for name, expected in tm.answers(values).items():
        assert together[name].shape == expected.shape
        np.testing.assert_allclose(together[name], expected, rtol=1e-4, atol=1e-6)
        np.testing.assert_array_equal(bucketed.run({"pixels": values}, ())[name], together[name])


def test_views_are_gathered_like_arrays_and_show_what_their_memory_holds_by_then(
    bucketed: TorchBackend,
) -> None:
    memory = tm.floats(5, 1)
    parts = [{"pixels": memory[:2]}, {"pixels": memory[2:]}]
    views = [bucketed.view(part) or pytest.fail("it need not be copied") for part in parts]
    for seed in (2, 3):
        memory[...] = tm.floats(5, seed)
        found = bucketed.run_parts(views, [2, 3], ())
        for name, expected in bucketed.run_parts(parts, [2, 3], ()).items():
            np.testing.assert_array_equal(found[name], expected)


def test_what_lies_askew_or_is_read_only_has_no_view(bucketed: TorchBackend) -> None:
    values = tm.floats(2)
    room = np.zeros(values.nbytes + 1, np.uint8)
    askew = np.ndarray(values.shape, np.float32, room, 1)
    fixed = values.copy()
    fixed.flags.writeable = False
    for array in (askew, fixed, values[:, ::-1]):
        assert bucketed.view({"pixels": array}) is None


def test_a_batch_beyond_the_last_bucket_is_refused_and_harms_nothing(bucketed: TorchBackend) -> None:
    bucketed_cap = bucketed._cap
    assert bucketed_cap == 8
    found = bucketed.run({"pixels": tm.floats(9)}, ())  # more than was promised: in two runs
    np.testing.assert_allclose(found["scores"], tm.answers(tm.floats(9))["scores"], rtol=1e-4, atol=1e-6)


def test_answers_belong_to_the_caller(bucketed: TorchBackend) -> None:
    first = bucketed.run({"pixels": tm.floats(2, 1)}, ("scores",))["scores"]
    kept = first.copy()
    for seed in range(4):
        bucketed.run({"pixels": tm.floats(2, seed + 2)}, ("scores",))
    np.testing.assert_array_equal(first, kept)


def test_inputs_may_be_read_only_unaligned_or_strided(bucketed: TorchBackend) -> None:
    values = tm.floats(2)
    frozen = values.copy()
    frozen.flags.writeable = False
    memory = bytearray(values.nbytes + 1)
    memory[1:] = values.tobytes()
    unaligned: Array = np.ndarray(values.shape, np.float32, memory, 1)
    strided = np.repeat(values, 2, axis=0)[::2]
    expected = bucketed.run({"pixels": values}, ())["scores"]
    for given_as in (frozen, unaligned, strided):
        np.testing.assert_array_equal(bucketed.run({"pixels": given_as}, ())["scores"], expected)


def test_an_unknown_output_is_named(bucketed: TorchBackend) -> None:
    with pytest.raises(ModelError, match="has no output 'x'; it has scores, features"):
        bucketed.run({"pixels": tm.floats(1)}, ["x"])


# ---- pixels ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_bytes_become_values_on_the_device_as_the_lookup_tables_say(layout: str, tmp_path: Path) -> None:
    """Through a network that answers its input."""

    class Same(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    side_by_side = layout == "nhwc"
    shape = f"[{SIDE}, {SIDE}, 3]" if side_by_side else f"[3, {SIDE}, {SIDE}]"
    text = (
        f'max_batch = 4\n[[input]]\nname = "x"\ndatatype = "UINT8"\nshape = {shape}\n'
        f'[[output]]\nname = "y"\ndatatype = "FP32"\nshape = [3, {SIDE}, {SIDE}]\n{IMAGE}'
    )
    backend = tm.load(tm.folder(tmp_path, text, {"model.pt": lambda file: tm.write_script(file, Same())}))
    found = backend.run({"x": tm.pictures(4, channels_last=side_by_side)}, ())["y"]
    image = ImageSettings(scale=0.017, mean=(1.2, 2.0, 1.5), std=(0.9, 1.1, 1.0))
    tables = lookup_tables(image, InputForm((3, SIDE, SIDE), True, 3, (SIDE, SIDE)), Datatype.FP32, "m")
    expected = np.stack([tables[c][0][tm.pictures(4)[:, c]] for c in range(3)], axis=1)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    backend.close()


def test_an_exported_network_takes_bytes_side_by_side(tmp_path: Path) -> None:
    text = (
        f'max_batch = 4\n[[input]]\nname = "pixels"\ndatatype = "UINT8"\nshape = [{SIDE}, {SIDE}, 3]\n'
        f"[image]\nscale = {1 / 255}\n"
    )
    backend = tm.load(tm.folder(tmp_path, text, {"model.pt2": tm.write_exported}))
    found = backend.run({"pixels": tm.pictures(3, channels_last=True)}, ())["scores"]
    np.testing.assert_allclose(found, tm.answers(tm.floats(3))["scores"], rtol=1e-4, atol=1e-5)
    backend.close()


class Filler:
    """Pictures of one byte, which all their pixels then have; those of byte 0 cannot be read."""

    def fill(self, pictures: Sequence[Array], into: Any) -> Mapping[int, CarpoolError]:
        assert len(into) == len(pictures)
        for row, picture in zip(into, pictures, strict=True):
            row.fill_(int(picture[0]))
        return {
            index: InvalidInput("broken picture") for index, picture in enumerate(pictures) if not picture[0]
        }


def test_encoded_pictures_are_filled_in_and_bad_ones_named(tmp_path: Path, scripted: Path) -> None:
    text = f"max_batch = 8\n{IMAGE}[pytorch]\nbuckets = [2, 8]\n"
    backend = tm.load(place(tmp_path, scripted, text), fill=lambda _device: Filler())
    found, errors = backend.run_encoded([np.array([level], np.uint8) for level in (9, 0, 200)], ())
    levels = np.array([9, 0, 200], np.uint8).reshape(3, 1, 1, 1)
    pixels = np.broadcast_to(levels, (3, 3, SIDE, SIDE)).copy()
    expected = backend.run({"INPUT__0": pixels}, ())
    for name in ("scores", "features"):
        np.testing.assert_array_equal(found[name], expected[name])
    assert list(errors) == [1]
    assert errors[1].message == "broken picture"
    backend.close()


def test_without_a_filler_pictures_are_refused(bucketed: TorchBackend) -> None:
    with pytest.raises(ModelError, match="takes no encoded images on cpu"):
        bucketed.run_encoded([np.zeros(4, np.uint8)], ())


# ---- names and shapes -----------------------------------------------------------------------------------


class Two(torch.nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return a - b, a * b


@pytest.mark.parametrize(
    ("first", "second"), [("INPUT__1", "INPUT__0"), ("b", "a"), ("second__1", "first__0"), ("y", "x")]
)
def test_inputs_go_by_number_by_parameter_or_by_order(first: str, second: str, tmp_path: Path) -> None:
    def tensor(kind: str, name: str) -> str:
        return f'{kind} [ {{ name: "{name}" data_type: TYPE_FP32 dims: [2] }} ]\n'

    place = tmp_path / "m"
    (place / "1").mkdir(parents=True)
    tm.write_script(place / "1" / "model.pt", Two())
    (place / "config.pbtxt").write_text(
        'platform: "pytorch_libtorch"\nmax_batch_size: 4\n'
        + tensor("input", first)
        + tensor("input", second)
        + tensor("output", "OUTPUT__1")
        + tensor("output", "OUTPUT__0")
    )
    backend = tm.load(place)
    of_first, of_second = np.full((3, 2), 5, np.float32), np.full((3, 2), 2, np.float32)
    found = backend.run({first: of_first, second: of_second}, ())
    difference = 3 if first == "y" else -3  # names that say nothing: the first that is declared is the first
    assert {name: array.tolist() for name, array in found.items()} == {
        "OUTPUT__0": [[difference] * 2] * 3,
        "OUTPUT__1": [[10] * 2] * 3,
    }
    backend.close()


def test_more_outputs_than_it_answers_are_a_mistake(tmp_path: Path, scripted: Path) -> None:
    extra = '[[output]]\nname = "more"\ndatatype = "FP32"\nshape = [1]\n'
    with pytest.raises(
        ModelError, match=r"answers 2 tensors \(scores, features\), and scores, features, more"
    ):
        tm.load(place(tmp_path, scripted, f"max_batch = 2\n{INPUT}{OUTPUTS}{extra}"))


class Sums(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum(-1)


def test_lengths_may_vary_and_there_may_be_no_batch(tmp_path: Path) -> None:
    def settings_for(shape: str, max_batch: int, answer: str) -> str:
        return (
            f'max_batch = {max_batch}\n[[input]]\nname = "x"\ndatatype = "FP32"\nshape = {shape}\n'
            f'[[output]]\nname = "y"\ndatatype = "FP32"\nshape = {answer}\n'
        )

    files = {"model.pt": lambda file: tm.write_script(file, Sums())}
    varying = tm.load(tm.folder(tmp_path, settings_for("[2, -1]", 4, "[2]"), files, "varying"))
    for length in (3, 5):
        found = varying.run_parts([{"x": np.ones((1, 2, length), np.float32)}] * 2, [1, 1], ())
        np.testing.assert_array_equal(found["y"], np.full((2, 2), length))
    whole = tm.load(tm.folder(tmp_path, settings_for("[3, 2]", 0, "[3]"), files, "whole"))
    np.testing.assert_array_equal(whole.run({"x": np.ones((3, 2), np.float32)}, ())["y"], np.full(3, 2))
    varying.close()
    whole.close()


def test_what_pytorch_cannot_carry_is_named(tmp_path: Path, scripted: Path) -> None:
    with pytest.raises(Unsupported, match='"scores" is BYTES'):
        tm.described(
            place(tmp_path, scripted, f"max_batch = 2\n{INPUT}{OUTPUTS.replace('FP32', 'BYTES', 1)}")
        )


# ---- faults and the end ---------------------------------------------------------------------------------


def test_a_network_that_raises_leaves_the_instance_alive(bucketed: TorchBackend) -> None:
    with pytest.raises(ModelError, match="m: "):
        bucketed.run({"pixels": np.zeros((2, 3, SIDE, SIDE + 1), np.float32)}, ())
    assert bucketed.alive
    assert bucketed.run({"pixels": tm.floats(1)}, ())["scores"].shape == (1, 4)


def test_an_abort_is_the_end_and_closing_twice_does_no_harm(tmp_path: Path, scripted: Path) -> None:
    backend = tm.load(place(tmp_path, scripted, f"max_batch = 2\n{INPUT}{OUTPUTS}"))
    assert backend.alive
    backend.abort()
    assert not backend.alive
    with pytest.raises(ModelError) as caught:
        backend.run({"pixels": tm.floats(1)}, ())
    assert caught.value.reason == "aborted"
    backend.close()
    backend.close()


def test_instances_share_the_weights(tmp_path: Path, scripted: Path) -> None:
    where = place(tmp_path, scripted, f"max_batch = 2\n{INPUT}{OUTPUTS}")
    one, other = tm.load(where), tm.load(where)
    assert one._programs is not None
    assert other._programs is not None
    assert one._programs.network is other._programs.network
    one.close()
    assert other.run({"pixels": tm.floats(1)}, ())["scores"].shape == (1, 4)
    other.close()


@pytest.mark.parametrize("works", [True, False])
def test_compiling_is_tried_for_each_size_and_may_fail(
    works: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[int] = []

    def compiler(pipeline: torch.nn.Module, *, dynamic: bool, mode: str) -> Any:
        def run(*rows: torch.Tensor) -> Any:
            calls.append(len(rows[0]))
            if not works:
                raise RuntimeError("no compiler here")
            return pipeline(*rows)

        assert mode == "max-autotune-no-cudagraphs"
        assert not dynamic
        return run

    monkeypatch.setattr(torch, "compile", compiler)
    text = f'max_batch = 4\n{INPUT}{OUTPUTS}[pytorch]\nmodule = "model.py"\ncompile = "max-autotune"\n'
    told: list[str] = []
    backend = tm.load(
        tm.folder(tmp_path, text, {"model.pt": tm.write_weights, "model.py": CODE}), tell=told.append
    )
    found = backend.run({"pixels": tm.floats(3)}, ())["scores"]
    np.testing.assert_allclose(found, tm.answers(tm.floats(3))["scores"], rtol=1e-4, atol=1e-6)
    assert set(calls) == ({1, 2, 4} if works else {1})
    assert told[0] == "compiling for batches of 1"
    assert ("runs without torch.compile: no compiler here" in caplog.text) is not works
    backend.close()
