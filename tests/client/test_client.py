"""`carpool.Client` and `carpool.AsyncClient` against the real HTTP server with fake models behind it.

Each story is told twice: `ask` calls a method of either client, and waits for what it gives.
"""

from __future__ import annotations

import asyncio
import io
import ssl
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import carpool
from carpool.errors import (
    CarpoolError,
    InvalidInput,
    NotFound,
    Refused,
    TooLarge,
    Unavailable,
    Unreachable,
)
from carpool.vision.python_pictures import (
    Classes,
    Detections,
    Embedding,
    Masks,
    Outputs,
    Poses,
    RotatedBoxes,
    picture_file,
    typed,
)
from client.scripted_server import Scripted, scripted_server
from frontend.http.front_end import FrontEnd, front_end, image_model
from frontend.picture_models import BLUE, GREEN, RED, classifier, detector, embedder, picture, segmenter
from waiting import until

MADE = Path(__file__).parents[1] / "frontend" / "access" / "certificates"
Ask = Callable[..., Any]


@pytest.fixture(scope="module")
def served() -> Iterator[FrontEnd]:
    with front_end(classifier(), detector(), segmenter(), embedder(), image_model("image")) as found:
        yield found


@pytest.fixture
def script() -> Iterator[Scripted]:
    with scripted_server() as found:
        yield found


def from_threads(url: str, method: str, *arguments: Any, **more: Any) -> Any:
    settings = more.pop("settings", {})
    with carpool.Client(url, **settings) as client:
        found = getattr(client, method)(*arguments, **more)
        return list(found) if method in ("map", "stream") else found


def from_asyncio(url: str, method: str, *arguments: Any, **more: Any) -> Any:
    settings = more.pop("settings", {})

    async def story() -> Any:
        async with carpool.AsyncClient(url, **settings) as client:
            found = getattr(client, method)(*arguments, **more)
            return [one async for one in found] if method in ("map", "stream") else await found

    return asyncio.run(asyncio.wait_for(story(), 60))


@pytest.fixture(params=[from_threads, from_asyncio], ids=["threads", "asyncio"])
def ask(request: pytest.FixtureRequest) -> Ask:
    found: Ask = request.param
    return found


# ---- answers


def test_answers_are_typed(served: FrontEnd, ask: Ask) -> None:
    found = ask(served.url, "detect", picture(RED, size=(64, 48)), score=0.5)
    assert isinstance(found, Detections)
    assert (found.model, found.version, found.width, found.height) == ("finder", "1", 64, 48)
    assert found.labels == ["red"]
    assert found.class_ids.tolist() == [0]
    assert found.boxes.shape == (1, 4)
    assert found.boxes[0].tolist() == pytest.approx([0, 0, 32, 48], abs=0.5)
    assert found.scores[0] > 0.9
    assert found["detections"][0]["label"] == "red", "it is the JSON as well"

    best = ask(served.url, "classify", picture(GREEN), top_k=2)
    assert isinstance(best, Classes)
    assert best.labels[0] == "green"
    assert len(best.things) == 2

    vector = ask(served.url, "embed", picture(BLUE))
    assert isinstance(vector, Embedding)
    assert vector.vector.dtype == np.float32
    assert vector.vector.ndim == 1

    nothing = ask(served.url, "detect", picture(RED), score=1)
    assert nothing.boxes.shape == (0, 4)


@pytest.mark.parametrize("form", ["png", "rle"])
def test_masks_are_arrays(served: FrontEnd, ask: Ask, form: str) -> None:
    pixels = np.zeros((20, 32, 3), np.uint8)
    pixels[:, 16:] = RED
    found = ask(served.url, "segment", pixels, format=form)
    assert isinstance(found, Masks)
    assert found.masks.shape == (1, 20, 32)
    assert found.masks.dtype == np.bool_
    assert found.masks[0, :, 20:].all()
    assert not found.masks[0, :, :12].any()
    assert found.boxes.shape == (1, 4)


def test_a_picture_may_have_any_form(served: FrontEnd, ask: Ask, tmp_path: Path) -> None:
    data = picture(GREEN, "PNG", size=(40, 30))
    path = tmp_path / "green.png"
    path.write_bytes(data)
    image = Image.open(io.BytesIO(data))
    for given in (data, bytearray(data), memoryview(data), path, str(path), image, np.asarray(image)):
        found = ask(served.url, "classify", given, model="namer", top_k=1)
        assert (found.labels, found.width) == (["green"], 40)
    grey = ask(served.url, "predict", np.full((9, 9), 200, np.uint8), model="namer")
    assert grey.width == 9
    for wrong in (3, np.zeros((4, 4), np.float32), np.zeros((4, 4, 4), np.uint8), tmp_path / "absent.png"):
        with pytest.raises(InvalidInput) as error:
            ask(served.url, "classify", wrong)
        assert error.value.field == "picture"


