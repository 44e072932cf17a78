"""HAProxy and Envoy with TLS, gRPC, an access log and a page of their state, in front of a real server."""

from __future__ import annotations

import os
import ssl
import subprocess
import urllib.error
import urllib.request
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton

from backends import onnx_models
from carpool.extensions.deploy.balancer_config import FILES, Address
from carpool.extensions.deploy.balancer_extras import BalancerExtras, whole_balancer_config
from extensions.deploy.rendered import program
from live.server import PATIENCE_S, free_ports, serving
from waiting import until

pytestmark = pytest.mark.conformance


def answers(url: str, trusted: ssl.SSLContext | None = None) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5, context=trusted) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False


@pytest.mark.parametrize("kind", ["haproxy", "envoy"])
def test_tls_grpc_streams_log_and_state(tmp_path: Path, kind: str) -> None:
    found = program(kind)
    cert, key = tmp_path / "carpool.pem", tmp_path / "carpool.pem.key"
    made = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost", "-days", "2"]
    made += ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(cert)]
    subprocess.run(["openssl", *made], check=True, capture_output=True)
    listen, grpc, stats = (Address("127.0.0.1", port) for port in free_ports(3))
    (tmp_path / "models" / "m" / "1").mkdir(parents=True)
    onnx_models.identity(tmp_path / "models" / "m" / "1" / "model.onnx")
    with serving(tmp_path / "models", grpc=1, folder=tmp_path) as server:
        extras = BalancerExtras(
            grpc, server.grpc_port, str(cert), "" if kind == "haproxy" else str(key), stats, access_log=True
        )
        file = tmp_path / FILES[kind]
        file.write_text(whole_balancer_config(kind, [Address("127.0.0.1", server.port)], listen, extras))
        log = tmp_path / "balancer.log"
        with log.open("wb") as out:
            balancer = subprocess.Popen(
                [str(found), "-f" if kind == "haproxy" else "-c", str(file)],
                env=os.environ
                | ({"LD_LIBRARY_PATH": str(found.parent / "lib")} if kind == "haproxy" else {}),
                stdout=out,
                stderr=out,
            )
        try:
            trusted = ssl.create_default_context(cafile=str(cert))
            address = f"https://localhost:{listen.port}/v2/health/ready"
            until(lambda: answers(address, trusted), "it passes requests on", PATIENCE_S)
            page = "metrics" if kind == "haproxy" else "stats/prometheus"
            assert answers(f"http://localhost:{stats.port}/")
            assert answers(f"http://localhost:{stats.port}/{page}")
            client = triton.InferenceServerClient(
                f"localhost:{grpc.port}", ssl=True, root_certificates=str(cert)
            )
            tensor = triton.InferInput("x", [1, 3], "FP32")
            tensor.set_data_from_numpy(np.ones((1, 3), np.float32))
            until(lambda: client.is_server_ready(), "gRPC is passed on", PATIENCE_S)
            assert client.infer("m", [tensor]).as_numpy("y").tolist() == [[1.0, 1.0, 1.0]]
            told: Queue[tuple[Any, Any]] = Queue()
            client.start_stream(lambda result, error: told.put((result, error)))
            client.async_stream_infer("m", [tensor])
            answer, error = told.get(timeout=PATIENCE_S)
            client.stop_stream()
            assert error is None
            assert answer.as_numpy("y").tolist() == [[1.0, 1.0, 1.0]]
        finally:
            balancer.terminate()
            balancer.wait(PATIENCE_S)
        assert "/v2/health/ready" in log.read_text(errors="replace")
