"""Pictures to a real server with the demo models: right answers, ways in, hostile files, clients gone."""

from __future__ import annotations

import base64
import contextlib
import io
import random
import re
import shlex
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from PIL import Image

from carpool.demo import bundled_models, pictures
from frontend.http.harness import Response
from frontend.http.test_app_images import FORM
from frontend.http.test_multipart import file_part, form
from live.plain_detector import overlap, things_in
from live.server import LAYOUTS, NEEDS_CURL, Live, error_of, resident_bytes, serving
from vision.made_files import HEADS
from waiting import until

PHOTOS = {file.stem: file for file in pictures()}
SETTINGS = {
    "CARPOOL_SLO_MS": "60000",  # other tests may have the machine: nothing here is about being in time
    "CARPOOL_SLOTS": "24",  # MiB: a handful of pictures, so that whoever leaks one is found out
}
FUZZED = 120
MORE_BYTES = 400 << 20  # what hostile files may add; the largest picture that is allowed takes 150 MB


def plainly(model: Path, folder: Path, batch: int = 2) -> Path:
    """The same model with one instance, one thread and small batches: trying and measuring what is best takes
    most of a minute."""
    copied = shutil.copytree(model, folder / model.name)
    settings = copied / "model.toml"
    text, most = re.subn(
        r"^max_batch = \d+$", f"max_batch = {batch}", settings.read_text(), flags=re.MULTILINE
    )
    assert most == 1
    settings.write_text(f"instances = 1\n{text}\n[onnxruntime]\nintra_op_threads = 1\n")
    return copied


@pytest.fixture(scope="module", params=LAYOUTS)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("pictures")
    grpc = int(request.param > 0)
    model = plainly(bundled_models() / "nanodet", folder)
    with serving(model, frontends=request.param, grpc=grpc, folder=folder, environment=SETTINGS) as running:
        pids = [*running.frontend_pids, running.engine_pid]
        yield running
        assert [*running.frontend_pids, running.engine_pid] == pids, "a process died of a picture"


def ask(server: Live, path: str, body: bytes, extra: bytes = b"") -> Response:
    with server.connect() as client:
        return client.post(path, body, extra)


def answer_of(response: Response) -> dict[str, Any]:
    assert response.status == 200, response
    document: dict[str, Any] = orjson.loads(response.body)
    return document


def good(server: Live) -> None:
    """More pictures at once than a leak would have left slots for."""
    for _ in range(2):
        results = answer_of(
            ask(server, "/detect", form(*[file_part(PHOTOS["chelsea"].read_bytes())] * 4), FORM)
        )["results"]
        assert [one["detections"][0]["label"] for one in results] == ["cat"] * 4


# ---- right answers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("photo", "label"), [("astronaut", "person"), ("chelsea", "cat")])
def test_the_answer_is_that_of_a_slow_and_plain_pipeline(server: Live, photo: str, label: str) -> None:
    answer = answer_of(ask(server, "/detect", PHOTOS[photo].read_bytes()))
    expected = things_in(PHOTOS[photo])
    assert answer["detections"][0]["label"] == expected[0].label == label
    assert len(answer["detections"]) == len(expected)
    for found, thing in zip(answer["detections"], expected, strict=True):
        assert found["label"] == thing.label
        assert overlap(found["box"], thing.box) > 0.8
        assert abs(found["score"] - thing.score) < 0.1
    with Image.open(PHOTOS[photo]) as opened:
        assert answer["image"] == {"width": opened.width, "height": opened.height}


def test_every_way_of_sending_gives_the_same_answer(server: Live) -> None:
    data = PHOTOS["astronaut"].read_bytes()
    text = base64.b64encode(data).decode()
    wanted = answer_of(ask(server, "/detect", data))
    assert wanted["model"] == "nanodet"
    for path, body, extra in (
        ("/models/nanodet/predict", data, b"Content-Type: image/jpeg\r\n"),
        ("/detect?model=nanodet&version=1", data, b"Content-Type: image/png\r\n"),
        ("/detect", form(file_part(data, file_name="picture.png")), FORM),
        ("/detect", orjson.dumps({"image": text}), b"Content-Type: application/json\r\n"),
        (
            "/detect",
            orjson.dumps({"image": f"data:image/jpeg;base64,{text}"}),
            b"Content-Type: application/json\r\n",
        ),
    ):
        assert answer_of(ask(server, path, body, extra)) == wanted
    modules = [(triton_http, server.url)]
    modules += [(triton_grpc, f"127.0.0.1:{server.grpc_port}")] if server.grpc_pids else []
    for module, url in modules:
        client = module.InferenceServerClient(url)
        given = module.InferInput("image", [1], "BYTES")
        given.set_data_from_numpy(np.array([data], object))
        found = client.infer("nanodet", [given], outputs=[module.InferRequestedOutput("answer")])
        assert orjson.loads(found.as_numpy("answer")[0]) == wanted
        client.close()


