"""`carpool watch`: every frame is counted once, whatever becomes of it; a broken camera stops no other."""

from __future__ import annotations

import io
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import av
import pytest

from carpool.errors import Refused
from carpool.extensions.cameras import command as watch_command
from carpool.extensions.cameras.watch_output import drawn
from carpool.extensions.cameras.watching import CameraReport, Counts, WatchReport
from carpool.types import Array
from carpool.vision.python_pictures import typed
from cli_run import CliResult, run_cli
from client.scripted_server import Scripted, scripted_server
from extensions.cameras.made_videos import absurd, picture, sound, tool, video
from frontend.http.front_end import FrontEnd, front_end
from frontend.picture_models import classifier, detector, segmenter
from waiting import until

PATIENCE_S = 60
PARTS = ("answered", "replaced", "refused", "failed")


@pytest.fixture
def served() -> Iterator[FrontEnd]:
    with front_end(detector(), classifier(), segmenter()) as found:
        yield found


@pytest.fixture
def script() -> Iterator[Scripted]:
    with scripted_server() as found:
        found.say({"x-carpool-models": [{"name": "finder"}]})
        yield found


def watch(url: str, *arguments: object) -> CliResult:
    return run_cli(["watch", *map(str, arguments), "--url", url])


def report_of(done: CliResult) -> dict[str, Any]:
    assert done.stdout, done.output
    report: dict[str, Any] = json.loads(done.stdout)
    check_sums(report)
    return report


def check_sums(report: dict[str, Any]) -> None:
    for one in (report["total"], *report["cameras"]):
        assert one["read"] == one["sent"] + one["dropped"], one
        assert one["sent"] == sum(one[name] for name in PARTS), one
        assert one["answered"] == one["computed"] + one["cached"], one
    for name in ("read", "dropped", "sent", "computed", "cached", *PARTS):
        assert report["total"][name] == sum(one[name] for one in report["cameras"])


