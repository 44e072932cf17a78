"""This adds what operators expect of a balancer besides balancing: TLS, an access log, a page of its own
state, and the gRPC ports beside the HTTP ones. Each is put into the file of deploy/balancer where it is asked
for; without, that file is as it was measured."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from string import Template

from carpool.errors import InvalidInput
from carpool.extensions.deploy.balancer_config import (
    FILES,
    Address,
    balancer_config,
    deploy_folder,
)

_PATH = re.compile(r"/[\w./-]{1,250}")
_GRPC_LINES = {
    "haproxy": "    server replica-{number} {place} port {http}",
    "envoy": '            - endpoint: {{address: {{socket_address: {{address: "{host}", '
    "port_value: {port}}}}}, health_check_config: {{port_value: {http}}}}}",
}
_ENVOY_LOG = """\
                access_log:
                  - name: envoy.access_loggers.stdout
                    typed_config:
                      "@type": type.googleapis.com/envoy.extensions.access_loggers.stream.v3.StdoutAccessLog
                      log_format:
                        text_format_source:
                          inline_string: "%START_TIME% %DOWNSTREAM_REMOTE_ADDRESS% %REQ(:METHOD)% %REQ(:PATH)% %RESPONSE_CODE% %RESP(X-CARPOOL-REASON)% %UPSTREAM_HOST% %UPSTREAM_REQUEST_ATTEMPT_COUNT% %DURATION% ms\\n"
"""  # noqa: E501
_ENVOY_TLS = """\
          transport_socket:
            name: envoy.transport_sockets.tls
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.DownstreamTlsContext
              common_tls_context:
                alpn_protocols: [{protocols}]
                tls_params: {{tls_minimum_protocol_version: TLSv1_2}}
                tls_certificates:
                  - certificate_chain: {{filename: {cert}}}
                    private_key: {{filename: {key}}}
"""
_NGINX_LOG = """\
    log_format carpool '$remote_addr $request $status $sent_http_x_carpool_reason '
                       '$upstream_addr $request_time';
    access_log /dev/stdout carpool;
