"""What both clients say and understand, without a socket: requests as bytes, replies as answers or errors."""

from __future__ import annotations

import re
import ssl
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import uniform
from typing import Any, Generic, NamedTuple, TypeVar
from urllib.parse import quote, urlencode, urlsplit

import numpy as np
import orjson

from carpool.errors import (
    CarpoolError,
    DeadlineExceeded,
    Forbidden,
    Gone,
    InvalidInput,
    ModelError,
    NotFound,
    Refused,
    Replaced,
    TooLarge,
    Unauthenticated,
    Unavailable,
    Unreachable,
    Unsupported,
    advice_for,
)
from carpool.types import Array, Datatype, InferRequest, RequestedOutput, RequestOptions, Tensor
from carpool.vision.python_pictures import Answer, Picture, picture_file, typed
from carpool.wire.http_reply import Reply
from carpool.wire.v2 import HEADER_LENGTH, decode_response, encode_request, read_header_length

MOST_REPLY_BYTES = 1 << 30
IDLE_S = 30.0  # a server keeps connections for longer: one that is used again is still there
_KEY = re.compile(r"[!-~]{1,512}")
_FIELD = re.compile(r"[ -~]{1,256}")
_LATER = 1.5
_FIRST_S, _LONGEST_S = 0.05, 5.0  # between two tries, unless the server says more
_ERRORS: Mapping[int, type[CarpoolError]] = {
    400: InvalidInput,
    401: Unauthenticated,
    403: Forbidden,
    404: NotFound,
    409: Replaced,
    410: Gone,
    413: TooLarge,
    429: Refused,
    500: ModelError,
    501: Unsupported,
    503: Unavailable,
    504: DeadlineExceeded,
}
_AT_GATE = ("cannot-finish", "overload", "over-share")  # a server may say 503 to those, for a balancer
_DATATYPES = {
    datatype.dtype: datatype for datatype in Datatype if datatype not in (Datatype.BF16, Datatype.BYTES)
}
Value = TypeVar("Value")
Wanted = TypeVar("Wanted", bound=Answer)


