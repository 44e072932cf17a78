"""Pictures' files into a model's uint8 input, on its device: a whole batch is decoded, then resized, at once.

On CUDA the chip's own decoder reads JPEGs: through a handle of the instance's own, and what that cannot read
through torchvision. What neither reads is decoded on the CPU, which also says what is wrong with a file. On a
CPU that is the way of all of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from importlib.util import find_spec

import torch

from carpool.backends.nvjpeg import NoDecoder, Nvjpeg, loaded_library
from carpool.backends.picture_form import Decode, PictureForm, Place
from carpool.backends.torch_resize import PlainResize
from carpool.errors import CarpoolError
from carpool.types import Array

_MOST_FAILURES = 3

_log = logging.getLogger(__name__)

Resize = Callable[[Sequence[torch.Tensor], Sequence[int], torch.Tensor], None]
DecodeAll = Callable[[list[torch.Tensor]], list[torch.Tensor]]


def can_decode(device: torch.device) -> bool:
    """Whether the device reads JPEGs itself, and not merely through the CPU."""
    return device.type == "cuda" and find_spec("torchvision") is not None


class DevicePictures:
    """One per instance of a model; `fill` is called from one thread at a time."""

    def __init__(
        self,
        device: torch.device | str,
        form: PictureForm,
        place: Place,
        decode: Decode,
        *ways: DecodeAll,
    ) -> None:
        """`decode` reads one file on the CPU; each of `ways` a batch on the device, by default as that can:
        what the first does not read, the next is asked for."""
        self._device = torch.device(device)
        self._decode = decode
        self._ways = ways or (_chip_decoders(self._device) if can_decode(self._device) else ())
        self._resize = _resizer(form, self._device, place)
        self._failures = 0

    def fill(self, pictures: Sequence[Array], into: torch.Tensor) -> dict[int, CarpoolError]:
        """See `FillPictures`. What the device has no memory for raises, for the caller to halve its batch."""
        errors: dict[int, CarpoolError] = {}
        sources = self._decoded(pictures, 0, errors, self._ways)
        if sources:
            rows = [row for row in range(len(pictures)) if row not in errors]
            self._resize(sources, rows, into)
        return errors

    def _decoded(
        self,
        pictures: Sequence[Array],
        first: int,
        errors: dict[int, CarpoolError],
        ways: Sequence[DecodeAll],
    ) -> list[torch.Tensor]:
        """Each as [3, h, w]; without those that are in `errors` now. `first` is the number of the first.

        One bad file fails them all, so they are halved until it is alone: its neighbours stay on the device,
        and a client who sends bad ones costs the others little.
        """
        if not ways:
            return self._decoded_on_cpu(pictures, first, errors)
        try:
            return ways[0]([torch.from_numpy(picture) for picture in pictures])
        except torch.cuda.OutOfMemoryError:
            raise
        except NoDecoder as error:
            self._failed(ways[0], error)
        except RuntimeError:
            if len(pictures) > 1:
                half = len(pictures) // 2
                left = self._decoded(pictures[:half], first, errors, ways)
                return left + self._decoded(pictures[half:], first + half, errors, ways)
        return self._decoded(pictures, first, errors, ways[1:])

    def _decoded_on_cpu(
        self, pictures: Sequence[Array], first: int, errors: dict[int, CarpoolError]
    ) -> list[torch.Tensor]:
        decoded = []
        for number, picture in enumerate(pictures, first):
            try:
                pixels = torch.from_numpy(self._decode(picture))
            except CarpoolError as error:
                errors[number] = error
            else:
                decoded.append(pixels.to(self._device).permute(2, 0, 1))
        return decoded

    def _failed(self, way: DecodeAll, why: NoDecoder) -> None:
        """It may be the first attempt only; what goes on failing is not asked again."""
        self._failures += 1
        if self._failures == _MOST_FAILURES:
            self._ways = tuple(other for other in self._ways if other is not way)
            _log.warning("JPEGs are decoded without a decoder of the instance's own from now on: %s", why)


def _chip_decoders(device: torch.device) -> tuple[DecodeAll, ...]:
    """An instance's own, where that can be had: torchvision decodes one batch of the process at a time."""
    try:
        return Nvjpeg(loaded_library(), device), _torchvision(device)
    except (NoDecoder, OSError, AttributeError):  # no library, one without these functions, or no engine
        return (_torchvision(device),)


def _torchvision(device: torch.device) -> DecodeAll:
    from torchvision.io import ImageReadMode, decode_jpeg

    def decode_all(files: list[torch.Tensor]) -> list[torch.Tensor]:
        decoded: list[torch.Tensor] = decode_jpeg(files, mode=ImageReadMode.RGB, device=device)
        return decoded

    return decode_all


def _resizer(form: PictureForm, device: torch.device, place: Place) -> Resize:
    if device.type == "cuda" and find_spec("triton") is not None:
        from carpool.backends.triton_resize import FusedResize  # needs a compiler's runtime, and the device

        return FusedResize(form, device, place)
    return PlainResize(form, device, place)
