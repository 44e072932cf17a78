"""Keeps what was seen: JSON lines for all cameras, and a video with the answers drawn in for each."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import orjson

from carpool.errors import CarpoolError
from carpool.extensions.cameras.camera_address import CameraAddress
from carpool.types import Array
from carpool.vision import draw
from carpool.vision.decode import decode
from carpool.vision.picture_answers import Mask
from carpool.vision.python_pictures import Answer, Masks

if TYPE_CHECKING:
    from av.container import OutputContainer
    from av.video.stream import VideoStream

_CODECS = (("libx264", {"preset": "veryfast", "crf": "23"}), ("mpeg4", {"qscale": "4"}))
_TICKS = 1000  # a second of a written video
_BIT_RATE = 2_000_000


class CannotWrite(CarpoolError):
    exit_code = 1


class Output(Protocol):
    """Writes answered frames of one camera after the other, each from a thread; one call at a time."""

    def add(
        self, number: int, at: float, picture: bytes, answer: Answer, more: Mapping[str, Any]
    ) -> None: ...
    def close(self) -> None: ...


class JsonLines:
    """One file for all cameras; a line is a single write, so that their threads do not mix them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = path.open("wb", buffering=0)
        except OSError as error:
            raise CannotWrite(f"--jsonl: {path} cannot be written: {error.strerror or error}") from None

    def of(self, camera: CameraAddress) -> Output:
        return _CameraLines(self, camera.name)

    def write(self, line: bytes) -> None:
        try:
            self._file.write(line)
        except OSError as error:
            raise CannotWrite(f"--jsonl: {self._path} cannot be written: {error.strerror or error}") from None

    def close(self) -> None:
        self._file.close()


class _CameraLines:
    def __init__(self, lines: JsonLines, name: str) -> None:
        self._lines = lines
        self._name = name

    def add(self, number: int, at: float, picture: bytes, answer: Answer, more: Mapping[str, Any]) -> None:
        line = {"camera": self._name, "frame": number, "time_s": round(at, 3), **more, **answer}
        self._lines.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))

    def close(self) -> None:
        pass


class AnnotatedVideo:
    """Answered frames at their times, in the size of the first; an answer that comes after a newer one is
    left out, since time does not go back."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._container: OutputContainer | None = None
        self._stream: VideoStream | None = None
        self._last = -1

    def add(self, number: int, at: float, picture: bytes, answer: Answer, more: Mapping[str, Any]) -> None:
        tick = round(at * _TICKS)
        if tick > self._last:
            self._write(drawn(decode(picture).pixels, answer), tick)
            self._last = tick

    def _write(self, pixels: Array, tick: int) -> None:
        import av

        try:
            stream = self._stream or self._open(pixels.shape[1] & ~1 or 2, pixels.shape[0] & ~1 or 2)
            assert self._container is not None
            image = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            image = image.reformat(width=stream.width, height=stream.height, format="yuv420p")
            image.pts, image.time_base = tick, Fraction(1, _TICKS)
            self._container.mux(stream.encode(image))
        except (av.FFmpegError, OSError) as error:
            raise CannotWrite(f"--out: {self._path} cannot be written: {error.strerror or error}") from None

    def _open(self, width: int, height: int) -> VideoStream:
        import av

        name, options = next((one for one in _CODECS if one[0] in av.codecs_available), _CODECS[-1])
        self._container = av.open(str(self._path), "w", format="mp4")
        made = self._container.add_stream(name, rate=Fraction(_TICKS), options=dict(options))
        stream = cast("VideoStream", made)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.codec_context.time_base = Fraction(1, _TICKS)
        stream.codec_context.thread_count = 1
        if name == "mpeg4":
            stream.bit_rate = _BIT_RATE
        self._stream = stream
        return stream

    def close(self) -> None:
        import av

        if self._container is None or self._stream is None:
            return
        try:
            self._container.mux(self._stream.encode(None))
            self._container.close()
        except (av.FFmpegError, OSError) as error:
            raise CannotWrite(f"--out: {self._path} cannot be written: {error.strerror or error}") from None


def drawn(pixels: Array, answer: Answer) -> Array:
    """The answer in the picture, as the server draws it; what cannot be drawn from its JSON leaves the
    picture as it is."""
    size = (answer.width, answer.height) if "image" in answer else (pixels.shape[1], pixels.shape[0])
    if isinstance(answer, Masks):
        things = cast("list[Mask]", answer.things)
        return draw.objects(pixels, zip(things, _masks(answer), strict=True), size)
    found = answer.get("detections")
    if found is not None:
        if any("keypoints" in one for one in found):
            return draw.poses(pixels, found, size)
        if any("corners" in one for one in found):
            return draw.rotated(pixels, found, size)
        return draw.detections(pixels, found, size)
    return draw.classes(pixels, answer["classes"]) if "classes" in answer else pixels


def _masks(answer: Masks) -> list[Array]:
    return [answer.mask(number).astype("uint8") for number in range(len(answer.things))]
