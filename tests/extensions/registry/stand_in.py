"""A stand-in for an MLflow server: the calls that Carpool makes, answered in the forms that `mlflow server`
3.17 was seen to give, and every way in which they can go wrong."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

MLMODEL = """artifact_path: mlflow-artifacts:/1/models/m-7/artifacts
flavors:
  onnx:
    code: null
    data: model.onnx
    onnx_version: 1.22.0
    providers:
    - CUDAExecutionProvider
    - CPUExecutionProvider
  python_function:
    data: model.onnx
    env:
      conda: conda.yaml
    loader_module: mlflow.onnx
mlflow_version: 3.17.2
model_id: m-7
"""

Files = dict[str, bytes]
Reply = tuple[int, dict[str, str], bytes]
Break = Callable[[str], Reply | None]
"""Given a path with its query: what to answer instead, if anything."""


@dataclass
class StandIn:
    """One registered model, `detector`."""

    port: int = 0
    versions: dict[int, Files] = field(default_factory=dict)
    aliases: dict[str, int] = field(default_factory=dict)
    status: dict[int, str] = field(default_factory=dict)
    instead: Break = lambda _path: None
    asked: list[str] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)  # of every request
    tags: dict[int, dict[str, str]] = field(default_factory=dict)
    metrics: list[dict[str, Any]] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def register(self, version: int, model: bytes, **more: bytes) -> None:
        self.versions[version] = {"MLmodel": MLMODEL.encode(), "model.onnx": model, **more}

    # ---- answers

    def get(self, path: str, query: dict[str, str]) -> Reply:
        route = path.removeprefix("/api/2.0/")
        if route.startswith("mlflow-artifacts/artifacts/"):
            return self._file(unquote(route.removeprefix("mlflow-artifacts/artifacts/")))
        if route == "mlflow-artifacts/artifacts":
            return self._listing(query["path"])
        if query.get("name") != "detector":
            return _error(
                404, "RESOURCE_DOES_NOT_EXIST", f"Registered Model with name={query['name']} not found"
            )
        if route == "mlflow/registered-models/alias":
            version = self.aliases.get(query["alias"])
            if version is None:
                message = f"Registered model alias {query['alias']} not found."
                return _error(400, "INVALID_PARAMETER_VALUE", message)
            return _document(self._version(version))
        if int(query["version"]) not in self.versions:
            return _error(404, "RESOURCE_DOES_NOT_EXIST", "Model Version not found")
        if route == "mlflow/model-versions/get":
            return _document(self._version(int(query["version"])))
        if route == "mlflow/model-versions/get-download-uri":
            uri = f"mlflow-artifacts:/1/models/m-{query['version']}/artifacts"
            return _document({"artifact_uri": uri})
        return _error(404, "ENDPOINT_NOT_FOUND", route)

    def _version(self, version: int) -> dict[str, Any]:
        return {
            "model_version": {
                "name": "detector",
                "version": str(version),
                "creation_timestamp": 1763000000000 + version,
                "source": f"models:/m-{version}",
                "run_id": f"run{version}",
                "status": self.status.get(version, "READY"),
                "aliases": [alias for alias, number in self.aliases.items() if number == version],
            }
        }

    def _listing(self, path: str) -> Reply:
        version, below = self._place(path)
        entries: dict[str, dict[str, Any]] = {}
        for name, content in self.versions[version].items():
            if name.startswith(below):
                first, _, deeper = name.removeprefix(below).partition("/")
                entry = {"path": first, "is_dir": True} if deeper else {"path": first, "is_dir": False}
                entries[first] = entry if deeper else {**entry, "file_size": len(content)}
        return _document({"files": list(entries.values())})

    def _file(self, path: str) -> Reply:
        version, _ = self._place(path)
        name = path.partition("/artifacts/")[2]
        if name not in self.versions[version]:
            return _error(404, "RESOURCE_DOES_NOT_EXIST", "no such file")
        return 200, {"Content-Type": "application/octet-stream"}, self.versions[version][name]

    @staticmethod
    def _place(path: str) -> tuple[int, str]:
        """The version, and the folder below it with a slash behind."""
        parts = path.split("/")
        below = "/".join(parts[4:])
        return int(parts[2].removeprefix("m-")), f"{below}/" if below else ""

    def post(self, path: str, sent: dict[str, Any]) -> Reply:
        route = path.removeprefix("/api/2.0/mlflow/")
        if route == "model-versions/set-tag":
            self.tags.setdefault(int(sent["version"]), {})[sent["key"]] = sent["value"]
        elif route == "runs/log-metric":
            self.metrics.append(sent)
        elif route == "registered-models/alias":
            self.aliases[sent["alias"]] = int(sent["version"])
        else:
            return _error(404, "ENDPOINT_NOT_FOUND", route)
        return _document({})


def _document(document: object, status: int = 200) -> Reply:
    return status, {"Content-Type": "application/json"}, json.dumps(document).encode()


def _error(status: int, code: str, message: str) -> Reply:
    return _document({"error_code": code, "message": message}, status)


@contextmanager
def standing_in(known: StandIn | None = None) -> Iterator[StandIn]:
    """The server, on a free port, or on the one that it had before."""
    stand_in = known or StandIn()

    class Handler(BaseHTTPRequestHandler):
        def _answer(self, body: bytes | None) -> None:
            stand_in.asked.append(self.path)
            stand_in.keys.append(self.headers.get("Authorization", ""))
            parts = urlsplit(self.path)
            query = {name: values[0] for name, values in parse_qs(parts.query).items()}
            reply = stand_in.instead(self.path)
            if reply is None and body is not None:
                reply = stand_in.post(parts.path, json.loads(body))
            status, fields, content = reply or stand_in.get(parts.path, query)
            self.send_response(status)
            for name, value in ({"Content-Length": str(len(content))} | fields).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def do_GET(self) -> None:
            self._answer(None)

        def do_POST(self) -> None:
            self._answer(self.rfile.read(int(self.headers["Content-Length"])))

        def log_message(self, *_said: object) -> None:
            pass

    ThreadingHTTPServer.allow_reuse_address = True
    server = ThreadingHTTPServer(("127.0.0.1", stand_in.port), Handler)
    stand_in.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield stand_in
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
