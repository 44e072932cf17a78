"""Reads what a server says about itself before it is loaded, and how the two know each other."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import orjson

from carpool.errors import CarpoolError, InvalidInput, Unreachable, advice_for
from carpool.lab.load.messages import Header
from carpool.types import DATATYPES, TensorSpec
from carpool.wire.v2 import decode_error


@dataclass(frozen=True, slots=True)
class Trust:
    """`ca` signs the server's certificate; `insecure` believes any. `key` goes with every request."""

    ca: str = ""
    insecure: bool = False
    key: str = field(default="", repr=False)

    def context(self) -> ssl.SSLContext:
        """Returns the context for an https:// address."""
        try:
            context = ssl.create_default_context(cafile=self.ca or None)
        except (OSError, ValueError):  # no such file, or no certificate in it
            raise InvalidInput(f"--ca {self.ca} is not a certificate in PEM form") from None
        if self.insecure:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context

    def credentials(self) -> Any:
        """Returns the credentials for a grpcs:// address."""
        import grpc

        if self.insecure:
            raise InvalidInput(
                "--insecure goes with https://; for grpcs:// give the server's own certificate as --ca"
            )
        try:
            roots = Path(self.ca).read_bytes() if self.ca else None
        except OSError:
            raise InvalidInput(f"--ca {self.ca} cannot be read") from None
        return grpc.ssl_channel_credentials(roots)

    def headers(self) -> tuple[tuple[str, str], ...]:
        return (("Authorization", f"Bearer {self.key}"),) if self.key else ()


TRUSTING = Trust()


_ANSWER_S, _PERSON_S = 10.0, 30.0
_MOST_BYTES = 64 << 20
_SERVICE = "/inference.GRPCInferenceService/"


def only_model(facts: HttpFacts | GrpcFacts) -> str:
    """Returns the one to ask when none was named."""
    names = sorted(set(facts.models()))
    if len(names) == 1:
        return names[0]
    if not names:
        raise Unreachable("the server has no model that is ready")
    raise InvalidInput(f"choose a model: --model {' or '.join(names[:8])}")


def input_spec(name: Any, datatype: Any, shape: Any) -> TensorSpec:
    if (
        not isinstance(name, str)
        or datatype not in DATATYPES
        or not isinstance(shape, list | tuple)
        or not all(type(length) is int and -1 <= length < 1 << 40 for length in shape)
    ):
        raise Unreachable(f"the server describes an invalid input: {name!r} {datatype!r} {shape!r}")
    return TensorSpec(name, DATATYPES[datatype], tuple(shape))


class HttpFacts:
    """Asks over short connections of their own."""

    def __init__(
        self, host: str, port: int | None, tls: ssl.SSLContext | None = None, headers: Sequence[Header] = ()
    ) -> None:
        self._address = (host, port)
        self._where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._prefix = ""  # of every path
        self._tls = tls
        self._headers = headers

    def check_ready(self) -> None:
        status, _ = self.ask("GET", "/v2/health/ready")
        if status != 200:
            raise Unreachable(
                f"{self._where} is not ready: GET /v2/health/ready answered {status}. Nothing was sent"
            )

    def models(self) -> list[str]:
        listed = _document(*self.ask("POST", "/v2/repository/index", b"{}"), "the list of models")
        return [str(entry.get("name")) for entry in _objects(listed) if entry.get("state") in ("READY", None)]

    def inputs(self, model: str, version: str) -> list[TensorSpec]:
        path = f"/v2/models/{quote(model, safe='')}"
        if version:
            path += f"/versions/{quote(version, safe='')}"
        document = _document(*self.ask("GET", path), f"model {model!r}")
        entries = _objects(document.get("inputs") if isinstance(document, dict) else None)
        return [input_spec(entry.get("name"), entry.get("datatype"), entry.get("shape")) for entry in entries]

    def profile(self, model: str) -> Any:
        """Returns what the server measured of a model; None from one that does not report it."""
        status, body = self.ask("GET", f"/v2/models/{quote(model, safe='')}/profile")
        return _document(status, body, f"the profile of {model!r}") if status == 200 else None

    def try_one(self, message: tuple[bytes, bytes]) -> tuple[int, bytes, str | None]:
        """Sends one request as it will be sent: status, body, and the length of its head."""
        with self._response(b"".join(message), "POST", _ANSWER_S) as response:
            length = response.getheader("Inference-Header-Content-Length")
            return response.status, response.read(_MOST_BYTES), length

    def post(self, path: str, body: bytes, what: str) -> None:
        """Have the server do something about `what`; raises `Unreachable` if it does not."""
        status, said = self.ask("POST", path, body)
        if status != 200:
            raise Unreachable(f"the server does not take {what}: {decode_error(said)[0] or status}")

    def ask(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        seconds: float = _ANSWER_S,
        headers: Sequence[Header] = (),
    ) -> tuple[int, bytes]:
        """Returns status and body."""
        lines = [f"{method} {self._prefix}{path} HTTP/1.1", f"Host: {self._where}", "Connection: close"]
        lines += [f"{name}: {value}" for name, value in (*self._headers, *headers)]
        lines += [f"Content-Length: {len(body)}", "", ""]
        with self._response("\r\n".join(lines).encode() + body, method, seconds) as response:
            return response.status, response.read(_MOST_BYTES)

    @contextlib.contextmanager
    def _response(self, request: bytes, method: str, seconds: float) -> Iterator[HTTPResponse]:
        opened = HTTPConnection(*self._address, timeout=seconds)
        if self._tls is not None:
            opened = HTTPSConnection(*self._address, timeout=seconds, context=self._tls)
        try:
            with contextlib.closing(opened):
                opened.connect()
                opened.send(request)
                with HTTPResponse(opened.sock, method=method) as response:
                    response.begin()
                    yield response
        except OSError as error:
            verified = getattr(error, "verify_message", "")  # "[SSL: …] certificate verify failed: …"
            why = str(error) if verified else error.strerror or str(error) or type(error).__name__
            raise self._no_answer(why) from None
        except HTTPException as error:  # its words would be those of whatever is there
            raise self._not_http(type(error).__name__) from None

    def _no_answer(self, why: str) -> CarpoolError:
        if "certificate verify failed" in why:
            return Unreachable(f"{self._where}: {why}; {advice_for(why)}. Nothing was sent")
        return Unreachable(f"there is no server at {self._where}: {why}. Nothing was sent")

    def _not_http(self, why: str) -> CarpoolError:
        return Unreachable(f"{self._where} does not speak HTTP: {why}")


