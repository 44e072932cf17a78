"""`carpool serve s3://…` from two independent S3 servers: moto's and rclone's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from backends.onnx_models import identity
from conformance.s3_servers import VARIABLE
from live.server import free_ports, infer_path, json_request, serving
from waiting import until

pytestmark = pytest.mark.conformance

KEYS = {
    "AWS_ACCESS_KEY_ID": "carpool-key",
    "AWS_SECRET_ACCESS_KEY": "carpool-SECRET",
    "AWS_DEFAULT_REGION": "us-east-1",
}
PUT = """
import sys, boto3
client = boto3.client("s3")
try:
    client.create_bucket(Bucket="bucket")
except client.exceptions.ClientError:
    pass
for place in sys.argv[1:]:
    file, key = place.split("=")
    client.upload_file(file, "bucket", key)
"""
FETCH = """
import sys
from pathlib import Path
from carpool.extensions.registry.remote_listing import Budget
from carpool.extensions.registry.remote_repository import RemoteRepository
found = RemoteRepository("s3://bucket/models", Path(sys.argv[1]), Budget())
print(found.folder, flush=True)
print(found.refresh(), flush=True)
"""


@dataclass
class Store:
    folder: Path
    url: str

    @property
    def environment(self) -> Mapping[str, str]:
        [packages] = self.folder.glob("lib/python*/site-packages")
        paths = os.pathsep.join(filter(None, [str(packages), os.environ.get("PYTHONPATH", "")]))
        return {**KEYS, "AWS_ENDPOINT_URL": self.url, "PYTHONPATH": paths}

    def put(self, files: Mapping[str, Path]) -> None:
        words = [f"{file}={key}" for key, file in files.items()]
        command = [str(self.folder / "bin" / "python"), "-c", PUT, *words]
        subprocess.run(command, check=True, timeout=120, env=os.environ | self.environment)


@pytest.fixture(params=["moto", "rclone"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    found = os.environ.get(VARIABLE)
    if not found:
        pytest.skip(f"no S3 servers: `make conformance` installs them (not with --ci), or {VARIABLE}=FOLDER")
    folder, [port] = Path(found), free_ports(1)
    if request.param == "moto":
        command = [str(folder / "bin" / "moto_server"), "-H", "127.0.0.1", "-p", str(port)]
    else:
        (tmp_path / "s3" / "bucket").mkdir(parents=True)
        command = [str(folder / "bin" / "rclone"), "serve", "s3", str(tmp_path / "s3")]
        command += ["--addr", f"127.0.0.1:{port}", "--auth-key", ",".join(list(KEYS.values())[:2])]
    url = f"http://127.0.0.1:{port}"
    with (tmp_path / "store.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        until(lambda: _answers(url), "the S3 server", 60.0)
        yield Store(folder, url)
    finally:
        process.terminate()
        process.wait(30)


def _answers(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=5).close()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True


def test_a_new_version_takes_over_and_nobody_fails(store: Store, tmp_path: Path) -> None:
    models = {number: identity(tmp_path / f"{number}.onnx", shape=("batch", 2)) for number in (1, 2)}
    store.put({"models/detector/1/model.onnx": models[1]})
    given = store.environment | {
        "CARPOOL_MODEL_CONTROL_MODE": "poll",
        "CARPOOL_POLL_S": "0.5",
        "CARPOOL_MODELS": "s3://bucket/models",
        "CARPOOL_CACHE_DIR": str(tmp_path / "cache"),
    }
    with serving(folder=tmp_path, environment=given) as server:
        statuses: list[int] = []
        stop = threading.Event()

        def ask() -> None:
            body = json_request([1.0, 2.0], [1, 2])
            with server.connect() as client:
                while not stop.is_set():
                    statuses.append(client.post(infer_path("detector"), body).status)

        asking = threading.Thread(target=ask)
        asking.start()
        try:
            store.put({"models/detector/2/model.onnx": models[2]})
            versions = "/v2/models/detector"
            until(lambda: server.get_json(versions)["versions"] == ["2"], "the new version")
        finally:
            stop.set()
            asking.join()
        assert statuses
        assert set(statuses) == {200}
        assert "SECRET" not in server.log()


def test_killed_during_the_download_there_is_never_half_a_model(store: Store, tmp_path: Path) -> None:
    weights = tmp_path / "weights.bin"
    weights.write_bytes(os.urandom(1 << 20) * 96)
    toml = tmp_path / "model.toml"
    toml.write_text('backend = "fake"\n')
    store.put({"models/large/1/weights.bin": weights, "models/large/model.toml": toml})
    command = [sys.executable, "-c", FETCH, str(tmp_path / "cache")]
    environment = os.environ | store.environment

    def begin() -> tuple[subprocess.Popen[str], Path]:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        assert process.stdout is not None
        return process, Path(process.stdout.readline().strip())

    process, folder = begin()
    parts = folder.parent / "parts"

    def fetched() -> int:
        return sum(path.stat().st_size for path in parts.glob("*")) if parts.is_dir() else 0

    until(lambda: fetched() >= 32 << 20, "a part of it")
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not list(folder.glob("*/*"))
    assert 0 < fetched() < weights.stat().st_size
    process, _ = begin()
    told, _ = process.communicate(timeout=120)
    assert told.strip() == "[]"
    assert (folder / "large" / "1" / "weights.bin").read_bytes() == weights.read_bytes()
