"""From an address and a few wishes to a target that can be sent to."""

from __future__ import annotations

import contextlib
import mimetypes
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, urlsplit

import orjson

from carpool.errors import CarpoolError, InvalidInput, Unreachable
from carpool.lab.load.facts import TRUSTING, GrpcFacts, HttpFacts, Trust, only_model
from carpool.lab.load.http_client import REFUSALS, HttpTarget
from carpool.lab.load.messages import (
    Asking,
    Bodies,
    Draw,
    Filling,
    Header,
    Message,
    Weighted,
    chat_body,
    generate_body,
    make_tensors,
    picture_messages,
    tensor_messages,
    whole_message,
)
from carpool.lab.load.tally import Target, Ticket
from carpool.types import Datatype, Tensor
from carpool.wire.v2 import decode_error, decode_response, read_header_length

_FOLDER = Path("/dev/shm")
_MOST = 1 << 30
_KINDS = 8192


class ClientRegion:
    """Holds one region with all different sets of tensors behind each other, until it is closed."""

    def __init__(self, facts: HttpFacts, sets: Sequence[list[Tensor]]) -> None:
        self._facts = facts
        self.name = f"carpool-load-{os.getpid()}-{id(self):x}"
        self._path = _FOLDER / self.name
        self.sets: list[list[dict[str, object]]] = []  # the inputs of each, as a request names them
        size = 0
        for tensors in sets:
            self.sets.append([])
            for tensor in tensors:
                if tensor.datatype is Datatype.BYTES:
                    raise InvalidInput(f"input {tensor.name!r} is text: leave out --shared-memory")
                self.sets[-1].append(self._input(tensor, size))
                size += tensor.data.nbytes
        if size > _MOST:
            raise InvalidInput(f"--shared-memory would take {size:,} bytes: use a smaller --distinct")
        try:
            with self._path.open("xb") as file:
                file.writelines(tensor.data.tobytes() for tensors in sets for tensor in tensors)
            self._tell("register", orjson.dumps({"key": f"/{self.name}", "byte_size": size}))
        except OSError as error:
            self._path.unlink(missing_ok=True)
            raise InvalidInput(f"--shared-memory: {_FOLDER} cannot be used: {error.strerror}") from None
        except BaseException:
            self._path.unlink(missing_ok=True)
            raise

    def _input(self, tensor: Tensor, offset: int) -> dict[str, object]:
        where = {
            "shared_memory_region": self.name,
            "shared_memory_offset": offset,
            "shared_memory_byte_size": tensor.data.nbytes,
        }
        described = {"name": tensor.name, "datatype": tensor.datatype.value, "shape": list(tensor.shape)}
        return described | {"parameters": where}

    def close(self) -> None:
        """The server is asked to forget it; one that is gone has forgotten already."""
        with contextlib.suppress(CarpoolError):
            self._tell("unregister", b"")
        self._path.unlink(missing_ok=True)

    def _tell(self, verb: str, body: bytes) -> None:
        path = f"/v2/systemsharedmemory/region/{quote(self.name, safe='')}/{verb}"
        self._facts.post(path, body, "the region")


def region_messages(asking: Asking, region: ClientRegion, draw: Draw) -> Callable[[Ticket], Message]:
    """Requests without tensors: they say where those lie. The outputs come in the answer, as bytes."""

    @lru_cache(maxsize=_KINDS)
    def build(number: int, source: str, priority: int) -> Message:
        parameters: dict[str, object] = {"binary_data_output": True}
        if priority:
            parameters["priority"] = priority
        body = orjson.dumps({"inputs": region.sets[number], "parameters": parameters})
        return whole_message(asking, source, "application/json", body)

    return lambda ticket: build(ticket.number % len(region.sets), draw.source(ticket), draw.priority(ticket))


_MOST_PICTURES = 256 << 20  # bytes of all of them
_CHAT, _GENERATE = "/v1/chat/completions", "/generate_stream"
_PORTS = {"http": 8000, "https": 8000, "grpc": 8001, "grpcs": 8001}
_CHANNELS = 4
_NOT_WORTH_REPEATING = (
    *("INVALID_ARGUMENT", "NOT_FOUND", "PERMISSION_DENIED"),
    *("UNAUTHENTICATED", "UNIMPLEMENTED"),
)
_CONNECTIONS = 256