def test_without_a_model_the_first_answers(served: FrontEnd, ask: Ask) -> None:
    assert ask(served.url, "predict", picture(RED)).model == "cutter"
    assert ask(served.url, "predict", picture(RED), model="finder").model == "finder"


def test_drawn_answers(served: FrontEnd, ask: Ask) -> None:
    drawn = ask(served.url, "draw", picture(RED, size=(640, 480)), task="detect", file_format="png")
    assert Image.open(io.BytesIO(drawn)).size == (640, 480)
    with pytest.raises(InvalidInput, match="format"):
        ask(served.url, "draw", picture(RED), file_format="gif")


def test_tensors(ask: Ask) -> None:
    with front_end() as served:
        image = np.arange(6, dtype=np.uint8).reshape(1, 2, 3)
        assert ask(served.url, "infer", "image", {"image": image})["scores"].tolist() == [[15, 1, 2, 3]]
        one, two = np.array([[3, 4]], np.int32), np.array([[1, 1]], np.int32)
        both = ask(served.url, "infer", "pair", {"a": one, "b": two}, outputs=["difference"])
        assert {name: array.tolist() for name, array in both.items()} == {"difference": [[2, 3]]}
        words = np.array([["one", "zwei"]])
        [said] = ask(served.url, "infer", "echo-BYTES", {"x": words}).values()
        assert said.ravel().tolist() == [b"one", b"zwei"]
        with pytest.raises(InvalidInput, match="data-type"):
            ask(served.url, "infer", "image", {"image": image.astype(np.float32)})
        with pytest.raises(InvalidInput, match="protocol"):
            ask(served.url, "infer", "image", {"image": image.astype(np.complex64)})
        with pytest.raises(NotFound):
            ask(served.url, "infer", "absent", {"image": image})


def test_outputs_as_arrays() -> None:
    listed = {"name": "y", "datatype": "FP32", "shape": [2], "data": [1.5, None]}
    found = typed({"outputs": [listed]})
    assert isinstance(found, Outputs)
    assert np.array_equal(found.arrays["y"], np.array([1.5, np.nan], np.float32), equal_nan=True)


def test_keypoints_and_turned_boxes_are_arrays() -> None:
    box = {"label": "a", "class_id": 0, "score": 0.5, "box": [1, 2, 3, 4]}
    image = {"width": 9, "height": 9}
    points = {**box, "keypoints": [[1, 2, 0.5], [3, 4, 0.25]]}
    pose = typed({"image": image, "detections": [points, points]})
    assert isinstance(pose, Poses)
    assert (pose.keypoints.shape, pose.boxes.shape) == ((2, 2, 3), (2, 4))
    turned = typed({"image": image, "detections": [{**box, "corners": [[0, 0]] * 4, "angle": 0.5}]})
    assert isinstance(turned, RotatedBoxes)
    assert (turned.corners.shape, turned.angles.tolist()) == ((1, 4, 2), [0.5])
    nothing = {"image": image, "detections": []}
    empty = typed(nothing, Poses)
    assert isinstance(empty, Poses)
    assert empty.keypoints.shape == (0, 0, 2)
    assert type(typed(nothing)) is Detections
    assert type(typed(nothing, Masks)) is Detections


def test_an_image_of_pillow_is_sent_as_it_is_shown() -> None:
    """An orientation that Pillow did not apply is not applied by the server either."""
    image = Image.new("RGB", (6, 4), RED)
    image.getexif()[0x0112] = 6
    with Image.open(io.BytesIO(picture_file(image))) as sent:
        assert sent.size == (6, 4)
        assert 0x0112 not in sent.getexif()


# ---- errors and patience


def test_errors_say_why(served: FrontEnd, ask: Ask) -> None:
    with pytest.raises(NotFound) as absent:
        ask(served.url, "detect", picture(RED), model="nobody")
    assert "nobody" in absent.value.message
    with pytest.raises(InvalidInput, match="not an image of a known format"):
        ask(served.url, "detect", b"no picture")
    with pytest.raises(InvalidInput) as wrong:
        ask(served.url, "classify", picture(RED), iou=0.5)
    assert wrong.value.field == "iou"
    with pytest.raises(InvalidInput, match="is for detect"):
        ask(served.url, "classify", picture(RED), model="finder")


def refused(script: Scripted, times: int, status: int = 429, seconds: float = 0.001) -> None:
    for _ in range(times):
        script.say({"error": "too much", "reason": "overload", "retry_after_s": seconds}, status)


