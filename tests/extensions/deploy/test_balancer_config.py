"""What `carpool deploy balancer` writes: the file of deploy/balancer with the addresses put in."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from carpool.errors import InvalidInput
from carpool.extensions.deploy.balancer_config import (
    FILES,
    Address,
    balancer_config,
    deploy_folder,
    read_address,
)
from carpool.extensions.deploy.balancer_extras import BalancerExtras, whole_balancer_config
from cli_run import run_cli

REPLICAS = [Address("10.0.0.1", 8000), Address("carpool-2", 8010), Address("fd00::7", 8000)]
LISTEN = Address("0.0.0.0", 8080)


@pytest.mark.parametrize("kind", FILES)
def test_only_the_marks_are_filled_in(kind: str) -> None:
    text = balancer_config(kind, REPLICAS, LISTEN)
    assert "${" not in text
    source = (deploy_folder() / "balancer" / FILES[kind]).read_text()
    kept = [line for line in source.splitlines() if "${CARPOOL" not in line]
    written = iter(text.splitlines())
    assert all(line in written for line in kept), "in order, unchanged"
    assert all(str(replica.port) in text and replica.host in text for replica in REPLICAS)


def test_envoy_is_yaml_with_every_replica() -> None:
    document = yaml.safe_load(balancer_config("envoy", REPLICAS, LISTEN))
    cluster = document["static_resources"]["clusters"][0]
    ends = cluster["load_assignment"]["endpoints"][0]["lb_endpoints"]
    places = [end["endpoint"]["address"]["socket_address"] for end in ends]
    assert [Address(place["address"], place["port_value"]) for place in places] == REPLICAS
    assert cluster["lb_policy"] == "ROUND_ROBIN"
    weighted = yaml.safe_load(balancer_config("envoy", REPLICAS, LISTEN, weighted=True))
    policy = weighted["static_resources"]["clusters"][0]["load_balancing_policy"]["policies"][0]
    assert policy["typed_extension_config"]["name"].endswith("client_side_weighted_round_robin")


def test_what_the_balancers_know_of_refusals() -> None:
    """The words are the server's."""
    from carpool.core.job import Reason

    text = balancer_config("envoy", REPLICAS, LISTEN)
    found = re.search(r'regex: "([a-z|-]+)"', text)
    assert found
    retried = set(found[1].split("|"))
    gate = {Reason.OVERLOAD, Reason.CANNOT_FINISH, Reason.OVER_SHARE, Reason.QUEUE_FULL, Reason.RESTARTING}
    assert {reason.value for reason in gate} <= retried
    assert not {Reason.GIVEN_UP.value, Reason.DEADLINE.value, Reason.TIMEOUT.value} & retried


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("http://10.0.0.1:9000", Address("10.0.0.1", 9000)),
        ("carpool-1", Address("carpool-1", 8000)),
        ("http://[fd00::7]:1/", Address("fd00::7", 1)),
    ],
)
def test_addresses(text: str, address: Address) -> None:
    assert read_address(text, "a replica", 8000) == address


@pytest.mark.parametrize(
    "text",
    [
        *("https://a:1", "http://a/path", "http://u@a", "http://a:99999", "", "http://", "a b", "a;b"),
        *("http://a\n    bind :1", "http://a}{", "ftp://a", "http://a?x", "http://a:x"),
    ],
)
def test_what_could_mean_something_else_in_a_configuration_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="a replica must be like"):
        read_address(text, "a replica", 8000)


def test_replicas_are_named_once_and_weights_are_envoys() -> None:
    with pytest.raises(InvalidInput, match="each once"):
        balancer_config("nginx", [LISTEN, LISTEN], LISTEN)
    with pytest.raises(InvalidInput, match="each once"):
        balancer_config("nginx", [], LISTEN)
    with pytest.raises(InvalidInput, match="--weighted is for envoy"):
        balancer_config("haproxy", REPLICAS, LISTEN, weighted=True)


