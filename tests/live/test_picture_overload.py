"""Far more pictures than a model carries, over real sockets: the rest is refused before it is decoded."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from frontend.picture_models import picture
from live.server import LAYOUTS, PATIENCE_S, Live, error_of, serving
from waiting import until

# Slow enough that a busy machine makes no difference: whatever comes at once finds the same queue.
MODEL = """
backend = "fake"
task = "classify"
slo_ms = 2000
max_batch = 4
[fake]
curve = "800+20"
[image]
size = 64
[[input]]
name = "x"
datatype = "FP32"
shape = [3, 64, 64]
[[output]]
name = "y"
datatype = "FP32"
shape = [10]
"""
CLIENTS = 60
PICTURE = picture()


@pytest.fixture(scope="module", params=LAYOUTS)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("pictures")
    model = folder / "models" / "slow"
    model.mkdir(parents=True)
    (model / "model.toml").write_text(MODEL)
    with serving(folder / "models", frontends=request.param, folder=folder) as running:
        yield running


def at_once(server: Live) -> Counter[int]:
    """All clients have their picture read in the same moment."""
    seen: Counter[int] = Counter()
    lock = threading.Lock()
    together = threading.Barrier(CLIENTS)

    def client(_number: int) -> None:
        with server.connect() as one:
            together.wait(PATIENCE_S)
            response = one.post("/classify", PICTURE)
            if response.status != 200:
                assert response.status in (429, 504), response
                error_of(response, response.status)
            with lock:
                seen[response.status] += 1

    with ThreadPoolExecutor(CLIENTS) as pool:
        for done in [pool.submit(client, number) for number in range(CLIENTS)]:
            done.result(3 * PATIENCE_S)
    return seen


def test_who_is_refused_is_refused_before_it_is_decoded(server: Live) -> None:
    before = server.metric("carpool_decode_duration_seconds_count", model="slow")
    seen = at_once(server)
    assert seen.total() == CLIENTS
    assert 0 < seen[200] <= 16  # two or three batches of four fit into the promise
    decoded = server.metric("carpool_decode_duration_seconds_count", model="slow") - before
    assert seen[200] <= decoded <= seen[200] + 8  # a busy machine may lose a batch or two on the way
    server.until_metric(0, "nv_inference_pending_request_count", model="slow")
    with server.connect() as client:  # afterwards it serves as if nothing had been
        until(lambda: client.post("/classify", PICTURE).status == 200, "it serves again")
