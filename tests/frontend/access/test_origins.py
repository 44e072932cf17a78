"""What a browser says about who sends a request, and by which name it calls the server."""

from __future__ import annotations

import pytest

from carpool.errors import Forbidden
from carpool.frontend.access.guard import Guard, Names
from carpool.frontend.access.route_rules import RULES

LOOPBACK = [
    "localhost",
    "localhost:8000",
    "LOCALHOST.:80",
    "127.0.0.1:8000",
    "127.8.9.1",
    "[::1]:8000",
    "[::1]",
]
FOREIGN = [
    "evil.example",
    "evil.example:8000",
    "localhost.evil.example",
    "10.0.0.5:8000",
    "",
    "[::2]:1",
    "a:b:c",
]


@pytest.mark.parametrize("host", LOOPBACK)
def test_this_machine_may_call_itself_by_its_names(host: str) -> None:
    Names(loopback=True).check_host({b"host": host.encode()})


@pytest.mark.parametrize("host", FOREIGN)
def test_a_foreign_name_on_loopback_is_refused(host: str) -> None:
    with pytest.raises(Forbidden, match="--allowed-host"):
        Names(loopback=True).check_host({b"host": host.encode()})
    Names().check_host({b"host": host.encode()})


def test_a_name_can_be_allowed() -> None:
    names = Names(loopback=True, allowed=["Carpool.example"])
    names.check_host({b"host": b"carpool.example:443"})
    names.check_host({})
    with pytest.raises(Forbidden):
        names.check_host({b"host": b"x.carpool.example"})


def test_on_the_network_a_list_of_names_leaves_addresses_alone() -> None:
    """Probes come by address, and an address cannot be made to point elsewhere."""
    names = Names(allowed=["carpool.example"])
    names.check_host({b"host": b"10.0.0.5:8000"})
    with pytest.raises(Forbidden):
        names.check_host({b"host": b"evil.example"})


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {b"sec-fetch-site": b"same-origin"},
        {b"sec-fetch-site": b"none"},
        {b"origin": b"http://localhost:8000"},
        {b"origin": b"http://localhost:8000", b"sec-fetch-site": b"same-origin"},
        {b"origin": b"https://proxy.example"},
    ],
)
def test_ones_own_pages_may(headers: dict[bytes, bytes]) -> None:
    Names(loopback=True, allowed=["proxy.example"]).check_site({b"host": b"localhost:8000", **headers})


@pytest.mark.parametrize(
    "headers",
    [
        {b"sec-fetch-site": b"cross-site"},
        {b"sec-fetch-site": b"same-site"},
        {b"origin": b"null"},
        {b"origin": b"http://localhost:9000"},
        {b"origin": b"http://localhost"},
        {b"origin": b"http://127.0.0.1:8000"},
        {b"origin": b"file://"},
        {b"origin": b"http://evil.example"},
        {b"origin": b"http://localhost:8000", b"sec-fetch-site": b"cross-site"},
        {b"origin": b"https://proxy.example", b"sec-fetch-site": b"cross-site"},
    ],
)
def test_pages_of_other_sites_may_not(headers: dict[bytes, bytes]) -> None:
    with pytest.raises(Forbidden, match="another site"):
        Names(loopback=True, allowed=["proxy.example"]).check_site({b"host": b"localhost:8000", **headers})


def test_all_that_is_not_only_read_is_closed_to_pages_of_other_sites() -> None:
    """Inference as well: it may write to clients' memory, continue a sequence, load a model."""
    guard, foreign = Guard(), {b"host": b"localhost:8000", b"sec-fetch-site": b"cross-site"}
    routes = [name for name in RULES if " " in name and not name.startswith("GET ")]
    assert len(routes) > 20
    for name in routes:
        with pytest.raises(Forbidden, match="another site"):
            guard.check_http(RULES[name], foreign, name)
        guard.check_http(RULES[name], {b"host": b"localhost:8000"}, name)
    for name in RULES:
        if name.startswith("GET "):
            guard.check_http(RULES[name], foreign, name)


def test_ports_that_go_without_saying() -> None:
    Names().check_site({b"host": b"carpool.example", b"origin": b"https://carpool.example"})
    Names().check_site({b"host": b"carpool.example:443", b"origin": b"https://carpool.example"})
    with pytest.raises(Forbidden):
        Names().check_site({b"host": b"carpool.example:80", b"origin": b"https://carpool.example"})
