"""Programs of others that speak HTTP/2 with the front end: a conformance suite, a load generator, proxies,
and gRPC's own client with the options that people set."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from tritonclient.grpc import InferenceServerClient
from tritonclient.grpc import service_pb2 as pb

from carpool.types import Array, Datatype, TensorSpec
from conformance.fleet_engines import VARIABLE, binary
from frontend.fake_door import FakeModel
from frontend.grpc.front_end import SERVICE, SUM, FrontEnd, channel, floats, front_end, image_request, infer
from frontend.grpc.wire import framed
from frontend.http.front_end import models
from waiting import until

SIZE = 600_000


def largest(inputs: dict[str, Array]) -> dict[str, Array]:
    return {"y": inputs["x"].max(axis=1, keepdims=True)}


@pytest.fixture(scope="module")
def front() -> Iterator[FrontEnd]:
    given = [TensorSpec("x", Datatype.UINT8, (SIZE,))]
    with front_end(
        *models(), FakeModel("large", given, [TensorSpec("y", Datatype.UINT8, (1,))], largest)
    ) as running:
        yield running


def large_request(value: int) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name="large")
    request.inputs.add(name="x", datatype="UINT8", shape=[1, SIZE])
    request.raw_input_contents.append(bytes(SIZE - 1) + bytes((value,)))
    return request


def is_served(connected: grpc.Channel) -> None:
    """Short and long messages, calls at once, a stream, and an error with its details."""
    assert floats(infer(connected, image_request())) == SUM
    call = connected.unary_unary(
        SERVICE + "ModelInfer",
        request_serializer=pb.ModelInferRequest.SerializeToString,
        response_deserializer=pb.ModelInferResponse.FromString,
    )
    waiting = [(value, call.future(large_request(value), timeout=60)) for value in range(1, 9)]
    for value, answer in waiting:
        assert answer.result().raw_output_contents[0] == bytes((value,))
    stream = connected.stream_stream(
        SERVICE + "ModelStreamInfer",
        request_serializer=pb.ModelInferRequest.SerializeToString,
        response_deserializer=pb.ModelStreamInferResponse.FromString,
    )
    answers = list(stream(iter([large_request(3), large_request(4)]), timeout=60))
    assert sorted(one.infer_response.raw_output_contents[0][0] for one in answers) == [3, 4]
    with pytest.raises(grpc.RpcError) as raised:
        call(pb.ModelInferRequest(model_name="absent"), timeout=60)
    assert raised.value.code() is grpc.StatusCode.NOT_FOUND
    assert "absent" in raised.value.details()


OPTIONS = {
    "long messages": {"grpc.max_send_message_length": -1, "grpc.max_receive_message_length": -1},
    "keepalive": {
        "grpc.keepalive_time_ms": 1000,
        "grpc.keepalive_timeout_ms": 20_000,
        "grpc.keepalive_permit_without_calls": 1,
        "grpc.http2.max_pings_without_data": 0,
    },
    "small windows and frames": {
        "grpc.http2.lookahead_bytes": 16_384,
        "grpc.http2.max_frame_size": 16_384,
        "grpc.http2.bdp_probe": 0,
    },
    "large frames": {"grpc.http2.max_frame_size": 16_777_215, "grpc.http2.write_buffer_size": 1 << 20},
    "gzip": {"grpc.default_compression_algorithm": grpc.Compression.Gzip.value},
    "deflate": {"grpc.default_compression_algorithm": grpc.Compression.Deflate.value},
    "no header table": {"grpc.http2.hpack_table_size.encoder": 0, "grpc.http2.hpack_table_size.decoder": 0},
    "other names": {"grpc.default_authority": "models.example", "grpc.primary_user_agent": "tests/1 " * 20},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_grpcio_with_the_options_that_people_set(front: FrontEnd, options: dict[str, object]) -> None:
    with channel(front, **options) as connected:
        is_served(connected)


def test_metadata_of_some_kilobytes(front: FrontEnd) -> None:
    with channel(front, **{"grpc.max_metadata_size": 65_536}) as connected:
        for number in range(3):  # the table is full from the second on
            metadata = tuple((f"x-text-{at}-bin", os.urandom(700)) for at in range(6))
            answer = infer(connected, image_request(id=str(number)), metadata=metadata)
            assert floats(answer) == SUM


# ── programs that make conformance may find ──


@contextlib.contextmanager
def running(*command: object, environment: dict[str, str] | None = None) -> Iterator[None]:
    process = subprocess.Popen(
        [str(word) for word in command],
        env=os.environ | (environment or {}),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield
    finally:
        process.terminate()
        process.wait(30)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
        return True
    return False


def balancer(name: str) -> Path:
    folder = os.environ.get(VARIABLE)
    found = binary(name, Path(folder)) if folder else None
    if found is None:
        pytest.skip("make fleet fetches what this needs, and make conformance names its folder")
    return found


HAPROXY = """
defaults
  mode http
  timeout connect 5s
  timeout client 60s
  timeout server 60s
