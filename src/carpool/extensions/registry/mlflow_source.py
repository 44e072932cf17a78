"""This module has MLflow's registry over its REST interface, with the standard library alone.

Three calls resolve an alias: which version, where its files are, which they are; then one for each file. What
comes over the network is hostile until checked: names, sizes, kinds and amounts.
"""

from __future__ import annotations

import base64
import http.client
import json
import ssl
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote, unquote, urlencode, urlsplit

from carpool.config.regular_file import read_regular
from carpool.errors import ConfigError
from carpool.extensions.registry.settings import read_address
from carpool.extensions.registry.source import (
    BadArtifacts,
    NotInRegistry,
    NotReady,
    Pin,
    PinnedFile,
    RegistryDown,
)

MOST_BYTES = 64 << 30
MOST_FILES = 1000
_DEEPEST = 8
_MOST_JSON = 4 << 20
_MOST_MLMODEL = 1 << 20
_ANSWER_S = 10.0
_SILENT_S = 30.0  # between two pieces of a file
_FETCH_S = 6 * 3600.0
_BLOCK = 1 << 20
_API = "/api/2.0/mlflow/"
_ARTIFACTS = "/api/2.0/mlflow-artifacts/artifacts"
_MLMODEL = "MLmodel"
_ABSENT = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE")
_LONGEST_NAME = 255
_RUNS_CODE = (
    ".py",
    ".pyc",
    ".so",
    ".pt",
    ".pt2",
    ".pth",
    ".torchscript",
    ".pkl",
    ".pickle",
    ".joblib",
    ".sh",
)
_VARIABLES = ("MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD")


@dataclass(frozen=True, slots=True)
class MlflowServer:
    """Describes where it is, and with which key it is asked. Secrets are in no representation and no
    message."""

    url: str  # without a user's name and password
    host: str
    port: int
    prefix: str
    tls: ssl.SSLContext | None = field(repr=False)
    authorization: str = field(repr=False)

    @classmethod
    def at(cls, url: str, environ: Mapping[str, str]) -> MlflowServer:
        """Finds the server by --registry, or MLFLOW_TRACKING_URI; MLflow's other variables as its own clients
        read them."""
        given = url or environ.get("MLFLOW_TRACKING_URI", "")
        parts = urlsplit(given)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1 or parts.query:
            told = "nothing" if not given else f"{parts.scheme}://…"
            raise ConfigError(
                f"--registry (or MLFLOW_TRACKING_URI) must be like https://mlflow.example, not {told}",
                field="registry",
            )
        token, user, password = (environ.get(name, "") for name in _VARIABLES)
        user, password = user or unquote(parts.username or ""), password or unquote(parts.password or "")
        authorization = ""
        if user:
            authorization = "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()
        elif token:
            authorization = f"Bearer {token}"
        if not authorization.isprintable() or not authorization.isascii():
            raise ConfigError("MLFLOW_TRACKING_TOKEN must be printable", field="registry")
        tls = None
        if parts.scheme == "https":
            tls = ssl.create_default_context()
            if environ.get("MLFLOW_TRACKING_INSECURE_TLS", "").lower() in ("1", "true"):
                tls.check_hostname = False
                tls.verify_mode = ssl.CERT_NONE
        prefix = parts.path.rstrip("/")
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        plain = f"{parts.scheme}://{host}{f':{port}' if port else ''}{prefix}"
        return cls(plain, parts.hostname, port or (443 if tls else 80), prefix, tls, authorization)

    def ask(self, path: str, query: Mapping[str, str] | None = None, sent: object = None) -> dict[str, Any]:
        """A document; `sent` makes it a POST."""
        target = f"{path}?{urlencode(query)}" if query else path
        body = None if sent is None else json.dumps(sent).encode()
        with _Reply(self, "GET" if sent is None else "POST", target, body, _ANSWER_S) as reply:
            data = reply.read(_MOST_JSON + 1)
        if len(data) > _MOST_JSON:
            raise RegistryDown(f"{self.url}: a response of more than {_MOST_JSON} bytes to {path}")
        try:
            document = json.loads(data or b"{}")
        except (ValueError, RecursionError):
            document = None
        if not isinstance(document, dict):
            raise RegistryDown(f"{self.url}: {path} was not answered with JSON: is that an MLflow server?")
        return document

    def blocks(self, path: str) -> Iterator[bytes]:
        """Yields a file, as it comes."""
        with _Reply(self, "GET", path, None, _SILENT_S) as reply:
            while block := reply.read(_BLOCK):
                yield block