def test_pictures_that_stand_on_their_side_are_turned(server: Live) -> None:
    with Image.open(PHOTOS["chelsea"]) as opened:
        exif = opened.getexif()
        exif[0x0112] = 6  # to be turned to the right
        file = io.BytesIO()
        opened.rotate(90, expand=True).save(file, "JPEG", exif=exif, quality=95)
    answer = answer_of(ask(server, "/detect", file.getvalue()))
    assert answer["image"] == {"width": 451, "height": 300}
    assert overlap(answer["detections"][0]["box"], things_in(PHOTOS["chelsea"])[0].box) > 0.8


@pytest.mark.parametrize(("accept", "kind"), [(b"", "JPEG"), (b"Accept: image/png\r\n", "PNG")])
def test_the_drawn_answer_is_a_picture_of_the_same_size(server: Live, accept: bytes, kind: str) -> None:
    response = ask(server, "/detect?overlay=1", PHOTOS["astronaut"].read_bytes(), accept)
    drawn = Image.open(io.BytesIO(response.body))
    assert drawn.format == kind
    assert drawn.size == (512, 512)
    with Image.open(PHOTOS["astronaut"]) as opened:
        before = np.asarray(opened.convert("RGB"), np.int16)
    changed = np.abs(np.asarray(drawn.convert("RGB"), np.int16) - before).max(axis=2) > 60
    assert 0.001 < changed.mean() < 0.2


def test_several_files_of_which_one_is_corrupt(server: Live) -> None:
    files = [
        PHOTOS["astronaut"].read_bytes(),
        PHOTOS["coffee"].read_bytes()[:9000],
        PHOTOS["chelsea"].read_bytes(),
    ]
    results = answer_of(ask(server, "/detect", form(*map(file_part, files)), FORM))["results"]
    assert [one.get("status") for one in results] == [None, 400, None]
    assert results[0]["detections"][0]["label"] == "person"
    assert results[2]["detections"][0]["label"] == "cat"


def test_the_task_is_in_the_live_document_and_the_routes_are_described(server: Live) -> None:
    [model] = server.get_json("/console/live")["models"]
    assert model["task"] == "detect"
    document = server.get_json("/openapi.json")
    assert document["x-carpool-models"] == [{"name": "nanodet", "version": "1", "task": "detect"}]
    assert b"/openapi.json" in server.get("/docs").body
    assert error_of(ask(server, "/classify", b"x"), 404, "no-task")


# ---- hostile files ----------------------------------------------------------------------------------------


def bomb() -> bytes:
    file = io.BytesIO()
    Image.new("1", (12_000, 12_000)).save(file, "PNG")
    return file.getvalue()


HOSTILE: dict[str, bytes | None] = {
    "nothing": b"",
    "text": b"hello",
    "svg": b"<svg xmlns='http://www.w3.org/2000/svg' width='10' height='10'/>",
    "html": b"<!doctype html><img src=x>",
    "zip first": b"PK\x03\x04" + PHOTOS["coffee"].read_bytes(),
    "truncated": PHOTOS["coffee"].read_bytes()[:30_000],
    "head only": PHOTOS["coffee"].read_bytes()[:200],
    "bomb": None,  # `bomb` takes a third of a second
    "gif bomb": b"GIF89a" + struct.pack("<HHBBB", 65_535, 65_535, 0x80, 0, 0) + bytes(6),
    **{f"huge {name}": head(60_000, 60_000) for name, head in HEADS.items()},
}


@pytest.mark.parametrize("case", list(HOSTILE))
def test_a_hostile_file_is_a_clear_error_and_takes_no_memory(server: Live, case: str) -> None:
    before = [resident_bytes(pid) for pid in server.frontend_pids]
    file = HOSTILE[case]
    response = ask(server, "/detect", bomb() if file is None else file)
    assert response.status in (400, 413), response
    document = error_of(response, response.status)
    assert document["field"] == "image"
    after = [resident_bytes(pid) for pid in server.frontend_pids]
    assert all(new - old < MORE_BYTES for new, old in zip(after, before, strict=True))


