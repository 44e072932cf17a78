"""Text of pictures as it is written, with a fake engine: events, chunks, slow readers, and who leaves."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from carpool import AsyncClient, Client
from carpool.errors import InvalidInput, ModelError, Refused, Unavailable
from carpool.frontend.access.guard import Guard
from carpool.frontend.http import event_stream
from carpool.frontend.pictures import sent_pictures
from carpool.link.engine_client import Answer
from carpool.types import StepTiming, Timing
from carpool.wire.event_lines import EventReader
from cli_run import run_cli
from frontend.access.key_files import ALICE
from frontend.http.front_end import FrontEnd, error_of, front_end
from frontend.http.harness import Client as Connection
from frontend.http.harness import Response, post
from frontend.picture_models import RED, detector, picture, words, writer
from waiting import until

if TYPE_CHECKING:  # every process of pytest imports this file, and its import takes the time of 100 tests
    import openai

KEY = "a-key-that-is-long-enough-0123456789"
TEXT = "Red and blue…"
EVENTS = b"Accept: text/event-stream\r\n"
JSON = b"Content-Type: application/json\r\n"
URL = "data:image/jpeg;base64," + base64.b64encode(picture(RED)).decode()


def broken(given: Any) -> Iterator[dict[str, Any]]:
    yield from words(given)[:2]
    raise ModelError("the model raised ValueError: no")


def silent(_given: Any) -> list[dict[str, Any]]:
    return []


@pytest.fixture(scope="module")
def served() -> Iterator[FrontEnd]:
    crash, quiet = writer("x_crash"), writer("x_quiet")
    crash.function, quiet.function = broken, silent
    with front_end(writer(), writer("teller", "caption"), crash, quiet, detector()) as found:
        yield found


def ask(found: FrontEnd, path: str, body: bytes = b"", extra: bytes = b"") -> Response:
    with found.connect() as client:
        return client.post(path, body or picture(RED), extra)


def events_of(response: Response) -> list[Any]:
    assert response.status == 200, response.body
    assert response.fields["content-type"] == "text/event-stream; charset=utf-8"
    found = EventReader().feed(response.body)
    return [one if one == b"[DONE]" else json.loads(one) for one in found]


def chat(*, model: str = "writer", **more: Any) -> bytes:
    parts = [{"type": "text", "text": "Read"}, {"type": "image_url", "image_url": {"url": URL}}]
    return json.dumps({"model": model, "messages": [{"role": "user", "content": parts}], **more}).encode()


# ── /read, /caption ──


@pytest.mark.parametrize("path", ["/read", "/read?model=writer", "/models/writer/predict", "/caption"])
def test_a_document_without_a_wish_for_events(served: FrontEnd, path: str) -> None:
    document = json.loads(ask(served, path).body)
    assert (document["text"], document["finish_reason"]) == (TEXT, "stop")
    assert document["image"] == {"width": 32, "height": 24}


@pytest.mark.parametrize(
    ("path", "extra"),
    [
        ("/read", EVENTS),
        ("/read?stream=1", b""),
        ("/caption", EVENTS),
        ("/models/writer/predict", EVENTS),
        ("/read", b"Accept: application/json;q=0.5, text/event-stream\r\n"),
    ],
)
def test_events(served: FrontEnd, path: str, extra: bytes) -> None:
    *pieces, last = events_of(ask(served, path, extra=extra))
    assert [one["text"] for one in pieces] == ["Red", " and", " blue…"]
    assert [one["index"] for one in pieces] == [0, 1, 2]
    assert last["done"] is True
    assert (last["text"], last["finish_reason"]) == (TEXT, "stop")
    assert set(last["timing"]) == {"decode_ms", "queue_ms", "infer_ms", "post_ms"}


def test_a_connection_goes_on_after_a_stream(served: FrontEnd) -> None:
    with served.connect() as client:
        for _ in range(3):
            assert events_of(client.post("/read", picture(RED), EVENTS))[-1]["done"]
        assert client.post("/read", picture(RED)).status == 200


def test_old_clients_get_no_chunks(served: FrontEnd) -> None:
    body = picture(RED)
    head = b"POST /read HTTP/1.0\r\nContent-Length: %d\r\nAccept: text/event-stream\r\n\r\n" % len(body)
    with served.connect() as client:
        client.send(head + body)
        said = client.rest()
    assert b"transfer-encoding" not in said
    assert said.count(b"data: ") == 4


def test_what_is_no_text_is_a_document(served: FrontEnd) -> None:
    response = ask(served, "/detect", extra=EVENTS)
    assert response.fields["content-type"] == "application/json"
    response = ask(served, "/models/finder/predict", extra=EVENTS)
    assert response.fields["content-type"] == "application/json"


def test_an_error_in_the_middle_is_an_event(served: FrontEnd) -> None:
    *pieces, last = events_of(ask(served, "/read?model=x_crash", extra=EVENTS))
    assert len(pieces) == 2
    assert (last["status"], last["reason"]) == (500, "model-error")
    assert ask(served, "/read?model=x_crash").status == 500


def test_a_model_that_says_nothing(served: FrontEnd) -> None:
    [last] = events_of(ask(served, "/read?model=x_quiet", extra=EVENTS))
    assert (last["text"], last["finish_reason"]) == ("", "stop")


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/read?stream=maybe", "stream"),
        ("/read?max_tokens=0", "max_tokens"),
        ("/detect?max_tokens=4", "max_tokens"),
    ],
)
def test_what_cannot_be_asked(served: FrontEnd, path: str, field: str) -> None:
    response = ask(served, path, extra=EVENTS)
    assert response.status == 400
    assert error_of(response)["field"] == field


def test_several_pictures_are_no_stream(served: FrontEnd) -> None:
    one = base64.b64encode(picture(RED)).decode()
    body = json.dumps({"images": [one, one]}).encode()
    assert ask(served, "/read", body, JSON + EVENTS).status == 400
    both = json.loads(ask(served, "/read", body, JSON).body)["results"]
    assert [one["text"] for one in both] == [TEXT, TEXT]


def test_a_broken_picture_has_a_status(served: FrontEnd) -> None:
    assert ask(served, "/read", b"no picture", EVENTS).status == 400


def test_max_tokens_reach_the_model(served: FrontEnd) -> None:
    ask(served, "/read?max_tokens=7", extra=EVENTS)
    assert served.door.calls[-1].head.options.custom == {"max_tokens": 7}
    ask(served, "/v1/chat/completions", chat(max_tokens=9), JSON)
    assert served.door.calls[-1].head.options.custom == {"max_tokens": 9, "prompt": "Read"}


# ── OpenAI's routes ──


@pytest.fixture
def client(served: FrontEnd) -> Iterator[openai.OpenAI]:
    import openai

    with openai.OpenAI(base_url=f"http://{served.url}/v1", api_key="none", max_retries=0) as found:
        yield found


def message(url: str = URL) -> Any:
    return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]


def test_openais_own_client(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="writer", messages=message(), temperature=0)
    assert answer.choices[0].message.content == TEXT
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3


def test_openais_own_client_streams(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="writer", messages=message(), stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    said = [one.choices[0].delta.content for one in chunks if one.choices and one.choices[0].delta.content]
    assert said == ["Red", " and", " blue…"]
    assert [one.choices[0].finish_reason for one in chunks if one.choices][-1] == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 3


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_are_those_that_the_engine_counted(stream: bool) -> None:
    timing = StepTiming(infer=0.01, batch=1, steps=(("encode", Timing()), ("write", Timing(batch=9))))
    with front_end(writer("counts", writes=True)) as found, found.connect() as client:
        found.door.held = True
        more = {"stream_options": {"include_usage": True}} if stream else {}
        body = chat(model="counts", stream=stream, **more)
        client.send(post("/v1/chat/completions", body, JSON))
        call = found.wait_for_call()

        def end() -> None:
            call.say({"text_output": [b"Red"], "finish_reason": [b"stop"]}, finish="stop", last=True)
            call.answered = True
            call.hears.done(Answer(timing=timing))

        found.run(end)
        response = client.response()
        document = events_of(response)[-2] if stream else json.loads(response.body)
        assert document["usage"]["completion_tokens"] == 9


def turn(url: str = URL) -> Any:
    parts = [{"type": "input_text", "text": "Read"}, {"type": "input_image", "image_url": url}]
    return [{"role": "user", "content": parts}]


def test_openais_own_client_asks_for_a_response(served: FrontEnd, client: openai.OpenAI) -> None:
    answer = client.responses.create(
        model="writer", input=turn(), instructions="Be brief.", max_output_tokens=9, temperature=0
    )
    assert (answer.output_text, answer.status, answer.error) == (TEXT, "completed", None)
    assert (answer.instructions, answer.max_output_tokens, answer.model) == ("Be brief.", 9, "writer")
    assert answer.usage is not None
    assert (answer.usage.output_tokens, answer.usage.total_tokens) == (3, 3)
    assert served.door.calls[-1].head.options.custom == {"max_tokens": 9, "prompt": "Be brief.\nRead"}


def test_openais_own_client_streams_a_response(client: openai.OpenAI) -> None:
    events = list(client.responses.create(model="writer", input=turn(), stream=True))
    assert [one.sequence_number for one in events] == list(range(len(events)))
    kinds = [one.type.removeprefix("response.") for one in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert "".join(one.delta for one in events if one.type == "response.output_text.delta") == TEXT
    ended = events[-1]
    assert ended.type == "response.completed"
    assert ended.response.output_text == TEXT
    with client.responses.stream(model="writer", input=turn()) as stream:  # gathers by the numbers of items
        assert stream.get_final_response().output_text == TEXT


def test_events_of_a_response_have_their_names(served: FrontEnd) -> None:
    body = json.dumps({"model": "writer", "input": turn(), "stream": True}).encode()
    lines = ask(served, "/v1/responses", body, JSON).body.split(b"\n")
    names = [line[7:].decode() for line in lines if line.startswith(b"event: ")]
    assert names == [json.loads(line[6:])["type"] for line in lines if line.startswith(b"data: ")]


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_that_was_cut_says_so(stream: bool) -> None:
    with front_end(writer()) as found, found.connect() as client:
        found.door.held = True
        client.send(
            post(
                "/v1/responses",
                json.dumps({"model": "writer", "input": turn(), "stream": stream}).encode(),
                JSON,
            )
        )
        call = found.wait_for_call()

        def end() -> None:
            call.say({"text_output": [b"Red"], "finish_reason": [b"length"]}, finish="length", last=True)
            call.answered = True
            call.hears.done(Answer(timing=Timing()))

        found.run(end)
        response = client.response()
        document = events_of(response)[-1]["response"] if stream else json.loads(response.body)
    assert (document["status"], document["incomplete_details"]) == (
        "incomplete",
        {"reason": "max_output_tokens"},
    )
    assert document["output"][0]["content"][0]["text"] == "Red"


def test_an_error_after_the_first_piece_of_a_response(served: FrontEnd) -> None:
    body = json.dumps({"model": "x_crash", "input": turn(), "stream": True}).encode()
    *_, error, failed = events_of(ask(served, "/v1/responses", body, JSON))
    assert (error["type"], failed["type"]) == ("error", "response.failed")
    assert "ValueError" in error["message"]
    assert failed["response"]["error"]["message"] == error["message"]
    assert failed["sequence_number"] == error["sequence_number"] + 1


def test_openais_own_client_lists_models(client: openai.OpenAI) -> None:
    import openai

    assert sorted(one.id for one in client.models.list()) == ["teller", "writer", "x_crash", "x_quiet"]
    assert client.models.retrieve("writer").id == "writer"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("finder")


def test_openais_own_client_hears_why(client: openai.OpenAI) -> None:
    import openai

    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="writer", messages=message(), n=2)
    assert refused.value.param == "n"
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model="writer", input=turn(), previous_response_id="resp_1")
    assert refused.value.param == "previous_response_id"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="finder", messages=message())
    with pytest.raises(openai.APIError, match="ValueError"):
        list(client.chat.completions.create(model="x_crash", messages=message(), stream=True))


def test_chunks_end_with_the_word_for_it(served: FrontEnd) -> None:
    found = events_of(ask(served, "/v1/chat/completions", chat(stream=True), JSON))
    assert found[-1] == b"[DONE]"
    assert len({one["id"] for one in found[:-1]}) == 1


@pytest.mark.parametrize(
    ("path", "body", "extra", "status", "param"),
    [
        ("/v1/chat/completions", chat(tools=[{}]), JSON, 400, "tools"),
        ("/v1/chat/completions", b"{", JSON, 400, "body"),
        ("/v1/chat/completions", b"[" * 5000, JSON, 400, "body"),
        ("/v1/chat/completions", chat(), b"Content-Type: text/plain\r\n", 400, "content-type"),
        ("/v1/chat/completions", chat(model="nobody"), JSON, 404, None),
        ("/v1/responses", b"{", JSON, 400, "body"),
        ("/v1/responses", b'{"model": "writer", "input": "What?"}', JSON, 400, "input"),
        ("/v1/responses", b'{"model": "writer", "tools": [{}]}', JSON, 400, "tools"),
        ("/v1/responses", b"{}", b"Content-Type: text/plain\r\n", 400, "content-type"),
        ("/v1/responses/resp_1", b"", JSON, 404, None),
        ("/v1/completions", b"{}", JSON, 404, None),
        ("/v1/models", b"{}", JSON, 405, None),
        ("/v1/chat/completions", chat().replace(URL.encode(), b"data:;base64,AAAA"), JSON, 400, None),
    ],
)
def test_refusals_in_openais_words(
    served: FrontEnd, path: str, body: bytes, extra: bytes, status: int, param: str | None
) -> None:
    response = ask(served, path, body, extra)
    error = json.loads(response.body)["error"]
    assert response.status == status
    assert set(error) >= {"message", "type", "param", "code"}
    if param is not None:
        assert error["param"] == param


def test_a_refusal_says_when_to_come_back() -> None:
    with front_end(writer()) as found:
        found.door.refusal = Refused("too much", predicted_ms=400.0, retry_after_s=2.0)
        response = ask(found, "/v1/chat/completions", chat(stream=True), JSON)
        assert (response.status, response.fields["retry-after"]) == (429, "2")
        assert json.loads(response.body)["error"]["type"] == "rate_limit_error"
        found.door.refusal = Unavailable("loading")
        assert ask(found, "/v1/chat/completions", chat(), JSON).status == 503


def test_keys_are_asked_for(tmp_path: Path) -> None:
    import openai

    keys = tmp_path / "keys"
    keys.write_text(f"bob {KEY} models=teller\n")
    keys.chmod(0o600)
    guard = Guard(api_key_file=keys)
    with front_end(writer(), writer("teller", "caption"), guard=guard) as found:
        response = ask(found, "/v1/chat/completions", chat(), JSON)
        assert response.status == 401
        assert json.loads(response.body)["error"]["type"] == "authentication_error"
        with openai.OpenAI(base_url=f"http://{found.url}/v1", api_key=KEY, max_retries=0) as client:
            assert [one.id for one in client.models.list()] == ["teller"]
            assert client.chat.completions.create(model="teller", messages=message()).choices
            with pytest.raises(openai.PermissionDeniedError):
                client.chat.completions.create(model="writer", messages=message())


def test_a_stream_ends_with_its_key(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"bob {KEY}\nalice {ALICE}\n")
    keys.chmod(0o600)
    guard = Guard(api_key_file=keys)
    with front_end(writer(), guard=guard) as found, found.connect() as bob, found.connect() as alice:
        found.door.held = True
        head = b"POST /read HTTP/1.1\r\nHost: a\r\nX-API-Key: %b\r\nContent-Length: %d\r\n%b\r\n"
        for client, key in ((bob, KEY), (alice, ALICE)):
            body = picture(RED)
            client.send(head % (key.encode(), len(body), EVENTS) + body)
        until(lambda: len(found.door.calls) == 2)
        alices, bobs = sorted(found.door.calls, key=lambda call: call.source)
        for client, call in ((bob, bobs), (alice, alices)):
            found.run(partial(call.say, {"text_output": [b"Red"]}))
            client.until(b"Red")
        keys.write_text(f"alice {ALICE}\n# bob {KEY}")
        found.run(guard.reload)
        assert not bobs.cancelled, "the file is half written"
        keys.write_text(f"alice {ALICE}\n")
        found.run(guard.reload)
        until(lambda: bobs.cancelled)
        assert not alices.cancelled
        found.run(lambda: alices.say({"text_output": [b"Blue"]}))
        alice.until(b"Blue")


# ── who reads slowly, and who leaves ──


@pytest.mark.parametrize("path", ["/read", "/v1/chat/completions", "/v1/responses"])
def test_a_client_that_leaves_cancels_its_call(path: str) -> None:
    asked = {"model": "writer", "input": turn(), "stream": True}
    others = {"/read": picture(RED), "/v1/responses": json.dumps(asked).encode()}
    body, extra = others.get(path, chat(stream=True)), EVENTS if path == "/read" else JSON
    with front_end(writer()) as found:
        found.door.held = True
        with found.connect() as client:
            head = b"POST %b HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n%b\r\n"
            client.send(head % (path.encode(), len(body), extra) + body)
            call = found.wait_for_call()
            found.run(lambda: call.say({"text_output": [b"Red"]}))
            client.until(b"Red")
        until(lambda: call.cancelled)
        found.until_slots_are_back()


def test_who_does_not_read_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "MOST_UNREAD", 4096)
    monkeypatch.setattr(sent_pictures, "MOST_WRITTEN", 1 << 30)
    with front_end(writer()) as found:
        found.door.held = True
        with Connection("127.0.0.1", found.server.port, receive_buffer=4096) as client:
            body = picture(RED)
            head = b"POST /read HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n%b\r\n"
            client.send(head % (len(body), EVENTS) + body)
            call = found.wait_for_call()
            long = {"text_output": [b"a" * 100_000]}
            for _ in range(1000):  # sockets take megabytes before they are full
                found.run(lambda: call.say(long))
                if call.cancelled:
                    break
            assert call.cancelled
        found.until_slots_are_back()


def test_a_model_that_never_ends_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sent_pictures, "MOST_WRITTEN", 8)
    with front_end(writer()) as found:
        response = ask(found, "/read")
        assert response.status == 500
        assert "more than 8" in error_of(response)["error"]


# ── carpool's own clients ──


def test_our_client_streams(served: FrontEnd) -> None:
    with Client(f"http://{served.url}") as client:
        with client.stream_text(picture(RED)) as pieces:
            assert list(pieces) == ["Red", " and", " blue…"]
            assert pieces.answer is not None
            assert (pieces.text, pieces.answer.finish_reason) == (TEXT, "stop")
        assert client.caption(picture(RED)).text == TEXT
        with client.stream_text(picture(RED), model="writer") as pieces:
            assert next(pieces) == "Red"
        with pytest.raises(ModelError):
            list(client.stream_text(picture(RED), model="x_crash"))
        with pytest.raises(InvalidInput):
            client.stream_text(b"no picture")


def test_our_other_client_streams(served: FrontEnd) -> None:
    async def read() -> tuple[list[str], str]:
        async with AsyncClient(f"http://{served.url}") as client:
            async with await client.stream_text(picture(RED)) as pieces:
                found = [piece async for piece in pieces]
            with pytest.raises(ModelError):
                [piece async for piece in await client.stream_text(picture(RED), model="x_crash")]
            with pytest.raises(InvalidInput):
                await client.stream_text(b"no picture")
            return found, (await client.caption(picture(RED))).text

    assert asyncio.run(read()) == (["Red", " and", " blue…"], TEXT)


# ── our own tools ──


@pytest.mark.parametrize("path", ["/read", "/v1/chat/completions"])
def test_the_load_generator_times_tokens(served: FrontEnd, tmp_path: Path, path: str) -> None:
    file = tmp_path / "a.jpg"
    file.write_bytes(picture(RED))
    options = ["--image", str(file), "--stream", "--model", "writer", "--concurrency", "2", "--requests", "6"]
    path += "?model=writer" if path == "/read" else ""
    done = run_cli(["load", f"http://{served.url}{path}", *options, "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert (found["answered"], found["failed"], found["tokens"]) == (6, {}, 18)
    assert found["first_token_ms"]["count"] == 6
    assert found["token_interval_ms"]["count"] == 12
    assert found["tokens_per_second"] > 0


def test_predict_prints_text_as_it_comes(served: FrontEnd, tmp_path: Path) -> None:
    file = tmp_path / "a.jpg"
    file.write_bytes(picture(RED))

    def run(*options: str) -> Any:
        return run_cli(["predict", str(file), "--url", f"http://{served.url}", "--stream", *options])

    assert run("--model", "writer").stdout == f"{TEXT}\n"
    broken = run("--model", "x_crash")
    assert (broken.exit_code, "ValueError" in broken.stderr) == (1, True)
    assert run("--task", "detect").exit_code == 2
