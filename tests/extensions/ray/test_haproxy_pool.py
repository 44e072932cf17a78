"""What is said to HAProxy's runtime socket, against one that answers as HAProxy 2.8 does."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from carpool.extensions.deploy.balancer_config import Address, deploy_folder
from carpool.extensions.deploy.haproxy_runtime import PoolConfig, runtime_config
from carpool.extensions.ray.haproxy_pool import BalancerError, HaproxyProcess, RuntimeSocket, ServerPool
from conformance.fleet_engines import VARIABLE, binary

A, B = Address("10.0.0.1", 31000), Address("fd00::7", 31001)
OPTIONS = "check inter 1s"


class Fake:
    """HAProxy's servers, and its answers about them."""

    def __init__(self) -> None:
        self.servers: dict[str, dict[str, object]] = {}
        self.heard: list[str] = []

    def say(self, command: str) -> str:
        self.heard.append(command)
        words = command.split()
        if words[:2] == ["show", "servers"]:
            lines = ["# bkname/svname bkid/svid addr port - purge_delay used_cur used_max need_est"]
            lines += [
                f"replicas/{name} 3/1 1.2.3.4 1 - 5000 {one['busy']} 2 2"
                for name, one in self.servers.items()
            ]
            return "\n".join(lines)
        name = words[2].partition("/")[2]
        if words[0] == "add":
            if name in self.servers:
                return "Already exists a server with the same name in backend."
            self.servers[name] = {"state": "maint", "busy": 0, "checks": False, "closing": 1}
            return "New server registered."
        if name not in self.servers:
            return "No such server."
        return self._change(words, self.servers[name], name)

    def _change(self, words: list[str], one: dict[str, object], name: str) -> str:
        if words[0] == "del":
            if one["state"] != "maint":
                return "Only servers in maintenance mode can be deleted."
            if one["closing"]:
                one["closing"] = 0
                return "Server still has connections attached to it, cannot remove it."
            del self.servers[name]
            return "Server deleted."
        if words[:2] == ["enable", "health"]:
            one["checks"] = True
        else:
            one["state"] = {"enable": "ready", "disable": "maint"}.get(words[0]) or words[-1]
        return ""

    def states(self) -> dict[str, object]:
        return {name: one["state"] for name, one in self.servers.items()}


@pytest.fixture
def fake() -> Fake:
    return Fake()


@pytest.fixture
def pool(fake: Fake) -> ServerPool:
    return ServerPool(fake.say, PoolConfig("replicas", OPTIONS), drain_s=60.0)


def test_servers_are_added_with_checks_and_enabled(fake: Fake, pool: ServerPool) -> None:
    assert pool.bring({"a": A, "b": B}, 0.0) == 0
    assert fake.states() == {"a": "ready", "b": "ready"}
    assert all(one["checks"] for one in fake.servers.values())
    assert "add server replicas/b [fd00::7]:31001 check inter 1s" in fake.heard
    said = len(fake.heard)
    pool.bring({"a": A, "b": B}, 1.0)
    assert len(fake.heard) == said + 1, "and then only looked at"


def test_who_leaves_is_drained_before_it_is_removed(fake: Fake, pool: ServerPool) -> None:
    pool.bring({"a": A, "b": B}, 0.0)
    fake.servers["a"]["busy"] = 3
    assert pool.bring({"b": B}, 1.0) == 1
    assert fake.states() == {"a": "drain", "b": "ready"}
    assert pool.bring({"b": B}, 2.0) == 1
    assert fake.states()["a"] == "drain", "three answers are awaited"
    fake.servers["a"]["busy"] = 0
    pool.bring({"b": B}, 3.0)
    pool.bring({"b": B}, 4.0)  # at first connections are still being closed
    assert pool.bring({"b": B}, 5.0) == 0
    assert fake.states() == {"b": "ready"}


def test_who_never_finishes_is_removed_in_the_end(fake: Fake, pool: ServerPool) -> None:
    pool.bring({"a": A}, 0.0)
    fake.servers["a"]["busy"] = 1
    pool.bring({}, 1.0)
    pool.bring({}, 60.0)
    assert fake.states() == {"a": "drain"}
    for second in (62.0, 63.0, 64.0):
        left = pool.bring({}, second)
    assert (fake.states(), left) == ({}, 0)


def test_who_was_silent_for_a_while_comes_back(fake: Fake, pool: ServerPool) -> None:
    pool.bring({"a": A}, 0.0)
    fake.servers["a"]["busy"] = 1
    pool.bring({}, 1.0)
    assert pool.bring({"a": A}, 2.0) == 0
    assert fake.states() == {"a": "ready"}


def test_one_that_began_again_gets_all_of_them(fake: Fake, pool: ServerPool) -> None:
    pool.bring({"a": A, "b": B}, 0.0)
    fake.servers.clear()
    pool.bring({"a": A, "b": B}, 1.0)
    assert fake.states() == {"a": "ready", "b": "ready"}


