"""Requests as bytes, made once for each kind: tensors, pictures, sources and priorities."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import isfinite, prod
from pathlib import Path
from random import Random
from typing import Any, TypeAlias, TypeVar

import numpy as np
import orjson

from carpool.errors import InvalidInput
from carpool.lab.load.tally import Ticket
from carpool.types import Array, Datatype, InferRequest, RequestOptions, Tensor, TensorSpec
from carpool.wire.v2 import HEADER_LENGTH, encode_request

MOST_BYTES = 256 << 20  # of a request
_PREPARED = 64 << 20  # of all different ones, if that is more than one
_TEXT_BYTES = 16  # of a random element of BYTES
_MOST_FILE = 256 << 20


@dataclass(frozen=True, slots=True)
class Filling:
    """Describes what to put into the inputs. `data` is `random`, `zeros` or a .npy, .npz or .json file."""

    data: str = "random"
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    seed: int = 1
    distinct: int = 8


def make_tensors(specs: Sequence[TensorSpec], filling: Filling, images: int) -> list[list[Tensor]]:
    """Returns as many different requests as wanted and affordable, each with `images` images. The shapes of
    `specs` are as the server reports them: -1 is any length, and at first place the batch."""
    unknown = set(filling.shapes) - {spec.name for spec in specs}
    if unknown:
        names = ", ".join(spec.name for spec in specs)
        raise InvalidInput(f"--shape names {min(unknown)!r}, but the model's inputs are {names}")
    inputs = [(spec, _shape(spec, filling.shapes.get(spec.name), images)) for spec in specs]
    size = sum(prod(shape) * (spec.datatype.size or _TEXT_BYTES) for spec, shape in inputs)
    if size > MOST_BYTES:
        raise InvalidInput(f"a request would have {size:,} bytes: the most is {MOST_BYTES:,}")
    if filling.data in ("random", "zeros"):
        zero = filling.data == "zeros"
        different = 1 if zero else max(1, min(filling.distinct, _PREPARED // max(1, size)))
        random = np.random.default_rng(filling.seed)
        return [
            [Tensor(s.name, s.datatype, shape, _made(s.datatype, shape, random, zero)) for s, shape in inputs]
            for _ in range(different)
        ]
    arrays = _read(Path(filling.data), specs)
    return [[_from_file(*one, arrays) for one in inputs]]


def _shape(spec: TensorSpec, given: tuple[int, ...] | None, images: int) -> tuple[int, ...]:
    shape = spec.shape
    if given is not None:
        if len(given) != len(shape) or any(s not in (-1, g) for s, g in zip(shape, given, strict=True)):
            raise InvalidInput(
                f"--shape {spec.name}:{_text(given)} does not fit: the model says {_text(shape)}"
            )
        return given if images == 1 else (given[0] * images, *given[1:])
    if -1 in shape[1:]:
        example = _text([abs(shape[0]), *(224 if length == -1 else length for length in shape[1:])])
        raise InvalidInput(
            f"input {spec.name!r} is {_text(shape)}: say how long it is, like --shape {spec.name}:{example}"
        )
    if shape[:1] == (-1,):
        return (images, *shape[1:])
    if images > 1:
        raise InvalidInput(f"input {spec.name!r} is {_text(shape)}, which has no batch: ask with --batch 1")
    return shape


def _text(shape: Sequence[int]) -> str:
    return ",".join(map(str, shape))


def _made(kind: Datatype, shape: tuple[int, ...], random: np.random.Generator, zero: bool) -> Array:
    dtype = kind.dtype
    if kind is Datatype.BYTES:
        letters = random.integers(97, 123, (prod(shape), _TEXT_BYTES), np.uint8)
        texts = [b"0" * _TEXT_BYTES if zero else row.tobytes() for row in letters]
        return np.array(texts, object).reshape(shape)
    if zero:
        return np.zeros(shape, dtype)
    if kind is Datatype.BF16:  # the upper half of a float
        return (random.random(shape, np.float32).view(np.uint32) >> 16).astype(dtype)
    if dtype.kind == "f":
        return random.random(shape, np.float32).astype(dtype)
    if dtype.kind == "b":
        return random.integers(0, 2, shape, np.uint8).astype(dtype)
    return random.integers(0, min(255, int(np.iinfo(dtype).max)), shape, endpoint=True).astype(dtype)


# ---- files


def _read(path: Path, specs: Sequence[TensorSpec]) -> Mapping[str, Any]:
    """Returns arrays by the name of their input; a file with a single nameless one is for a model with one
    input."""
    try:
        if path.stat().st_size > _MOST_FILE:
            raise InvalidInput(f"--data {path} is over {_MOST_FILE:,} bytes")
        if path.suffix == ".json":
            return _json(orjson.loads(path.read_bytes()))
        loaded = np.load(path, allow_pickle=False)
    except OSError as error:
        raise InvalidInput(f"--data: cannot read {path}: {error.strerror or error}") from None
    except (ValueError, EOFError) as error:
        raise InvalidInput(
            f"--data must be random, zeros, or a .npy, .npz or .json file: {path}: {error}"
        ) from None
    if isinstance(loaded, np.ndarray):
        if len(specs) != 1:
            names = ", ".join(spec.name for spec in specs)
            raise InvalidInput(f"--data {path} is one array, but the inputs are {names}: use .npz")
        return {specs[0].name: loaded}
    with loaded:
        return {name: loaded[name] for name in loaded.files}


def _json(document: Any) -> dict[str, Any]:
    """Reads `{"input": [...]}`, or a whole request of the v2 protocol."""
    if not isinstance(document, dict):
        raise ValueError("it must be an object with an array for each input")
    listed = document.get("inputs")
    if not isinstance(listed, list):
        return document
    if not all(isinstance(entry, dict) and "data" in entry for entry in listed):
        raise ValueError('every one of its "inputs" needs "name" and "data"')
    return {str(entry.get("name")): entry["data"] for entry in listed}


def _from_file(spec: TensorSpec, shape: tuple[int, ...], arrays: Mapping[str, Any]) -> Tensor:
    """Returns a tensor in the shape to be sent; data for one image is repeated for all of a batch."""
    if spec.name not in arrays:
        raise InvalidInput(f"--data has nothing for input {spec.name!r}")
    try:
        if spec.datatype is Datatype.BYTES:
            values = np.asarray(arrays[spec.name], object).flat
            data = np.array([v if isinstance(v, bytes) else str(v).encode() for v in values], object)
        else:
            data = np.asarray(arrays[spec.name]).astype(spec.datatype.dtype).reshape(-1)
        if data.size and prod(shape) != data.size and prod(shape) % data.size == 0:
            data = np.tile(data, prod(shape) // data.size)
        return Tensor(spec.name, spec.datatype, shape, np.ascontiguousarray(data.reshape(shape)))
    except (ValueError, TypeError) as error:
        raise InvalidInput(f"--data does not fit input {spec.name!r} ({_text(shape)}): {error}") from None


_DRAWN = 4093  # a prime, so that names and bodies, which go round too, meet in every combination

Value = TypeVar("Value")
Weighted: TypeAlias = tuple[tuple[Value, float], ...]


class Draw:
    """Deals out sources and priorities by their weights over the numbers of requests; without any, no source
    is named, and the priority is the model's default."""

    def __init__(self, sources: Weighted[str] = (), priorities: Weighted[int] = (), seed: int = 1) -> None:
        random = Random(seed)
        self._sources = self._draw(random, sources, "")
        self._priorities = self._draw(random, priorities, 0)

    @staticmethod
    def _draw(random: Random, weighted: Weighted[Value], default: Value) -> list[Value]:
        if len(weighted) < 2:
            return [weighted[0][0] if weighted else default]
        values, weights = zip(*weighted, strict=True)
        return random.choices(values, weights, k=_DRAWN)

    def source(self, ticket: Ticket) -> str:
        """Returns the source of the trace or camera, or else draws one; the ticket stores it."""
        if not ticket.source:
            ticket.source = self._sources[ticket.number % len(self._sources)]
        return ticket.source

    def priority(self, ticket: Ticket) -> int:
        return self._priorities[ticket.number % len(self._priorities)]


