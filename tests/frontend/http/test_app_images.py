"""The picture routes over real sockets, with a fake engine: ways in, answers, refusals, and who leaves."""

from __future__ import annotations

import base64
import contextlib
import io
import threading
from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import orjson
import pytest
from PIL import Image

from carpool.errors import DeadlineExceeded, ModelError, Refused, Replaced, TooLarge
from carpool.frontend.pictures.sent_pictures import PictureModel
from frontend.http.front_end import FrontEnd, error_of, front_end
from frontend.http.harness import PATIENCE, Response, chunked, post
from frontend.http.test_multipart import BOUNDARY, file_part, form
from frontend.picture_models import (
    BLUE,
    GREEN,
    RED,
    begin,
    classifier,
    detector,
    embedder,
    models,
    picture,
    segmenter,
)
from waiting import until

FORM = b"Content-Type: multipart/form-data; boundary=%b\r\n" % BOUNDARY
JSON = b"Content-Type: application/json\r\n"


@pytest.fixture
def served() -> Iterator[FrontEnd]:
    with front_end(*models()) as found:
        yield found


@contextlib.contextmanager
def holding(found: FrontEnd) -> Iterator[threading.Event]:
    """Keep the decoding threads busy until told: the one, and the other for pictures that take long."""
    go, began = threading.Event(), threading.Semaphore(0)

    def wait() -> None:
        began.release()
        go.wait(PATIENCE)

    for weight in (1.0, 49e6):
        workers = found.app._service.with_pictures().workers
        found.run(partial(begin, workers, wait, lambda *_: None, weight=weight))
        assert began.acquire(timeout=PATIENCE)
    try:
        yield go
    finally:
        go.set()


def ask(found: FrontEnd, path: str, body: bytes, extra: bytes = b"") -> Response:
    with found.connect() as client:
        return client.post(path, body, extra)


def failures(found: FrontEnd, model: str) -> float:
    """Of all reasons."""
    lines = [
        line for line in found.metrics().splitlines() if line.startswith("nv_inference_request_failure{")
    ]
    return sum(float(line.rpartition(" ")[2]) for line in lines if f'model="{model}"' in line)


def answer_of(response: Response) -> dict[str, Any]:
    assert response.status == 200, response.body
    assert response.fields["content-type"] == "application/json"
    document: dict[str, Any] = orjson.loads(response.body)
    return document


# ---- answers ----------------------------------------------------------------------------------------------


def test_detect_answers_in_pixels_of_the_picture(served: FrontEnd) -> None:
    answer = answer_of(ask(served, "/detect", picture(RED, size=(32, 24))))
    assert answer["model"] == "finder"
    assert answer["version"] == "1"
    assert answer["image"] == {"width": 32, "height": 24}
    [found] = answer["detections"]
    assert found["label"] == "red"
    assert found["box"] == [0.0, 0.0, 16.0, 24.0]
    assert found["score"] > 0.9


def test_each_task_has_its_route(served: FrontEnd) -> None:
    assert answer_of(ask(served, "/classify?top_k=1", picture(GREEN)))["classes"][0]["label"] == "green"
    assert len(answer_of(ask(served, "/embed", picture(BLUE)))["embedding"]) == 3
    assert answer_of(ask(served, "/models/plain/predict", picture()))["outputs"][0]["name"] == "means"


def test_every_way_of_sending_gives_the_same_answer(served: FrontEnd) -> None:
    data = picture(GREEN)
    text = base64.b64encode(data).decode()
    sent = [
        (data, b""),
        (data, b"Content-Type: image/jpeg\r\n"),
        (data, b"Content-Type: image/png\r\n"),  # its bytes say what it is
        (data, b"Content-Type: application/octet-stream\r\n"),
        (form(file_part(data)), FORM),
        (form(file_part(data, file_name="wrong.png")), FORM),
        (orjson.dumps({"image": text}), JSON),
        (orjson.dumps({"image": f"data:image/jpeg;base64,{text}"}), JSON),
        (orjson.dumps({"image": "\n".join(text[at : at + 76] for at in range(0, len(text), 76))}), JSON),
    ]
    answers = [answer_of(ask(served, "/classify", body, extra)) for body, extra in sent]
    with served.connect() as client:
        chunks = b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data)
        answers.append(answer_of(client.send(chunked("/classify", chunks)).response()))
    assert all(answer == answers[0] for answer in answers)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WebP", "BMP", "TIFF", "GIF"])