def test_what_haproxy_does_not_want_is_told_in_its_words(fake: Fake, pool: ServerPool) -> None:
    pool._say = lambda command: "" if command.startswith("show") else "Unknown command."
    with pytest.raises(BalancerError, match="Unknown command"):
        pool.bring({"a": A}, 0.0)
    for name in ("a b", "a;del server x", "", "a\nb"):
        with pytest.raises(BalancerError, match="cannot be the name"):
            pool.bring({name: A}, 0.0)


@pytest.fixture
def listening(tmp_path: Path) -> Iterator[tuple[Path, list[bytes]]]:
    path, heard = tmp_path / "s", []
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(path))
    server.listen()

    def serve() -> None:
        while True:
            try:
                line, _ = server.accept()
            except OSError:
                return
            with line:
                heard.append(line.recv(4096))
                line.sendall(b"Name: HAProxy\nVersion: 2.8\n\n")

    thread = threading.Thread(target=serve)
    thread.start()
    yield path, heard
    server.shutdown(socket.SHUT_RDWR)
    server.close()
    thread.join(10.0)


def test_one_command_a_connection(listening: tuple[Path, list[bytes]]) -> None:
    path, heard = listening
    assert RuntimeSocket(path).say("show info") == "Name: HAProxy\nVersion: 2.8"
    assert heard == [b"show info\n"]
    with pytest.raises(BalancerError, match="does not answer"):
        RuntimeSocket(path.with_name("nobody")).say("show info")


def test_the_configuration_is_that_of_deploy() -> None:
    """Only what marks are for and what the runtime needs is added."""
    made = runtime_config(Address("0.0.0.0", 8000), Path("/tmp/s"))
    source = (deploy_folder() / "balancer" / "haproxy.cfg").read_text().splitlines()
    kept = [line for line in source if "${CARPOOL" not in line and not line.startswith("    retries ")]
    written = iter(made.text.splitlines())
    assert all(line in written for line in kept), "in order, unchanged"
    assert "    bind 0.0.0.0:8000\n" in made.text
    assert "    stats socket /tmp/s mode 600 level admin\n" in made.text
    assert f"default_backend {made.http.backend}\n" in made.text
    default = next(line.split(maxsplit=1)[1] for line in source if line.startswith("    default-server "))
    assert made.http.server == f"{default} observe layer4 error-limit 2 on-error mark-down"
    assert "    retries 3\n" in made.text
    assert "${" not in made.text


def test_with_grpc_there_is_a_pool_more() -> None:
    made = runtime_config(Address("0.0.0.0", 8000), Path("/tmp/s"), Address("0.0.0.0", 8001))
    source = (deploy_folder() / "balancer" / "grpc" / "haproxy.cfg").read_text()
    assert made.grpc is not None
    assert made.grpc.backend != made.http.backend
    assert f"backend {made.grpc.backend}\n" in made.text
    assert "    bind 0.0.0.0:8001 proto h2\n" in made.text
    assert f"    default-server {made.grpc.server}\n" in source
    assert "${" not in made.text
    assert runtime_config(Address("0.0.0.0", 8000), Path("/tmp/s")).grpc is None


def test_what_is_said_of_one_server_alone(fake: Fake, pool: ServerPool) -> None:
    pool.bring({"a": f"{A} port 31009"}, 0.0)
    assert "add server replicas/a 10.0.0.1:31000 port 31009 check inter 1s" in fake.heard


@pytest.mark.conformance
def test_a_real_haproxy_takes_and_gives_back_servers() -> None:
    folder = os.environ.get(VARIABLE)
    program = binary("haproxy", Path(folder)) if folder else None
    if program is None:
        pytest.skip("make fleet fetches HAProxy, and make conformance names its folder")
    with socket.create_server(("127.0.0.1", 0)) as behind:  # it answers nothing, and that is enough
        haproxy = HaproxyProcess(str(program), "127.0.0.1", 0, 0)
        try:
            line = haproxy.start()
            assert haproxy.config is not None
            pool = ServerPool(line.say, haproxy.config.http)
            assert not haproxy.serves()
            pool.bring({"a": Address(*behind.getsockname())}, 0.0)
            assert "a" in pool._busy()
            assert haproxy.config.grpc is not None
            calls = ServerPool(line.say, haproxy.config.grpc)
            calls.bring({"a": f"{Address(*behind.getsockname())} port {behind.getsockname()[1]}"}, 0.0)
            assert "a" in calls._busy()
            second = HaproxyProcess(str(program), "127.0.0.1", haproxy.address.port)
            with pytest.raises(BalancerError, match="does not start at"):
                second.start()  # and does not share the port
            second.remove()
            now = 1.0
            while pool.bring({}, now):
                now += 1.0
                assert now < 1000.0
            assert pool._busy() == {}
        finally:
            haproxy.remove()
    assert not haproxy.folder.exists()
