"""Pictures decoded and resized on the model's device: as the CPU does it, to one level of brightness."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from PIL import Image

from carpool.backends.backend import Cut, FileToKeep, PictureForm, Place, PlacedRectangle
from carpool.config.model import ImageSettings
from carpool.engine.loading.device_pictures import _pixels, _placed, sample_picture
from carpool.errors import CarpoolError, InvalidInput
from carpool.extensions.torch.torch_pictures import CpuResize, DecodeAll, DevicePictures, can_decode
from carpool.types import Array, Datatype, TensorSpec
from carpool.vision.decode import Decoded, decode
from carpool.vision.transforms import Transform

TOLERANCE = 1  # of 255: the two ways round to neighbours
CPU = torch.device("cpu")
SIZES = ((64, 48), (13, 50), (20, 24), (7, 5), (101, 33), (1, 9), (200, 150))  # width, height
INPUT = (24, 20)
_GPU_MARKS = (
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
)


def on_a_gpu(test: Callable[..., None]) -> Callable[..., None]:
    for mark in _GPU_MARKS:
        test = mark(test)
    return test


random = np.random.default_rng(3)


def pixels(width: int, height: int) -> Array:
    return random.integers(0, 256, (height, width, 3), dtype=np.uint8)


def jpeg(width: int = 40, height: int = 30, colour: tuple[int, int, int] = (200, 90, 30)) -> Array:
    out = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(out, "JPEG", quality=95)
    return np.frombuffer(out.getvalue(), np.uint8).copy()


def form_of(settings: ImageSettings, size: tuple[int, int] = INPUT) -> PictureForm:
    return PictureForm(*size, settings.layout != "nhwc", settings.channels == "bgr", settings.pad)


def place_of(settings: ImageSettings, size: tuple[int, int] = INPUT) -> Place:
    def place(width: int, height: int) -> PlacedRectangle:
        return _placed(width, height, size, settings)

    return place


def rows(settings: ImageSettings, count: int, size: tuple[int, int] = INPUT) -> torch.Tensor:
    shape = (*size, 3) if settings.layout == "nhwc" else (3, *size)
    return torch.full((count, *shape), 7, dtype=torch.uint8)


def by_the_cpu(decoded: Decoded, settings: ImageSettings, size: tuple[int, int] = INPUT) -> Array:
    shape = (*size, 3) if settings.layout == "nhwc" else (3, *size)
    transform = Transform(settings, TensorSpec("x", Datatype.UINT8, shape), "m")
    out = np.empty(transform.shape, np.uint8)
    transform.prepare(decoded, out)
    return out


def difference(one: Array, other: Array) -> Array:
    found: Array = np.abs(one.astype(int) - other.astype(int))
    return found


def pictures_on(
    device: torch.device, settings: ImageSettings, size: tuple[int, int] = INPUT, *ways: DecodeAll
) -> DevicePictures:
    place = place_of(settings, size)
    return DevicePictures(device, form_of(settings, size), place, _pixels, *ways)


# ---- resizing ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("resize", ["letterbox", "stretch", "crop"])
@pytest.mark.parametrize("kernel", ["auto", "area", "bilinear", "bicubic"])
@pytest.mark.parametrize(("layout", "channels"), [("nchw", "rgb"), ("nhwc", "bgr")])
def test_mixed_sizes_become_what_the_cpu_makes_of_them(
    resize: str, kernel: str, layout: str, channels: str
) -> None:
    settings = ImageSettings(resize=resize, kernel=kernel, layout=layout, channels=channels, pad=90)
    sources = [pixels(*size) for size in (*SIZES, SIZES[0])]
    into = rows(settings, len(sources) + 2)
    tensors = [torch.from_numpy(source).permute(2, 0, 1) for source in sources]
    CpuResize(form_of(settings), place_of(settings))(tensors, range(1, len(sources) + 1), into)
    for source, row in zip(sources, into[1:], strict=False):
        expected = by_the_cpu(Decoded(source, source.shape[1], source.shape[0]), settings)
        assert difference(row.numpy(), expected).max() <= TOLERANCE
    assert (into[0] == 7).all()
    assert (into[-1] == 7).all()


# ---- parts of pictures that are on the device -------------------------------------------------------------

EVERYWHERE = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=_GPU_MARKS)])


def parts() -> list[tuple[int, int, int, int, int]]:
    """The number of a picture; left, top, width and height: whole ones, single pixels, edges, strips."""
    found = []
    for number, (width, height) in enumerate(SIZES):
        found += [(number, 0, 0, width, height), (number, width - 1, height - 1, 1, 1)]
        found += [(number, width // 3, height // 4, max(1, width // 2), max(1, height // 3))]
        found += [(number, 0, height // 2, width, 1), (number, width // 2, 0, 1, height)]
    return found


@EVERYWHERE
@pytest.mark.parametrize("resize", ["letterbox", "stretch", "crop"])
@pytest.mark.parametrize(
    ("kernel", "layout", "channels"), [("auto", "nchw", "rgb"), ("bicubic", "nhwc", "bgr")]
)
def test_crops_are_those_that_the_cpu_cuts(
    device: str, resize: str, kernel: str, layout: str, channels: str
) -> None:
    settings = ImageSettings(resize=resize, kernel=kernel, layout=layout, channels=channels, pad=90)
    sources = [pixels(*size) for size in SIZES]
    there = [torch.from_numpy(source).to(device).permute(2, 0, 1) for source in sources]
    there[::2] = [tensor.contiguous() for tensor in there[::2]]
    asked = parts()
    into = rows(settings, len(asked) + 1).to(device)
    cuts = [Cut(there[number], *box) for number, *box in asked]
    assert pictures_on(torch.device(device), settings).fill(cuts, into) == {}
    for (number, left, top, width, height), row in zip(asked, into.cpu(), strict=False):
        part = np.ascontiguousarray(sources[number][top : top + height, left : left + width])
        assert difference(row.numpy(), by_the_cpu(Decoded(part, width, height), settings)).max() <= TOLERANCE
    assert (into[-1] == 7).all()


@EVERYWHERE
def test_a_picture_that_is_kept_is_the_one_that_was_decoded(device: str) -> None:
    settings, size, kept = ImageSettings(resize="stretch"), (64, 64), {}
    bad = np.frombuffer(b"no picture", np.uint8).copy()
    files = [FileToKeep(sample_picture(), lambda one: kept.setdefault("first", one)), sample_picture()]
    files += [FileToKeep(bad, lambda one: kept.setdefault("bad", one))]
    files += [FileToKeep(jpeg(), lambda one: kept.setdefault("last", one))]
    filling = pictures_on(torch.device(device), settings, size)
    into = rows(settings, 4, size).to(device)
    assert set(filling.fill(files, into)) == {2}
    assert {name: tuple(one.shape) for name, one in kept.items()} == {
        "first": (3, 480, 640),
        "last": (3, 30, 40),
    }
    whole = rows(settings, 2, size).to(device)
    filling.fill([Cut(kept["first"], 0, 0, 640, 480), Cut(kept["last"], 0, 0, 40, 30)], whole)
    assert difference(whole[0].cpu().numpy(), into[0].cpu().numpy()).max() <= TOLERANCE
    assert difference(whole[1].cpu().numpy(), into[3].cpu().numpy()).max() <= TOLERANCE


# ---- decoding ---------------------------------------------------------------------------------------------


def test_files_are_decoded_and_placed_on_a_cpu() -> None:
    settings = ImageSettings(resize="crop")
    files = [jpeg(), jpeg(90, 31, (3, 200, 8)), sample_picture()]
    into = rows(settings, 4)
    assert pictures_on(CPU, settings).fill(files, into) == {}
    for file, row in zip(files, into, strict=False):
        assert difference(row.numpy(), by_the_cpu(decode(file.data), settings)).max() <= TOLERANCE
    assert (into[3] == 7).all()


def test_a_bad_file_among_good_ones_is_its_owners_alone() -> None:
    settings = ImageSettings()
    files = [jpeg(), np.frombuffer(b"no picture", np.uint8).copy(), jpeg(30, 30), jpeg()[:200]]
    into = rows(settings, 4)
    errors = pictures_on(CPU, settings).fill(files, into)
    assert {number: type(error) for number, error in errors.items()} == {1: InvalidInput, 3: InvalidInput}
    for number in (0, 2):
        expected = by_the_cpu(decode(files[number].data), settings)
        assert difference(into[number].numpy(), expected).max() <= TOLERANCE


def test_nothing_but_bad_files() -> None:
    bad = np.frombuffer(b"no picture", np.uint8).copy()
    assert set(pictures_on(CPU, ImageSettings()).fill([bad, bad], rows(ImageSettings(), 2))) == {0, 1}


class Chip:
    """Decodes a whole batch, or nothing if one of its files is bad."""

    def __init__(self) -> None:
        self.batches: list[int] = []

    def __call__(self, files: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        self.batches.append(len(files))
        try:
            found = [decode(file.numpy().data).pixels for file in files]
        except CarpoolError as error:
            raise RuntimeError("the chip gives no reason") from error
        return [torch.from_numpy(one).permute(2, 0, 1).contiguous() for one in found]


def test_a_batch_is_decoded_at_once() -> None:
    chip = Chip()
    errors = pictures_on(CPU, ImageSettings(), INPUT, chip).fill([jpeg()] * 9, rows(ImageSettings(), 9))
    assert errors == {}
    assert chip.batches == [9]


def test_a_file_that_the_chip_cannot_read_costs_its_neighbours_little() -> None:
    chip, settings = Chip(), ImageSettings()
    files = [jpeg(colour=(number, 200, 90)) for number in range(16)]
    files[11] = jpeg()[:300]
    into = rows(settings, 16)
    errors = pictures_on(CPU, settings, INPUT, chip).fill(files, into)
    assert list(errors) == [11]
    assert "JPEG" in errors[11].message
    assert sum(chip.batches) <= 16 * 3  # halved, and not one by one
    for number in set(range(16)) - {11}:
        assert difference(into[number].numpy(), by_the_cpu(decode(files[number].data), settings)).max() <= 1


def test_a_file_that_only_the_cpu_can_read_is_answered() -> None:
    def chip(files: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        raise RuntimeError("unsupported")

    settings = ImageSettings()
    into = rows(settings, 2)
    assert pictures_on(CPU, settings, INPUT, chip).fill([jpeg(), jpeg(9, 9)], into) == {}
    assert difference(into[0].numpy(), by_the_cpu(decode(jpeg().data), settings)).max() <= TOLERANCE


def test_a_device_without_memory_is_for_the_caller_to_see() -> None:
    def chip(files: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        raise torch.cuda.OutOfMemoryError("none left")

    with pytest.raises(torch.cuda.OutOfMemoryError):
        pictures_on(CPU, ImageSettings(), INPUT, chip).fill([jpeg()] * 2, rows(ImageSettings(), 2))


# ---- on a GPU ---------------------------------------------------------------------------------------------


@on_a_gpu
@pytest.mark.parametrize("resize", ["letterbox", "stretch", "crop"])
@pytest.mark.parametrize("kernel", ["auto", "area", "bilinear", "bicubic"])
@pytest.mark.parametrize(("layout", "channels"), [("nchw", "rgb"), ("nhwc", "bgr")])
def test_the_fused_kernel_makes_what_the_cpu_makes(
    resize: str, kernel: str, layout: str, channels: str
) -> None:
    pytest.importorskip("triton")
    from carpool.extensions.torch.triton_resize import FusedResize

    gpu = torch.device("cuda")
    settings = ImageSettings(resize=resize, kernel=kernel, layout=layout, channels=channels, pad=90)
    sources = [pixels(*size) for size in SIZES]
    tensors = [torch.from_numpy(source).to(gpu).permute(2, 0, 1) for source in sources]
    tensors[::2] = [tensor.contiguous() for tensor in tensors[::2]]
    into = rows(settings, len(sources) + 1).to(gpu)
    resize_all = FusedResize(form_of(settings), gpu, place_of(settings))
    for _ in range(2):  # the first time it learns the sizes
        into.fill_(7)
        resize_all(tensors, range(1, len(sources) + 1), into)
        torch.cuda.synchronize()
    for source, row in zip(sources, into[1:].cpu(), strict=True):
        expected = by_the_cpu(Decoded(source, source.shape[1], source.shape[0]), settings)
        assert difference(row.numpy(), expected).max() <= TOLERANCE
    assert (into[0] == 7).all()


@on_a_gpu
def test_the_chip_decodes_as_the_cpu_does() -> None:
    gpu, settings, size = torch.device("cuda"), ImageSettings(resize="crop"), (224, 224)
    if not can_decode(gpu):
        pytest.skip("without torchvision")
    files = [sample_picture(), jpeg(), sample_picture(), jpeg()[:300]]
    into = rows(settings, 4, size).to(gpu)
    errors = pictures_on(gpu, settings, size).fill(files, into)
    torch.cuda.synchronize()
    assert set(errors) <= {3}
    for file, row in zip(files[:3], into.cpu(), strict=False):
        assert difference(row.numpy(), by_the_cpu(decode(file.data), settings, size)).mean() <= 2.5


@on_a_gpu
def test_the_decoder_of_an_instance_reads_as_torchvision_does() -> None:
    pytest.importorskip("torchvision")
    from carpool.extensions.torch.torch_pictures import NoDecoder, Nvjpeg, _torchvision, loaded_library

    gpu = torch.device("cuda")
    try:
        decoders = [Nvjpeg(loaded_library(), gpu) for _ in range(2)]
    except NoDecoder as error:
        pytest.skip(str(error))
    files = [torch.from_numpy(file) for file in (sample_picture(), jpeg(), sample_picture(), jpeg())]
    expected = _torchvision(gpu)(files)
    for decode_all in decoders * 2:
        found = decode_all(files)
        torch.cuda.synchronize()
        for picture, other in zip(found, expected, strict=True):
            assert picture.shape == other.shape
            assert difference(picture.cpu().numpy(), other.cpu().numpy()).max() <= TOLERANCE