def test_who_is_told_to_come_back_comes_back(script: Scripted, ask: Ask) -> None:
    refused(script, 1)
    refused(script, 1, 503)
    script.say({"image": {"width": 1, "height": 1}, "classes": []})
    assert ask(script.url, "classify", b"x").things == []
    assert [asked.body for asked in script.asked] == [b"x"] * 3


def test_patience_ends(script: Scripted, ask: Ask) -> None:
    refused(script, 1, seconds=100.0)
    with pytest.raises(Refused) as error:
        ask(script.url, "classify", b"x", settings={"patience_s": 1.0})
    assert (error.value.reason, error.value.retry_after_s) == ("overload", 100.0)
    assert len(script.asked) == 1
    refused(script, 1)
    with pytest.raises(Refused):
        ask(script.url, "classify", b"x", settings={"patience_s": 0.0})


@pytest.mark.parametrize("status", [400, 404, 409, 410, 413, 500, 502, 504])
def test_what_was_not_refused_is_not_asked_again(script: Scripted, ask: Ask, status: int) -> None:
    script.say({"error": "no", "reason": "word", "retry_after_s": 0.0}, status)
    with pytest.raises(CarpoolError) as error:
        ask(script.url, "classify", b"x")
    assert (error.value.message, error.value.reason) == ("no", "word")
    assert len(script.asked) == 1


def test_a_proxy_says_it_in_its_own_way(script: Scripted, ask: Ask) -> None:
    script.say({}, 503)
    with pytest.raises(Unavailable, match="status 503"):
        ask(script.url, "classify", b"x")
    script.say([], 503, Retry_After="7200")
    with pytest.raises(Unavailable) as error:
        ask(script.url, "classify", b"x")
    assert error.value.retry_after_s == 7200.0


def test_nobody_there(ask: Ask) -> None:
    with pytest.raises(Unreachable, match="is the server running"):
        ask("http://127.0.0.1:9", "classify", b"x")
    for wrong in ("ftp://a", "http://", "http://a:b"):
        with pytest.raises(InvalidInput, match="url must be"):
            ask(wrong, "classify", b"x")
    with pytest.raises(InvalidInput, match="go with an https"):
        ask("http://a", "classify", b"x", settings={"ca": "ca.pem"})
    with pytest.raises(InvalidInput, match="ca or certificate"):
        ask("https://a", "classify", b"x", settings={"ca": "absent.pem"})


def test_over_tls(ask: Ask) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(MADE / "server.pem", MADE / "server-key.pem")
    with scripted_server(context) as script:
        with pytest.raises(Unreachable, match="certificate verify failed"):
            ask(script.url, "classify", b"x")
        for settings in ({"ca": str(MADE / "server.pem")}, {"insecure": True}):
            script.say({"image": {}, "classes": []})
            assert ask(script.url, "classify", b"x", settings=settings).labels == []


def test_too_large_is_said_though_the_body_was_not_read(ask: Ask) -> None:
    with front_end(classifier(), max_body_bytes=1 << 16) as served, pytest.raises(TooLarge):
        ask(served.url, "classify", bytes(1 << 17))


def test_what_goes_along(script: Scripted, ask: Ask) -> None:
    script.say({"image": {}, "detections": []})
    settings = {"api_key": "secret", "timeout_s": 30.0}
    more = {"deadline_ms": 250, "source": "door 7", "version": "3", "model": "a/b", "overlay": False}
    ask(script.url + "/behind/proxy/", "detect", b"x", **more, settings=settings)
    [asked] = script.asked
    assert asked.path == "/behind/proxy/detect?overlay=0&version=3&model=a%2Fb"
    assert asked.fields["authorization"] == "Bearer secret"
    assert asked.fields["x-carpool-deadline-ms"] == "250"
    assert asked.fields["x-carpool-source"] == "door 7"
    with pytest.raises(InvalidInput, match="X-Carpool-Source"):
        ask(script.url, "detect", b"x", source="a\r\nb: c")
    with pytest.raises(InvalidInput, match="api_key"):
        ask(script.url, "detect", b"x", settings={"api_key": "a\r\nb"})


def test_an_address_is_for_the_server_to_fetch(script: Scripted, ask: Ask) -> None:
    script.say({"image": {}, "detections": []})
    ask(script.url, "detect", "https://pictures.example/a.jpg")
    assert script.asked[0].body == b'{"url":"https://pictures.example/a.jpg"}'


def test_connections_are_kept(script: Scripted, ask: Ask) -> None:
    for _ in range(3):
        script.say({"image": {}, "classes": []})
    ask(script.url, "map", [b"1", b"2", b"3"], task="classify", at_once=1)
    assert len({asked.connection for asked in script.asked}) == 1


def test_a_connection_that_was_closed_meanwhile_is_not_used_again(script: Scripted, ask: Ask) -> None:
    for _ in range(3):
        script.say({"image": {}, "classes": []}, Connection="close")
    assert len(ask(script.url, "map", [b"1", b"2", b"3"], task="classify", at_once=1)) == 3


