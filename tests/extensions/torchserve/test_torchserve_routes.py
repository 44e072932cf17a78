"""TorchServe's inference routes over real sockets, with a fake engine."""

from __future__ import annotations

from collections.abc import Iterator

import orjson
import pytest

from carpool.extensions.torchserve.front import as_handlers_did
from frontend.http.front_end import FrontEnd, error_of, front_end
from frontend.http.harness import Response
from frontend.http.test_multipart import BOUNDARY, file_part, form
from frontend.picture_models import GREEN, RED, models, picture

FORM = b"Content-Type: multipart/form-data; boundary=%b\r\n" % BOUNDARY


@pytest.fixture(scope="module")
def served() -> Iterator[FrontEnd]:
    with front_end(*models()) as found:
        yield found


def ask(found: FrontEnd, path: str, body: bytes, extra: bytes = b"", method: bytes = b"POST") -> Response:
    head = b"%b %b HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n%b\r\n"
    with found.connect() as client:
        return client.send(head % (method, path.encode(), len(body), extra) + body).response()


def name_for(found: FrontEnd, task: str) -> str:
    body = ask(found, f"/{task}", picture(GREEN)).body
    return str(orjson.loads(body)["model"])


@pytest.mark.parametrize("method", [b"POST", b"PUT"])
def test_a_classifier_answers_by_label(served: FrontEnd, method: bytes) -> None:
    name = name_for(served, "classify")
    answer = orjson.loads(ask(served, f"/predictions/{name}", picture(GREEN), method=method).body)
    plain = orjson.loads(ask(served, f"/models/{name}/predict", picture(GREEN)).body)
    assert answer == {one["label"]: one["score"] for one in plain["classes"]}
    assert max(answer, key=answer.get) == "green"


def test_a_detector_answers_boxes(served: FrontEnd) -> None:
    [found] = orjson.loads(ask(served, "/predictions/finder", picture(RED, size=(32, 24))).body)
    assert found["red"] == [0.0, 0.0, 16.0, 24.0]
    assert found["score"] > 0.9


def test_a_form_as_curl_sends_it(served: FrontEnd) -> None:
    alone = ask(served, "/predictions/finder", picture(RED))
    assert ask(served, "/predictions/finder", form(file_part(picture(RED))), FORM).body == alone.body


@pytest.mark.parametrize("version", ["1", "1.0"])
def test_a_version_in_the_path(served: FrontEnd, version: str) -> None:
    assert ask(served, f"/predictions/finder/{version}", picture(RED)).status == 200


@pytest.mark.parametrize(
    ("path", "status", "says"),
    [
        ("/predictions/nobody", 404, "nobody"),
        ("/predictions/finder/7", 404, "7"),
        ("/predictions/finder/1.0?version=1", 400, "has a version already"),
        ("/predictions/finder?model=other", 400, "has a model already"),
    ],
)
def test_what_is_not_there_is_told(served: FrontEnd, path: str, status: int, says: str) -> None:
    response = ask(served, path, picture(RED))
    assert response.status == status
    assert says in error_of(response)["error"]


def test_what_is_no_picture_is_told(served: FrontEnd) -> None:
    assert ask(served, "/predictions/finder", b"no picture").status == 400


def test_ping(served: FrontEnd) -> None:
    response = ask(served, "/ping", b"", method=b"GET")
    assert (response.status, orjson.loads(response.body)) == (200, {"status": "Healthy"})


def test_several_and_other_tasks_are_told_as_they_are() -> None:
    several = {"results": [{"classes": [{"label": "a", "score": 0.5}]}, {"error": "broken", "status": 400}]}
    assert orjson.loads(as_handlers_did(orjson.dumps(several))) == [{"a": 0.5}, several["results"][1]]
    assert orjson.loads(as_handlers_did(b'{"embedding":[1.0]}')) == {"embedding": [1.0]}
