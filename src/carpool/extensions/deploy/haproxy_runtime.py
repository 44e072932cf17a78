"""This writes HAProxy's configuration for replicas that come and go while it runs: the files of
deploy/balancer without replicas, which are added and taken away through a socket."""

from __future__ import annotations

import re
from pathlib import Path
from string import Template
from typing import NamedTuple

from carpool.errors import InvalidInput
from carpool.extensions.deploy.balancer_config import FILES, Address, deploy_folder
from carpool.extensions.deploy.balancer_extras import with_haproxy_grpc

_TRIES_AFTER_A_NODE = 3
_AT_ONCE_OUT = " observe layer4 error-limit 2 on-error mark-down"


class PoolConfig(NamedTuple):
    backend: str
    server: str  # what is said of a server that is added: such a one takes no default from the file


class RuntimeConfig(NamedTuple):
    text: str
    http: PoolConfig
    grpc: PoolConfig | None


def runtime_config(listen: Address, socket: Path, grpc: Address | None = None) -> RuntimeConfig:
    """It answers the question whether it serves as Ray's own proxies do, which KubeRay asks."""
    text = (deploy_folder() / "balancer" / FILES["haproxy"]).read_text("utf-8")
    http = _pool(text)
    answer = (
        "    http-request return status {} content-type text/plain string {} if {{ path /-/healthz }}{}\n"
    )
    serves = f" {{ nbsrv({http.backend}) gt 0 }}"
    health = answer.format(200, "success", serves) + answer.format(503, "no-replica", "")
    # Two of them at one port would each get a part of the requests: the second is to fail.
    first = f"global\n    noreuseport\n    stats socket {socket} mode 600 level admin"
    text = re.sub(r"^global$", first, text, count=1, flags=re.M)
    text = re.sub(r"^(frontend \S+)$", rf"\1\n{health.rstrip()}", text, count=1, flags=re.M)
    # With a node all of its replicas are lost, not at quite the same time: who is sent from one on to the
    # next of them needs more than one try. And who cannot be reached is left out until a check finds it.
    text = re.sub(r"^( *retries) \d+$", rf"\1 {_TRIES_AFTER_A_NODE}", text, count=1, flags=re.M)
    filled = Template(text).safe_substitute(CARPOOL_LISTEN=str(listen), CARPOOL_SERVERS="")
    http = http._replace(server=http.server + _AT_ONCE_OUT)
    if grpc is None:
        return RuntimeConfig(filled, http, None)
    both = with_haproxy_grpc(filled, (), grpc, 0)
    return RuntimeConfig(both, http, _pool(both))


def _pool(text: str) -> PoolConfig:
    """Returns that of the file's last front end."""
    backends = re.findall(r"^ *default_backend (\S+)$", text, re.MULTILINE)
    servers = re.findall(r"^ *default-server (.+)$", text, re.MULTILINE)
    if not backends or not servers:
        raise InvalidInput(f"{FILES['haproxy']} names no default_backend, or has no default-server")
    return PoolConfig(backends[-1], servers[-1])