class _Reply:
    """Represents one request on a connection of its own, and every way in which it can fail as one of our
    errors.

    Redirects are not followed: they would carry the key elsewhere.
    """

    def __init__(self, server: MlflowServer, method: str, target: str, body: bytes | None, silent_s: float):
        self._server = server
        fields = {"Accept": "*/*", "User-Agent": "carpool", "Connection": "close"}
        if server.authorization:
            fields["Authorization"] = server.authorization
        if body is not None:
            fields["Content-Type"] = "application/json"
        where, tls = (server.host, server.port), server.tls
        self._connection = (
            http.client.HTTPConnection(*where, timeout=silent_s)
            if tls is None
            else http.client.HTTPSConnection(*where, timeout=silent_s, context=tls)
        )
        try:
            self._connection.request(method, server.prefix + target, body, fields)
            self._response = self._connection.getresponse()
            if self._response.status != 200:
                raise self._refusal(target.partition("?")[0])
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            raise self._lost(error) from None
        except BaseException:
            self._connection.close()
            raise

    def __enter__(self) -> _Reply:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def read(self, most: int) -> bytes:
        try:
            return self._response.read(most)
        except (OSError, http.client.HTTPException) as error:
            raise self._lost(error) from None

    def _lost(self, error: Exception) -> RegistryDown:
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return RegistryDown(f"{self._server.url}: no response: {why}")

    def _refusal(self, path: str) -> Exception:
        status, url = self._response.status, self._server.url
        try:
            document = json.loads(self._response.read(_MOST_JSON))
            code, said = str(document["error_code"]), str(document.get("message", ""))[:200]
        except (ValueError, KeyError, TypeError, RecursionError, AttributeError):
            code, said = "", ""
        said = said if said.isprintable() else repr(said)
        if (status == 404 and (code or path.startswith(_ARTIFACTS))) or (status == 400 and code in _ABSENT):
            return NotInRegistry(f"{url}: {said or f'there is no {path}'}")
        if status in (401, 403):
            token, user, password = _VARIABLES
            who = f"{token}, or {user} and {password}"
            return RegistryDown(f"{url}: status {status}, so the key is missing or not known: set {who}")
        down = RegistryDown(f"{url}: status {status} for {path}{f': {said}' if said else ''}")
        later = self._response.headers.get("Retry-After", "")
        if later.isascii() and later.isdigit() and len(later) < 6:
            down.retry_after_s = float(later)
        return down


