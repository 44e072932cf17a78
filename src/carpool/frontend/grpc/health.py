"""gRPC's own health service, which Kubernetes and load balancers ask."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from carpool.errors import NotFound
from carpool.frontend.grpc.grpc_service import Service
from carpool.frontend.grpc.schema import health_class
from carpool.frontend.grpc.statuses import refuse

HealthCheckRequest = health_class("HealthCheckRequest")
HealthCheckResponse = health_class("HealthCheckResponse")

_LOOK_S = 0.1
_UNKNOWN, _SERVING, _NOT_SERVING, _SERVICE_UNKNOWN = range(4)


def check(service: Service, name: str, known: frozenset[str]) -> int:
    """The status of the whole server, or of a service that it has; of others it knows nothing."""
    if name and name not in known:
        return _SERVICE_UNKNOWN
    return _SERVING if service.ready else _NOT_SERVING


async def watch(service: Service, name: str, known: frozenset[str], context: Any) -> None:
    """Tell the status now and whenever it changes, until the server stops."""
    told = None
    while True:
        status = check(service, name, known)
        if status != told:
            await context.write(answer(status))
            told = status
        if service.stopping.is_set():
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(service.stopping.wait(), _LOOK_S)


def answer(status: int) -> bytes:
    return bytes(HealthCheckResponse(status=status).SerializeToString())


async def checked(service: Service, name: str, known: frozenset[str], context: Any) -> bytes:
    status = check(service, name, known)
    if status == _SERVICE_UNKNOWN:
        return refuse(context, NotFound("this server has no service of that name", field="service"))
    return answer(status)