@dataclass(frozen=True, slots=True)
class Server:
    """Describes where a server is, and how the two know each other."""

    url: str
    host: str
    port: int
    prefix: str
    tls: ssl.SSLContext | None
    fields: Mapping[str, str] = field(repr=False)  # of every request

    @property
    def where(self) -> str:
        """Returns the value for the Host field."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def lost(self, why: object) -> Unreachable:
        return Unreachable(f"{self.url}: {why}; {advice_for(str(why))}")

    def too_slow(self, seconds: float) -> Unreachable:
        return Unreachable(f"{self.url}: no response within {seconds:g} s", reason="timeout")


def find_server(
    url: str, *, api_key: str, ca: str, certificate: str, private_key: str, insecure: bool
) -> Server:
    parts = urlsplit(url if "://" in url else f"http://{url}")
    try:
        port = parts.port
    except ValueError:
        port = -1
    if parts.scheme not in ("http", "https") or not parts.hostname or port == -1 or parts.query:
        raise InvalidInput(f"url must be like http://localhost:8000, not {url!r}", field="url")
    if api_key and not _KEY.fullmatch(api_key):
        raise InvalidInput("api_key must be up to 512 printable characters", field="api_key")
    tls = None
    if parts.scheme == "https":
        try:
            tls = ssl.create_default_context(cafile=ca or None)
            if certificate:
                tls.load_cert_chain(certificate, private_key or None)
        except (OSError, ValueError) as error:
            raise InvalidInput(f"ca or certificate cannot be read: {error}", field="ca") from None
        if insecure:
            tls.check_hostname = False
            tls.verify_mode = ssl.CERT_NONE
    elif ca or certificate or insecure:
        raise InvalidInput("ca, certificate and insecure go with an https:// url", field="url")
    fields = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    default = 443 if tls else 80
    return Server(url, parts.hostname, port or default, parts.path.rstrip("/"), tls, fields)


@dataclass(frozen=True, slots=True)
class Question(Generic[Value]):
    """Describes one request, and how its reply is read."""

    path: str
    body: bytes | bytearray | memoryview
    fields: Mapping[str, str]
    read: Callable[[Reply], Value]
    method: str = "POST"


class Patience:
    """Decides when a rejected request is retried: later each time, since there are other clients.

    Only what the server rejected is retried, and never sooner than the server said.
    """

    def __init__(self, seconds: float, now: float) -> None:
        self._end = now + seconds
        self._wait = _FIRST_S

    def wait(self, error: CarpoolError, now: float) -> float | None:
        """Seconds to wait; None is no more patience, or no use."""
        later = error.retry_after_s if isinstance(error, Refused | Unavailable) else None
        if later is None:
            return None
        self._wait = max(later, min(self._wait * _LATER, _LONGEST_S))
        wait = self._wait * uniform(1.0, _LATER)
        return wait if now + wait <= self._end else None


def error_of(status: int, fields: Mapping[str, str], body: bytes) -> CarpoolError:
    """Returns the error with the server's own sentence and reason, and when to come back, where it says
    that."""
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError:
        document = None
    if not isinstance(document, dict):
        document = {"error": body[:200].decode(errors="replace")}
    message = str(document.get("error") or f"the server answered with status {status}")
    reason, at_fault = document.get("reason"), document.get("field")
    at_gate = status == 503 and reason in _AT_GATE
    error = Refused(message) if at_gate else _ERRORS.get(status, CarpoolError)(message)
    if isinstance(reason, str) and reason:
        error.reason = reason
    if isinstance(at_fault, str):
        error.field = at_fault
    if isinstance(error, Refused) and isinstance(document.get("predicted_ms"), int | float):
        error.predicted_ms = float(document["predicted_ms"])
    if not isinstance(error, Refused | Unavailable):
        return error
    later, whole = document.get("retry_after_s"), fields.get("retry-after", "")
    if isinstance(later, int | float) and later >= 0:
        error.retry_after_s = float(later)
    elif whole.isascii() and whole.isdigit() and len(whole) < 9:
        error.retry_after_s = float(whole)
    return error


# ---- pictures


class Asked(NamedTuple):
    """Describes what is asked of a picture, besides the picture."""

    task: str = ""  # without, what the model does
    model: str = ""
    version: str = ""
    deadline_ms: float | None = None
    source: str = ""
    latest: bool = False


def ask_picture(
    picture: Picture, asked: Asked, options: Mapping[str, object], wanted: type[Wanted]
) -> Question[Wanted]:
    def read(reply: Reply) -> Wanted:
        answer = typed(read_document(reply), wanted)
        if not isinstance(answer, wanted):
            raise InvalidInput(f"the response has no {wanted.__name__.lower()}: {', '.join(answer)}")
        return answer

    return _picture(picture, asked, options, "application/json", read)


def ask_events(picture: Picture, asked: Asked, options: Mapping[str, object]) -> Question[Reply]:
    """Asks for an answer that comes in pieces."""
    return _picture(picture, asked, options, "text/event-stream", lambda reply: reply)


def ask_drawing(picture: Picture, asked: Asked, options: Mapping[str, object], kind: str) -> Question[bytes]:
    if kind not in ("jpeg", "png", "webp"):
        raise InvalidInput(f"file_format must be jpeg, png or webp, not {kind!r}", field="file_format")
    return _picture(picture, asked, options, f"image/{kind}", lambda reply: reply.body)


def _picture(
    picture: Picture,
    asked: Asked,
    options: Mapping[str, object],
    accept: str,
    read: Callable[[Reply], Value],
) -> Question[Value]:
    fields = {"Accept": accept, "Content-Type": "application/octet-stream"}
    body: bytes | bytearray | memoryview
    if isinstance(picture, str) and picture.startswith(("http://", "https://")):
        fields["Content-Type"], body = "application/json", orjson.dumps({"url": picture})
    else:
        body = picture_file(picture)
    if asked.deadline_ms is not None:
        fields["X-Carpool-Deadline-Ms"] = f"{asked.deadline_ms:g}"
    if asked.source:
        fields["X-Carpool-Source"] = asked.source
    if asked.latest:
        fields["X-Carpool-Latest"] = "1"
    for name, value in fields.items():
        if not _FIELD.fullmatch(value):
            raise InvalidInput(f"{name} must be printable and short, not {value[:80]!r}", field=name)
    query = {name: _text(value) for name, value in options.items() if value is not None}
    if asked.version:
        query["version"] = asked.version
    if asked.task:
        path = f"/{quote(asked.task, safe='')}"
        query |= {"model": asked.model} if asked.model else {}
    else:
        path = f"/models/{quote(asked.model, safe='')}/predict"
    return Question(f"{path}?{urlencode(query)}" if query else path, body, fields, read)


def _text(value: object) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


def read_document(reply: Reply) -> dict[str, Any]:
    try:
        document = orjson.loads(reply.body)
    except orjson.JSONDecodeError:
        document = None
    if not isinstance(document, dict):
        raise Unreachable("the server at this address is not Carpool")
    return document


def ask_first_model() -> Question[str]:
    """Asks which model answers pictures when none is named: the first that was configured."""

    def read(reply: Reply) -> str:
        models = read_document(reply).get("x-carpool-models")
        if not isinstance(models, list):
            raise Unreachable("the server at this address is not a Carpool server that takes images")
        if not models:
            raise NotFound("no model of this server takes images", reason="no-task")
        return str(models[0]["name"])

    return Question("/openapi.json", b"", {}, read, "GET")


# ---- tensors


def ask_infer(
    model: str,
    inputs: Mapping[str, Array],
    version: str,
    outputs: Sequence[str],
    options: RequestOptions,
    deadline_ms: float | None,
) -> Question[dict[str, Array]]:
    tensors = [_tensor(name, np.asarray(array)) for name, array in inputs.items()]
    wanted = [RequestedOutput(name, binary=True) for name in outputs]
    sent = encode_request(
        InferRequest(model, tensors, outputs=wanted, options=options, binary_output=not wanted)
    )
    path = f"/v2/models/{quote(model, safe='')}"
    path += f"/versions/{quote(version, safe='')}" if version else ""
    fields = {"Content-Type": "application/octet-stream"}
    if sent.header_length is not None:
        fields[HEADER_LENGTH] = str(sent.header_length)
    if deadline_ms is not None:
        fields["X-Carpool-Deadline-Ms"] = f"{deadline_ms:g}"
    return Question(f"{path}/infer", b"".join(sent.buffers), fields, _read_tensors)


def _read_tensors(reply: Reply) -> dict[str, Array]:
    length = read_header_length(reply.fields.get(HEADER_LENGTH.lower()), len(reply.body))
    return {tensor.name: tensor.data for tensor in decode_response(reply.body, length).outputs}


def _tensor(name: str, array: Array) -> Tensor:
    """Text and bytes are BYTES; numbers keep their datatype, none is converted in silence."""
    if array.dtype.kind in "SUO":
        elements = [one.encode() if isinstance(one, str) else one for one in array.ravel().tolist()]
        if not all(isinstance(one, bytes) for one in elements):
            raise InvalidInput(f"input {name!r} holds objects that are neither text nor bytes", field=name)
        held = np.empty(len(elements), object)
        held[:] = elements
        return Tensor(name, Datatype.BYTES, array.shape, held.reshape(array.shape))
    datatype = _DATATYPES.get(array.dtype.newbyteorder("<"))
    if datatype is None:
        raise InvalidInput(f"input {name!r} is {array.dtype}, which the protocol does not have", field=name)
    return Tensor(name, datatype, array.shape, array.astype(datatype.dtype, copy=False))


def trace_fields() -> dict[str, str]:
    """The trace that this call belongs to, for a program that makes some; others need not even load that."""
    fields: dict[str, str] = {}
    if "opentelemetry.trace" in sys.modules:
        from opentelemetry.propagate import inject

        inject(fields)
    return fields
