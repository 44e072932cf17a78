"""Clients' shared memory over HTTP: Triton's own client and helpers, and clients that mean no good."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import tritonclient.utils.shared_memory as shm
from tritonclient.http import InferenceServerClient, InferInput, InferRequestedOutput
from tritonclient.utils import InferenceServerException, serialize_byte_tensor

from carpool.engine.control.engine_questions import ClientRegions
from carpool.frontend.access.guard import Guard
from carpool.frontend.calls import client_memory
from carpool.memory.client_files import OpenRegion
from doc_pages import part_of
from frontend.access.key_files import ALICE, BOB, write
from frontend.client_files import ClientFile, client_file
from frontend.fake_host import FakeHost
from frontend.http.front_end import IMAGE, FrontEnd, error_of, front_end, infer, infer_body
from frontend.http.harness import PATIENCE, Client, post

SUM = [[15.0, 1.0, 2.0, 3.0]]


def allow(front: FrontEnd, allowed: bool = True) -> FrontEnd:
    def teach() -> None:
        host: Any = FakeHost(front.door)
        ClientRegions(host, allowed=allowed)
        host.publish()

    front.run(teach)
    return front


@pytest.fixture(scope="module")
def running() -> Iterator[FrontEnd]:
    with front_end() as front:
        yield allow(front)


@pytest.fixture
def front(running: FrontEnd) -> Iterator[FrontEnd]:
    yield running
    with InferenceServerClient(running.url) as client:
        client.unregister_system_shared_memory()
    running.door.calls.clear()


@pytest.fixture
def client(front: FrontEnd) -> Iterator[InferenceServerClient]:
    with InferenceServerClient(front.url, concurrency=4) as connected:
        yield connected


def key_of(name: str) -> str:
    """Of this process: tests may run side by side."""
    return f"/carpool-test-{os.getpid()}-{name}"


@contextlib.contextmanager
def region(client: InferenceServerClient, name: str, size: int) -> Iterator[Any]:
    handle = shm.create_shared_memory_region(name, key_of(name), size)
    try:
        client.register_system_shared_memory(name, key_of(name), size)
        yield handle
    finally:
        shm.destroy_shared_memory_region(handle)


def image_in(name: str, images: int = 1, offset: int = 0) -> InferInput:
    tensor = InferInput("image", [images, 2, 3], "UINT8")
    return tensor.set_shared_memory(name, 6 * images, offset)


def wanted(output: str, name: str, size: int, offset: int = 0) -> InferRequestedOutput:
    requested = InferRequestedOutput(output)
    requested.set_shared_memory(name, size, offset)
    return requested


# ── the client's own way ──


def test_inputs_and_outputs_in_regions(client: InferenceServerClient) -> None:
    with region(client, "in", 6) as given, region(client, "out", 32) as taken:
        shm.set_shared_memory_region(given, [IMAGE])
        result = client.infer("image", [image_in("in")], outputs=[wanted("scores", "out", 20, 4)])
        assert result.get_output("scores") == {
            "name": "scores",
            "datatype": "FP32",
            "shape": [1, 4],
            "parameters": {
                "shared_memory_region": "out",
                "shared_memory_byte_size": 16,
                "shared_memory_offset": 4,
                "binary_data_size": 0,
            },
        }
        assert shm.get_contents_as_numpy(taken, np.float32, [1, 4], 4).tolist() == SUM


def test_only_some_of_it_in_regions(client: InferenceServerClient) -> None:
    numbers = np.arange(3, dtype=np.int32)[np.newaxis]
    with region(client, "a", 12) as given, region(client, "sum", 12) as taken:
        shm.set_shared_memory_region(given, [numbers])
        a = InferInput("a", [1, 3], "INT32").set_shared_memory("a", 12)
        for binary in (True, False):
            b = InferInput("b", [1, 3], "INT32")
            b.set_data_from_numpy(10 * numbers, binary_data=binary)
            outputs = [InferRequestedOutput("difference", binary_data=binary), wanted("sum", "sum", 12)]
            for inputs in ([a, b], [b, a]):
                result = client.infer("pair", inputs, outputs=outputs)
                assert result.as_numpy("difference").tolist() == (-9 * numbers).tolist()
                assert shm.get_contents_as_numpy(taken, np.int32, [1, 3]).tolist() == (11 * numbers).tolist()
                taken._mpsm_handle.buf[:] = bytes(len(taken._mpsm_handle.buf))


def test_only_outputs_in_regions(client: InferenceServerClient) -> None:
    image = InferInput("image", [1, 2, 3], "UINT8")
    with region(client, "out", 16) as taken:
        for binary in (True, False):
            image.set_data_from_numpy(IMAGE, binary_data=binary)
            client.infer("image", [image], outputs=[wanted("scores", "out", 16)], request_id="7")
            assert shm.get_contents_as_numpy(taken, np.float32, [1, 4]).tolist() == SUM
            taken._mpsm_handle.buf[:16] = bytes(16)


def test_strings(client: InferenceServerClient) -> None:
    words = np.array([[b"", b"caf\xc3\xa9", b"x" * 300]], object)
    packed = serialize_byte_tensor(words)
    size = len(packed.item())
    with region(client, "in", size) as given, region(client, "out", 400) as taken:
        shm.set_shared_memory_region(given, [packed])
        text = InferInput("x", [1, 3], "BYTES").set_shared_memory("in", size)
        result = client.infer("echo-BYTES", [text], outputs=[wanted("y", "out", 400)])
        assert result.get_output("y")["parameters"]["shared_memory_byte_size"] == size
        assert shm.get_contents_as_numpy(taken, np.object_, [1, 3]).tolist() == words.tolist()


def test_many_requests_over_one_region(client: InferenceServerClient) -> None:
    with region(client, "in", 6 * 40) as given, region(client, "out", 16 * 40) as taken:
        images = np.arange(240, dtype=np.uint8).reshape(40, 2, 3)
        shm.set_shared_memory_region(given, [images])
        asked = [
            client.async_infer(
                "image", [image_in("in", 1, 6 * i)], outputs=[wanted("scores", "out", 16, 16 * i)]
            )
            for i in range(40)
        ]
        for answer in asked:
            answer.get_result()
        found = shm.get_contents_as_numpy(taken, np.float32, [40, 4])
        assert found[:, 0].tolist() == images.reshape(40, -1).sum(1).tolist()


def test_status(client: InferenceServerClient) -> None:
    assert client.get_system_shared_memory_status() == []
    with region(client, "in", 6), region(client, "out", 32):
        line = {"name": "in", "key": key_of("in"), "offset": 0, "byte_size": 6}
        assert client.get_system_shared_memory_status("in") == [line]
        assert [line["name"] for line in client.get_system_shared_memory_status()] == ["in", "out"]
        client.unregister_system_shared_memory("in")
        with pytest.raises(
            InferenceServerException, match="Unable to find system shared memory region: 'in'"
        ) as raised:
            client.get_system_shared_memory_status("in")
        assert raised.value.status() == "404"


def test_wrong_registrations(client: InferenceServerClient) -> None:
    with region(client, "in", 6):
        for name, key, size in (
            ("in", key_of("in"), 6),
            ("x", "/none", 6),
            ("x", key_of("in"), 1 << 40),
        ):
            with pytest.raises(InferenceServerException) as raised:
                client.register_system_shared_memory(name, key, size)
            assert raised.value.status() == "400"
    for body in (b"[]", b"{", b'{"key": {}}', b""):
        with front_client(client) as plain:
            assert plain.post("/v2/systemsharedmemory/region/x/register", body).status == 400


@contextlib.contextmanager
def front_client(client: InferenceServerClient) -> Iterator[Client]:
    host, port = client._parsed_url.host, client._parsed_url.port
    with Client(host, port) as plain:
        yield plain


def test_cuda_memory_is_not_there(client: InferenceServerClient) -> None:
    assert client.get_cuda_shared_memory_status() == []
    client.unregister_cuda_shared_memory()
    with pytest.raises(InferenceServerException, match="CUDA shared memory is not offered") as raised:
        client.register_cuda_shared_memory("r", b"handle", 0, 8)
    assert raised.value.status() == "501"
    assert "cuda_shared_memory" not in client.get_server_metadata()["extensions"]
    assert "system_shared_memory" in client.get_server_metadata()["extensions"]


def test_nothing_is_allowed_unless_the_server_says_so() -> None:
    with front_end() as closed, InferenceServerClient(closed.url) as client:
        allow(closed, allowed=False)
        client.unregister_system_shared_memory()  # as perf_analyzer does at its start
        assert client.get_system_shared_memory_status() == []
        assert "system_shared_memory" not in client.get_server_metadata()["extensions"]
        calls = [
            lambda: client.register_system_shared_memory("r", "/k", 8),
            lambda: client.infer("image", [image_in("r")]),
        ]
        for call in calls:
            with pytest.raises(InferenceServerException, match="--allow-client-shm") as raised:
                call()
            assert raised.value.status() == "501"


# ── trouble ──


def in_file(offset: int = 0, name: str = "r", size: int = 6) -> dict[str, Any]:
    place = {
        "shared_memory_region": name,
        "shared_memory_byte_size": size,
        "shared_memory_offset": offset,
    }
    return {"name": "image", "datatype": "UINT8", "shape": [size // 6, 2, 3], "parameters": place}


def out_file(size: int, offset: int = 0) -> dict[str, Any]:
    place = {"shared_memory_region": "r", "shared_memory_byte_size": size, "shared_memory_offset": offset}
    return {"name": "scores", "parameters": place}


@pytest.fixture
def file(front: FrontEnd) -> Iterator[ClientFile]:
    with client_file(IMAGE.tobytes() + bytes(26)) as made:
        register(front, made)
        yield made


def register(front: FrontEnd, file: ClientFile, name: str = "r") -> None:
    asked = orjson.dumps({"key": file.key, "byte_size": 32})
    with front.connect() as plain:
        assert plain.post(f"/v2/systemsharedmemory/region/{name}/register", asked).status == 200


def unregister(front: FrontEnd, name: str = "r") -> None:
    with front.connect() as plain:
        assert plain.post(f"/v2/systemsharedmemory/region/{name}/unregister", b"").status == 200


def test_places_beyond_the_region(front: FrontEnd, file: ClientFile) -> None:
    with front.connect() as plain:
        for offset in (27, 32, 2**62, 2**63, 2**64 - 1):
            response = infer(plain, "image", infer_body([in_file(offset)]))
            assert response.status == 400
            assert error_of(response)["reason"] == "invalid-input"
        response = infer(plain, "image", infer_body([in_file()], outputs=[out_file(16, 17)]))
        assert "'scores' takes 16 bytes from 17 on" in error_of(response)["error"]
        assert not front.door.calls
        assert infer(plain, "image", infer_body([in_file()])).status == 200


def test_an_output_without_room_names_the_bytes_it_needs(front: FrontEnd, file: ClientFile) -> None:
    with front.connect() as plain:
        response = infer(plain, "image", infer_body([in_file()], outputs=[out_file(15, 6)]))
        assert response.status == 400
        assert "should be at least 16 bytes to hold the results" in error_of(response)["error"]
        assert "queue;dur" in response.fields["server-timing"]
        assert infer(plain, "image", infer_body([in_file()], outputs=[out_file(16, 6)])).status == 200


def test_a_region_that_shrinks(front: FrontEnd, file: ClientFile) -> None:
    """Neighbours that use others are not concerned."""
    with client_file(file.read()) as other, front.connect() as plain:
        register(front, other, "other")
        for size, status in ((6, 200), (5, 400), (0, 400)):
            file.shrink(size)
            response = infer(plain, "image", infer_body([in_file()]))
            assert response.status == status
            assert infer(plain, "image", infer_body([in_file(name="other")])).status == 200
        assert "has shrunk: 0 of 6 bytes" in error_of(response)["error"]


def test_a_region_that_shrinks_while_the_model_runs(front: FrontEnd, file: ClientFile) -> None:
    front.door.held = True
    with front.connect() as plain:
        body, _ = infer_body([in_file()], outputs=[out_file(16, 6)])
        plain.send(post("/v2/models/image/infer", body))
        call = front.wait_for_call()
        file.shrink(6)
        front.door.held = False
        front.run(call.finish)
        response = plain.response()
        assert response.status == 400
        assert "no room for 16 bytes" in error_of(response)["error"]
        assert len(file.read()) == 6


@pytest.mark.parametrize("removed", [True, False])
def test_unregistering_while_the_model_runs(front: FrontEnd, file: ClientFile, removed: bool) -> None:
    front.door.held = True
    with front.connect() as plain:
        body, _ = infer_body([in_file()], outputs=[out_file(16, 6)])
        plain.send(post("/v2/models/image/infer", body))
        call = front.wait_for_call()
        unregister(front)
        held = file.path.open("rb")
        if removed:
            file.path.unlink()
        front.door.held = False
        front.run(call.finish)
        assert plain.response().status == 200
        with held:
            assert np.frombuffer(held.read()[6:22], np.float32).tolist() == SUM[0]
        response = infer(plain, "image", infer_body([in_file()]))
        assert "Unable to find shared memory region: 'r'" in error_of(response)["error"]
        assert front.run(file.descriptors) == 0


def test_too_much_for_one_request(front: FrontEnd) -> None:
    with client_file(bytes(2 << 20)) as file, front.connect() as plain:
        asked = orjson.dumps({"key": file.key, "byte_size": 2 << 20})
        assert plain.post("/v2/systemsharedmemory/region/r/register", asked).status == 200
        tensor = {**in_file(size=2 << 20), "name": "x", "shape": [1, 2 << 20]}
        assert infer(plain, "echo-UINT8", infer_body([tensor])).status == 413


# ── in threads ──


LONG = {"custom": "what is known of a head is kept: these are others"}


@pytest.fixture
def all_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_memory, "_AT_ONCE", 0)


@pytest.mark.interpreted
@pytest.mark.usefixtures("all_is_long")
def test_long_copies_are_made_in_a_thread(
    front: FrontEnd, file: ClientFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = []
    for method in ("read", "write"):
        copy = getattr(OpenRegion, method)

        def noted(*arguments: Any, copy: Any = copy) -> None:
            names.append(threading.current_thread().name)
            copy(*arguments)

        monkeypatch.setattr(OpenRegion, method, noted)
    with front.connect() as plain:
        response = infer(plain, "image", infer_body([in_file()], parameters=LONG, outputs=[out_file(16, 6)]))
        assert response.status == 200
        assert np.frombuffer(file.read()[6:22], np.float32).tolist() == SUM[0]
        too_small = infer(plain, "image", infer_body([in_file()], parameters=LONG, outputs=[out_file(15, 6)]))
        assert too_small.status == 400
    assert len(names) == 3
    assert all(name.startswith("http") for name in names)


@pytest.mark.interpreted
@pytest.mark.usefixtures("all_is_long")
def test_a_client_that_leaves_during_the_copy(
    front: FrontEnd, file: ClientFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slot is given back when the thread is done with it, and not before."""
    begun, go_on = threading.Event(), threading.Event()
    copy = OpenRegion.read

    def slow(self: OpenRegion, *arguments: Any) -> None:
        begun.set()
        assert go_on.wait(PATIENCE)
        copy(self, *arguments)

    monkeypatch.setattr(OpenRegion, "read", slow)
    plain = front.connect()
    plain.send(post("/v2/models/image/infer", infer_body([in_file()], parameters=LONG)[0]))
    assert begun.wait(PATIENCE)
    plain.reset()
    front.server.until_connections(0)
    assert front.run(lambda: len(front.door.slots_in_use)) == 1
    go_on.set()
    front.until_slots_are_back()
    assert not front.door.calls


