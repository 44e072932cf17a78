"""Tensors in system shared memory: written once, registered with the server, and named in every request."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from urllib.parse import quote

import orjson

from carpool.errors import CarpoolError, InvalidInput
from carpool.lab.load.facts import HttpFacts
from carpool.lab.load.http_client import HttpTarget
from carpool.lab.load.messages import Asking, Message, head_and_body
from carpool.lab.load.request_data import Draw
from carpool.lab.load.ticket import Ticket
from carpool.types import Datatype, Tensor

_FOLDER = Path("/dev/shm")
_MOST = 1 << 30
_KINDS = 8192


class ClientRegion:
    """One region with all different sets of tensors behind each other, until it is closed."""

    def __init__(self, facts: HttpFacts, sets: Sequence[list[Tensor]]) -> None:
        self._facts = facts
        self.name = f"carpool-load-{os.getpid()}-{id(self):x}"
        self._path = _FOLDER / self.name
        self._offsets: list[list[tuple[Tensor, int]]] = []
        size = 0
        for tensors in sets:
            placed = []
            for tensor in tensors:
                if tensor.datatype is Datatype.BYTES:
                    raise InvalidInput(f"input {tensor.name!r} is text: leave out --shared-memory")
                placed.append((tensor, size))
                size += tensor.data.nbytes
            self._offsets.append(placed)
        if size > _MOST:
            raise InvalidInput(f"--shared-memory would take {size:,} bytes: use a smaller --distinct")
        try:
            with self._path.open("xb") as file:
                for placed in self._offsets:
                    for tensor, _ in placed:
                        file.write(tensor.data.tobytes())
        except OSError as error:
            self._path.unlink(missing_ok=True)
            raise InvalidInput(f"--shared-memory: {_FOLDER} cannot be used: {error.strerror}") from None
        try:
            facts.post(
                self._route("register"),
                orjson.dumps({"key": f"/{self.name}", "byte_size": size}),
                "the region",
            )
        except BaseException:
            self._path.unlink(missing_ok=True)
            raise

    def __len__(self) -> int:
        return len(self._offsets)

    def inputs(self, number: int) -> list[dict[str, object]]:
        """The inputs of one set, as a request names them."""
        return [
            {
                "name": tensor.name,
                "datatype": tensor.datatype.value,
                "shape": list(tensor.shape),
                "parameters": {
                    "shared_memory_region": self.name,
                    "shared_memory_offset": offset,
                    "shared_memory_byte_size": tensor.data.nbytes,
                },
            }
            for tensor, offset in self._offsets[number]
        ]

    def close(self) -> None:
        """The server is asked to forget it; one that is gone has forgotten already."""
        try:
            self._facts.post(self._route("unregister"), b"", "the region")
        except CarpoolError:
            """Nothing depends on it any more."""
        self._path.unlink(missing_ok=True)

    def _route(self, verb: str) -> str:
        return f"/v2/systemsharedmemory/region/{quote(self.name, safe='')}/{verb}"


class RegionTarget(HttpTarget):
    """Takes its region along when it goes."""

    region: ClientRegion

    async def close(self) -> None:
        await super().close()
        self.region.close()


def region_messages(asking: Asking, region: ClientRegion, draw: Draw) -> Callable[[Ticket], Message]:
    """Requests without tensors: they say where those lie. The outputs come in the answer, as bytes."""

    @lru_cache(maxsize=_KINDS)
    def build(number: int, source: str, priority: int) -> Message:
        parameters: dict[str, object] = {"binary_data_output": True}
        if priority:
            parameters["priority"] = priority
        body = orjson.dumps({"inputs": region.inputs(number), "parameters": parameters})
        return head_and_body(asking, source, "application/json", body)

    return lambda ticket: build(ticket.number % len(region), draw.source(ticket), draw.priority(ticket))
