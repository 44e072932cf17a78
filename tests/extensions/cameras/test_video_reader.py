"""Frames of files and streams: when they are due, which are passed over, and files that are no videos."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from carpool.extensions.cameras import video_reader
from carpool.extensions.cameras.camera_address import CameraAddress, find_cameras
from carpool.extensions.cameras.video_reader import Frame, LatestFrame, VideoReader, jpeg_of
from extensions.cameras.made_videos import absurd, sound, video
from extensions.cameras.rtsp_camera import rtsp_camera

FAST = 1000.0  # frames a second: every frame of a file


class Seen(LatestFrame):
    """Takes every frame at once, and ends it all after so many."""

    def __init__(self, most: int = 10_000) -> None:
        super().__init__(self._look)
        self.frames: list[Frame] = []
        self.stop = threading.Event()
        self._most = most

    def _look(self) -> None:
        frame = self.take()
        assert frame is not None
        self.frames.append(frame)
        if len(self.frames) >= self._most:
            self.stop.set()


@pytest.fixture
def in_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits, and nobody is late."""
    monkeypatch.setattr(VideoReader, "_wait_until", lambda reader, _due: not reader._stop.is_set())
    monkeypatch.setattr(video_reader, "now", lambda: 0.0)


def read(
    path: Path | str, fps: float = FAST, most: int = 10_000, *, again: bool = False
) -> tuple[VideoReader, Seen]:
    seen = Seen(most)
    [camera] = find_cameras([str(path)])
    reader = VideoReader(camera, fps, seen.stop, again=again, threads=1)
    reader.run(seen)
    return reader, seen


@pytest.mark.usefixtures("in_no_time")
def test_every_frame_or_as_many_as_wanted(tmp_path: Path) -> None:
    file = video(tmp_path / "a.mp4", frames=50, fps=25)
    reader, seen = read(file)
    assert (reader.state, reader.why, len(seen.frames)) == ("ended", "", 50)
    assert [frame.number for frame in seen.frames] == list(range(50))
    assert [frame.at for frame in seen.frames][:3] == pytest.approx([0.0, 0.04, 0.08])
    _, some = read(file, fps=5)
    assert [frame.at for frame in some.frames] == pytest.approx(
        [number / 5 for number in range(10)], abs=0.021
    )


@pytest.mark.usefixtures("in_no_time")
def test_a_frame_rate_that_varies(tmp_path: Path) -> None:
    times = [0, 10, 20, 500, 510, 1900, 1910, 2000]
    _, seen = read(video(tmp_path / "a.mp4", times=times), fps=2)
    assert [round(frame.at * 1000) for frame in seen.frames] == [0, 500, 1900, 2000]


@pytest.mark.usefixtures("in_no_time")
def test_again_and_again(tmp_path: Path) -> None:
    file = video(tmp_path / "a.mp4", frames=5, fps=5)
    reader, seen = read(file, most=12, again=True)
    assert len(seen.frames) == 12
    assert reader.state == "stopped"
    assert [frame.at for frame in seen.frames] == pytest.approx(
        [number / 5 for number in range(12)], abs=0.01
    )


def test_what_comes_too_late_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(number * 0.5 for number in range(10_000))  # every look at it costs half a second
    monkeypatch.setattr(video_reader, "now", lambda: next(clock))
    _, seen = read(video(tmp_path / "a.mp4", frames=25, fps=25), fps=25)
    assert seen.read == 25
    assert seen.read == len(seen.frames) + seen.dropped
    assert seen.dropped > 20


@given(
    st.lists(st.one_of(st.none(), st.floats(), st.floats(0, 100)), min_size=1, max_size=30),
    st.sampled_from([None, 0, -5, 25, 1e9]),
)
def test_times_never_go_back_or_jump(times: list[float | None], rate: float | None) -> None:
    stream: Any = SimpleNamespace(average_rate=rate, guessed_rate=None)
    images: Any = iter([SimpleNamespace(time=told) for told in times])
    found = [seconds for _, seconds in video_reader._timed(images, stream)]
    assert found[0] == 0.0
    steps = [later - sooner for sooner, later in pairwise(found)]
    assert all(0.0 <= step <= video_reader._JUMP_S + 1e-6 for step in steps)


# ---- files that are no videos


def broken(kind: str, folder: Path) -> tuple[Path, str]:
    file = folder / f"{kind}.mp4"
    if kind == "empty":
        file.write_bytes(b"")
        return file, "cannot be read"
    if kind == "text":
        file.write_text("no video at all\n" * 100)
        return file, "cannot be read"
    if kind == "cut":  # before the part that says where the frames are
        file.write_bytes(video(file).read_bytes()[:600])
        return file, "cannot be read"
    if kind == "sound":
        return sound(file), "there is no video in it, only audio"
    if kind == "absurd":
        return absurd(folder / "absurd.avi"), ""
    if kind == "playlist":
        file = folder / "list.m3u8"
        file.write_text("#EXTM3U\n#EXTINF:1,\nhttp://127.0.0.1:1/a.ts\n#EXT-X-ENDLIST\n")
        return file, ""
    raise AssertionError(kind)


@pytest.mark.parametrize("kind", ["empty", "text", "cut", "sound", "absurd", "playlist"])
def test_what_is_wrong_is_said(kind: str, tmp_path: Path) -> None:
    file, words = broken(kind, tmp_path)
    reader, seen = read(file)
    assert reader.state == "broken"
    assert words in reader.why
    assert reader.why
    assert str(file) not in reader.why
    assert not seen.read