@dataclass(frozen=True, slots=True)
class Aim:
    """Describes whom to ask, and what. `pictures` are uploaded as they are; without them, tensors are
    sent."""

    url: str
    model: str = ""
    version: str = ""
    pictures: tuple[Path, ...] = ()
    batch: int = 1
    filling: Filling = field(default_factory=Filling)
    sources: Weighted[str] = ()
    priorities: Weighted[int] = ()
    headers: tuple[Header, ...] = ()
    deadline_ms: float | None = None
    connections: int | None = None
    shared_memory: bool = False  # tensors lie in a region instead of in the requests
    trust: Trust = TRUSTING
    stream: bool = False  # answers come in pieces

    def asking(self, host: str, path: str) -> Asking:
        return Asking(host, path, (*self.trust.headers(), *self.headers), self.deadline_ms)

    def draw(self) -> Draw:
        return Draw(self.sources, self.priorities, self.filling.seed)


@dataclass(frozen=True, slots=True)
class Address:
    scheme: str
    host: str
    port: int
    path: str  # with its query

    @property
    def over_grpc(self) -> bool:
        return self.scheme.startswith("grpc")

    @property
    def secure(self) -> bool:
        return self.scheme.endswith("s")

    @property
    def authority(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def read_url(url: str) -> Address:
    parts = urlsplit(url if "://" in url else f"http://{url}")
    try:
        port = parts.port
    except ValueError:
        port = -1
    if parts.scheme not in _PORTS or not parts.hostname or port == -1 or parts.username is not None:
        raise InvalidInput(
            f"the address must be like http://localhost:8000 or grpc://localhost:8001, not {url!r}"
        )
    if parts.scheme.startswith("grpc") and find_spec("grpc") is None:
        raise InvalidInput("asking over gRPC needs grpcio: pip install 'carpool[grpc-client]'")
    path = parts.path + (f"?{parts.query}" if parts.query else "")
    if not path.isascii() or not path.isprintable() or " " in path:
        raise InvalidInput(f"the path {path!r} must be escaped")
    return Address(parts.scheme, parts.hostname, port or _PORTS[parts.scheme], path if path != "/" else "")


def take_aim(aim: Aim) -> Target:
    """Ask the server what is needed, and send it one request to see that it is right. Blocks for moments."""
    address = read_url(aim.url)
    if aim.shared_memory and (address.over_grpc or aim.pictures):
        raise InvalidInput("--shared-memory goes with tensors to an http:// address of this machine")
    if aim.stream and (address.over_grpc or not aim.pictures):
        raise InvalidInput(
            "--stream goes with --image to an http:// address: only images can be read as text"
        )
    if address.over_grpc:
        return _grpc(aim, address)
    facts = http_facts(address, aim.trust)
    facts.check_ready()
    made = _pictures(aim, address, facts) if aim.pictures else _tensors(aim, address, facts)
    tls = aim.trust.context() if address.secure else None
    many = aim.connections or _CONNECTIONS
    where = address.host, address.port
    return HttpTarget(*where, made.message, many, made.name, tls, made.closing, aim.stream)


class _Made(NamedTuple):
    """Holds what a target sends, how it is called, and what ends it."""

    message: Callable[[Ticket], Message]
    name: str
    closing: Callable[[], None] = lambda: None


def _tensors(aim: Aim, address: Address, facts: HttpFacts) -> _Made:
    if address.path:
        raise InvalidInput(f"the path {address.path} goes with --image: for tensors give the server alone")
    model = aim.model or only_model(facts)
    version = f"/versions/{quote(aim.version, safe='')}" if aim.version else ""
    asking = aim.asking(address.authority, f"/v2/models/{quote(model, safe='')}{version}/infer")
    bodies = _bodies(facts, model, aim)
    name = f"{address.scheme}://{address.authority}, model {model}"
    if aim.shared_memory:
        region = ClientRegion(facts, bodies(1))
        made = _Made(region_messages(asking, region, aim.draw()), name, region.close)
    else:
        made = _Made(tensor_messages(asking, model, bodies, aim.draw()), name)
    status, body, length = facts.try_one(made.message(Ticket(0, 0.0)))
    _check(status, body)
    if status == 200:
        decode_response(body, read_header_length(length, len(body)))
    return made


def _pictures(aim: Aim, address: Address, facts: HttpFacts) -> _Made:
    path = address.path or (f"/models/{quote(aim.model, safe='')}/predict" if aim.model else "")
    if path == _GENERATE:  # of which model, another option says
        path = f"/v2/models/{quote(aim.model or only_model(facts), safe='')}{_GENERATE}"
    if not path:
        raise InvalidInput(f"--image needs a route, like {aim.url.rstrip('/')}/detect, or --model NAME")
    asking = aim.asking(address.authority, path)
    pictures = read_pictures(aim.pictures)
    if path.partition("?")[0] == _CHAT:
        pictures = [chat_body(aim.model or only_model(facts), *one, stream=aim.stream) for one in pictures]
    elif path.endswith(_GENERATE):
        pictures = [generate_body(picture) for picture, _ in pictures]
    elif aim.stream:
        asking = replace(asking, headers=(*asking.headers, ("Accept", "text/event-stream")))
    message = picture_messages(asking, pictures, aim.draw())
    _check(*facts.try_one(message(Ticket(0, 0.0)))[:2])
    return _Made(message, f"{address.scheme}://{address.authority}{path}")


def http_facts(address: Address, trust: Trust = TRUSTING) -> HttpFacts:
    return HttpFacts(address.host, address.port, trust.context() if address.secure else None, trust.headers())


def _check(status: int, body: bytes) -> None:
    """Raises Unreachable for a status that stays wrong; a rejection or a failure may be what is measured."""
    if (300 <= status < 500 and status not in REFUSALS) or status == 501:
        said = decode_error(body)[0] or "no reason given"
        raise Unreachable(f"the first request was answered {status}: {said[:500]}")


def _grpc(aim: Aim, address: Address) -> Target:
    from carpool.lab.load.grpc_client import GrpcTarget, tensor_calls

    if aim.pictures or address.path:
        raise InvalidInput("over gRPC there are only tensors: upload images to an http:// address")
    credentials = aim.trust.credentials() if address.secure else None
    facts = GrpcFacts(address.authority, credentials, aim.trust.headers())
    facts.check_ready()
    model = aim.model or only_model(facts)
    asking = aim.asking(address.authority, "")
    call = tensor_calls(asking, model, aim.version, _bodies(facts, model, aim), aim.draw())
    try:
        facts.ask("ModelInfer", *call(Ticket(0, 0.0)))
    except Unreachable as error:
        if error.reason in _NOT_WORTH_REPEATING:
            raise
    name = f"{address.scheme}://{address.authority}, model {model}"
    channels = aim.connections or _CHANNELS
    return GrpcTarget(address.authority, call, connections=channels, name=name, credentials=credentials)


def _bodies(facts: HttpFacts | GrpcFacts, model: str, aim: Aim) -> Bodies:
    """Returns tensors for requests of any number of images, by what the server said of the model once."""
    specs = facts.inputs(model, aim.version)
    if not specs:
        raise Unreachable(f"the server says that model {model!r} has no inputs")
    return lambda images: make_tensors(specs, aim.filling, images * aim.batch)


def read_pictures(paths: tuple[Path, ...]) -> list[tuple[bytes, str]]:
    found = []
    size = 0
    for path in paths:
        content_type = mimetypes.guess_type(path.name, strict=False)[0] or "application/octet-stream"
        try:
            size += path.stat().st_size
            if size > _MOST_PICTURES:
                raise InvalidInput(f"the images are over {_MOST_PICTURES:,} bytes together")
            found.append((path.read_bytes(), content_type))
        except OSError as error:
            raise InvalidInput(f"--image: cannot read {path}: {error.strerror or error}") from None
    return found
