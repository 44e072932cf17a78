"""Drift through a whole server: pictures over HTTP, the route, the metrics, the command, and a restart."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from carpool.extensions.drift.engine import DriftBooks
from carpool.extensions.drift.kept_pictures import read_index
from cli_run import run_cli
from frontend.whole_server import WholeServer, whole_server
from waiting import until

PATIENCE_S = 60.0
NAME = "efficientnet_lite0"


@pytest.fixture(name="models", scope="module")
def watched_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / NAME
    with resources.as_file(resources.files("carpool.demo") / "models" / NAME) as demo:
        shutil.copytree(demo, folder)
    settings = folder / "model.toml"
    kept = json.dumps(str(folder.parent.parent / "kept"))
    drift = f"\n[drift]\nsample = 1.0\nuncertain = {{ folder = {kept}, margin = 1.0, per_hour = 2 }}\n"
    text = settings.read_text().replace("slo_ms = 250", "slo_ms = 60000")  # a busy machine keeps that, too
    text = text.replace("max_batch = 8", "max_batch = 1")  # the others would be measured, and never asked for
    settings.write_text(text + drift)
    return folder


@pytest.fixture(name="server", scope="module")
def running(models: Path) -> Iterator[WholeServer]:
    with whole_server(models, state_dir=models.parent.parent / "state") as server:
        yield server


def picture(name: str = "coffee") -> bytes:
    return (resources.files("carpool.demo") / "pictures" / f"{name}.jpg").read_bytes()


def ask(server: WholeServer, path: str, body: bytes | None = None, **headers: str) -> Any:
    request = Request(f"http://{server.url}{path}", body, headers)
    with urlopen(request, timeout=PATIENCE_S) as answer:
        text = answer.read()
    return json.loads(text) if text.startswith((b"{", b"[")) else text.decode()


def send(server: WholeServer, source: str = "door") -> None:
    ask(server, "/classify", picture(), **{"X-Carpool-Source": source, "Content-Type": "image/jpeg"})


def status(server: WholeServer) -> dict[str, Any]:
    found: dict[str, Any] = ask(server, f"/v2/models/{NAME}/drift")
    return found


def test_pictures_are_measured_judged_and_kept(server: WholeServer, models: Path) -> None:
    until(lambda: status(server)["window"]["pictures"] >= 3, work=lambda: send(server))
    document = status(server)
    assert document["reference"]["learning"]
    assert "learning its reference" in document["says"]
    assert [one["source"] for one in document["sources"]] == ["door"]
    measured = {line["what"] for line in document["measures"]}
    assert {"size", "brightness", "sharpness", "bytes", "classes", "score", "entropy"} <= measured
    until(lambda: 'carpool_camera_state{model="' + NAME in ask(server, "/metrics"), work=lambda: send(server))
    page = ask(server, "/metrics")
    assert f'carpool_camera_state{{model="{NAME}",source="door",state="black"}} 0' in page
    assert "carpool_drift_psi{" not in page  # nothing was judged yet
    kept = models.parent.parent / "kept"
    until(lambda: len(read_index(kept)) == 2, work=lambda: send(server))
    line = read_index(kept)[0]
    assert (line["why"], line["model"], line["source"]) == ("uncertain", NAME, "door")
    assert (kept / line["picture"]).read_bytes() == picture()
    counted = f'carpool_uncertain_kept_total{{model="{NAME}",version="1"}} 2'
    until(lambda: counted in ask(server, "/metrics"))  # it is counted once its line is written


@pytest.mark.conformance
def test_pictures_in_the_v2_protocol(server: WholeServer) -> None:
    data = [base64.b64encode(picture("chelsea")).decode()]
    image = {"name": "image", "shape": [1, 1], "datatype": "BYTES", "data": data}
    for outputs in ([{"name": "answer"}], []):
        body = {"inputs": [image], "outputs": outputs, "parameters": {"source": "v2"}}
        sent = json.dumps({key: value for key, value in body.items() if value}).encode()

        def seen() -> int:
            found = [one for one in status(server)["sources"] if one["source"] == "v2"]
            return int(found[0]["pictures"]) if found else 0

        before = seen()
        until(
            lambda before=before: seen() > before,
            work=lambda sent=sent: ask(server, f"/v2/models/{NAME}/infer", sent),
        )


def test_by_hand(server: WholeServer, tmp_path: Path) -> None:
    def drift(*arguments: str) -> Any:
        return run_cli(["drift", *arguments, "--url", server.url])

    until(lambda: status(server)["window"]["pictures"] >= 1, work=lambda: send(server))
    shown = drift("status", NAME)
    assert shown.exit_code == 0
    assert "learning its reference" in " ".join(shown.stdout.split())
    saved = tmp_path / "usual.json"
    assert drift("status", NAME, "--save", str(saved)).exit_code == 0
    assert json.loads(saved.read_text())["format"] == 1
    assert json.loads(drift("learn", NAME, "--hours", "1", "--json").stdout)["reference"]["learning"]
    assert drift("learn", NAME, "--hours", "0").exit_code == 1
    assert drift("learn", NAME, "--save", "x.json").exit_code == 2
    assert json.loads(drift("reset", NAME, "--json").stdout)["window"]["pictures"] == 0
    assert drift("status", "nobody").exit_code == 1


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"{}", 400, "action must be learn or reset"),
        (b'{"action": "forget"}', 400, "action must be"),
        (b'{"action": "learn", "hour": 2}', 400, "did you mean"),
        (b'{"action": "learn", "hours": "2"}', 400, "hours must be"),
        (b'{"action": "learn", "hours": true}', 400, "hours must be"),
        (b'{"action": "learn", "hours": 1e9}', 400, "hours must be"),
        (b"[1]", 400, ""),
    ],
)
def test_what_cannot_be_done(server: WholeServer, body: bytes, status: int, words: str) -> None:
    with pytest.raises(HTTPError) as refused:
        ask(server, f"/v2/models/{NAME}/drift", body, **{"Content-Type": "application/json"})
    assert refused.value.code == status
    assert words in json.loads(refused.value.read())["error"]


def test_it_goes_on_after_a_restart(models: Path, tmp_path: Path) -> None:
    with whole_server(models, state_dir=tmp_path) as server:
        until(lambda: status(server)["window"]["pictures"] >= 2, work=lambda: send(server))
    with whole_server(models, state_dir=tmp_path) as server:
        assert status(server)["window"]["pictures"] >= 2
    (file,) = (tmp_path / "drift").glob("*.json")
    file.write_bytes(b'{"format": 1, "ref')
    with whole_server(models, state_dir=tmp_path) as server:
        assert status(server)["window"]["pictures"] == 0
    assert file.with_suffix(".unreadable").is_file()


def test_a_model_that_is_not_watched(tmp_path: Path, models: Path) -> None:
    plain = tmp_path / NAME
    shutil.copytree(models, plain)
    settings = plain / "model.toml"
    settings.write_text(settings.read_text().partition("\n[drift]")[0])
    with whole_server(plain) as server:
        with pytest.raises(HTTPError) as refused:
            status(server)
        assert refused.value.code == 404
        assert "has no [drift]" in json.loads(refused.value.read())["error"]
        send(server)


def test_a_state_folder_that_cannot_be_written(tmp_path: Path) -> None:
    place = tmp_path / "file"
    place.write_text("no folder")
    books = DriftBooks(place)
    books.save()  # nothing is known yet
    assert place.read_text() == "no folder"