Message: TypeAlias = tuple[bytes, bytes]
"""Head and body, to be written one after the other; a small body is in the head already, which costs less."""
Header: TypeAlias = tuple[str, str]

SOURCE = "X-Carpool-Source"
DEADLINE = "X-Carpool-Deadline-Ms"
LATEST = "X-Carpool-Latest"
_SETS = 64  # of tensors that are kept
_KINDS = 8192  # messages that are kept: sources × priorities × bodies
_SMALL = 16 * 1024
_BINARY = "application/octet-stream"
_TOKEN = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_OURS = {"host", "content-length", "transfer-encoding", "connection", HEADER_LENGTH.lower()}

Bodies = Callable[[int], Sequence[list[Tensor]]]
"""The different sets of tensors for requests of so many images."""


@dataclass(frozen=True, slots=True)
class Asking:
    """Holds what every request says beside its tensors or picture. `path` is from the root of the server."""

    host: str
    path: str
    headers: tuple[Header, ...] = ()
    deadline_ms: float | None = None


def check_headers(headers: Sequence[Header]) -> None:
    for name, value in headers:
        if not _TOKEN.fullmatch(name) or not value.isprintable() or not value.isascii():
            raise InvalidInput(f"--header {name!r} must be 'Name: value' in printable ASCII")
        if name.lower() in _OURS:
            raise InvalidInput(f"--header {name} cannot be given: the generator sets it")


