"""Whether a camera is broken, from what is seen of its pictures. Time is told.

Black is told at once. Frozen is one whose pixels stay the same for ten minutes while frames come: a scene in
which nothing moves has the noise of the sensor. Blurred is one whose sharpness is below its reference.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

BLACK, FROZEN, BLURRED, CHANGED = "black", "frozen", "blurred", "changed"
STATES = (BLACK, FROZEN, BLURRED, CHANGED)
"""The worst first: a black picture stays the same, too. Changed is one whose pictures or answers are beyond
its reference in another way."""

FROZEN_S = 600.0
_FROZEN_FRAMES = 10  # at least, in that time: of fewer it cannot be said that frames come


class Camera:
    __slots__ = ("_black", "_frames", "_last", "_look", "_since")

    def __init__(self) -> None:
        self._black = False
        self._look = ""  # a digest of its pixels
        self._since = self._last = 0.0  # the first and the last frame that looked so
        self._frames = 0

    def seen(self, look: str, black: bool, now: float) -> None:
        self._black = black
        if look != self._look or now < self._last:
            self._look, self._since, self._frames = look, now, 0
        self._frames += 1
        self._last = now

    def state(self, alarms: tuple[str, ...], *, softer: bool) -> str:
        """`softer`: the sharpness of the last window is below that of the reference. Empty: it is well."""
        if self._black:
            return BLACK
        if self._look and self._frames >= _FROZEN_FRAMES and self._last - self._since >= FROZEN_S:
            return FROZEN
        if alarms and alarms[0] == "sharpness" and softer:
            return BLURRED
        return CHANGED if alarms else ""

    def written(self) -> dict[str, Any]:
        times = {"since": self._since, "last": self._last, "frames": self._frames}
        return {"black": self._black, "look": self._look, **times}


def read_camera(document: Mapping[str, Any]) -> Camera:
    try:
        camera = Camera()
        camera._black, camera._look = bool(document["black"]), str(document["look"])
        camera._since, camera._last = float(document["since"]), float(document["last"])
        camera._frames = int(document["frames"])
        return camera
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a camera: {error}") from None
