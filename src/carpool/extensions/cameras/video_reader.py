"""Frames of one camera, when they are due: a thread plays a file as if it were live, or follows a stream.

Whatever a file says of itself is doubted: sizes are bounded before memory is taken for them, times that jump
are put right, and what cannot be decoded is passed over.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import floor, isfinite
from time import monotonic as now
from typing import TYPE_CHECKING, Any, NamedTuple

from carpool.errors import InvalidInput
from carpool.extensions.cameras.camera_address import CameraAddress
from carpool.types import Array
from carpool.vision import draw

if TYPE_CHECKING:
    from av import VideoFrame
    from av.container import InputContainer
    from av.packet import Packet
    from av.video.stream import VideoStream

MOST_PIXELS = 50_000_000  # 8K has 33 million
_LONGEST_SIDE = 32_768
_JUMP_S = 10.0  # from one frame to the next: more is a mistake of the clock
_USUAL_FPS, _FASTEST_FPS = 25.0, 1000.0
_MOST_BAD = 250  # packets in a row that cannot be decoded
_TOLERANCE_S = 1e-5  # sums of times are not exact
_WAIT_S = 10.0  # for a stream to open, and for its next packet
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0
_OPTIONS = {  # a file may not name other places to read from
    "file": {"protocol_whitelist": "file"},
    "rtsp": {"protocol_whitelist": "rtp,rtsp,rtsps,tcp,tls,udp", "rtsp_transport": "tcp"},
    "web": {"protocol_whitelist": "crypto,http,https,httpproxy,rtmp,tcp,tls"},
}


class CannotRead(Exception):
    """Says why, without the address."""


class Frame(NamedTuple):
    number: int
    at: float  # seconds in the video, or since the camera was first opened
    read: float  # when
    image: VideoFrame | None  # until it is encoded


class LatestFrame:
    """Holds a camera's newest frame: its thread stores it, the loop takes it, and a frame that is still there
    when the next one arrives is dropped. Both threads change the state under the lock; the callback that
    wakes the loop is called outside the lock, and only when the place was empty."""

    def __init__(self, told: Callable[[], None]) -> None:
        self.read = 0
        self.dropped = 0
        self._told = told
        self._lock = threading.Lock()
        self._frame: Frame | None = None
        self._closed = False

    def put(self, image: VideoFrame, at: float) -> None:
        with self._lock:
            if self._closed:
                return
            was_empty = self._frame is None
            self.dropped += not was_empty
            self._frame = Frame(self.read, at, now(), image)
            self.read += 1
        if was_empty:
            self._told()

    def too_late(self) -> None:
        """Counts a frame that was read and is old by now."""
        with self._lock:
            self.read += not self._closed
            self.dropped += not self._closed

    def take(self) -> Frame | None:
        with self._lock:
            frame, self._frame = self._frame, None
            return frame

    @property
    def is_empty(self) -> bool:
        return self._frame is None

    def close(self) -> None:
        """Drops the stored frame and ignores later ones: the counts stay as they are now."""
        with self._lock:
            self.dropped += self._frame is not None
            self._frame = None
            self._closed = True


class VideoReader:
    """Runs in a thread of its own until its video or everything ends. `state` and `why` are for people.
    `phase` is how long a file waits before its first frame: cameras do not all look at the same moment."""

    def __init__(
        self,
        camera: CameraAddress,
        fps: float,
        stop: threading.Event,
        *,
        again: bool,
        threads: int,
        phase: float = 0.0,
    ) -> None:
        self.state = "opening"
        self.why = ""
        self.reopened = 0
        self._camera = camera
        self._interval = 1.0 / fps
        self._stop = stop
        self._again = again
        self._threads = threads
        self._phase = phase
        self._began: float | None = None  # when the first frame of a file was there

    def run(self, latest: LatestFrame) -> None:
        try:
            if self._camera.live:
                self._follow(latest)
            else:
                self._play(latest)
            self.state = "stopped" if self._stop.is_set() else "ended"
        except CannotRead as error:
            self.state, self.why = "broken", str(error)
        except Exception as error:  # this camera's alone, whatever it is: the others go on
            self.state, self.why = "broken", f"cannot be read: {type(error).__name__}"

    # ---- files

    def _play(self, latest: LatestFrame) -> None:
        """At the speed at which it was recorded, as a camera would have sent it."""
        played = 0.0
        while not self._stop.is_set():
            played += self._play_once(latest, played)
            if not self._again:
                return

    def _play_once(self, latest: LatestFrame, played: float) -> float:
        """Returns how long it was."""
        due, seconds = 0.0, 0.0
        any_seen = False
        with self._opened() as (container, stream):
            for image, seconds in _timed(_frames(container, stream), stream):
                self.state, any_seen = "running", True
                if seconds < due - _TOLERANCE_S:
                    continue
                due = (floor((seconds + _TOLERANCE_S) / self._interval) + 1) * self._interval
                if self._began is None:
                    self._stop.wait(self._phase)
                    self._began = now()
                shown = self._began + played + seconds
                if not self._wait_until(shown):
                    break
                if now() - shown > self._interval:
                    latest.too_late()
                else:
                    latest.put(image, played + seconds)
            if not any_seen:
                raise CannotRead("no frame of it can be decoded")
            return seconds + _usual_length(stream)

    def _wait_until(self, due: float) -> bool:
        return not self._stop.wait(max(0.0, due - now()))

    # ---- cameras

    def _follow(self, latest: LatestFrame) -> None:
        """Every frame is decoded, so that none waits in the camera; the newest is handed on when it is time.
        A camera that is lost is looked for again, after longer and longer pauses."""
        pause, began, due = _FIRST_PAUSE_S, now(), 0.0
        while not self._stop.is_set():
            why = "the stream ended"
            try:
                with self._opened() as (container, stream):
                    for image in _frames(container, stream):
                        if self._stop.is_set():
                            return
                        self.state, self.why, pause = "running", "", _FIRST_PAUSE_S
                        at = now() - began
                        if at >= due:
                            due = max(due, at - self._interval) + self._interval
                            latest.put(image, at)
            except CannotRead as error:
                why = str(error)
            self.state, self.why = "lost", why
            self.reopened += 1
            if self._stop.wait(pause):
                return
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    @contextmanager
    def _opened(self) -> Iterator[tuple[InputContainer, VideoStream]]:
        """Opens the video. Messages of libav contain the file's name or a stream's password: only the kind of
        error is reported."""
        import av

        camera = self._camera
        kind = "rtsp" if camera.address.startswith("rtsp") else "web" if camera.live else "file"
        form = "video4linux2" if camera.is_device else None
        timeout = _WAIT_S if camera.live and not camera.is_device else None
        # With a protocol before it, a file called "http:x" or "concat:x" is a file.
        where = f"file:{camera.address}" if not camera.live else camera.address
        options = {} if camera.is_device else _OPTIONS[kind]
        try:
            with av.open(where, "r", format=form, options=dict(options), timeout=timeout) as container:
                yield container, _video_of(container, self._threads)
        except av.FFmpegError as error:
            raise CannotRead(_said(error)) from None
        except (OSError, ValueError, MemoryError) as error:
            why = getattr(error, "strerror", None) or type(error).__name__
            raise CannotRead(f"cannot be read: {why}") from None


def _said(error: Any) -> str:
    return f"cannot be read: {str(error.strerror or type(error).__name__)[:200]}"


def _video_of(container: InputContainer, threads: int) -> VideoStream:
    from av.stream import Disposition

    for stream in container.streams.video:
        if not stream.disposition & Disposition.attached_pic:  # the cover of a song is no video
            _check_size(stream.codec_context.width, stream.codec_context.height)
            stream.codec_context.thread_count = threads
            stream.codec_context.options = {"max_pixels": str(MOST_PIXELS)}
            return stream
    kinds = sorted({stream.type for stream in container.streams if stream.type != "video"})
    raise CannotRead(f"there is no video in it{', only ' + ' and '.join(kinds) if kinds else ''}")


def _check_size(width: int, height: int) -> None:
    if width * height > MOST_PIXELS or max(width, height) > _LONGEST_SIDE:
        raise CannotRead(f"its frames of {width}×{height} pixels are larger than the {MOST_PIXELS:,} allowed")


def _frames(container: InputContainer, stream: VideoStream) -> Iterator[VideoFrame]:
    """Yields what can be decoded; what cannot is passed over, unless nothing else comes."""
    import av

    bad = 0
    for packet in _packets(container, stream):
        try:
            images = packet.decode()
        except av.FFmpegError as error:
            bad += 1
            if bad > _MOST_BAD:
                raise CannotRead(f"cannot be decoded: {error.strerror}") from None
            continue
        for image in images:
            bad = 0
            _check_size(image.width, image.height)
            if not image.is_corrupt:
                yield image


def _packets(container: InputContainer, stream: VideoStream) -> Iterator[Packet[VideoStream]]:
    """PyAV raises IndexError at the first packet of a stream that appears in mid-file, as damage makes them
    appear: it goes on from there when it is asked again."""
    for _ in range(_MOST_BAD):
        try:
            yield from container.demux(stream)
            return
        except IndexError:
            continue


def _timed(images: Iterator[VideoFrame], stream: VideoStream) -> Iterator[tuple[VideoFrame, float]]:
    """Yields frames with seconds from the first, which never go back. A frame without a time, or with one
    that cannot be, follows the one before it at the usual pace."""
    usual = _usual_length(stream)
    seconds, last = 0.0, 0.0
    for number, image in enumerate(images):
        told = image.time if image.time is not None and isfinite(image.time) else last + usual
        step = told - last if number else 0.0
        last = told
        seconds += step if 0.0 <= step <= _JUMP_S else usual
        yield image, seconds


def _usual_length(stream: VideoStream) -> float:
    """Returns the length of a frame, in seconds."""
    rate = float(stream.average_rate or stream.guessed_rate or _USUAL_FPS)
    return 1.0 / (rate if 0.0 < rate <= _FASTEST_FPS else _USUAL_FPS)


def jpeg_of(image: VideoFrame, quality: int) -> bytes:
    """Upright, as the server takes it."""
    import numpy as np

    pixels: Array = image.to_ndarray(format="rgb24")
    turns = round(image.rotation / 90) % 4  # counterclockwise, as numpy turns
    if turns:
        pixels = np.ascontiguousarray(np.rot90(pixels, turns))
    try:
        return draw.encode(pixels, "jpeg", quality)
    except InvalidInput as error:
        raise CannotRead(error.message) from None