def test_every_format_is_read(served: FrontEnd, kind: str) -> None:
    assert answer_of(ask(served, "/classify", picture(BLUE, kind)))["classes"][0]["label"] == "blue"


def test_several_pictures_are_answered_in_order_and_one_bad_one_alone(served: FrontEnd) -> None:
    files = [picture(RED), b"no picture", picture(BLUE), b""]
    response = ask(served, "/classify?top_k=1", form(*map(file_part, files)), FORM)
    results = answer_of(response)["results"]
    assert [one.get("status", 200) for one in results] == [200, 400, 200, 400]
    assert [one["classes"][0]["label"] for one in (results[0], results[2])] == ["red", "blue"]
    assert results[1]["reason"] == "invalid-input"
    assert "server-timing" in response.fields


def test_a_list_in_json_is_answered_as_a_list(served: FrontEnd) -> None:
    one = base64.b64encode(picture(RED)).decode()
    results = answer_of(ask(served, "/classify", orjson.dumps({"images": [one]}), JSON))["results"]
    assert len(results) == 1


def test_more_pictures_than_may_be_under_way_are_all_answered(served: FrontEnd) -> None:
    body = form(*[file_part(picture(RED))] * 50)
    results = answer_of(ask(served, "/classify", body, FORM))["results"]
    assert len(results) == 50
    assert all("classes" in one for one in results)


def test_server_timing_says_where_the_time_went(served: FrontEnd) -> None:
    timing = ask(served, "/detect", picture()).fields["server-timing"]
    parts = dict(part.split(";", 1) for part in timing.split(", "))
    assert set(parts) == {"decode", "queue", "infer", "post", "batch"}
    assert parts["queue"] == "dur=2.000"
    assert parts["batch"] == 'desc="17"'


def test_long_answers_are_compressed_for_those_who_can_read_it() -> None:
    with front_end(embedder()) as found:
        body = form(*[file_part(picture())] * 40)
        response = ask(found, "/embed", body, FORM + b"Accept-Encoding: gzip\r\n")
    assert response.fields["content-encoding"] == "gzip"


# ---- drawn answers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "extra", "kind"),
    [
        ("/detect?overlay=1", b"", "JPEG"),
        ("/detect?overlay=true", b"Accept: image/png\r\n", "PNG"),
        ("/detect", b"Accept: image/*\r\n", "JPEG"),
        ("/classify", b"Accept: image/webp\r\n", "WEBP"),
    ],
)
def test_the_picture_comes_back_with_the_answer_in_it(
    served: FrontEnd, path: str, extra: bytes, kind: str
) -> None:
    response = ask(served, path, picture(size=(640, 480)), extra)
    assert response.status == 200
    assert response.fields["content-type"] == f"image/{kind.lower()}"
    assert "server-timing" in response.fields
    drawn = Image.open(io.BytesIO(response.body))
    assert drawn.format == kind
    assert drawn.size == (640, 480)


def test_a_mask_is_drawn_and_a_form_may_ask_for_it() -> None:
    with front_end(segmenter()) as found:
        body = form(file_part(picture()), (b"Content-Disposition: form-data; name=overlay", b"1"))
        response = ask(found, "/segment", body, FORM)
        assert response.fields["content-type"] == "image/jpeg"
        answer = answer_of(ask(found, "/segment?format=rle", picture()))
    assert answer["masks"][0]["rle"]["size"] == [24, 32]


def test_what_cannot_be_drawn_is_said_before_any_work(served: FrontEnd) -> None:
    assert error_of(ask(served, "/embed", picture(), b"Accept: image/png\r\n"))["field"] == "overlay"
    assert ask(served, "/embed?overlay=1", picture()).status == 400
    body = form(*[file_part(picture())] * 2)
    assert "one at a time" in error_of(ask(served, "/detect?overlay=1", body, FORM))["error"]
    assert not served.door.calls


# ---- which model ------------------------------------------------------------------------------------------


def test_the_first_configured_model_answers_unless_another_is_named() -> None:
    with front_end(classifier("a"), classifier("b"), detector()) as found:
        index = sorted(found.door.catalog.index, key=lambda line: line.name, reverse=True)
        found.run(lambda: found.door.renew(index=index))
        assert answer_of(ask(found, "/classify", picture()))["model"] == "b"
        assert answer_of(ask(found, "/classify?model=a&version=1", picture()))["model"] == "a"
        assert "/models/finder/predict" in error_of(ask(found, "/classify?model=finder", picture()))["error"]


