"""The floor under gRPC: the same library on the same event loop, with a handler that does nothing.

It answers every ModelInfer with the same message, without reading the request: what this costs, any server
written on `grpc.aio` has to pay before its first line. Arguments: the port, and the file with the answer.
"""

import sys
from pathlib import Path
from typing import Any

import grpc
import uvloop

METHOD = "/inference.GRPCInferenceService/ModelInfer"
AHEAD = 1 << 20  # as in Carpool: a tensor comes in one piece
OPTIONS = (("grpc.http2.lookahead_bytes", AHEAD), ("grpc.http2.max_frame_size", AHEAD))


class OneMethod(grpc.GenericRpcHandler):  # type: ignore[misc]
    def __init__(self, answer: bytes) -> None:
        self._answer = answer
        self._handler = grpc.unary_unary_rpc_method_handler(self._handle)

    def service(self, details: Any) -> grpc.RpcMethodHandler | None:
        return self._handler if details.method == METHOD else None

    async def _handle(self, _message: bytes, _context: Any) -> bytes:
        return self._answer


async def main(port: int, answer: bytes) -> None:
    server = grpc.aio.server(handlers=[OneMethod(answer)], options=OPTIONS)
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), Path(sys.argv[2]).read_bytes()))
