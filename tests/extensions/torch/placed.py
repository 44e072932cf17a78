"""An instance of the runner in this process, with a model that doubles numbers, and the engine's end."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Mapping, Sequence
from mmap import mmap
from typing import Any

import numpy as np
import orjson

from carpool.config.model import ModelSignature
from carpool.errors import CarpoolError, InvalidInput, ModelError
from carpool.extensions.torch.picture_slots import PictureSlots
from carpool.extensions.torch.runner_instance import Arenas, RunnerInstance
from carpool.link.catalog import Batching, ModelEntry
from carpool.link.link_failures import read_failure
from carpool.link.records import FROM_RUNNER, RUN, RUN_PLACE, TEMPLATE, TO_RUNNER, Ending, read_endings
from carpool.memory.arena import create_memory, map_memory
from carpool.memory.layout import write_file
from carpool.types import Array, Datatype, Signature, TensorSpec

WIDTH = 4
SLOT = 4096
ARENA = 7
TEMPLATE_NUMBER = 3


def signature(width: int = WIDTH, max_batch: int = 8) -> Signature:
    inputs = (TensorSpec("x", Datatype.FP32, (WIDTH,)),)
    return Signature("m", inputs, (TensorSpec("y", Datatype.FP32, (width,)),), max_batch)


class Doubling:
    """Answers each row twice as large. Cannot bear a batch with -1 in it, and waits while `go` is not set."""

    signature = ModelSignature()

    def __init__(self, width: int = WIDTH, device: str = "") -> None:
        self._width = width
        self.device = device
        self.alive = True
        self.batches: list[int] = []
        self.views = 0
        self.began = threading.Event()
        self.go = threading.Event()
        self.go.set()

    def view(self, inputs: Mapping[str, Array]) -> Mapping[str, Array] | None:
        self.views += 1
        return inputs if all(array.flags.aligned for array in inputs.values()) else None

    def run(self, inputs: Mapping[str, Array], wanted: Sequence[str]) -> Mapping[str, Array]:
        raise AssertionError("it gathers")

    def run_parts(
        self, parts: Sequence[Mapping[str, Any]], images: Sequence[int], wanted: Sequence[str]
    ) -> Mapping[str, Array]:
        self.batches.append(sum(images))
        self.began.set()
        assert self.go.wait(30)
        rows = np.concatenate([part["x"] for part in parts])
        if (rows == -1).any():
            raise ModelError("it is poisoned")
        return {"y": np.tile(rows * 2, (1, self._width // WIDTH)) if self._width > 0 else rows * 2}

    def run_encoded(
        self, pictures: Sequence[Array], wanted: Sequence[str]
    ) -> tuple[Mapping[str, Array], Mapping[int, CarpoolError]]:
        """The length of each file; an empty one is bad."""
        lengths = np.array([[len(picture)] * WIDTH for picture in pictures], np.float32)
        bad = {n: InvalidInput("no picture") for n, picture in enumerate(pictures) if not len(picture)}
        return {"y": lengths}, bad

    def abort(self) -> None:
        self.alive = False

    def close(self) -> None:
        self.alive = False


class Stand:
    """Inputs lie in slot 0, 1, 2 …, their outputs in slot 100, 101, 102 …"""

    def __init__(
        self, backend: Doubling, signed: Signature | None = None, *, encoded: bool = False, piece: int = 8
    ) -> None:
        self.backend = backend
        self.arenas = Arenas(PictureSlots(lambda _: 0))
        file = create_memory("test", 200 * SLOT)
        self.memory: mmap = map_memory(file)
        os.close(file)
        self.arenas.add(ARENA, self.memory)
        vision = {"encoded": True, "input": {"name": "x"}} if encoded else None
        entry = ModelEntry(
            key=0,
            name="m",
            version="1",
            signature=signed or signature(),
            batching=Batching(""),
            vision=vision,
        )
        self.ours, theirs = socket.socketpair()
        self.ours.settimeout(30)
        self._ended = threading.Event()
        self.instance = RunnerInstance(backend, entry, self.arenas, theirs, piece, 1 << 20, self._ended.set)
        self._tell(encoded)

    def __enter__(self) -> Stand:
        return self

    def __exit__(self, *_: object) -> None:
        self.backend.go.set()
        self.ours.close()
        assert self._ended.wait(30)

    def _tell(self, encoded: bool) -> None:
        tensor = ["x", "UINT8", [8], 0, 8, False] if encoded else ["x", "FP32", [1, WIDTH], 0, 16, False]
        document = {
            "key": 0,
            "inputs": [tensor],
            "wanted": [],
            "priority": 0,
            "timeout": 0.0,
            "source": "",
            "latest": False,
            "encoded": encoded,
        }
        payload = orjson.dumps(document)
        self.ours.sendall(TO_RUNNER.pack(TEMPLATE, len(payload), TEMPLATE_NUMBER) + payload)

    def put(self, slot: int, number: float, shift: int = 0) -> None:
        at = slot * SLOT + shift
        self.memory[at : at + 16] = np.full(WIDTH, number, np.float32).tobytes()

    def put_file(self, slot: int, data: bytes) -> None:
        write_file(memoryview(self.memory)[slot * SLOT : (slot + 1) * SLOT], data)

    def answer(self, slot: int, width: int = WIDTH) -> list[float]:
        found = np.frombuffer(self.memory, np.float32, width, (100 + slot) * SLOT)
        numbers: list[float] = found.tolist()
        return numbers

    def start(self, slots: Sequence[int], capacity: int = SLOT, shift: int = 0) -> None:
        places = [
            RUN_PLACE.pack(ARENA, TEMPLATE_NUMBER, slot * SLOT + shift, (100 + slot) * SLOT, capacity)
            for slot in slots
        ]
        self.ours.sendall(TO_RUNNER.pack(RUN, len(places) * RUN_PLACE.size, 0) + b"".join(places))

    def end(self, count: int) -> list[Ending]:
        data = bytearray()
        while len(data) < FROM_RUNNER.size or len(data) < FROM_RUNNER.size + self._size(data):
            piece = self.ours.recv(1 << 16)
            assert piece, "it ended"
            data += piece
        return read_endings(bytes(data[FROM_RUNNER.size :]), count)

    @staticmethod
    def _size(data: bytearray) -> int:
        size: int = FROM_RUNNER.unpack_from(data)[1]
        return size

    def run(self, slots: Sequence[int], capacity: int = SLOT, shift: int = 0) -> list[Ending]:
        self.start(slots, capacity, shift)
        return self.end(len(slots))


def error_of(ending: Ending) -> CarpoolError:
    return read_failure(ending.status, ending.payload)