class MlflowSource:
    """Represents one address in one registry."""

    def __init__(self, server: MlflowServer, address: str, *, allow_pickle: bool = False) -> None:
        self._server = server
        self._asked = read_address(address)
        self._allow_pickle = allow_pickle
        self._address = address

    @property
    def address(self) -> str:
        return self._address

    # ---- which version, and which files

    def resolve(self, known: Pin | None = None) -> Pin:
        asked = self._asked
        if asked.alias:
            query = {"name": asked.name, "alias": asked.alias}
            answer = self._server.ask(f"{_API}registered-models/alias", query)
        else:
            query = {"name": asked.name, "version": asked.version}
            answer = self._server.ask(f"{_API}model-versions/get", query)
        found = answer.get("model_version")
        if not isinstance(found, dict):
            raise RegistryDown(f"{self._server.url}: no model_version in the response for {self._address}")
        version, stamp = _version(found, self._address), str(found.get("creation_timestamp", ""))
        status = str(found.get("status", "READY"))
        if status != "READY":
            raise NotReady(f"{self._address}: version {version} is {status[:40]}")
        if known is not None and (known.version, known.stamp) == (version, stamp):
            return known
        root = self._root(version)
        files = tuple(sorted(self._listed(root), key=lambda file: file.path))
        content = [
            self._server.url,
            asked.name,
            version,
            stamp,
            root,
            [[file.path, file.size] for file in files],
        ]
        digest = sha256(json.dumps(content).encode()).hexdigest()
        return Pin(version, digest, files, self._address, root, str(found.get("run_id") or ""), stamp)

    def _root(self, version: int) -> str:
        """Returns the folder of its files below the server's own artifacts."""
        query = {"name": self._asked.name, "version": str(version)}
        uri = str(self._server.ask(f"{_API}model-versions/get-download-uri", query).get("artifact_uri", ""))
        parts = urlsplit(uri)
        if parts.scheme != "mlflow-artifacts":
            raise BadArtifacts(
                f"{self._address}: its files lie at {uri[:120]!r}, which the registry does not hand out: "
                "start mlflow server with --serve-artifacts"
            )
        pieces = unquote(parts.path).strip("/").split("/")
        if any(piece in ("", ".", "..") or "\\" in piece or not piece.isprintable() for piece in pieces):
            raise BadArtifacts(f"{self._address}: its files lie at {uri[:120]!r}, which is no folder")
        return "/".join(pieces)

    def _listed(self, root: str) -> Iterator[PinnedFile]:
        waiting, seen, total = [""], 0, 0
        while waiting:
            below = waiting.pop()
            path = f"{root}/{below}".rstrip("/")
            entries = self._server.ask(_ARTIFACTS, {"path": path}).get("files", [])
            if not isinstance(entries, list):
                raise RegistryDown(f"{self._server.url}: the listing of {path} is no list")
            for entry in entries:
                seen += 1
                name = self._name(entry)
                if seen > MOST_FILES or below.count("/") > _DEEPEST:
                    raise BadArtifacts(f"{self._address}: more than {MOST_FILES} files, or too many folders")
                if entry.get("is_dir"):
                    waiting.append(f"{below}{name}/")
                    continue
                size = _size(entry, f"{self._address}: {below}{name}")
                total += size
                if total > MOST_BYTES:
                    raise BadArtifacts(f"{self._address}: more than {MOST_BYTES >> 30} GiB of files")
                yield PinnedFile(f"{below}{name}", size)

    def _name(self, entry: object) -> str:
        """One part of a path: listings give no more, so that more would lead elsewhere."""
        name = entry.get("path") if isinstance(entry, dict) else None
        sound = isinstance(name, str) and name.isprintable() and 0 < len(name.encode()) <= _LONGEST_NAME
        if not isinstance(name, str) or not sound or name in (".", "..") or "/" in name or "\\" in name:
            raise BadArtifacts(
                f"{self._address}: the listing has a file {str(name)[:80]!r}, which is no name"
            )
        return name

    # ---- the files

    def fetch(self, pin: Pin, folder: Path) -> None:
        listed = {file.path: file for file in pin.files}
        text = ""
        give_up = time.monotonic() + _FETCH_S
        if _MLMODEL in listed:
            if listed[_MLMODEL].size > _MOST_MLMODEL:
                raise BadArtifacts(f"{pin.address}: {_MLMODEL} is larger than {_MOST_MLMODEL} bytes")
            self._download(pin, listed[_MLMODEL], folder, give_up)
            text = read_regular(folder / _MLMODEL, _MOST_MLMODEL).decode("utf-8", "replace")
        data, served_as = model_file(text, listed, pin.address, allow_pickle=self._allow_pickle)
        for file in pin.files:
            runs_code = PurePosixPath(file.path).suffix.lower() in _RUNS_CODE
            hidden = any(part.startswith(".") for part in file.path.split("/"))
            if file.path != _MLMODEL and not hidden and (self._allow_pickle or not runs_code):
                self._download(pin, file, folder, give_up)
        if served_as != data:
            (folder / served_as).hardlink_to(folder / data)

    def _download(self, pin: Pin, file: PinnedFile, folder: Path, give_up: float) -> None:
        target = folder / file.path
        target.parent.mkdir(parents=True, exist_ok=True)
        size = 0
        try:
            with target.open("xb") as opened:
                for block in self._server.blocks(f"{_ARTIFACTS}/{quote(f'{pin.root}/{file.path}')}"):
                    size += len(block)
                    if size > file.size or time.monotonic() > give_up:
                        break
                    opened.write(block)
        except OSError as error:
            raise BadArtifacts(f"{target}: cannot be written: {error.strerror or error}") from None
        if size != file.size:
            what = f"more than {file.size}" if size > file.size else f"{size} of {file.size}"
            raise BadArtifacts(f"{pin.address}: {file.path} was received with {what} bytes")

    # ---- what is sent to the registry

    def write_back(
        self, pin: Pin, state: str, rollout: str = "", metrics: Mapping[str, float] | None = None
    ) -> None:
        version = {"name": self._asked.name, "version": str(pin.version)}
        tags = {"carpool.state": state} | ({"carpool.rollout": rollout} if rollout else {})
        for key, value in tags.items():
            sent = {**version, "key": key, "value": value[:5000]}
            self._server.ask(f"{_API}model-versions/set-tag", sent=sent)
        if not pin.run:
            return  # a version that no run made: there is nothing that could have metrics
        at = int(time.time() * 1e3)
        for key, number in (metrics or {}).items():
            said = {"run_id": pin.run, "key": key, "value": number, "timestamp": at}
            self._server.ask(f"{_API}runs/log-metric", sent=said)

    def point(self, pin: Pin) -> None:
        if not self._asked.alias:
            raise NotInRegistry(f"{self._address} is a version, and no alias that could be moved")
        sent = {"name": self._asked.name, "alias": self._asked.alias, "version": str(pin.version)}
        self._server.ask(f"{_API}registered-models/alias", sent=sent)