def check_source(source: str) -> None:
    if not source.isprintable() or not 1 <= len(source) <= 128:
        raise InvalidInput("--source must be printable text of 1 to 128 characters")


def asked_headers(asking: Asking, source: str) -> list[Header]:
    """Returns the headers that name the source and the deadline to the server, and the user's own."""
    found = list(asking.headers)
    if source:
        found.append((SOURCE, source))
    if asking.deadline_ms is not None and isfinite(asking.deadline_ms):
        found.append((DEADLINE, f"{asking.deadline_ms:.3f}"))
    return found


def tensor_messages(asking: Asking, model: str, bodies: Bodies, draw: Draw) -> Callable[[Ticket], Message]:
    """Returns messages of protocol v2 with binary tensors."""
    made = lru_cache(maxsize=_SETS)(bodies)

    @lru_cache(maxsize=_SETS)
    def tail(images: int, number: int) -> bytes:  # one for all kinds that have these tensors
        return b"".join(encode_request(InferRequest(model, made(images)[number])).buffers[1:])

    @lru_cache(maxsize=_KINDS)
    def build(images: int, number: int, source: str, priority: int) -> Message:
        options = RequestOptions(priority=priority)
        request = InferRequest(model, made(images)[number], options=options, binary_output=True)
        encoded = encode_request(request)
        return whole_message(asking, source, _BINARY, tail(images, number), bytes(encoded.buffers[0]))

    def message(ticket: Ticket) -> Message:
        images = ticket.images
        number = ticket.number % len(made(images))
        return build(images, number, draw.source(ticket), draw.priority(ticket))

    return message


def picture_messages(
    asking: Asking, pictures: Sequence[tuple[bytes, str]], draw: Draw
) -> Callable[[Ticket], Message]:
    """Image upload: the file is the body. `pictures` have their content types."""

    @lru_cache(maxsize=_KINDS)
    def build(number: int, source: str) -> Message:
        picture, content_type = pictures[number]
        return whole_message(asking, source, content_type, picture)

    return lambda ticket: build(ticket.number % len(pictures), draw.source(ticket))


def chat_body(model: str, picture: bytes, content_type: str, *, stream: bool) -> tuple[bytes, str]:
    """Returns the picture in a request of OpenAI's chat."""
    url = f"data:{content_type};base64,{b64encode(picture).decode()}"
    message = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}
    return orjson.dumps({"model": model, "messages": [message], "stream": stream}), "application/json"


def generate_body(picture: bytes) -> tuple[bytes, str]:
    """Returns the picture in a request of Triton's generate extension."""
    return orjson.dumps({"image": b64encode(picture).decode()}), "application/json"


def whole_message(asking: Asking, source: str, content_type: str, body: bytes, start: bytes = b"") -> Message:
    """`start` is what comes before the body: the head of binary tensors, which has a length of its own."""
    lines = [f"POST {asking.path} HTTP/1.1", f"Host: {asking.host}"]
    lines += [f"{name}: {value}" for name, value in asked_headers(asking, source)]
    lines.append(f"Content-Type: {content_type}")
    if start:
        lines.append(f"{HEADER_LENGTH}: {len(start)}")
    lines += [f"Content-Length: {len(start) + len(body)}", "", ""]
    head = "\r\n".join(lines).encode() + start
    return (head + body, b"") if len(body) <= _SMALL else (head, body)