def test_many_cameras_answers_and_drawings(served: FrontEnd, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for number in range(4):
        video(tmp_path / "in" / f"c{number}.mp4")
    lines, out = tmp_path / "boxes.jsonl", tmp_path / "out"
    given = (tmp_path / "in", "--task", "detect", "--fps", 10, "--json", "--out", out, "--jsonl", lines)
    done = watch(f"http://{served.url}", *given)
    assert done.exit_code == 0, done.output
    report = report_of(done)
    assert report["total"]["read"] == 40
    assert report["total"]["answered"] > 0
    assert {one["state"] for one in report["cameras"]} == {"ended"}
    found = [json.loads(line) for line in lines.read_text().splitlines()]
    assert len(found) == report["total"]["answered"]
    assert {line["camera"] for line in found} == {"c0", "c1", "c2", "c3"}
    assert all(line["detections"][0]["label"] == "red" for line in found)
    assert all(line["latency_ms"] > 0 for line in found)
    for one in report["cameras"]:
        with av.open(str(out / f"{one['camera']}.mp4")) as container:
            images = list(container.decode(video=0))
            times = [image.time for image in images]
        assert 0 < len(images) <= one["answered"]
        assert times == sorted(times)
        assert (images[0].width, images[0].height) == (512, 384), "small ones are enlarged, for the letters"


def test_a_table_for_people(served: FrontEnd, tmp_path: Path) -> None:
    done = watch(f"http://{served.url}", video(tmp_path / "gate.mp4", 5), "--fps", 25)
    assert done.exit_code == 0, done.output
    assert "gate" in done.stdout
    assert "5 frames read" in " ".join(done.stdout.split())


def test_one_that_is_broken_stops_no_other(served: FrontEnd, tmp_path: Path) -> None:
    good = video(tmp_path / "good.mp4", 5)
    empty = tmp_path / "empty.mp4"
    empty.write_bytes(b"")
    files = (empty, sound(tmp_path / "song.mp4"), absurd(tmp_path / "huge.avi"), good)
    done = watch(f"http://{served.url}", *files, "--task", "detect", "--json", "--fps", 25)
    assert done.exit_code == 1
    states = {one["camera"]: one["state"] for one in report_of(done)["cameras"]}
    assert states == {"empty": "broken", "song": "broken", "huge": "broken", "good": "ended"}
    said = done.stderr.splitlines()
    assert [line for line in said if f"{empty}: cannot be read" in line]
    assert [line for line in said if "song.mp4: there is no video in it, only audio" in line]
    assert [line for line in said if "huge.avi: " in line]
    assert len(said) == 3


def test_everything_that_can_become_of_a_frame(script: Scripted, tmp_path: Path) -> None:
    answer = {"model": "finder", "image": {"width": 64, "height": 48}, "detections": []}
    script.say(answer)
    script.say(answer, X_Carpool_Cache="hit; kind=similar; change=2.1; age=1.2")
    script.say(answer, X_Carpool_Cache="joined")
    script.say(answer, X_Carpool_Cache="miss")
    script.say({"error": "newer", "reason": "replaced"}, 409)
    script.say({"error": "no", "reason": "overload", "retry_after_s": 1.0}, 429)
    script.say({"error": "late", "reason": "deadline"}, 504)
    script.say({"error": "restarting", "reason": "restarting"}, 503)
    script.say({"error": "broke", "reason": "model-error"}, 500)
    script.say({"error": "this picture", "reason": "invalid-input"}, 400)
    done = watch(script.url, video(tmp_path / "gate.mp4", 10, fps=5), "--at-once", 1, "--json", "--fps", 5)
    report = report_of(done)
    assert done.exit_code == 0
    total = report["total"]
    if total["dropped"] == 0:  # a machine that stands still drops some, and what is left adds up all the same
        assert [total[name] for name in ("computed", "cached", *PARTS)] == [2, 2, 4, 1, 3, 2]
    for asked in script.asked[1:]:
        assert asked.path == "/models/finder/predict"
        assert asked.fields["x-carpool-source"] == "gate"
        assert asked.fields["x-carpool-latest"] == "1"
        assert asked.body[:2] == b"\xff\xd8"


def test_what_is_asked_goes_along(script: Scripted, tmp_path: Path) -> None:
    for _ in range(2):
        script.say({"model": "m", "detections": []})
    given = ("--task", "detect", "--model", "m", "--score", 0.6, "--iou", 0.5, "--deadline-ms", 250)
    watch(script.url, video(tmp_path / "a.mp4", 2, fps=5), *given)
    assert script.asked[1].path == "/detect?score=0.6&iou=0.5&model=m"
    assert script.asked[1].fields["x-carpool-deadline-ms"] == "250"


def test_refusals_do_not_end_it(served: FrontEnd, tmp_path: Path) -> None:
    served.door.refusal = Refused("no room for it now", reason="overload")
    done = watch(f"http://{served.url}", video(tmp_path / "a.mp4", 5), "--task", "detect", "--json")
    report = report_of(done)
    assert done.exit_code == 1
    assert report["total"]["refused"] == report["total"]["sent"] > 0
    assert "nothing was answered: overload" in done.stderr


def test_what_nobody_will_ever_answer_ends_it(served: FrontEnd, tmp_path: Path) -> None:
    file = video(tmp_path / "a.mp4", 5)
    done = watch(f"http://{served.url}", file, "--model", "absent", "--loop")
    assert done.exit_code == 2
    assert "absent" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_server_that_is_not_there_is_said_in_one_line(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        done = watch(f"http://127.0.0.1:{taken.getsockname()[1]}", video(tmp_path / "a.mp4", 2))
    assert done.exit_code == 1
    assert "is the server running?" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_camera_that_is_not_there_and_its_password(served: FrontEnd, tmp_path: Path) -> None:
    listed = tmp_path / "cameras.txt"
    listed.write_text(f"lost rtsp://me:hunter2@127.0.0.1:1/x\ngate {video(tmp_path / 'a.mp4', 5)}\n")
    done = watch(f"http://{served.url}", "--list", listed, "--task", "detect", "--seconds", 3, "--json")
    assert done.exit_code == 1
    assert "hunter2" not in done.output + done.stderr
    assert "rtsp://127.0.0.1:1/x: cannot be read: Connection refused" in done.stderr
    by_name = {one["camera"]: one for one in report_of(done)["cameras"]}
    assert by_name["gate"]["answered"] > 0
    assert by_name["lost"]["read"] == 0


def test_it_ends_with_its_time_and_with_ctrl_c(served: FrontEnd, tmp_path: Path) -> None:
    file = video(tmp_path / "a.mp4", 25)
    done = watch(f"http://{served.url}", file, "--task", "detect", "--loop", "--seconds", 0.5, "--json")
    report = report_of(done)
    assert [one["state"] for one in report["cameras"]] == ["stopped"]
    assert done.exit_code == (0 if report["total"]["answered"] else 1)
    code = "from carpool.cli.main import main; main()"
    command = [
        sys.executable,
        "-P",
        "-c",
        code,
        "watch",
        str(file),
        "--url",
        f"http://{served.url}",
        "--loop",
    ]
    command += ["--task", "detect", "--json", "--jsonl", str(tmp_path / "lines")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        lines = tmp_path / "lines"
        until(lambda: process.poll() is not None or (lines.exists() and lines.stat().st_size), "answers")
        process.send_signal(signal.SIGINT)
        output, complaints = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, complaints
    report = json.loads(output)
    check_sums(report)
    assert report["total"]["answered"] > 0


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("--fps", 0), "--fps must be from 0.01 to 240"),
        (("--at-once", 0), "--at-once must be a whole number from 1 to 64"),
        (("--seconds", 0), "--seconds must be above 0"),
        (("--deadline-ms", -1), "--deadline-ms must be above 0"),
        (("--url", "ftp://x"), "--url: url must be like http://localhost:8000"),
        (("--list", "absent.txt"), "--list absent.txt cannot be read"),
    ],
)
def test_mistakes_name_their_option(given: tuple[object, ...], words: str, tmp_path: Path) -> None:
    file = video(tmp_path / "a.mp4", 2)
    done = run_cli(["watch", str(file), *map(str, given)])
    assert done.exit_code == 2
    assert words in done.stderr


