"""Models that write, served: pictures of lines in, right text out, whoever leaves and whatever dies."""

from __future__ import annotations

import base64
import io
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import numpy as np
import orjson
import pytest
from PIL import Image

pytest.importorskip("torch")

from carpool.demo import text_model
from carpool.extensions.text.fake_stepper import fake_text
from carpool.extensions.torch.zygote_start import RUNNER_MODULE
from carpool.wire.event_lines import EventReader
from frontend.http.harness import Response, post
from live.server import NEEDS_CURL, Live, command, descendants, is_alive, serving
from waiting import until

TEXT = "Invoice 2041, due 17 May"
LINE = text_model() / "line.png"
EVENTS = b"Accept: text/event-stream\r\n"
TELLER = """
class Model:
    def predict(self, image):
        for word in ("a ", "grey ", "wall"):
            yield {"text_output": [[word]]}
"""
TELLER_SETTINGS = """
task = "caption"
decoupled = true
[[input]]
name = "image"
datatype = "UINT8"
shape = [3, 32, 32]
[[output]]
name = "text_output"
datatype = "BYTES"
shape = [1]
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("generation")
    models = folder / "models"
    shutil.copytree(text_model(), models / "reader")
    for name, step in (("writer", "2+0.01"), ("slow", "300+1")):
        (models / name).mkdir()
        (models / name / "model.toml").write_text(
            f'[generate]\nslots = 4\n[fake]\ncurve = "1+0.1"\nstep_curve = "{step}"\n'
        )
    teller = models / "teller" / "1"
    teller.mkdir(parents=True)
    (teller / "model.py").write_text(TELLER)
    (teller.parent / "model.toml").write_text(TELLER_SETTINGS)
    with serving(models, frontends=1, grpc=1, folder=folder) as running:
        yield running


def document(picture: Any, **parameters: Any) -> bytes:
    tensor = {"name": "image", "datatype": "UINT8", "shape": list(picture.shape)}
    return orjson.dumps({"inputs": [tensor | {"data": picture.ravel().tolist()}], "parameters": parameters})


def ask(server: Live, model: str, picture: Any, **parameters: Any) -> tuple[int, dict[str, Any]]:
    with server.connect() as client:
        response = client.post(f"/v2/models/{model}/infer", document(picture, **parameters))
    return response.status, orjson.loads(response.body)


def text_of(answer: dict[str, Any]) -> tuple[str, str]:
    found = {output["name"]: output["data"][0] for output in answer["outputs"]}
    return found["text_output"], found["finish_reason"]


def random_picture(seed: int) -> Any:
    return np.random.default_rng(seed).integers(0, 256, (1, 32, 64), dtype=np.uint8)


def png(seed: int) -> bytes:
    """What the fake model sees of it is what it was made of."""
    file = io.BytesIO()
    Image.fromarray(random_picture(seed)[0]).save(file, "png")
    return file.getvalue()


def send(server: Live, path: str, body: bytes, extra: bytes = b"") -> Response:
    with server.connect() as client:
        response = client.post(path, body, extra)
    assert response.status == 200, response
    return response


def events_of(response: Response) -> list[dict[str, Any]]:
    return [orjson.loads(one) for one in EventReader().feed(response.body)]


def written(server: Live, door: str, model: str, picture: bytes, **more: Any) -> tuple[str, str]:
    """Text and finish_reason, through one of the doors; of streams, all pieces together."""
    return DOORS[door](server, model, picture, more)


def _picture_route(server: Live, model: str, picture: bytes, more: dict[str, Any]) -> tuple[str, str]:
    query = "".join(f"&{name}={value}" for name, value in more.items())
    answer = orjson.loads(send(server, f"/read?model={model}{query}", picture).body)
    return answer["text"], answer["finish_reason"]


def _picture_events(server: Live, model: str, picture: bytes, more: dict[str, Any]) -> tuple[str, str]:
    query = "".join(f"&{name}={value}" for name, value in more.items())
    *pieces, last = events_of(send(server, f"/read?model={model}{query}", picture, EVENTS))
    assert [one["index"] for one in pieces] == list(range(len(pieces)))
    assert last["text"] == "".join(one["text"] for one in pieces)
    assert last["done"]
    return last["text"], last["finish_reason"]


def _generate(server: Live, model: str, picture: bytes, more: dict[str, Any]) -> tuple[str, str]:
    body = orjson.dumps({"image": base64.b64encode(picture).decode(), **more})
    answer = orjson.loads(send(server, f"/v2/models/{model}/generate", body).body)
    assert answer["model_name"] == model
    return answer["text_output"], answer["finish_reason"]


def _generate_stream(server: Live, model: str, picture: bytes, more: dict[str, Any]) -> tuple[str, str]:
    body = orjson.dumps({"image": base64.b64encode(picture).decode(), **more})
    found = events_of(send(server, f"/v2/models/{model}/generate_stream", body))
    return "".join(one["text_output"] for one in found), found[-1]["finish_reason"]


def chat(server: Live, model: str, picture: bytes, **more: Any) -> Any:
    import openai  # takes long, and every process of pytest imports this file

    url = "data:image/png;base64," + base64.b64encode(picture).decode()
    content = [{"type": "image_url", "image_url": {"url": url}}]
    client = openai.OpenAI(base_url=f"http://{server.url}/v1", api_key="none", max_retries=0)
    with client:
        said = client.chat.completions.create(
            model=model, messages=cast("Any", [{"role": "user", "content": content}]), **more
        )
        return list(said) if more.get("stream") else said


def _chat(server: Live, model: str, picture: bytes, more: dict[str, Any]) -> tuple[str, str]:
    choice = chat(server, model, picture, **more).choices[0]
    return choice.message.content, choice.finish_reason


def _chat_stream(server: Live, model: str, picture: bytes, more: dict[str, Any]) -> tuple[str, str]:
    choices = [chunk.choices[0] for chunk in chat(server, model, picture, stream=True, **more)]
    return "".join(choice.delta.content or "" for choice in choices), choices[-1].finish_reason


DOORS = {
    "read": _picture_route,
    "events": _picture_events,
    "generate": _generate,
    "generate_stream": _generate_stream,
    "chat": _chat,
    "chat stream": _chat_stream,
}


def runner_pids(server: Live) -> list[int]:
    below = descendants(server.pid)
    return [pid for pid in below if RUNNER_MODULE in command(pid) and is_alive(pid)]


def test_a_picture_of_a_line_is_read(server: Live) -> None:
    with server.connect() as client:
        response = client.post("/read?model=reader", (text_model() / "line.png").read_bytes())
    assert response.status == 200, response
    assert orjson.loads(response.body)["text"] == TEXT
    until(lambda: server.metric("carpool_text_tokens_total", model="reader") >= len(TEXT) + 1, "counted")


def test_usage_counts_tokens(server: Live) -> None:
    """Each letter of this model is one, and so is the end; a piece may have several."""
    line = LINE.read_bytes()
    assert chat(server, "reader", line).usage.completion_tokens == len(TEXT) + 1
    assert chat(server, "reader", line, max_tokens=3).usage.completion_tokens == 3
    *_, last = chat(server, "reader", line, stream=True, stream_options={"include_usage": True})
    assert last.usage.total_tokens == len(TEXT) + 1


def test_whole_texts_over_v2_are_those_of_each_picture(server: Live) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda seed: ask(server, "writer", random_picture(seed)), range(32)))
    for seed, (status, answer) in enumerate(answers):
        assert status == 200, answer
        assert text_of(answer) == (fake_text(random_picture(seed)).decode(), "stop")
    status, answer = ask(server, "writer", random_picture(1), max_tokens=3)
    assert status == 200
    assert text_of(answer) == (fake_text(random_picture(1)).decode()[:3], "length")


@pytest.mark.parametrize("door", DOORS)
def test_every_door_gives_the_same_text(server: Live, door: str) -> None:
    whole, reason = written(server, "read", "writer", png(7))
    assert whole
    assert reason == "stop"
    assert written(server, door, "writer", png(7)) == (whole, "stop")
    assert written(server, door, "writer", png(7), max_tokens=3) == (whole[:3], "length")


@pytest.mark.conformance
@pytest.mark.parametrize("door", DOORS)
def test_the_shipped_reader_through_every_door(server: Live, door: str) -> None:
    assert written(server, door, "reader", LINE.read_bytes()) == (TEXT, "stop")
    assert written(server, door, "reader", LINE.read_bytes(), max_tokens=3) == (TEXT[:3], "length")


@pytest.mark.parametrize(("most", "reason"), [(0, "stop"), (3, "length")])
def test_triton_clients_have_streams_with_an_end_and_whole_texts(
    server: Live, most: int, reason: str
) -> None:
    grpc = pytest.importorskip("tritonclient.grpc")
    picture, parameters = random_picture(4), {"max_tokens": most} if most else None
    text = fake_text(picture).decode()[: most or None]
    image = grpc.InferInput("image", list(picture.shape), "UINT8")
    image.set_data_from_numpy(picture)
    heard: queue.Queue[tuple[Any, Any]] = queue.Queue()
    client = grpc.InferenceServerClient(f"127.0.0.1:{server.grpc_port}")
    client.start_stream(lambda result, error: heard.put((result, error)))
    client.async_stream_infer("writer", [image], enable_empty_final_response=True, parameters=parameters)
    pieces, final = [], False
    while not final:
        result, error = heard.get(timeout=60)
        assert error is None, error
        final = result.get_response().parameters["triton_final_response"].bool_param
        pieces.append(result.as_numpy("text_output")[0].decode())
    assert "".join(pieces) == text
    assert len(pieces) >= len(text)
    assert result.as_numpy("finish_reason")[0] == reason.encode()
    client.stop_stream()
    whole = client.infer("writer", [image], parameters=parameters)
    assert whole.as_numpy("text_output")[0].decode() == text
    assert whole.as_numpy("finish_reason")[0] == reason.encode()
    client.close()


def test_tensors_through_generate(server: Live) -> None:
    picture = random_picture(9)
    text = fake_text(picture).decode()
    body = orjson.dumps({"image": picture.ravel().tolist(), "id": "7"})
    answer = orjson.loads(send(server, "/v2/models/writer/generate", body).body)
    assert (answer["text_output"], answer["finish_reason"], answer["id"]) == (text, "stop", "7")
    found = events_of(send(server, "/v2/models/writer/generate_stream", body))
    assert "".join(one["text_output"] for one in found) == text


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        ({"image": "not so!"}, "base64"),
        ({"image": ""}, "no image"),
        ({"image": base64.b64encode(b"no picture").decode()}, "not an image"),
        ({"image": base64.b64encode(png(1)).decode(), "max_tokens": 0}, "max_tokens"),
        ({"image": base64.b64encode(png(1)).decode(), "max_tokens": 1.5}, "max_tokens"),
        ({"image": base64.b64encode(png(1)).decode(), "max_tokens": 1e308}, "max_tokens"),
        ({"image": base64.b64encode(png(1)).decode(), "parameters": 3}, "parameters"),
        (b'{"image": "%b", "max_tokens": NaN}' % base64.b64encode(png(1)), "NaN"),
        (b'{"image": "%b", "max_tokens": %d}' % (base64.b64encode(png(1)), 1 << 70), "max_tokens"),
        ({"image": [1, 2, 3]}, "image"),
        ({}, "image"),
        ([], "object"),
    ],
)
@pytest.mark.parametrize("route", ["generate", "generate_stream"])
def test_what_generate_cannot_read(server: Live, route: str, sent: Any, said: str) -> None:
    with server.connect() as client:
        response = client.post(
            f"/v2/models/writer/{route}", sent if isinstance(sent, bytes) else orjson.dumps(sent)
        )
    assert response.status in (400, 415, 422), response
    assert said in orjson.loads(response.body)["error"]


def test_a_python_model_that_yields_text(server: Live) -> None:
    assert orjson.loads(send(server, "/caption", png(1)).body)["text"] == "a grey wall"
    *pieces, last = events_of(send(server, "/caption", png(1), EVENTS))
    assert [one["text"] for one in pieces] == ["a ", "grey ", "wall"]
    assert (last["text"], last["finish_reason"]) == ("a grey wall", "stop")
    for door in ("chat", "chat stream", "generate", "generate_stream"):
        assert written(server, door, "teller", png(1)) == ("a grey wall", "stop"), door


@pytest.mark.parametrize(
    ("picture", "parameters", "said"),
    [
        (np.zeros((1, 31, 64), np.uint8), {}, "shape"),
        (np.zeros((1, 32, 60), np.uint8), {}, "image"),
        (np.zeros((1, 32, 1024), np.uint8), {}, "image"),
        (np.zeros((1, 32, 64), np.uint8), {"max_tokens": 0}, "max_tokens"),
        (np.zeros((1, 32, 64), np.uint8), {"max_tokens": "many"}, "max_tokens"),
    ],
)
def test_what_cannot_be_read_is_a_400(server: Live, picture: Any, parameters: Any, said: str) -> None:
    status, answer = ask(server, "reader", picture, **parameters)
    assert status == 400, answer
    assert said in answer["error"]


def test_clients_that_leave_free_their_slots(server: Live) -> None:
    for seed in range(12):
        client = server.connect()
        client.send(post("/v2/models/writer/infer", document(random_picture(seed))))
        client.reset()
    status, answer = ask(server, "writer", random_picture(50))
    assert status == 200, answer
    until(lambda: server.metric("carpool_text_slots", model="writer", state="used") == 0, "free slots")


def test_who_leaves_in_mid_stream_frees_its_slot(server: Live) -> None:
    """Each step takes so long that a text is far from its end when its first piece is there."""
    image = base64.b64encode(png(7)).decode()
    url = f"data:image/png;base64,{image}"
    message = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}
    asked = {
        "/read?model=slow&stream=1": png(7),
        "/v2/models/slow/generate_stream": orjson.dumps({"image": image}),
        "/v1/chat/completions": orjson.dumps({"model": "slow", "messages": [message], "stream": True}),
    }

    def used() -> float:
        return server.metric("carpool_text_slots", model="slow", state="used")

    whole, _ = written(server, "read", "writer", png(7))
    for path, body in asked.items():
        client = server.connect()
        client.send(post(path, body))
        client.until(b"data: ")
        assert used() == 1
        client.reset()
        until(lambda: used() == 0, path)
    assert server.metric("carpool_text_tokens_total", model="slow") < len(asked) * len(whole)


def run_carpool(*arguments: str) -> str:
    code = "import sys; from carpool.cli.main import main; sys.argv[0] = 'carpool'; main()"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, *arguments], capture_output=True, timeout=120, check=False
    )
    assert done.returncode == 0, done
    return done.stdout.decode()


@pytest.mark.conformance
def test_the_commands_that_stream(server: Live) -> None:
    said = run_carpool(
        *("predict", str(LINE), "--task", "read", "--model", "reader"),
        *("--stream", "--url", f"http://{server.url}"),
    )
    assert TEXT in said


@pytest.mark.conformance
@pytest.mark.parametrize(
    "path", ["/read", "/generate_stream", "/v2/models/writer/generate_stream", "/v1/chat/completions"]
)
def test_load_times_the_pieces_of_every_stream(server: Live, path: str) -> None:
    which = () if path.startswith(("/v2", "/read")) else ("--model", "writer")
    if path == "/read":
        path += "?model=writer"
    said = run_carpool(
        *("load", f"http://{server.url}{path}", *which, "--image", str(LINE), "--stream"),
        *("--concurrency", "2", "--requests", "6", "--json"),
    )
    report = json.loads(said)
    assert (report["answered"], report["failed"], report["refused"]) == (6, {}, {})
    assert report["tokens"] >= 6, report
    assert report["first_token_ms"]["p50"] > 0


@pytest.mark.conformance
@NEEDS_CURL
def test_curl(server: Live) -> None:
    command = ["curl", "-sN", "-H", "Accept: text/event-stream", "--data-binary", f"@{LINE}"]
    said = subprocess.run(
        [*command, f"http://{server.url}/read?model=reader"], capture_output=True, check=True, timeout=60
    )
    found = [orjson.loads(one) for one in EventReader().feed(said.stdout)]
    assert "".join(one["text"] for one in found[:-1]) == found[-1]["text"] == TEXT


@pytest.mark.conformance
def test_the_demo_reads_its_line() -> None:
    assert TEXT in run_carpool("demo", "reader")


@pytest.mark.conformance
def test_tokens_are_those_of_one_line_after_the_other(server: Live) -> None:
    """In slots, with neighbours, and with a cache; and alone, without one, in the same precision."""
    import torch

    from carpool.extensions.text import line_reader
    from carpool.extensions.text.text_network import read_line_reader

    network = read_line_reader(text_model() / "1" / "model.safetensors").eval()
    lines = _lines(("Total 207.15", "Gate B4", "quite a lot of words in one line", "x = 3?", "#17 & £9"))

    @torch.no_grad()
    def alone(picture: Any) -> str:
        encoded = network.encode(torch.from_numpy(picture)[None].float() / 255)
        tokens = [line_reader.END]
        while len(tokens) <= line_reader.LONGEST and (len(tokens) == 1 or tokens[-1] != line_reader.END):
            tokens.append(int(network.write(encoded, torch.tensor([tokens]))[0, -1].argmax()))
        return line_reader.text_of(tokens[1:])

    with ThreadPoolExecutor(len(lines)) as pool:
        answers = list(pool.map(lambda picture: ask(server, "reader", picture), lines))
    for picture, (status, answer) in zip(lines, answers, strict=True):
        assert status == 200, answer
        assert text_of(answer)[0] == alone(picture)


def _lines(texts: Sequence[str]) -> list[Any]:
    from PIL import ImageDraw, ImageFont

    found = []
    for text in texts:
        font = ImageFont.load_default(22)
        width = min(512, -(-int(font.getlength(text) + 8) // 8) * 8)
        image = Image.new("L", (width, 32), 240)
        ImageDraw.Draw(image).text((4, 3), text, 20, font)
        found.append(np.array(image)[None])
    return found


@pytest.mark.conformance
def test_a_runner_that_is_killed_costs_its_riders_one_error_and_comes_back(server: Live) -> None:
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(ask, server, "reader", np.full((1, 32, 512), 250, np.uint8)) for _ in range(4)]
        for pid in runner_pids(server):
            os.kill(pid, signal.SIGKILL)
        for answer in asked:
            status, said = answer.result()
            assert status in (200, 500, 503), said
    until(lambda: ask(server, "reader", np.full((1, 32, 64), 250, np.uint8))[0] == 200, "a new one")
    with server.connect() as client:
        response = client.post("/read?model=reader", Path(text_model() / "line.png").read_bytes())
    assert orjson.loads(response.body)["text"] == TEXT


@pytest.mark.conformance
def test_pools_in_the_runner(tmp_path: Path) -> None:
    """One encoder and two decoders: texts, clients that leave, and a process that is killed."""
    models = tmp_path / "models"
    shutil.copytree(text_model(), models / "reader")
    with (models / "reader" / "model.toml").open("a") as file:
        file.write("slots = 2\n[encoder]\n[decoder]\ninstances = 2\n")
    line = LINE.read_bytes()
    with serving(models, frontends=1, folder=tmp_path) as server:

        def read(_: int = 0) -> tuple[int, str]:
            with server.connect() as client:
                response = client.post("/read", line)
            return response.status, orjson.loads(response.body).get("text", "")

        def slots(state: str) -> float:
            return server.metric("carpool_text_slots", model="reader", state=state)

        with server.connect() as client:
            profile = orjson.loads(client.get("/v2/models/reader/profile").body)
        assert (profile["encoders"], profile["decoders"], slots("free")) == (1, 2, 4)
        with ThreadPoolExecutor(8) as pool:
            assert set(pool.map(read, range(24))) == {(200, TEXT)}
            for _ in range(6):
                client = server.connect()
                client.send(post("/read?stream=1", line))
                client.until(b"data: ")
                client.reset()
            until(lambda: slots("used") == 0, "free slots")
            asked = [pool.submit(read) for _ in range(8)]
            for pid in runner_pids(server):
                os.kill(pid, signal.SIGKILL)
            assert {answer.result()[0] for answer in asked} <= {200, 500, 503}
        until(lambda: read() == (200, TEXT), "a new runner")
        assert slots("free") == 4