def test_frames_that_are_too_large_are_not_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(video_reader, "MOST_PIXELS", 3000)
    reader, seen = read(video(tmp_path / "a.mp4"))
    assert (reader.state, seen.read) == ("broken", 0)
    assert reader.why == "its frames of 64×48 pixels are larger than the 3,000 allowed"


@pytest.mark.usefixtures("in_no_time")
@pytest.mark.parametrize("ending", [".mkv", ".avi", ".ts"])
def test_a_video_that_was_cut_off_is_read_to_where_it_ends(ending: str, tmp_path: Path) -> None:
    file = video(tmp_path / f"a{ending}", frames=400)
    whole = file.read_bytes()
    for part in (2, 3):
        file.write_bytes(whole[: len(whole) * part // 4])
        _, seen = read(file)
        assert 0 < len(seen.frames) < 400


@pytest.mark.usefixtures("in_no_time")
def test_damage_is_passed_over(tmp_path: Path) -> None:
    file = video(tmp_path / "a.ts", frames=100)
    data = bytearray(file.read_bytes())
    for at in range(len(data) // 3, len(data) * 2 // 3, 100):
        data[at] ^= 0xFF
    file.write_bytes(data)
    reader, seen = read(file)
    assert reader.state == "ended"
    assert 0 < len(seen.frames) <= 100


def test_a_file_may_not_be_named_like_a_protocol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "http:x").write_bytes(video(tmp_path / "a.mp4", frames=3).read_bytes())
    seen = Seen()
    camera = CameraAddress("x", "http:x", False, "http:x")
    VideoReader(camera, FAST, seen.stop, again=False, threads=1).run(seen)
    assert seen.read == 3


# ---- streams


@contextmanager
def streaming(data: bytes) -> Iterator[str]:
    """A camera that sends some frames and hangs up."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://me:hunter2@127.0.0.1:{server.server_address[1]}/live.ts"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_camera_that_hangs_up_is_called_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(video_reader, "_FIRST_PAUSE_S", 0.001)
    with streaming(video(tmp_path / "a.ts", frames=10).read_bytes()) as url:
        reader, seen = read(url, fps=1e6, most=25)
    assert len(seen.frames) == 25
    assert reader.reopened >= 2
    assert [frame.at for frame in seen.frames] == sorted(frame.at for frame in seen.frames)
    assert reader.state == "stopped"


def test_a_network_camera_with_a_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(video_reader, "_FIRST_PAUSE_S", 0.001)
    with rtsp_camera("me", "hunter2", frames=20) as (url, came):
        reader, seen = read(url, fps=1e6, most=30)
        assert len(seen.frames) == 30
        assert len(came) >= 2, "it hung up after 20, and was called again"
        wrong, nothing = Seen(), url.replace("hunter2", "hunter3")
        [camera] = find_cameras([nothing])
        monkeypatch.setattr(wrong.stop, "wait", lambda _pause: True)
        refused = VideoReader(camera, 5.0, wrong.stop, again=False, threads=1)
        refused.run(wrong)
    assert not wrong.read
    assert "401" in refused.why
    assert "hunter" not in reader.why + refused.why


def test_pauses_grow_while_nobody_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    class Stop(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            pauses.append(timeout or 0.0)
            if len(pauses) == 7:
                self.set()
            return self.is_set()

    [camera] = find_cameras(["rtsp://me:hunter2@127.0.0.1:1/x"])
    reader = VideoReader(camera, 5.0, Stop(), again=False, threads=1)
    reader.run(Seen())
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert reader.reopened == 7
    assert "refused" in reader.why
    assert "hunter2" not in reader.why


def test_a_device_that_is_no_camera(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Seen()
    monkeypatch.setattr(seen.stop, "wait", lambda _pause: True)
    [camera] = find_cameras(["/dev/null"])
    reader = VideoReader(camera, 5.0, seen.stop, again=False, threads=1)
    reader.run(seen)
    assert (seen.read, reader.reopened) == (0, 1)
    assert reader.why.startswith("cannot be read: ")


# ---- one place for the newest


def test_the_newest_takes_the_place_of_the_one_before() -> None:
    woken: list[int] = []
    latest = LatestFrame(lambda: woken.append(1))
    image: Any = object()
    for number in range(3):
        latest.put(image, float(number))
    assert (latest.read, latest.dropped, len(woken)) == (3, 2, 1)
    frame = latest.take()
    assert frame is not None
    assert (frame.number, frame.at) == (2, 2.0)
    assert latest.take() is None
    latest.put(image, 3.0)
    latest.too_late()
    latest.close()
    latest.put(image, 4.0)
    latest.too_late()
    assert (latest.read, latest.dropped) == (5, 4)
    assert latest.take() is None


@pytest.mark.usefixtures("in_no_time")
@pytest.mark.parametrize(
    ("turned", "size"), [(0, (64, 48)), (90, (48, 64)), (180, (64, 48)), (-90, (48, 64))]
)
def test_frames_are_sent_upright(turned: int, size: tuple[int, int], tmp_path: Path) -> None:
    _, seen = read(video(tmp_path / "a.mp4", frames=2, turned=turned))
    with Image.open(io.BytesIO(jpeg_of(seen.frames[0].image, 90))) as sent:
        assert sent.size == size
        red = {0: (5, 30), 90: (30, 60), 180: (60, 20), -90: (20, 5)}[turned]
        pixel = sent.convert("RGB").getpixel(red)
        assert isinstance(pixel, tuple)
        assert pixel[0] > 150