def _version(found: Mapping[str, Any], address: str) -> int:
    text = str(found.get("version", ""))
    if not (text.isascii() and text.isdigit() and len(text) <= 18 and int(text)):
        raise RegistryDown(f"{address}: its version is {text[:40]!r}, which is not a number")
    return int(text)


def _size(entry: Mapping[str, Any], what: str) -> int:
    """Returns a number, or one in text, as the protocol's JSON has large ones."""
    text = str(entry.get("file_size", ""))
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise BadArtifacts(f"{what}: the listing has no size")
    return int(text)


# ---- which of a version's files is the model: as MLflow's own MLmodel file says it, or by its name


_ONNX = "model.onnx"
_TORCH = "model.pth"
_READABLE = "onnx, and with allow_pickle = true pytorch"


def flavours(text: str) -> dict[str, dict[str, str]]:
    """Returns the part `flavors` of an MLmodel file: by flavour, its plain values.

    MLflow writes this file in the same few forms of YAML each time: keys, two spaces of depth, plain or
    quoted values. Everything else is passed over, so that nothing it could hold is ever obeyed.
    """
    found: dict[str, dict[str, str]] = {}
    current = ""
    for depth, key, value in _lines(text):
        if depth == 0:
            current = ""
            if key != "flavors" and found:
                break
        elif depth == 2 and not value:
            current = key
            found[key] = {}
        elif depth == 4 and current and value:
            found[current][key] = value
    return found


def _lines(text: str) -> Iterator[tuple[int, str, str]]:
    """Yields the lines of the block that begins with `flavors:`, and the first one after it."""
    inside = False
    for line in text.splitlines():
        depth = len(line) - len(line.lstrip(" "))
        key, separator, value = line.strip().partition(":")
        if not separator or line.lstrip().startswith(("#", "-")):
            continue
        if depth == 0:
            inside = key == "flavors"
        if inside or depth == 0:
            yield depth, key, value.strip().strip("'\"")


def model_file(text: str, listed: Collection[str], address: str, *, allow_pickle: bool) -> tuple[str, str]:
    """Returns the file that holds the model, and the name under which it is served from a version's
    folder."""
    if not text:
        if _ONNX in listed:
            return _ONNX, _ONNX
        raise BadArtifacts(f"{address}: neither an MLmodel nor a {_ONNX} is among its files")
    there = flavours(text)
    if "onnx" in there:
        return _checked(there["onnx"].get("data", _ONNX), listed, address), _ONNX
    if "pytorch" in there:
        if not allow_pickle:
            raise BadArtifacts(
                f"{address}: a model of flavour pytorch is a pickle, which runs code when it is read. "
                "Export it to ONNX, or set allow_pickle = true in [registry] if you trust everyone who "
                "may write there"
            )
        data = f"{there['pytorch'].get('model_data', 'data')}/{_TORCH}"
        return _checked(data, listed, address), _TORCH
    named = ", ".join(sorted(there)[:8]) or "none"
    raise BadArtifacts(f"{address}: none of its flavours can be served ({named}); readable: {_READABLE}")


def _checked(data: str, listed: Collection[str], address: str) -> str:
    """A folder may stand for the file in it; a model's other files lie beside it."""
    if data not in listed and f"{data}/{_ONNX}" in listed:
        data = f"{data}/{_ONNX}"
    if data not in listed:
        raise BadArtifacts(f"{address}: MLmodel names the file {data[:80]!r}, which is not there")
    others = [
        one for one in listed if PurePosixPath(one).parent == PurePosixPath(data).parent and one != data
    ]
    if PurePosixPath(data).parent != PurePosixPath() and data.endswith(".onnx") and others:
        raise BadArtifacts(f"{address}: {data} is in a folder, where its other files would not be found")
    return data
