"""A balancer's configuration, from the file in deploy/balancer that the tests use: where it listens and which
replicas there are is put in, and nothing else is changed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from string import Template
from typing import NamedTuple
from urllib.parse import urlsplit

from carpool.errors import InvalidInput

FILES = {"haproxy": "haproxy.cfg", "envoy": "envoy.yaml", "nginx": "nginx.conf"}
"""By kind of balancer, the name under which it looks for its configuration."""

_HOST = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,252})|[0-9A-Fa-f:.]{2,45}")
_MOST_REPLICAS = 1000
_SERVER_LINES = {
    "haproxy": "    server replica-{number} {place}",
    "envoy": "            - endpoint: {{address: {{socket_address: "
    '{{address: "{host}", port_value: {port}}}}}}}',
    "nginx": "        server {place} max_fails=1 fail_timeout=2s;",
}
_EVENLY = "      lb_policy: ROUND_ROBIN"
_WEIGHTED = """\
      # By what replicas say of themselves (--load-report always): each gets what it can answer.
      load_balancing_policy:
        policies:
          - typed_extension_config:
              name: envoy.load_balancing_policies.client_side_weighted_round_robin
              typed_config:
                "@type": type.googleapis.com/envoy.extensions.load_balancing_policies.client_side_weighted_round_robin.v3.ClientSideWeightedRoundRobin
                blackout_period: 2s
                weight_update_period: 1s
                weight_expiration_period: 60s"""  # noqa: E501


class Address(NamedTuple):
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def read_address(text: str, field: str, usual_port: int) -> Address:
    """HOST:PORT, or http://HOST:PORT. What is written into a configuration can mean nothing else there."""
    parts = urlsplit(text if "://" in text else f"http://{text}")
    try:
        host, port = parts.hostname or "", parts.port or usual_port
    except ValueError:
        host, port = "", 0
    rest = parts.path.strip("/") or parts.query or parts.fragment or parts.username
    if parts.scheme != "http" or rest or not _HOST.fullmatch(host):
        raise InvalidInput(
            f"{field} must be like http://10.0.0.1:{usual_port}, not {text[:80]!r}", field=field
        )
    return Address(host, port)


def deploy_folder() -> Path:
    """Returns what stands in deploy/ of the project; an installed package has it beside this file."""
    installed = Path(__file__).parent / "files"
    return installed if installed.is_dir() else Path(__file__).parents[4] / "deploy"


def balancer_config(
    kind: str, replicas: Sequence[Address], listen: Address, *, weighted: bool = False
) -> str:
    """`weighted` is Envoy's alone: the others cannot read what replicas say of their load."""
    if not 1 <= len(set(replicas)) == len(replicas) <= _MOST_REPLICAS:
        raise InvalidInput(f"name 1 to {_MOST_REPLICAS} replicas, each once", field="replicas")
    if weighted and kind != "envoy":
        raise InvalidInput(f"--weighted is for envoy: {kind} does not read load reports", field="weighted")
    lines = [
        _SERVER_LINES[kind].format(number=number, place=place, host=place.host, port=place.port)
        for number, place in enumerate(replicas, 1)
    ]
    template = Template((deploy_folder() / "balancer" / FILES[kind]).read_text("utf-8"))
    return template.safe_substitute(  # nginx has variables of its own
        CARPOOL_LISTEN=str(listen),
        CARPOOL_HOST=listen.host,
        CARPOOL_PORT=str(listen.port),
        CARPOOL_POLICY=_WEIGHTED if weighted else _EVENLY,
        CARPOOL_SERVERS="\n".join(lines),
    )
