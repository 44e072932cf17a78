"""Watches one stream of pictures, of a model's version or of one of its cameras: the window that is open, how
far the last one was from the reference, and the alarms. The caller passes the time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from carpool.extensions.drift.measures import MEASURES, MeasureCounts, read_counts

LEAST = 300
"""Pictures in a window, and in a reference: chance alone explains too much of fewer."""

_IN_A_ROW = 2
_ORDER = {measure: number for number, measure in enumerate(MEASURES)}


@dataclass(frozen=True, slots=True)
class Change:
    """An alarm began, or with `over` is over."""

    what: tuple[str, ...]
    over: bool


class DriftStream:
    """`now` never runs backwards for it: what comes from a clock that was set back counts as now."""

    __slots__ = ("_beyond", "alarms", "last", "psi", "silent_since", "window")

    def __init__(self, now: float) -> None:
        self.window = MeasureCounts(now)
        self.last: MeasureCounts | None = None  # the window that was judged
        self.psi: dict[str, float] = {}  # of that one
        self.alarms: tuple[str, ...] = ()  # the measures, the cause first
        self._beyond: dict[str, int] = {}  # in so many windows in a row
        self.silent_since = now

    def add(self, values: Mapping[str, Any], now: float) -> None:
        self.window.add(values)
        self.silent_since = now

    def look(self, now: float, length: float, limit: float, reference: MeasureCounts | None) -> Change | None:
        """Close the window if its time is over and it has enough pictures: else it waits for them. Windows
        end at whole hours, or whatever their length is, all at the same time; one that began late, and has
        seen less than half of it, goes on to the next. Without a reference nothing is judged."""
        began = self.window.began = min(self.window.began, now)
        is_over = now // length > began // length and now - began >= length / 2
        if not is_over or self.window.pictures < LEAST:
            return None
        self.last, self.window = self.window, MeasureCounts(now)
        if reference is None:
            self.psi = {}
            return self._alarm({})
        self.psi = self.last.against(reference, LEAST)
        beyond = {name: self._beyond.get(name, 0) + 1 for name, psi in self.psi.items() if psi > limit}
        return self._alarm(beyond)

    def forget(self) -> None:
        """What was judged: the reference is another one now."""
        self.psi = {}
        self._alarm({})

    def _alarm(self, beyond: dict[str, int]) -> Change | None:
        self._beyond = beyond
        before = self.alarms
        self.alarms = in_order(name for name, windows in beyond.items() if windows >= _IN_A_ROW)
        if bool(before) == bool(self.alarms):
            return None
        return Change(self.alarms or before, over=not self.alarms)

    def written(self) -> dict[str, Any]:
        return {
            "window": self.window.written(),
            "last": None if self.last is None else self.last.written(),
            "psi": {name: round(psi, 6) for name, psi in self.psi.items()},
            "beyond": self._beyond,
            "silent_since": self.silent_since,
        }


def read_stream(document: Mapping[str, Any]) -> DriftStream:
    """Reads a stream, and raises ValueError where it is none."""
    try:
        stream = DriftStream(float(document["silent_since"]))
        stream.window = read_counts(document["window"])
        stream.last = None if document["last"] is None else read_counts(document["last"])
        stream.psi = {str(name): float(psi) for name, psi in document["psi"].items() if name in MEASURES}
        stream._alarm({str(name): int(n) for name, n in document["beyond"].items() if name in MEASURES})
        return stream
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a stream: {error}") from None


def in_order(names: Iterable[str]) -> tuple[str, ...]:
    """Returns the cause first."""
    return tuple(sorted(names, key=_ORDER.__getitem__))


# ---- whether a camera is broken


BLACK, FROZEN, BLURRED, CHANGED = "black", "frozen", "blurred", "changed"
STATES = (BLACK, FROZEN, BLURRED, CHANGED)
"""The worst first: a black picture stays the same, too. Changed is one whose pictures or answers are beyond
its reference in another way."""

FROZEN_S = 600.0
_FROZEN_FRAMES = 10  # at least, in that time: of fewer it cannot be said that frames come


class Camera:
    """Decides whether a camera is broken, from measures of its pictures. The caller passes the time.

    Black is reported at once. A camera is frozen if its pixels stay the same for ten minutes while frames
    arrive: a scene in which nothing moves has the noise of the sensor. It is blurred if its sharpness is
    below its reference.
    """

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
