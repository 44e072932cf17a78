"""The ways to ask a server: over HTTP or gRPC, with the image in the request or in shared memory.

Each way can be asked once, for the answer to be compared, and repeated by a load generator.
"""

import http.client
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import grpc
import numpy as np
from tritonclient.grpc import service_pb2

from load import h2load, wrk
from load.burst import Fire
from peers import tiny
from peers.region import Region

HTTP, GRPC, HTTP_SHM, GRPC_SHM = "http", "grpc", "http + shm", "grpc + shm"
WAYS_OF = {"http": (HTTP,), "grpc": (GRPC,), "shm": (HTTP_SHM, GRPC_SHM)}
_ASK_S = 10.0
_REGION = "image"
_HTTP_PATH = "/v2/models/tiny/infer"
_GRPC_PATH = "/inference.GRPCInferenceService/ModelInfer"


class NotYet(Exception):
    """No good answer, so far."""


class Way(Protocol):
    """`group` says what may be compared, `protocol` what is sent."""

    @property
    def group(self) -> str: ...

    @property
    def protocol(self) -> str: ...

    def ask(self) -> np.ndarray:
        """The ten scores. Raises `NotYet`."""

    def loader(self, folder: Path, name: str) -> Fire:
        """What repeats the request. To be called when it has been answered once."""


@dataclass
class HttpWay:
    group: str
    protocol: str
    target: wrk.Target
    read: Callable[[Mapping[str, str], bytes], np.ndarray]

    def ask(self) -> np.ndarray:
        return self.read(*post(self.target))

    def loader(self, folder: Path, name: str) -> Fire:
        return self.target.loader(folder, name)


@dataclass
class GrpcWay:
    group: str
    protocol: str
    target: h2load.Target
    answer_bytes: int = 0

    def ask(self) -> np.ndarray:
        with grpc.insecure_channel(f"127.0.0.1:{self.target.port}") as channel:
            try:
                answer = channel.unary_unary(self.target.path)(self.target.message, timeout=_ASK_S)
            except grpc.RpcError as error:
                raise NotYet(str(error)) from error
        self.answer_bytes = len(answer)
        response = service_pb2.ModelInferResponse.FromString(answer)
        return np.frombuffer(response.raw_output_contents[0], "<f4")

    def loader(self, folder: Path, name: str) -> Fire:
        return self.target.loader(folder, name, self.answer_bytes)


def v2_way(group: str, http_port: int, grpc_port: int) -> Way:
    """One image to the tiny model in the v2 protocol."""
    in_memory = group in (HTTP_SHM, GRPC_SHM)
    if group in (HTTP, HTTP_SHM):
        label = "HTTP v2 + shm" if in_memory else "HTTP v2 binary"
        return HttpWay(group, label, _v2_target(http_port, in_memory), _read_v2)
    label = "gRPC + shm" if in_memory else "gRPC"
    return GrpcWay(group, label, h2load.Target(grpc_port, _GRPC_PATH, _message(in_memory)))


def registering(http_port: int, region: Region) -> wrk.Target:
    """To be sent once, before the first request that names the region; it holds for gRPC as well."""
    return wrk.Target(
        http_port,
        f"/v2/systemsharedmemory/region/{_REGION}/register",
        {"Content-Type": "application/json"},
        json.dumps({"key": region.key, "offset": 0, "byte_size": region.size}).encode(),
    )


def _v2_target(port: int, in_memory: bool) -> wrk.Target:
    """One image as a binary tensor or in the region, the answer as binary: what tritonclient sends."""
    image = tiny.image().tobytes()
    parameters: dict[str, object] = {"binary_data_size": len(image)}
    if in_memory:
        parameters = {"shared_memory_region": _REGION, "shared_memory_byte_size": len(image)}
    tensor = {
        "name": tiny.INPUT,
        "shape": [1, *tiny.SHAPE],
        "datatype": "UINT8",
        "parameters": parameters,
    }
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    headers = {
        "Content-Type": "application/octet-stream",
        "Inference-Header-Content-Length": str(len(head)),
    }
    return wrk.Target(port, _HTTP_PATH, headers, head if in_memory else head + image)


def _message(in_memory: bool) -> bytes:
    """A ModelInferRequest with the image, or with its place."""
    request = service_pb2.ModelInferRequest(model_name="tiny")
    tensor = request.inputs.add(name=tiny.INPUT, datatype="UINT8", shape=[1, *tiny.SHAPE])
    if in_memory:
        tensor.parameters["shared_memory_region"].string_param = _REGION
        tensor.parameters["shared_memory_byte_size"].int64_param = tiny.image().nbytes
    else:
        request.raw_input_contents.append(tiny.image().tobytes())
    return bytes(request.SerializeToString())


def answer_message(scores: np.ndarray) -> bytes:
    """A ModelInferResponse with these scores."""
    response = service_pb2.ModelInferResponse(model_name="tiny", model_version="1")
    response.outputs.add(name=tiny.OUTPUT, datatype="FP32", shape=[1, tiny.SCORES])
    response.raw_output_contents.append(scores.astype("<f4").tobytes())
    return bytes(response.SerializeToString())


def _read_v2(headers: Mapping[str, str], body: bytes) -> np.ndarray:
    """The scores behind the JSON head of a binary answer."""
    return np.frombuffer(body, "<f4", offset=int(headers["inference-header-content-length"]))


def post(target: wrk.Target) -> tuple[Mapping[str, str], bytes]:
    """The headers and the body of a 200. Raises `NotYet`."""
    connection = http.client.HTTPConnection("127.0.0.1", target.port, timeout=_ASK_S)
    try:
        connection.request("POST", target.path, target.body, dict(target.headers))
        response = connection.getresponse()
        headers, body = {k.lower(): v for k, v in response.getheaders()}, response.read()
    except OSError as error:
        raise NotYet(str(error)) from error
    finally:
        connection.close()
    if response.status != http.client.OK:
        raise NotYet(f"{response.status} {body[:300]!r}")
    return headers, body