# ---- many pictures


def test_many_pictures_are_answered_in_order(served: FrontEnd, ask: Ask) -> None:
    colours = [RED, GREEN, BLUE] * 10
    answers = ask(served.url, "map", map(picture, colours), task="classify", top_k=1, at_once=5)
    assert [answer.labels[0] for answer in answers] == ["red", "green", "blue"] * 10


def test_one_that_fails_stands_in_its_place(served: FrontEnd, ask: Ask) -> None:
    given = [picture(RED), b"no picture", picture(BLUE)]
    red, wrong, blue = ask(served.url, "map", given, task="classify", errors="return")
    assert (red.labels[0], blue.labels[0]) == ("red", "blue")
    assert isinstance(wrong, InvalidInput)
    with pytest.raises(InvalidInput):
        ask(served.url, "map", given, task="classify")


def test_pictures_are_taken_as_they_are_needed(served: FrontEnd) -> None:
    taken: list[int] = []

    def endless() -> Iterator[bytes]:
        for number in iter(lambda: len(taken), -1):
            taken.append(number)
            yield picture(RED)

    with carpool.Client(served.url) as client:
        answers = client.map(endless(), task="classify", at_once=2)
        for _ in range(5):
            next(answers)
        answers.close()  # type: ignore[attr-defined]
    assert len(taken) <= 5 + 4


# ---- live sources


def test_a_stream_answers_its_frames_in_order(served: FrontEnd, ask: Ask) -> None:
    frames = ask(served.url, "stream", iter([picture(RED)] * 20), task="classify", at_once=2)
    numbers = [frame.number for frame in frames]
    assert numbers == sorted(set(numbers))
    assert numbers[-1] == 19, "the last one is always answered"
    assert all(frame.answer.labels[0] == "red" for frame in frames)


def test_what_is_older_is_dropped(script: Scripted) -> None:
    """While one frame is under way three come: only the last of them is sent."""
    first_sent, rest_there = threading.Event(), threading.Event()
    for _ in range(2):
        script.say({"image": {}, "classes": []})

    def frames() -> Iterator[bytes]:
        yield b"0"
        first_sent.wait(30)
        yield from (b"1", b"2", b"3")
        rest_there.set()

    with carpool.Client(script.url) as client:
        asking = client._core.connections.ask

        async def slow(question: Any) -> Any:
            first_sent.set()
            rest_there.wait(30)
            return await asking(question)

        client._core.connections.ask = slow  # type: ignore[method-assign]
        seen = [frame.number for frame in client.stream(frames(), task="classify", at_once=1)]
    assert seen == [0, 3]
    assert [asked.body for asked in script.asked] == [b"0", b"3"]
    assert {asked.fields["x-carpool-latest"] for asked in script.asked} == {"1"}


def test_what_is_older_is_dropped_in_asyncio(script: Scripted) -> None:
    for _ in range(2):
        script.say({"image": {}, "classes": []})

    async def story() -> list[int]:
        first_sent, rest_there = asyncio.Event(), asyncio.Event()

        async def frames() -> AsyncIterator[bytes]:
            yield b"0"
            await first_sent.wait()
            for frame in (b"1", b"2", b"3"):
                yield frame
            rest_there.set()

        async with carpool.AsyncClient(script.url) as client:
            asking = client.connections.ask

            async def slow(question: Any) -> Any:
                first_sent.set()
                await rest_there.wait()
                return await asking(question)

            client.connections.ask = slow  # type: ignore[method-assign]
            return [frame.number async for frame in client.stream(frames(), task="classify", at_once=1)]

    assert asyncio.run(asyncio.wait_for(story(), 60)) == [0, 3]


def test_a_stream_goes_on_after_a_refusal_and_ends_with_an_error(script: Scripted, ask: Ask) -> None:
    refused(script, 1)
    script.say({"error": "older", "reason": "replaced"}, 409)
    script.say({"error": "gone", "reason": "not-found"}, 404)
    with pytest.raises(NotFound):
        ask(script.url, "stream", _slowly(script), task="classify", at_once=1)
    assert len(script.asked) == 3


def _slowly(script: Scripted) -> Iterator[bytes]:
    """The next frame comes when the previous one was answered."""
    for number in range(3):
        until(lambda: len(script.replies) <= 3 - number)  # noqa: B023
        yield b"%d" % number


def test_a_source_that_breaks_is_told(served: FrontEnd, ask: Ask) -> None:
    def frames() -> Iterator[bytes]:
        yield picture(RED)
        raise OSError("the camera fell down")

    with pytest.raises(OSError, match="fell down"):
        ask(served.url, "stream", frames(), task="classify")