def test_a_picture_with_something_behind_it_is_what_it_starts_as(server: Live) -> None:
    polyglot = PHOTOS["chelsea"].read_bytes() + b"PK\x03\x04<script>alert(1)</script>"
    assert answer_of(ask(server, "/detect", polyglot))["detections"][0]["label"] == "cat"


@pytest.mark.conformance
def test_damaged_photos_get_an_answer_or_a_clear_error_and_nothing_leaks(server: Live) -> None:
    chance = random.Random(20)
    originals = [file.read_bytes() for file in PHOTOS.values()]
    good(server)
    before = [resident_bytes(pid) for pid in server.frontend_pids]
    statuses = []
    with server.connect() as client:
        for number in range(FUZZED):
            data = bytearray(chance.choice(originals))
            for _ in range(chance.choice((1, 3, 20, 400))):
                data[chance.randrange(len(data))] = chance.randrange(256)
            if number % 5 == 0:
                del data[chance.randrange(len(data)) :]
            response = client.post("/detect", bytes(data))
            statuses.append(response.status)
            if response.status != 200:
                error_of(response, response.status)
    assert set(statuses) <= {200, 400, 413}
    assert 400 in statuses
    good(server)
    after = [resident_bytes(pid) for pid in server.frontend_pids]
    assert all(new - old < MORE_BYTES for new, old in zip(after, before, strict=True))


def test_clients_that_leave_at_any_moment_leave_nothing_behind(server: Live) -> None:
    data = PHOTOS["astronaut"].read_bytes()
    head = b"POST /detect HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(data)
    chance = random.Random(21)
    for _ in range(40):
        client = server.connect()
        client.send(head + data[: chance.choice((0, 100, len(data), len(data), len(data)))])
        client.socket.settimeout(chance.choice((0.001, 0.01, 0.03, 0.08)))
        with contextlib.suppress(TimeoutError):
            client.socket.recv(1)  # wherever it is by then
        client.reset()
    until(lambda: server.metric("nv_inference_pending_request_count", model="nanodet") == 0, "all over")
    good(server)


# ---- the first answer -------------------------------------------------------------------------------------


@NEEDS_CURL
def test_the_line_on_the_first_screen_works_as_it_is(server: Live) -> None:
    [line] = re.findall(r"^  Try: +(curl .*)$", server.log(), re.MULTILINE)
    done = subprocess.run(shlex.split(line), capture_output=True, timeout=60, check=True)
    assert orjson.loads(done.stdout)["detections"][0]["label"] == "person"


# ---- the other demo models --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    paths = [bundled_models() / name for name in ("efficientnet_lite0", "u2netp")]
    folder = tmp_path_factory.mktemp("demo")
    with serving(
        *(plainly(path, folder, batch=1) for path in paths),
        frontends=1,
        folder=folder,
        environment=SETTINGS | {"CARPOOL_SLOTS": "64"},
    ) as running:
        yield running


def test_coffee_is_espresso(demo: Live) -> None:
    answer = answer_of(ask(demo, "/classify?top_k=3", PHOTOS["coffee"].read_bytes()))
    assert answer["model"] == "efficientnet_lite0"
    assert len(answer["classes"]) == 3
    assert answer["classes"][0]["label"] == "espresso"


def test_the_astronaut_is_cut_out(demo: Live) -> None:
    answer = answer_of(ask(demo, "/segment", PHOTOS["astronaut"].read_bytes()))
    [mask] = answer["masks"]
    inside = np.asarray(Image.open(io.BytesIO(base64.b64decode(mask["png"])))) > 0
    assert inside.shape == (512, 512)
    person = things_in(PHOTOS["astronaut"])[0].box
    assert overlap(mask["box"], person) > 0.6
    rows, columns = np.mgrid[:512, :512]
    in_box = (columns >= person[0]) & (columns < person[2]) & (rows >= person[1]) & (rows < person[3])
    assert inside[in_box].mean() > 2 * inside[~in_box].mean()  # which holds a shuttle and a flag, too
    runs = answer_of(ask(demo, "/segment?format=rle", PHOTOS["astronaut"].read_bytes()))["masks"][0]["rle"]
    painted = np.repeat(np.arange(len(runs["counts"])) % 2, runs["counts"]).reshape(512, 512).T
    assert (painted.astype(bool) == inside).mean() > 0.999  # another run, and threads add in any order
