"""Tensors in a client's shared memory, over gRPC with Triton's own client."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from tritonclient.grpc import InferenceServerClient, InferInput, InferRequestedOutput
from tritonclient.utils import InferenceServerException
from tritonclient.utils import shared_memory as shm

from carpool.link.catalog import PublishedServer
from carpool.memory.client_files import EXTENSION, Region
from carpool.types import Datatype
from frontend.fake_door import echo
from frontend.grpc.front_end import FrontEnd, front_end
from frontend.http.front_end import IMAGE, models

LONG = 6 << 20  # copied by a thread
KEY = f"carpool-test-{os.getpid()}-grpc"


@pytest.fixture(scope="module")
def front() -> Iterator[FrontEnd]:
    with front_end(*models(), echo("long", Datatype.UINT8), max_body_bytes=2 * LONG) as running:
        yield running


@contextmanager
def region(front: FrontEnd, size: int) -> Iterator[shm.SharedMemoryRegion]:
    """One of that size, which the catalogue names `r`."""
    made = shm.create_shared_memory_region("r", f"/{KEY}", size)
    inode = (Path("/dev/shm") / KEY).stat().st_ino
    named = {"r": Region(1, "r", f"/{KEY}", 0, size, inode=inode)}
    front.run(lambda: front.door.renew(regions=named, server=PublishedServer(extensions=(EXTENSION,))))
    try:
        yield made
    finally:
        front.run(lambda: front.door.renew(regions={}, server=PublishedServer()))
        shm.destroy_shared_memory_region(made)


@pytest.fixture
def client(front: FrontEnd) -> Iterator[InferenceServerClient]:
    with InferenceServerClient(front.url) as connected:
        yield connected


def test_inputs_and_outputs_in_a_region(front: FrontEnd, client: InferenceServerClient) -> None:
    with region(front, 64) as made:
        shm.set_shared_memory_region(made, [IMAGE])
        image = InferInput("image", [1, 2, 3], "UINT8")
        image.set_shared_memory("r", IMAGE.nbytes)
        scores = InferRequestedOutput("scores")
        scores.set_shared_memory("r", 16, offset=16)
        for _ in range(3):
            result = client.infer("image", [image], outputs=[scores])
            assert shm.get_contents_as_numpy(made, np.float32, [1, 4], offset=16).tolist() == [[15, 1, 2, 3]]
        output = result.get_output("scores")
        assert (output.datatype, list(output.shape)) == ("FP32", [1, 4])
        assert output.parameters["shared_memory_region"].string_param == "r"
        assert output.parameters["shared_memory_byte_size"].int64_param == 16
        assert output.parameters["shared_memory_offset"].int64_param == 16
        heads = {id(call.head.inputs) for call in front.door.calls[-3:]}
        assert len(heads) == 1, "the link would not know them again"
    front.until_slots_are_back()


def test_one_input_in_a_region_and_one_in_the_message(front: FrontEnd, client: InferenceServerClient) -> None:
    with region(front, 64) as made:
        shm.set_shared_memory_region(made, [np.array([[7]], np.int32)])
        a = InferInput("a", [1, 1], "INT32")
        a.set_shared_memory("r", 4)
        b = InferInput("b", [1, 1], "INT32").set_data_from_numpy(np.array([[2]], np.int32))
        difference = InferRequestedOutput("difference")
        difference.set_shared_memory("r", 4, offset=8)
        result = client.infer("pair", [a, b], outputs=[difference, InferRequestedOutput("sum")])
        assert result.as_numpy("sum").tolist() == [[9]]
        assert shm.get_contents_as_numpy(made, np.int32, [1, 1], offset=8).tolist() == [[5]]


def test_long_tensors_are_copied_aside(front: FrontEnd, client: InferenceServerClient) -> None:
    with region(front, 2 * LONG) as made:
        sent = np.arange(LONG, dtype=np.uint8).reshape(1, LONG)
        shm.set_shared_memory_region(made, [sent])
        tensor = InferInput("x", [1, LONG], "UINT8")
        tensor.set_shared_memory("r", LONG)
        output = InferRequestedOutput("y")
        output.set_shared_memory("r", LONG, offset=LONG)
        client.infer("long", [tensor], outputs=[output])
        assert (shm.get_contents_as_numpy(made, np.uint8, [1, LONG], offset=LONG) == sent).all()
        front.door.calls.clear()
        for _ in range(5):  # a client that leaves while a thread copies
            client.async_infer(
                "long", [tensor], callback=lambda result, error: None, outputs=[output]
            ).cancel()
        front.until_slots_are_back()


def test_what_cannot_be_is_told(front: FrontEnd, client: InferenceServerClient) -> None:
    image = InferInput("image", [1, 2, 3], "UINT8")
    image.set_shared_memory("r", IMAGE.nbytes)
    with pytest.raises(InferenceServerException, match="allow-client-shm"):
        client.infer("image", [image])
    with region(front, 16) as made:
        shm.set_shared_memory_region(made, [IMAGE])
        small = InferRequestedOutput("scores")
        small.set_shared_memory("r", 8)
        with pytest.raises(InferenceServerException, match="should be at least 16 bytes") as caught:
            client.infer("image", [image], outputs=[small])
        assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"
        image.set_shared_memory("other", IMAGE.nbytes)
        with pytest.raises(InferenceServerException, match="not registered"):
            client.infer("image", [image])
        image.set_shared_memory("r", 5)
        with pytest.raises(InferenceServerException, match="Expected 6, got 5"):
            client.infer("image", [image])
    front.until_slots_are_back()