@pytest.mark.interpreted
@pytest.mark.usefixtures("all_is_long")
def test_a_client_that_leaves_while_its_answer_is_written(
    front: FrontEnd, file: ClientFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    copy = OpenRegion.write

    def slow(self: OpenRegion, *arguments: Any) -> None:
        begun.set()
        assert go_on.wait(PATIENCE)
        copy(self, *arguments)

    monkeypatch.setattr(OpenRegion, "write", slow)
    plain = front.connect()
    plain.send(
        post("/v2/models/image/infer", infer_body([in_file()], parameters=LONG, outputs=[out_file(16, 6)])[0])
    )
    assert begun.wait(PATIENCE)
    plain.reset()
    front.server.until_connections(0)
    assert front.run(lambda: len(front.door.slots_in_use)) == 1
    go_on.set()
    front.until_slots_are_back()


def test_the_example_in_the_documentation(front: FrontEnd, capsys: pytest.CaptureFixture[str]) -> None:
    text = part_of("protocols.md", "Shared memory")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    code = code.replace("/frames", f"/carpool-test-{os.getpid()}-frames").replace(
        "/scores", f"/carpool-test-{os.getpid()}-scores"
    )
    exec(code.replace("localhost:8000", front.url), {})
    assert capsys.readouterr().out == "[[15.  1.  2.  3.]]\n"


def test_each_key_has_its_own_regions(tmp_path: Path) -> None:
    guard = Guard(api_key_file=write(tmp_path / "keys", f"alice {ALICE}\nbob {BOB} models=-\n"))
    with (
        front_end(guard=guard) as running,
        client_file(bytes(64)) as file,
        allow(running).connect() as client,
    ):

        def ask(key: str, path: str, document: Any = None) -> Any:
            extra = b"X-API-Key: %b\r\n" % key.encode()
            path = f"/v2/systemsharedmemory{path}"
            body = orjson.dumps(document or {})
            sent = client.get(path, extra) if path.endswith("status") else client.post(path, body, extra)
            return orjson.loads(sent.body) if sent.body else sent.status

        ask(ALICE, "/region/in/register", {"key": file.key, "offset": 0, "byte_size": 64})
        assert [region["name"] for region in ask(ALICE, "/status")] == ["in"]
        assert ask(BOB, "/status") == []
        assert "Unable to find" in ask(BOB, "/region/in/status")["error"]
        for path in ("/region/in/unregister", "/unregister"):
            ask(BOB, path)
        assert len(ask(ALICE, "/status")) == 1
        ask(ALICE, "/unregister")
        assert ask(ALICE, "/status") == []