def test_places_that_cannot_be_written_are_said(served: FrontEnd, tmp_path: Path) -> None:
    file = video(tmp_path / "a.mp4", 2)
    for option, place in (("--jsonl", tmp_path / "absent" / "x"), ("--out", file)):
        done = watch(f"http://{served.url}", file, option, place)
        assert done.exit_code == 1
        assert f"{option}: {place} cannot be written" in done.stderr
    (tmp_path / "out" / "a.mp4").mkdir(parents=True)
    done = watch(f"http://{served.url}", file, "--task", "detect", "--out", tmp_path / "out")
    assert done.exit_code == 1
    assert "--out: " in done.stderr


THING = {"label": "a", "class_id": 0, "score": 0.9, "box": [5, 5, 40, 40]}
CORNERS = [[5, 5], [40, 5], [40, 40], [5, 40]]


@pytest.mark.parametrize(
    "found",
    [
        {"detections": [THING]},
        {"detections": [THING | {"keypoints": [[9, 9, 1.0]]}]},
        {"detections": [THING | {"corners": CORNERS, "angle": 0.1}]},
        {"masks": [THING | {"rle": {"size": [48, 64], "counts": [100, 500, 2472]}}]},
        {"classes": [{"label": "a", "class_id": 0, "score": 0.9}]},
    ],
)
def test_answers_are_drawn(found: dict[str, Any]) -> None:
    pixels: Array = picture()
    made = drawn(pixels, typed({"image": {"width": 64, "height": 48}, **found}))
    assert made.shape == (384, 512, 3)
    nothing = drawn(pixels, typed({"image": {"width": 64, "height": 48}, "embedding": [1.0]}))
    assert (nothing == pixels).all()


def test_the_videos_of_the_demo(tmp_path: Path) -> None:
    one, *_ = tool.make_videos(tmp_path, 2, seconds=4.0, fps=5, size=(160, 120))
    with av.open(str(one)) as container:
        frames = [image.to_ndarray(format="rgb24").astype(int) for image in container.decode(video=0)]
    assert len(frames) == 20
    assert frames[0].shape == (120, 160, 3)
    changes = [abs(later - sooner).mean() for sooner, later in pairwise(frames)]
    assert min(changes) > 0.5, "a sensor's noise is in every frame"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_sees_a_table_and_a_pipe_sees_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = Counts(read=9, dropped=2, sent=7, answered=4, computed=1, cached=3, replaced=2, refused=1)
    cameras = [
        CameraReport("gate", "gate.mp4", "running", "", counts, 4.9, 41.2, 97.0, 0),
        CameraReport("yard", "rtsp://10.0.0.7/1", "lost", "Connection refused", Counts(), 0.0, 0.0, 0.0, 3),
    ]
    total = CameraReport("all", "", "", "", counts, 4.9, 41.2, 97.0, 3)
    for stream, words in (
        (Terminal(), ("camera", "gate", "4.9", "41", "97", "lost: Connection refused", "all")),
        (io.StringIO(), ("1 of 2 cameras", "4.9 responses/s", "cached 3", "replaced 2", "dropped 2")),
    ):
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setattr(watch_command, "_LINE_EVERY_S", 0.0)
        monkeypatch.setenv("COLUMNS", "140")
        with watch_command._progress() as tell:
            tell(WatchReport(12.0, total, cameras))
        for word in words:
            assert word in stream.getvalue()


def test_every_key_of_its_json_is_documented() -> None:
    page = (Path(__file__).parents[3] / "docs" / "cli.md").read_text("utf-8")
    section = page.split("\n## carpool watch\n")[1].split("\n## ")[0]
    assert all(f"`{field.name}`" in section for field in fields(Counts))