def _objects(listed: Any) -> list[dict[str, Any]]:
    return [entry for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []


def _document(status: int, body: bytes, what: str) -> Any:
    if status != 200:
        raise Unreachable(f"the server did not report {what}: {decode_error(body)[0] or status}")
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        raise Unreachable(f"the server's response about {what} is not JSON") from None


class Failed(CarpoolError):
    """The server is not there, or said no."""

    exit_code = 1


class RunningServer(HttpFacts):
    """Represents a server by its URL, for the verbs that ask a few questions of a person."""

    def __init__(self, url: str, trust: Trust) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise InvalidInput(f"--url must be like http://localhost:8000, not {url!r}")
        tls = trust.context() if parts.scheme == "https" else None
        super().__init__(parts.hostname, port or (443 if tls else 80), tls, trust.headers())
        self._url = url
        self._prefix = parts.path.rstrip("/")

    def get(self, path: str) -> Any:
        return self._read_document(*self.ask("GET", path, seconds=_PERSON_S))

    def send(self, path: str, document: dict[str, Any], seconds: float = _PERSON_S) -> Any:
        return self._read_document(*self.ask("POST", path, orjson.dumps(document), seconds=seconds))

    def delete(self, path: str) -> Any:
        return self._read_document(*self.ask("DELETE", path, seconds=_PERSON_S))

    def _read_document(self, status: int, answer: bytes) -> Any:
        try:
            document = orjson.loads(answer or b"{}")
        except orjson.JSONDecodeError:
            document = None
        if status == 200 and document is not None:
            return document
        said = str(document.get("error", "")) if isinstance(document, dict) else ""
        why = "not a response of a model server" if status == 200 else said or f"HTTP status {status}"
        raise Failed(f"{self._url}: {why if why.isprintable() else repr(why)}")

    def _no_answer(self, why: str) -> CarpoolError:
        return Failed(f"{self._url}: no response: {why}; {advice_for(why)}")

    def _not_http(self, why: str) -> CarpoolError:  # noqa: ARG002
        return Failed(f"{self._url}: the server at this address does not speak HTTP")


class GrpcFacts:
    """Asks over a channel that blocks."""

    def __init__(self, address: str, credentials: Any = None, headers: Sequence[Header] = ()) -> None:
        self._where = address
        self._credentials = credentials
        self._said = tuple((name.lower(), value) for name, value in headers)

    def check_ready(self) -> None:
        if not self._read("ServerReady").ready:
            raise Unreachable(f"{self._where} is not ready: ServerReady answered false. Nothing was sent")

    def models(self) -> list[str]:
        return [model.name for model in self._read("RepositoryIndex", ready=True).models]

    def inputs(self, model: str, version: str) -> list[TensorSpec]:
        described = self._read("ModelMetadata", name=model, version=version)
        return [input_spec(entry.name, entry.datatype, tuple(entry.shape)) for entry in described.inputs]

    def _read(self, method: str, **fields: object) -> Any:
        """Returns the response to a request with these fields."""
        from google.protobuf.message import DecodeError

        from carpool.wire.proto import message_class

        answer = self.ask(method, message_class(f"{method}Request")(**fields).SerializeToString())
        try:
            return message_class(f"{method}Response").FromString(answer)
        except DecodeError:
            raise Unreachable(
                f"{self._where} answers {method} with a message that is not a {method}Response"
            ) from None

    def ask(self, method: str, message: bytes, metadata: tuple[tuple[str, str], ...] = ()) -> bytes:
        import grpc

        if self._credentials is None:
            opened = grpc.insecure_channel(self._where)
        else:
            opened = grpc.secure_channel(self._where, self._credentials)
        with opened as channel:
            try:
                answer: bytes = channel.unary_unary(_SERVICE + method)(
                    message, timeout=_ANSWER_S, metadata=metadata or self._said
                )
            except grpc.RpcError as error:
                raise Unreachable(
                    f"{self._where} answers {method} with: {error.details()}", reason=error.code().name
                ) from None
        return answer