def test_printed_or_written(tmp_path: Path) -> None:
    command = [
        "deploy",
        "balancer",
        "http://10.0.0.1:8000",
        "10.0.0.2",
        "--kind",
        "nginx",
        "--listen",
        "127.0.0.1:81",
    ]
    printed = run_cli(command)
    assert printed.exit_code == 0
    assert "listen 127.0.0.1:81;" in printed.stdout
    assert "server 10.0.0.2:8000 " in printed.stdout
    assert run_cli([*command, "--output", str(tmp_path), "--dry-run"]).stdout == printed.stdout
    assert not list(tmp_path.iterdir())
    assert run_cli([*command, "--output", str(tmp_path / "new")]).exit_code == 0
    assert (tmp_path / "new" / "nginx.conf").read_text() == printed.stdout
    (tmp_path / "file").write_text("")
    assert run_cli(["deploy", "balancer"]).exit_code == 2
    unwritable = run_cli([*command, "--output", str(tmp_path / "file" / "x")])
    assert unwritable.exit_code == 1
    assert "cannot be written: Not a directory" in unwritable.output


EXTRAS = BalancerExtras(
    Address("0.0.0.0", 8081), 8001, "/etc/tls/carpool.pem", "", Address("::1", 8404), True
)


def test_without_extras_nothing_is_added() -> None:
    for kind in FILES:
        plain = balancer_config(kind, REPLICAS, LISTEN)
        assert whole_balancer_config(kind, REPLICAS, LISTEN, BalancerExtras()) == plain


def test_haproxy_with_all_that_operators_ask_for() -> None:
    text = whole_balancer_config("haproxy", REPLICAS, LISTEN, EXTRAS)
    tls = "ssl crt /etc/tls/carpool.pem ssl-min-ver TLSv1.2 alpn"
    assert f"    bind 0.0.0.0:8080 {tls} h2,http/1.1\n" in text
    assert f"    bind 0.0.0.0:8081 {tls} h2\n" in text
    for section in ("frontend carpool", "frontend carpool-grpc", "backend replicas", "backend replicas-grpc"):
        assert text.count(f"\n{section}\n") == 1
    assert "    server replica-1 10.0.0.1:8001 port 8000\n" in text
    assert text.count("    option httplog\n") == text.count("\ndefaults\n") == 2
    assert "    bind [::1]:8404\n" in text
    assert "${" not in text


def test_envoy_with_all_that_operators_ask_for() -> None:
    document = yaml.safe_load(whole_balancer_config("envoy", REPLICAS, LISTEN, EXTRAS))
    assert document["admin"]["address"]["socket_address"] == {"address": "::1", "port_value": 8404}
    resources = document["static_resources"]
    assert [cluster["name"] for cluster in resources["clusters"]] == ["replicas", "replicas-grpc"]
    for listener, protocols in zip(resources["listeners"], (["h2", "http/1.1"], ["h2"]), strict=True):
        (chain,) = listener["filter_chains"]
        tls = chain["transport_socket"]["typed_config"]["common_tls_context"]
        assert tls["alpn_protocols"] == protocols
        assert "X-CARPOOL-REASON" in str(chain["filters"][0]["typed_config"]["access_log"])


def test_nginx_with_what_it_can() -> None:
    text = whole_balancer_config("nginx", REPLICAS, LISTEN, replace(EXTRAS, grpc=None))
    assert "        listen 0.0.0.0:8080 ssl;\n" in text
    assert "access_log /dev/stdout carpool;" in text
    assert "listen [::1]:8404;" in text
    assert text.count("{") == text.count("}")
    with pytest.raises(InvalidInput, match="use --kind haproxy or envoy"):
        whole_balancer_config("nginx", REPLICAS, LISTEN, EXTRAS)


@pytest.mark.parametrize("wrong", ["carpool.pem", "/a b", "/a\n    bind :1"])
def test_a_certificate_is_a_path(wrong: str) -> None:
    with pytest.raises(InvalidInput, match="--tls-cert must be a path"):
        BalancerExtras(tls_cert=wrong)
