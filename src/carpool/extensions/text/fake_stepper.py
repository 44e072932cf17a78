"""A model that writes and only takes time: digits after as long as its curves say, for load tests without
hardware."""

from __future__ import annotations

import threading
import time
import zlib
from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np

from carpool.backends.backend import Placement, aborted
from carpool.config.model import DYNAMIC, FakeSettings, ImageSettings, ModelConfig
from carpool.config.repository import ModelVersion
from carpool.core.curve import BatchCurve, CurveError
from carpool.errors import ConfigError
from carpool.extensions.text.settings import text_settings
from carpool.extensions.text.stepper import PICTURE, ModelPart, Stepper, with_tensors
from carpool.types import Array

_SLOTS = 64
_SHORTEST, _LONGEST = 4, 40  # characters of an answer


def describe_text(config: ModelConfig, version: ModelVersion) -> ModelConfig:
    del version
    return with_tensors(config, (1, 32, DYNAMIC), ImageSettings(size=(32, 512), resize="line", pad=255))


def load_text(config: ModelConfig, version: ModelVersion, placement: Placement, part: ModelPart) -> Stepper:
    del version, placement, part
    return FakeStepper(config)


class FakeStepper:
    """Writes digits that differ from picture to picture, some longer and some shorter, after as long as its
    curves say."""

    longest = 64
    end = 0
    broken, overlaps = False, True
    notes: Sequence[str] = ()

    def __init__(self, config: ModelConfig) -> None:
        settings, told = config.fake or FakeSettings(), text_settings(config).generate
        self.slots = told.slots or _SLOTS
        self.device = settings.device
        self._model = config.name
        try:
            self._encoding = BatchCurve.parse(settings.curve, self.slots)
            self._stepping = BatchCurve.parse(settings.step_curve, self.slots)
        except CurveError as error:
            raise ConfigError(f"{config.name}: fake: {error}") from None
        self.widths: Sequence[int] = tuple(range(1, self.slots + 1))
        self._left: list[bytes] = [b""] * self.slots
        self._busy = 0.0  # until then
        self._launched: deque[tuple[float, Array]] = deque()  # steps, and when their tokens are there
        self._stop = threading.Event()

    def read(self, inputs: Mapping[str, Array]) -> Array:
        return np.frombuffer(fake_text(inputs[PICTURE]), np.uint8)

    def encode(self, pictures: Sequence[Array]) -> Sequence[Array]:
        done = self._queued(self._encoding.times[len(pictures)])
        if not self._launched:
            self._take(max(0.0, done - time.monotonic()))
        return pictures

    def admit(self, slots: Sequence[int], encoded: Sequence[Array]) -> None:
        for slot, text in zip(slots, encoded, strict=True):
            self._left[slot] = text.tobytes()

    def launch(self, width: int) -> None:
        tokens = np.array([text[0] if text else self.end for text in self._left[:width]], np.int64)
        self._left[:width] = [text[1:] for text in self._left[:width]]
        self._launched.append((self._queued(self._stepping.times[width]), tokens))

    def tokens(self) -> Array:
        due, tokens = self._launched.popleft()
        self._take(max(0.0, due - time.monotonic()))
        return tokens

    def forget(self) -> None:
        self._launched.clear()
        self._busy = 0.0

    def step(self, width: int) -> Array:
        self.launch(width)
        return self.tokens()

    def piece(self, token: int) -> bytes:
        return bytes((token,))

    def sample(self) -> Array:
        return np.full(_LONGEST, ord("1"), np.uint8)

    def _queued(self, seconds: float) -> float:
        """Returns when something is done that begins behind everything before it."""
        self._busy = max(time.monotonic(), self._busy) + seconds
        return self._busy

    def _take(self, seconds: float) -> None:
        if self._stop.wait(seconds):
            raise aborted(self._model)

    def abort(self) -> None:
        self._stop.set()

    close = abort


def fake_text(picture: Array) -> bytes:
    """Returns what `FakeStepper` reads there."""
    seen = zlib.crc32(picture.tobytes())
    return (f"{seen:010d}" * 4)[: _SHORTEST + seen % (_LONGEST - _SHORTEST + 1)].encode()