frontend in
  bind 127.0.0.1:{port} proto h2
  default_backend out
backend out
  server one 127.0.0.1:{behind} proto h2
"""

ENVOY = """
static_resources:
  listeners:
  - address: {{socket_address: {{address: 127.0.0.1, port_value: {port}}}}}
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": {manager}
          stat_prefix: in
          codec_type: HTTP2
          route_config:
            virtual_hosts:
            - name: all
              domains: ["*"]
              routes: [{{match: {{prefix: "/"}}, route: {{cluster: carpool, timeout: 0s}}}}]
          http_filters:
          - name: envoy.filters.http.router
            typed_config: {{"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}}
  clusters:
  - name: carpool
    type: STATIC
    typed_extension_protocol_options:
      envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
        "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
        explicit_http_config: {{http2_protocol_options: {{}}}}
    load_assignment:
      cluster_name: carpool
      endpoints:
      - lb_endpoints:
        - endpoint: {{address: {{socket_address: {{address: 127.0.0.1, port_value: {behind}}}}}}}
"""


MANAGER = "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"


@pytest.mark.conformance
@pytest.mark.parametrize("name", ["haproxy", "envoy"])
def test_behind_a_proxy(front: FrontEnd, tmp_path: Path, name: str) -> None:
    program, port, file = balancer(name), free_port(), tmp_path / "settings"
    settings = HAPROXY if name == "haproxy" else ENVOY
    file.write_text(settings.format(port=port, behind=front.port, manager=f"type.googleapis.com/{MANAGER}"))
    if name == "haproxy":
        libraries = {"LD_LIBRARY_PATH": str(program.parent / "lib")}
        started = running(program, "-f", file, "-db", environment=libraries)
    else:
        started = running(program, "-c", file.rename(tmp_path / "envoy.yaml"), "--concurrency", 1)
    with started:
        until(lambda: listens(port))
        with grpc.insecure_channel(f"127.0.0.1:{port}") as connected:
            is_served(connected)
        with InferenceServerClient(f"127.0.0.1:{port}") as client:
            assert client.is_server_live()
    front.until_slots_are_back()


@pytest.mark.conformance
def test_h2load(front: FrontEnd, tmp_path: Path) -> None:
    """Frames of 16 KiB, several calls at once on each connection."""
    program = shutil.which("h2load")
    if program is None:
        pytest.skip("there is no h2load (Debian: nghttp2-client)")
    body = tmp_path / "body"
    body.write_bytes(framed(large_request(9).SerializeToString()))
    command = [program, "-n", "300", "-c", "6", "-m", "4", "-d", str(body)]
    command += ["-H", "content-type: application/grpc", "-H", "te: trailers"]
    url = f"http://127.0.0.1:{front.port}{SERVICE}ModelInfer"
    done = subprocess.run([*command, url], capture_output=True, text=True, timeout=120, check=True)
    assert "300 succeeded, 0 failed, 0 errored" in done.stdout, done.stdout
    assert re.search(r"status codes: 300 2xx", done.stdout)


NOT_OF_GRPC = {
    "Sends a WINDOW_UPDATE frame on half-closed (remote) stream",  # wants data; a call without its message
    "Sends a PRIORITY frame on half-closed (remote) stream",  # is answered with a status alone
    # Takes it that nobody allows frames longer than 16 KiB, whatever our settings say.
    "Sends a large size HEADERS frame that exceeds the SETTINGS_MAX_FRAME_SIZE",
    # Its calls end with their heads, so that there never are too many at once.
    "Sends HEADERS frames that causes their advertised concurrent stream limit to be exceeded",
}


@pytest.mark.conformance
def test_h2spec(front: FrontEnd) -> None:
    """Built so that its requests are calls, as docs/conformance.md says."""
    program = os.environ.get("CARPOOL_H2SPEC") or shutil.which("h2spec")
    if program is None:
        pytest.skip("there is no h2spec: CARPOOL_H2SPEC names it")
    command = [program, "-h", "127.0.0.1", "-p", str(front.port), "-P", SERVICE + "ServerLive"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    said = done.stdout[done.stdout.find("Failures:") :]
    failed = {found.strip() for found in re.findall(r"× \d+: (.*)", said)}
    assert "tests," in done.stdout
    assert failed <= NOT_OF_GRPC, said
