"""What a front end makes of an image in tiles, with an engine that answers at once: models that say the mean
colour of what they see, and images of which each part has one."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from typing import Any, cast

import cv2
import numpy as np
import orjson
import pytest
from PIL import Image

from carpool.errors import Refused
from carpool.extensions.tiles.settings import OPTIONS
from carpool.extensions.tiles.tile_run import TileRun, TilesUnderWay
from carpool.types import Timing
from carpool.vision.mask_regions import from_run_lengths
from frontend.http.front_end import FrontEnd, error_of, front_end
from frontend.http.harness import Client, Response
from frontend.picture_models import BLUE, GREEN, RED, classifier, detector, picture, segmenter
from waiting import until

SIDE = 64  # of a tile
USUAL = {"size": 640, "overlap": 0.2, "match": 0.5, "per_class": True}
TILED = {
    "size": SIDE,
    "overlap": 0.0,
    "merge": "",
    "metric": "",
    "match": 0.5,
    "per_class": True,
    "whole": False,
}


def mosaic(*colours: tuple[int, int, int], side: int = SIDE) -> bytes:
    """Squares beside each other."""
    whole = np.concatenate([np.full((side, side, 3), colour, np.uint8) for colour in colours], axis=1)
    file = io.BytesIO()
    Image.fromarray(whole).save(file, "PNG")
    return file.getvalue()


@pytest.fixture
def served() -> Iterator[FrontEnd]:
    models = (detector(), segmenter(), classifier(), detector("tiled", extra={"tiles": TILED}))
    with front_end(*models) as running:
        yield running


@pytest.fixture
def client(served: FrontEnd) -> Iterator[Client]:
    with served.connect() as connected:
        yield connected


def answer(response: Response) -> dict[str, Any]:
    assert response.status == 200, response.body
    document: dict[str, Any] = orjson.loads(response.body)
    return document


def boxes(document: dict[str, Any]) -> list[tuple[str, list[float]]]:
    return sorted((one["label"], one["box"]) for one in document["detections"])


QUERY = f"?model=finder&tile={SIDE}&overlap=0&whole=0"


def test_boxes_of_each_tile_are_where_they_are_in_the_image(served: FrontEnd, client: Client) -> None:
    """The model boxes the left half of what it sees."""
    document = answer(client.post(f"/detect{QUERY}", mosaic(RED, GREEN, BLUE)))
    assert boxes(document) == [
        ("blue", [128, 0, 160, 64]),
        ("green", [64, 0, 96, 64]),
        ("red", [0, 0, 32, 64]),
    ]
    assert document["image"] == {"width": 192, "height": 64}
    assert document["tiles"] == {
        **USUAL,
        "count": 3,
        "size": SIDE,
        "overlap": 0.0,
        "merge": "nmm",
        "metric": "ios",
        "whole": False,
    }
    (group,) = served.door.trips
    assert group.ended == [True]
    assert {call.ask.handling.step for call in served.door.calls} == {3}
    assert sum(call.head.batch for call in served.door.calls) == 3


def test_the_whole_image_is_asked_too(client: Client) -> None:
    two = mosaic(RED, RED)
    document = answer(client.post(f"/detect?model=finder&tile={SIDE}&overlap=0", two))
    assert document["tiles"]["whole"]
    assert boxes(document) == [("red", [0, 0, 64, 64]), ("red", [64, 0, 96, 64])]  # halves are joined


def test_an_image_that_is_one_tile(client: Client) -> None:
    plain = answer(client.post("/detect?model=finder", picture(GREEN)))
    document = answer(client.post("/detect?model=finder&tile=640", picture(GREEN)))
    tiles = document.pop("tiles")
    assert (tiles["count"], tiles["whole"]) == (1, False)
    assert document == plain


def test_settings_of_the_model(client: Client) -> None:
    two = mosaic(RED, BLUE)
    document = answer(client.post("/detect?model=tiled", two))
    assert len(document["detections"]) == document["tiles"]["count"] == 2
    whole = answer(client.post("/detect?model=tiled&tile=0", two))
    assert "tiles" not in whole
    assert len(answer(client.post("/detect?model=tiled&whole=1&metric=iou", two))["detections"]) == 2
    assert answer(client.post("/detect?model=tiled&tile=128", two))["tiles"]["count"] == 1


def test_options_in_a_form(client: Client) -> None:
    parts = [
        b'--b\r\nContent-Disposition: form-data; name="tile"\r\n\r\n%d' % SIDE,
        b'--b\r\nContent-Disposition: form-data; name="overlap"\r\n\r\n0',
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.png"\r\n\r\n' + mosaic(RED, BLUE),
        b"--b--\r\n",
    ]
    body = b"\r\n".join(parts)
    field = b"Content-Type: multipart/form-data; boundary=b\r\n"
    document = answer(client.post("/detect?model=finder", body, field))
    assert document["tiles"]["count"] == 2


def test_several_images_have_their_own_tiles(served: FrontEnd, client: Client) -> None:
    images = [base64.b64encode(one).decode() for one in (mosaic(RED, BLUE), mosaic(GREEN))]
    body = orjson.dumps({"images": images})
    document = answer(client.post(f"/detect{QUERY}", body, b"Content-Type: application/json\r\n"))
    assert [one["tiles"]["count"] for one in document["results"]] == [2, 1]
    assert [group.ended for group in served.door.trips] == [[True], [True]]


def test_only_the_best_where_so_many_are_wanted(client: Client) -> None:
    document = answer(client.post(f"/detect{QUERY}&max_detections=2", mosaic(RED, GREEN, BLUE)))
    assert len(document["detections"]) == 2


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("tile=31", "tile"),
        ("tile=many", "tile"),
        ("tile=64&overlap=0.91", "overlap"),
        ("tile=64&merge=all", "merge"),
        ("tile=64&metric=giou", "metric"),
        ("tile=64&match=0", "match"),
        ("tile=64&whole=perhaps", "whole"),
        ("tile=64&top_k=3", "top_k"),
    ],
)
def test_options_that_cannot_be(client: Client, query: str, field: str) -> None:
    response = client.post(f"/detect?model=finder&{query}", picture())
    assert response.status == 400
    assert error_of(response)["field"] == field


def test_other_tasks_have_no_tiles(client: Client) -> None:
    response = client.post("/classify?model=namer&tile=64", picture())
    assert response.status == 400
    assert "detect, segment" in error_of(response)["error"]


def test_a_device_of_many_tiles_is_not_asked(served: FrontEnd, client: Client) -> None:
    response = client.post("/detect?model=finder&tile=32&overlap=0.9", mosaic(*[RED] * 4, side=300))
    assert response.status == 400
    assert "more than the 1024 allowed" in error_of(response)["error"]
    assert not served.door.calls


def test_an_image_too_large_for_any_tile(served: FrontEnd, client: Client) -> None:
    """As without tiles: by its head, before it takes memory."""
    small = cv2.imencode(".jpg", np.zeros((16, 16, 3), np.uint8))[1].tobytes()
    at = small.index(b"\xff\xc0")
    claims = small[: at + 5] + (20_000).to_bytes(2, "big") * 2 + small[at + 9 :]
    response = client.post("/detect?model=finder&tile=640", claims)
    assert response.status == 413
    assert "20000×20000" in error_of(response)["error"]
    assert not served.door.calls


# ---- how parts go to the engine


def finish_next(served: FrontEnd, number: int) -> None:
    """Answers a call, and waits until another is made for it, or nothing is left."""
    door = served.door
    until(lambda: door.calls[number].is_ready)
    served.run(door.calls[number].finish)
    until(lambda: len(door.calls) > number + 1 or not door.slots_in_use)


def test_a_bounded_number_is_under_way_and_requests_have_some_parts(served: FrontEnd, client: Client) -> None:
    served.door.held = True
    client.send(
        b"POST /detect?model=finder&tile=32&overlap=0 HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
        % len(data := mosaic(*[RED, BLUE] * 3))
        + data
    )
    door = served.door
    until(lambda: bool(door.calls) and door.calls[0].is_ready and len(door.calls) > 1)
    until(lambda: sum(call.head.batch for call in door.calls) == 15)  # two batches of eight, by twos
    assert {call.head.batch for call in door.calls} == {1, 2}
    answered = 0
    while answered < len(door.calls):
        finish_next(served, answered)
        answered += 1
    assert sum(call.head.batch for call in door.calls) == 25
    assert answer(client.response())["tiles"]["count"] == 24


def test_a_client_that_leaves_ends_all_of_it(served: FrontEnd, client: Client) -> None:
    served.door.held = True
    data = mosaic(*[RED, BLUE] * 8)
    client.send(
        b"POST /detect?model=finder&tile=32&overlap=0 HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
        % len(data)
        + data
    )
    until(lambda: len(served.door.calls) > 3)
    client.reset()
    until(lambda: bool(served.door.trips[0].ended))
    assert served.door.trips[0].ended == [False]
    until(lambda: all(call.cancelled for call in served.door.calls))
    served.until_slots_are_back()


def test_a_part_that_fails_ends_all_of_it(served: FrontEnd, client: Client) -> None:
    door = served.door
    door.held = True
    data = mosaic(*[RED, BLUE] * 8)
    client.send(
        b"POST /detect?model=finder&tile=32&overlap=0 HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
        % len(data)
        + data
    )
    until(lambda: len(door.calls) > 3 and door.calls[2].is_ready)
    served.run(lambda: door.calls[2].finish(Refused("no time", reason="overload")))
    assert client.response().status == 429
    served.until_slots_are_back()
    assert door.trips[0].ended == [False]


def test_few_slots_are_enough() -> None:
    with front_end(detector(), slots=2) as served, served.connect() as client:
        document = answer(client.post(f"/detect{QUERY}", mosaic(*[RED, BLUE] * 6)))
        assert document["tiles"]["count"] == len(document["detections"]) == 12


def test_the_promise_is_that_of_each_tile() -> None:
    with front_end(detector(mode="promise")) as served, served.connect() as client:
        answer(client.post(f"/detect{QUERY}", mosaic(*[RED, BLUE] * 100, side=SIDE)))
        (group,) = served.door.trips
        assert group.entry.batching.slo == pytest.approx(200 * 0.05)


def test_only_the_engine_judges_how_long_it_takes(served: FrontEnd, client: Client) -> None:
    """What the gate says of a plain image is not about one that has the time of many."""
    served.door.refusal = Refused("no time", reason="overload")
    assert client.post("/detect?model=finder", mosaic(RED)).status == 429
    assert answer(client.post(f"/detect{QUERY}", mosaic(RED, RED)))["tiles"]["count"] == 2


class Waits:
    """Stands in for a run: takes what it wants when there is room."""

    def __init__(self, room: TilesUnderWay, wants: int) -> None:
        self.room, self.wants, self.has = room, wants, 0

    def go_on(self) -> None:
        while self.wants and self.room.take(cast("TileRun", self), 2):
            self.wants, self.has = self.wants - 2, self.has + 2

    def gives(self) -> None:
        self.has -= 2
        self.room.give(2)
        self.go_on()


def test_tiles_of_all_clients_take_half_of_the_slo() -> None:
    room = TilesUnderWay(0.4)
    room.ran(Timing(infer=0.05 * 4, batch=4))  # as it assumed: 50 ms each
    runs = [Waits(room, 100) for _ in range(3)]
    for run in runs:
        run.go_on()
    assert [run.has for run in runs] == [4, 0, 0]  # 200 ms
    for number in range(60):
        max(runs, key=lambda run: run.has).gives()
        assert sum(run.has for run in runs) == 4, number
    taken = [100 - run.wants for run in runs]
    assert max(taken) - min(taken) <= 8  # in turn


def test_one_alone_runs_however_long_it_takes() -> None:
    room = TilesUnderWay(0.01)
    for _ in range(50):
        room.ran(Timing(infer=1.0, batch=1))
    run = Waits(room, 4)
    run.go_on()
    assert run.has == 2
    run.gives()
    assert (run.has, run.wants) == (2, 0)


def test_without_a_promise_only_each_image_is_bounded() -> None:
    run = Waits(TilesUnderWay(None), 100)
    run.go_on()
    assert run.has == 100


def test_clients_that_leave_give_their_room_to_others() -> None:
    with front_end(detector(mode="promise")) as served:
        door = served.door
        door.held = True
        data = mosaic(*[RED, BLUE] * 8)
        head = b"POST /detect?model=finder&tile=32&overlap=0 HTTP/1.1\r\nHost: x\r\n"
        request = head + b"Content-Length: %d\r\n\r\n" % len(data) + data
        with served.connect() as first, served.connect() as second:
            first.send(request)
            until(lambda: sum(call.head.batch for call in door.calls) > 2)
            second.send(request)
            until(lambda: len(door.trips) == 2 and all(call.is_ready for call in door.calls))
            others = [call for call in door.calls if call.booking is door.trips[1]]
            assert len(others) == 1  # its first part, which the engine has let in
            first.reset()
            until(lambda: sum(call.booking is door.trips[1] for call in door.calls) > 1)
            second.reset()
            until(lambda: all(call.cancelled for call in door.calls))


# ---- masks, points and drawings


def test_masks_are_joined_over_tiles(client: Client) -> None:
    """The model masks what is red."""
    red = np.zeros((64, 160, 3), np.uint8)
    red[16:48, 32:144] = RED
    file = io.BytesIO()
    Image.fromarray(red).save(file, "PNG")
    document = answer(client.post("/segment?model=cutter&tile=64&overlap=0.25&format=rle", file.getvalue()))
    assert not document["tiles"]["whole"]  # each pixel has one class: there is nothing to merge
    (mask,) = document["masks"]
    height, width = mask["rle"]["size"]
    assert (width, height) == (160, 64)
    pixels = from_run_lengths(mask["rle"]["counts"], height, width)
    expected = (red[..., 0] > 0).astype(np.uint8)
    assert (pixels != expected).sum() <= 4 * (32 + 112)  # a tile's map has a quarter of its pixels
    drawn = client.post("/segment?model=cutter&tile=64&overlay=1", file.getvalue())
    assert (drawn.status, drawn.fields["content-type"]) == (200, "image/jpeg")


def test_a_drawing_is_of_the_whole_image(client: Client) -> None:
    response = client.post(f"/detect{QUERY}", mosaic(RED, BLUE), b"Accept: image/png\r\n")
    assert response.status == 200
    width, height = Image.open(io.BytesIO(response.body)).size
    assert width == 2 * height


# ---- progress


def events(response: Response) -> list[dict[str, Any]]:
    assert response.fields["content-type"].startswith("text/event-stream")
    return [orjson.loads(line[6:]) for line in response.body.split(b"\n") if line.startswith(b"data: ")]


def test_a_client_hears_how_far_it_is(client: Client) -> None:
    many = mosaic(*[RED, BLUE] * 36, side=32)
    query = "/detect?model=finder&tile=32&overlap=0&whole=0"
    said = events(client.post(query, many, b"Accept: text/event-stream\r\n"))
    done = [one["tiles"]["done"] for one in said[:-1]]
    assert done == sorted(done)
    assert {one["tiles"]["of"] for one in said[:-1]} == {72}
    plain = answer(client.post(query, many))
    assert said[-1] == {"done": True, **plain}


def test_few_tiles_and_no_tiles(client: Client) -> None:
    (only,) = events(client.post(f"/detect{QUERY}&stream=1", mosaic(RED)))
    assert only["done"]
    assert "tiles" not in answer(client.post("/detect?model=finder&stream=1", mosaic(RED)))


def test_an_error_before_the_first_event_has_a_status(served: FrontEnd, client: Client) -> None:
    served.door.held = True
    query = b"POST /detect?model=finder&tile=32&overlap=0&whole=0&stream=1 HTTP/1.1\r\nHost: x\r\n"
    client.send(query + b"Content-Length: %d\r\n\r\n" % len(data := mosaic(RED)) + data)
    call = served.wait_for_call()
    served.run(lambda: call.finish(Refused("no time", reason="overload")))
    assert client.response().status == 429


# ---- what is loaded, and said


def test_nothing_wraps_requests_before_one_asks_for_tiles(client: Client, served: FrontEnd) -> None:
    with front_end(detector()) as plain, plain.connect() as asks:
        service = plain.app._service
        asks.post("/detect", mosaic(RED))
        assert service.parts.state_of("tiles") is None
        assert "tiles" not in service.parts._parts
        entry = plain.door.catalog.newest["finder"]
        assert plain.run(lambda: service.lane(entry).infer) is None
        answer(asks.post(f"/detect{QUERY}", mosaic(RED)))
        assert plain.run(lambda: service.lane(entry).infer) is not None


def test_openapi_names_the_options(client: Client) -> None:
    document = orjson.loads(client.get("/openapi.json").body)
    named = {one["name"] for one in document["paths"]["/detect"]["post"]["parameters"]}
    assert OPTIONS.keys() <= named
    assert "tiles" in document["components"]["schemas"]["Detections"]["properties"]
    classes = {one["name"] for one in document["paths"]["/classify"]["post"]["parameters"]}
    assert not OPTIONS.keys() & classes