def test_a_task_without_a_model_says_which_tasks_there_are(served: FrontEnd) -> None:
    response = ask(served, "/segment", picture())
    assert response.status == 404
    document = error_of(response)
    assert document["reason"] == "no-task"
    assert "detect, classify, embed" in document["error"] or "classify" in document["error"]


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/models/nobody/predict", 404),
        ("/detect?model=nobody", 404),
        ("/detect?model=finder&version=9", 404),
        ("/detect?version=1", 400),
        ("/models/finder/predict?model=finder", 400),
        ("/models/tensors/predict", 400),
        ("/detect?scoer=1", 400),
        ("/detect?score=2", 400),
        ("/detect?top_k=2", 400),
        ("/detect?score=0.1&score=0.2", 400),
    ],
)
def test_wrong_names_and_values_are_refused_before_the_body(served: FrontEnd, path: str, status: int) -> None:
    with served.connect() as client:  # which never sends its body
        client.send(b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: 9000000\r\n\r\n" % path.encode())
        response = client.response()
    assert response.status == status
    error_of(response)


def test_a_model_that_is_replaced_is_used_from_the_next_picture_on(served: FrontEnd) -> None:
    with served.connect() as client:
        assert client.post("/classify", picture()).status == 200
        entries = dict(served.door.catalog.newest)
        gone = {name: entry for name, entry in entries.items() if name != "namer"}
        served.run(lambda: served.door.renew(newest=gone))
        assert client.post("/classify", picture()).status == 404
        served.run(lambda: served.door.renew(newest=entries))
        assert client.post("/classify", picture()).status == 200


# ---- bad input --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "extra"),
    [
        (b"", b""),
        (b"not a picture", b"Content-Type: image/jpeg\r\n"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", b"Content-Type: image/svg+xml\r\n"),
        (picture()[:300], b""),
        (b"{", JSON),
        (b"{}", JSON),
        (b'{"image": 1}', JSON),
        (b'{"image": "!!!"}', JSON),
        (b'{"image": "\xc3\xa9"}', JSON),
        (b'{"image": "data:image/png,x"}', JSON),
        (b'{"images": []}', JSON),
        (b'{"images": ["aGk="], "image": "aGk="}', JSON),
        (b'{"picture": "aGk="}', JSON),
        (form(file_part(picture(), name="image")), FORM),
        (form((b"Content-Disposition: form-data; name=score", b"0.5")), FORM),
        (form(file_part(picture()), (b"Content-Disposition: form-data; name=scoer", b"0.5")), FORM),
        (form(file_part(picture()), (b"Content-Disposition: form-data; name=score", b"5" * 300)), FORM),
        (b"--nothing", FORM),
        (picture(), b"Content-Type: multipart/form-data\r\n"),
    ],
)
def test_bad_input_is_a_clear_400_that_no_model_sees(served: FrontEnd, body: bytes, extra: bytes) -> None:
    response = ask(served, "/detect", body, extra)
    assert response.status == 400, response.body
    error_of(response)
    assert all(call.cancelled and not call.is_ready for call in served.door.calls)
    served.until_slots_are_back()


def test_an_option_in_the_query_and_in_the_form_is_refused(served: FrontEnd) -> None:
    body = form(file_part(picture()), (b"Content-Disposition: form-data; name=score", b"0.5"))
    assert answer_of(ask(served, "/detect", body, FORM))
    assert ask(served, "/detect?score=0.1", body, FORM).status == 400


def test_too_many_pictures_and_too_many_bytes_are_413(served: FrontEnd) -> None:
    assert ask(served, "/detect", form(*[file_part(b"x")] * 65), FORM).status == 413
    many = orjson.dumps({"images": ["aGk="] * 65})
    assert ask(served, "/detect", many, JSON).status == 413
    assert ask(served, "/detect", bytes((1 << 20) + 1)).status == 413  # the front end's own limit here


def test_a_get_says_what_to_do(served: FrontEnd) -> None:
    with served.connect() as client:
        response = client.get("/detect")
    assert response.status == 405
    assert response.fields["allow"] == "POST"


# ---- refusals and failures --------------------------------------------------------------------------------


def test_the_gate_speaks_before_the_body_is_read(served: FrontEnd) -> None:
    served.door.refusal = Refused("no room", reason="overload", retry_after_s=2.0)
    with served.connect() as client:
        client.send(b"POST /detect HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n")
        response = client.response()
    assert response.status == 429
    assert response.fields["retry-after"] == "2"
    assert failures(served, "finder") == 1
    assert served.door.turned == [("finder", "overload", 1, "")]


def test_options_that_the_model_does_not_take_are_its_failures(served: FrontEnd) -> None:
    """Also where one head is sent again and again: each request is counted."""
    for number, path in enumerate(("/detect?score=9", "/detect?score=9", "/detect?top_k=3"), 1):
        assert ask(served, path, picture(RED)).status == 400
        assert failures(served, "finder") == number
    assert [turned[:2] for turned in served.door.turned] == [("finder", "invalid-input")] * 3


def test_not_serving_and_no_slots_are_503() -> None:
    with front_end(detector(), slots=0) as found:
        assert error_of(ask(found, "/detect", picture()))["reason"] == "no-slots"
        assert [reason for _, reason, _, _ in found.door.turned] == ["no-slots"]
        found.door.serving = False
        assert error_of(ask(found, "/detect", picture()))["reason"] == "not-serving"


def test_an_error_of_the_engine_is_answered_with_its_status(served: FrontEnd) -> None:
    served.door.held = True
    with served.connect() as client:
        client.send(
            b"POST /detect HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(picture()) + picture()
        )
        call = served.wait_for_call()
        served.run(lambda: call.finish(ModelError("the model raised")))
        response = client.response()
    assert response.status == 500
    assert "queue;dur=2.000" in response.fields["server-timing"]
    served.until_slots_are_back()


def test_the_deadline_and_the_source_go_through_the_door(served: FrontEnd) -> None:
    ask(served, "/detect", picture(), b"X-Carpool-Deadline-Ms: 90000\r\nX-Carpool-Source: cam\r\n")
    call = served.door.calls[-1]
    assert call.source == "cam"
    assert 30.0 < call.deadline - call.arrived <= 90.0
    assert ask(served, "/detect", picture(), b"X-Carpool-Deadline-Ms: x\r\n").status == 400


def test_a_picture_that_is_refused_is_not_decoded(served: FrontEnd) -> None:
    """The engine hears of it when it is here, and has the last word before any work is done for it."""
    served.door.admits = False
    with served.connect() as client:
        client.send(post("/detect", picture()))
        until(lambda: bool(served.door.calls))
        [call] = served.door.calls
        assert call.ready_in is not None
        served.run(lambda: call.finish(Refused("too much")))
        assert client.response().status == 429
    served.until_slots_are_back()
    assert served.count("finder", "carpool_decode_duration_seconds_count") == 0


def test_who_is_given_up_while_it_waits_to_be_decoded_is_told_then_and_not_decoded(served: FrontEnd) -> None:
    with holding(served) as go, served.connect() as client:
        client.send(post("/detect", picture()))
        until(lambda: served.app._service.with_pictures().workers.waiting == 1)
        [call] = served.door.calls
        served.run(lambda: call.finish(DeadlineExceeded("too late")))
        assert client.response().status == 504  # the threads are still busy with something else
        assert served.app._service.with_pictures().workers.waiting == 0
        served.until_slots_are_back()
        go.set()
    assert served.count("finder", "carpool_decode_duration_seconds_count") == 0


def test_who_is_given_up_while_a_thread_decodes_it_keeps_its_slot_until_that_is_done(
    served: FrontEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go = threading.Event(), threading.Event()
    prepare = PictureModel.prepare

    def slowly(self: PictureModel, *given: Any) -> Any:
        begun.set()
        go.wait(PATIENCE)
        return prepare(self, *given)

    monkeypatch.setattr(PictureModel, "prepare", slowly)
    with served.connect() as client:
        client.send(post("/detect", picture()))
        assert begun.wait(PATIENCE)
        [call] = served.door.calls
        served.run(lambda: call.finish(DeadlineExceeded("too late")))
        assert client.response().status == 504
        assert len(served.door.slots_in_use) == 1  # the thread is writing to it
        go.set()
        served.until_slots_are_back()
    assert not call.is_ready


def test_a_full_queue_of_pictures_is_refused_before_their_bodies(served: FrontEnd) -> None:
    served.app._service.with_pictures().workers.most_waiting = 1
    with holding(served) as go, served.connect() as first, served.connect() as second:
        first.send(
            b"POST /detect HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(picture()), picture())
        )
        until(lambda: served.app._service.with_pictures().workers.waiting == 1)
        second.send(b"POST /detect HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n")
        refused = second.response()
        assert refused.status == 429
        assert error_of(refused)["reason"] == "queue-full"
        go.set()
        assert first.response().status == 200


def test_too_many_bytes_under_way_are_refused(served: FrontEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served.app._service.with_pictures()._held, "most", 1000)
    with holding(served) as go, served.connect() as first:
        data = picture(size=(64, 64))
        sent = orjson.dumps({"image": base64.b64encode(data).decode()})
        head = b"POST /detect HTTP/1.1\r\nHost: x\r\n%bContent-Length: %d\r\n\r\n" % (JSON, len(sent))
        first.send(head + sent)
        until(lambda: served.app._service.with_pictures().workers.waiting == 1)
        assert error_of(ask(served, "/embed", sent, JSON))["reason"] == "queue-full"
        go.set()
        assert first.response().status == 200
    assert ask(served, "/embed", sent, JSON).status == 200


def test_a_picture_that_came_as_it_is_counts_where_it_was_gathered(served: FrontEnd) -> None:
    """And not twice."""
    held = served.app._service.with_pictures()._held
    with holding(served) as go, served.connect() as first:
        data = picture(size=(64, 64))
        first.send(b"POST /detect HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(data), data))
        until(lambda: served.app._service.with_pictures().workers.waiting == 1)
        assert held.total == 0
        assert served.app._service.with_pictures()._pixels.total == 64 * 64
        go.set()
        assert first.response().status == 200
    until(lambda: served.app._service.with_pictures()._pixels.total == 0)


def test_a_bug_in_a_thread_fails_its_picture_alone(served: FrontEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise KeyError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr("carpool.frontend.pictures.sent_pictures.PictureModel.prepare", broken)
        assert ask(served, "/detect", picture()).status == 500
    with monkeypatch.context() as patch:
        patch.setattr("carpool.frontend.pictures.sent_pictures.PictureModel.of_one", broken)
        assert ask(served, "/detect", picture()).status == 500
    assert ask(served, "/detect", picture()).status == 200


def test_an_answer_that_is_too_large_is_said_so(served: FrontEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    def huge(*_: object) -> None:
        raise TooLarge("the response has too many numbers")

    monkeypatch.setattr("carpool.frontend.pictures.sent_pictures.PictureModel.of_one", huge)
    assert ask(served, "/models/plain/predict", picture()).status == 413


# ---- clients that leave -----------------------------------------------------------------------------------


def test_a_client_that_leaves_while_sending_holds_nothing(served: FrontEnd) -> None:
    client = served.connect()
    client.send(b"POST /detect HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\nhalf")
    until(lambda: served.server.server.connections == 1)
    client.reset()
    until(lambda: served.server.server.connections == 0)
    served.until_slots_are_back()


def test_a_client_that_leaves_before_decoding_is_not_decoded_for(served: FrontEnd) -> None:
    with holding(served) as go:
        client = served.connect()
        client.send(
            b"POST /detect HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(picture()), picture())
        )
        until(lambda: served.app._service.with_pictures().workers.waiting == 1)
        client.reset()
        served.until_slots_are_back()  # at once: no thread has begun
        assert served.app._service.with_pictures().workers.waiting == 0
        go.set()
    assert [call.cancelled for call in served.door.calls] == [True]
    assert served.count("finder", "carpool_decode_duration_seconds_count") == 0
    assert failures(served, "finder") >= 1


def test_a_client_that_leaves_while_the_model_runs_cancels_it(served: FrontEnd) -> None:
    served.door.held = True
    client = served.connect()
    client.send(
        b"POST /detect HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(picture()), picture())
    )
    call = served.wait_for_call()
    client.reset()
    until(lambda: call.cancelled)
    served.until_slots_are_back()


def test_a_client_that_leaves_while_its_answer_is_made_holds_nothing(served: FrontEnd) -> None:
    served.door.held = True
    client = served.connect()
    client.send(
        b"POST /detect?overlay=1 HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b"
        % (len(picture()), picture())
    )
    call = served.wait_for_call()
    with holding(served) as go:
        served.run(call.finish)
        client.reset()
        until(lambda: served.server.server.connections == 0)
        assert not call.released
        go.set()
        until(lambda: call.released)
    served.until_slots_are_back()


def test_a_client_that_leaves_a_form_leaves_all_of_its_pictures(served: FrontEnd) -> None:
    served.door.held = True
    client = served.connect()
    body = form(*[file_part(picture())] * 30)
    client.send(
        b"POST /detect HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n%b\r\n%b" % (len(body), FORM, body)
    )
    until(lambda: len(served.door.calls) == 16)
    client.reset()
    served.until_slots_are_back()
    assert len(served.door.calls) == 16
    assert all(call.cancelled for call in served.door.calls)


# ---- counters ---------------------------------------------------------------------------------------------


def test_pictures_are_counted(served: FrontEnd) -> None:
    ask(served, "/detect", picture())
    ask(served, "/detect", b"bad")
    assert served.count("finder", "nv_inference_request_success") == 1
    assert served.count("finder", "carpool_decode_duration_seconds_count") == 1
    assert served.count("finder", "carpool_post_duration_seconds_count") == 1
    assert failures(served, "finder") == 1


# ── live sources ──

LIVE = b"X-Carpool-Source: cam\r\nX-Carpool-Latest: 1\r\n"


def test_frames_go_through_the_door_before_they_are_decoded(served: FrontEnd) -> None:
    """Which of them takes whose place is for the engine to say, which knows those of every front end."""
    frame = b"POST /detect HTTP/1.1\r\nHost: x\r\n%bContent-Length: %d\r\n\r\n" % (LIVE, len(picture()))
    with holding(served) as go, served.connect() as first, served.connect() as second:
        first.send(frame + picture())
        until(lambda: len(served.door.calls) == 1)
        second.send(frame + picture())
        until(lambda: len(served.door.calls) == 2)
        served.run(lambda: served.door.calls[0].finish(Replaced("a newer frame")))
        response = first.response()
        assert (response.status, orjson.loads(response.body)["reason"]) == (409, "replaced")
        go.set()
        assert second.response().status == 200
    assert [call.sender[:2] for call in served.door.calls] == [("cam", True)] * 2
    served.until_slots_are_back()
    assert served.count("finder", "carpool_decode_duration_seconds_count") == 1


def test_frames_name_their_source_and_come_alone(served: FrontEnd) -> None:
    assert ask(served, "/detect", picture(), b"X-Carpool-Latest: 1\r\n").status == 400
    two = b"".join(
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n%b\r\n' % picture()
        for _ in range(2)
    )
    form = b"Content-Type: multipart/form-data; boundary=b\r\n"
    assert ask(served, "/detect", two + b"--b--\r\n", form).status == 200
    assert ask(served, "/detect", two + b"--b--\r\n", form + LIVE).status == 400


@cache
def large(side: int = 4000) -> bytes:
    """A picture of many pixels; what lies behind it makes it long enough for them."""
    return picture(kind="PNG", size=(side, side))


def test_large_pictures_of_one_request_wait_for_each_other(served: FrontEnd) -> None:
    """So that others are decoded in between."""
    workers = served.app._service.with_pictures().workers
    body = form(*[file_part(large())] * 4, file_part(picture(GREEN)))
    with holding(served) as go, served.connect() as client:
        client.send(post("/classify", body, FORM))
        until(lambda: workers.waiting == 1)
        with served.connect() as other:
            other.send(post("/classify", picture(GREEN)))
            until(lambda: workers.waiting == 2)
            go.set()
            assert answer_of(other.response())["classes"][0]["label"] == "green"
        assert len(answer_of(client.response())["results"]) == 5
    assert served.app._service.with_pictures()._pixels.total == 0


def test_pixels_that_wait_are_bounded(served: FrontEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served.app._service.with_pictures()._pixels, "most", 30_000_000)
    with holding(served) as go, served.connect() as client:
        client.send(post("/classify", large()))
        until(lambda: served.app._service.with_pictures().workers.waiting == 1)
        refused = ask(served, "/classify", large())
        assert (refused.status, error_of(refused)["reason"]) == (429, "queue-full")
        go.set()
        assert client.response().status == 200
    assert ask(served, "/classify", large()).status == 200


def test_a_form_of_too_many_pixels_is_refused_before_anything_is_decoded(served: FrontEnd) -> None:
    refused = ask(served, "/classify", form(*[file_part(large())] * 13), FORM)
    assert (refused.status, error_of(refused)["reason"]) == (413, "too-large")