"""


@dataclass(frozen=True, slots=True)
class BalancerExtras:
    grpc: Address | None = None  # where gRPC is listened for
    grpc_port: int = 8001  # of the replicas
    tls_cert: str = ""
    tls_key: str = ""  # empty: in the same file
    stats: Address | None = None
    access_log: bool = False

    def __post_init__(self) -> None:
        for field in ("tls_cert", "tls_key"):
            path = getattr(self, field)
            if path and not _PATH.fullmatch(path):
                raise InvalidInput(
                    f"--{field.replace('_', '-')} must be a path from the root, not {path[:80]!r}",
                    field=field,
                )
        if self.tls_key and not self.tls_cert:
            raise InvalidInput("--tls-key needs --tls-cert", field="tls_cert")


def whole_balancer_config(
    kind: str, replicas: Sequence[Address], listen: Address, extras: BalancerExtras, *, weighted: bool = False
) -> str:
    text = balancer_config(kind, replicas, listen, weighted=weighted)
    return _WITH[kind](text, replicas, listen, extras)


def _haproxy(text: str, replicas: Sequence[Address], listen: Address, extras: BalancerExtras) -> str:
    if extras.tls_key:
        raise InvalidInput(
            "haproxy reads the key from the certificate's file, or from one beside it that ends in .key",
            field="tls_key",
        )
    tls = f" ssl crt {extras.tls_cert} ssl-min-ver TLSv1.2 alpn " if extras.tls_cert else ""
    if tls:
        text = _once(text, f"    bind {listen}\n", f"    bind {listen}{tls}h2,http/1.1\n")
    if extras.grpc is not None:
        text = with_haproxy_grpc(text, replicas, extras.grpc, extras.grpc_port)
        if tls:
            text = _once(text, f"bind {extras.grpc} proto h2\n", f"bind {extras.grpc}{tls}h2\n")
    if extras.access_log:
        text = _once(text, "global\n", "global\n    log stdout format raw local0\n")
        text = re.sub(
            r"^defaults\n", "defaults\n    log global\n    option httplog\n", text, flags=re.MULTILINE
        )
        capture = "    capture response header X-Carpool-Reason len 24\n"
        text = re.sub(r"^(frontend .+\n)", rf"\1{capture}", text, flags=re.MULTILINE)
    if extras.stats is not None:
        text += (
            f"\nfrontend state\n    bind {extras.stats}\n    http-request set-log-level silent\n"
            "    http-request use-service prometheus-exporter if { path /metrics }\n"
            "    stats enable\n    stats uri /\n    stats refresh 5s\n"
        )
    return text


def with_haproxy_grpc(text: str, replicas: Sequence[Address], listen: Address, grpc_port: int) -> str:
    """Returns the sections of deploy/balancer/grpc behind those of a filled-in
    deploy/balancer/haproxy.cfg."""
    grpc = _grpc("haproxy", replicas, listen, grpc_port)
    window = re.findall(r"^ *tune\.h2\.\S+ \d+\n", grpc, re.MULTILINE)
    text = _once(text, "global\n", "global\n" + "".join(window))
    named = re.compile(r"\b(default_backend|backend|frontend) (carpool|replicas)$", re.MULTILINE)
    return text + "\n" + named.sub(r"\1 \2-grpc", grpc[grpc.index("defaults\n") :])


def _envoy(text: str, replicas: Sequence[Address], _listen: Address, extras: BalancerExtras) -> str:
    parts = [(text, "h2, http/1.1")]
    if extras.grpc is not None:
        grpc = _grpc("envoy", replicas, extras.grpc, extras.grpc_port)
        grpc = re.sub(
            r"\b(name|cluster|cluster_name|stat_prefix): (carpool|replicas)\b", r"\1: \2-grpc", grpc
        )
        parts.append((grpc, "h2"))
    made = []
    for part, protocols in parts:
        if extras.tls_cert:
            key = extras.tls_key or extras.tls_cert
            tls = _ENVOY_TLS.format(protocols=protocols, cert=extras.tls_cert, key=key)
            part = _once(part, "  clusters:\n", f"{tls}  clusters:\n")
        if extras.access_log:
            part = re.sub(r"(?m)^( +generate_request_id: false\n)", lambda found: found[1] + _ENVOY_LOG, part)
        made.append(part)
    text = made[0]
    for more in made[1:]:
        listeners, clusters = more[more.index("  listeners:\n") + len("  listeners:\n") :].split(
            "  clusters:\n"
        )
        text = _once(text, "  clusters:\n", f"{listeners}  clusters:\n") + clusters
    if extras.stats is not None:
        host, port = extras.stats
        text += f'admin: {{address: {{socket_address: {{address: "{host}", port_value: {port}}}}}}}\n'
    return text


def _nginx(text: str, _replicas: Sequence[Address], listen: Address, extras: BalancerExtras) -> str:
    if extras.grpc is not None:
        raise InvalidInput(
            "--grpc-listen: nginx streams a call to one replica and cannot retry it when that replica "
            "dies: use --kind haproxy or envoy",
            field="grpc_listen",
        )
    if extras.tls_cert:
        text = _once(
            text,
            f"        listen {listen};\n",
            f"        listen {listen} ssl;\n        ssl_certificate {extras.tls_cert};\n"
            f"        ssl_certificate_key {extras.tls_key or extras.tls_cert};\n"
            "        ssl_protocols TLSv1.2 TLSv1.3;\n",
        )
    if extras.access_log:
        text = _once(text, "    access_log off;\n", _NGINX_LOG)
    if extras.stats is not None:
        page = (
            f"    server {{\n        listen {extras.stats};\n"
            "        location / { stub_status; access_log off; }\n    }\n"
        )
        text = text.rstrip().removesuffix("}") + "\n" + page + "}\n"
    return text


_WITH: dict[str, Callable[[str, Sequence[Address], Address, BalancerExtras], str]] = {
    "haproxy": _haproxy,
    "envoy": _envoy,
    "nginx": _nginx,
}


def _grpc(kind: str, replicas: Sequence[Address], listen: Address, grpc_port: int) -> str:
    """deploy/balancer/grpc, filled in; what it says of its own filling in is left out."""
    text = (deploy_folder() / "balancer" / "grpc" / FILES[kind]).read_text("utf-8")
    lines = [
        _GRPC_LINES[kind].format(
            number=number,
            place=Address(place.host, grpc_port),
            host=place.host,
            port=grpc_port,
            http=place.port,
        )
        for number, place in enumerate(replicas, 1)
    ]
    return Template(re.sub(r"\A(?:#.*\n)+", "", text)).safe_substitute(
        CARPOOL_LISTEN=str(listen),
        CARPOOL_HOST=listen.host,
        CARPOOL_PORT=str(listen.port),
        CARPOOL_SERVERS="\n".join(lines),
    )


def _once(text: str, old: str, new: str) -> str:
    if text.count(old) != 1:
        raise InvalidInput(f"the balancer's file should have {old.strip()!r} once")
    return text.replace(old, new)
