"""A model that writes, on a GPU: captured steps and encoders write what the CPU writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)


from carpool.config.repository import find_models  # noqa: E402
from carpool.demo import text_model  # noqa: E402
from carpool.extensions.text.line_reader import LineReader  # noqa: E402
from carpool.extensions.text.stepper import ModelPart  # noqa: E402
from carpool.extensions.text.text_loading import TextLoading  # noqa: E402
from carpool.extensions.text.text_network import TextNetwork, line_network, read_network  # noqa: E402
from carpool.extensions.text.torch_stepper import TorchStepper  # noqa: E402
from carpool.extensions.torch.torch_device import CudaDevice, Device  # noqa: E402

pytestmark = pytest.mark.gpu
SLOTS, STEPS = 8, 20


def network() -> TextNetwork:
    torch.manual_seed(1)
    reader = LineReader().eval()
    with torch.no_grad():
        for parameter in reader.decoder.parameters():
            parameter.mul_(2.0)
        reader.characters.weight.mul_(30.0)
        reader.places.mul_(30.0)
    return line_network(reader)


def written(stepper: TorchStepper, count: int) -> list[list[int]]:
    random = np.random.default_rng(3)
    lines = [random.integers(0, 256, (1, 32, 512), dtype=np.uint8) for _ in range(count)]
    stepper.admit(range(count), stepper.encode(lines))
    steps = [stepper.step(count) for _ in range(STEPS)]
    return [[int(tokens[slot]) for tokens in steps] for slot in range(count)]


@pytest.mark.parametrize("count", [1, 3, SLOTS])
def test_a_gpu_writes_what_the_cpu_writes(count: int) -> None:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    on_gpu = TorchStepper(network(), SLOTS, CudaDevice(0))
    assert on_gpu.device == "cuda:0"
    on_cpu = TorchStepper(network(), SLOTS, Device())
    for _ in range(2):  # the second time in slots that somebody had
        assert written(on_gpu, count) == written(on_cpu, count)
    on_gpu.close()


def test_half_precision_runs_and_slots_are_bytes_of_it() -> None:
    half = TorchStepper(network(), SLOTS, CudaDevice(0), precision=torch.float16)
    assert half.slot_bytes == 2 * 4 * 192 * 2 * (80 + 64)
    assert len(written(half, SLOTS)) == SLOTS
    half.close()


def tokens_of(decoder: TorchStepper, rows: Sequence[Any]) -> list[list[int]]:
    decoder.admit(range(len(rows)), rows)
    steps = [decoder.step(len(rows)) for _ in range(STEPS)]
    return [[int(tokens[slot]) for tokens in steps] for slot in range(len(rows))]


def test_an_encoder_and_a_decoder_apart_write_what_one_stepper_writes() -> None:
    (source,), _ = find_models([text_model()], gpus=1)
    loading = TextLoading(source.config, source.versions[-1])
    loading.check()
    version = source.versions[-1]
    assert version.file is not None
    network = read_network(loading.config, version.file)
    lines = [np.roll(line(), 2 * n, 2) for n in range(SLOTS)]
    encoder, decoder, whole = (
        TorchStepper(network, SLOTS, CudaDevice(0), part=part)
        for part in (ModelPart.ENCODER, ModelPart.DECODER, ModelPart.WHOLE)
    )
    try:
        assert tokens_of(decoder, encoder.encode(lines)) == tokens_of(whole, whole.encode(lines))
    finally:
        for one in (encoder, decoder, whole):
            one.close()


def line() -> Any:
    """One that can be read: what it says depends on no rounding."""
    from PIL import Image

    with Image.open(text_model() / "line.png") as image:
        small = image.convert("L").resize((min(496, 32 * image.width // image.height), 32))
    found = np.full((1, 32, 512), 255, np.uint8)
    found[0, :, : small.width] = np.asarray(small)
    return found
