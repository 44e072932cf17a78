"""Descriptors that run out are told, in processes of their own with few of them."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import asyncio, contextlib, logging, os, resource, socket
from carpool.observe.logs import configure
from carpool.observe.descriptors import Descriptors, raise_limit
from carpool.frontend.http.http_server import HttpServer, listen

class Told(logging.Handler):
    count = 0

    def emit(self, record):
        self.count += "descriptors" in record.name

async def serve(clients):
    class App:
        def begin(self, exchange):
            raise NotImplementedError

    sockets = listen("127.0.0.1", 0)
    address = sockets[0].getsockname()
    server = HttpServer(App())
    await server.start(sockets)
    resource.setrlimit(resource.RLIMIT_NOFILE, (40, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    open_ones = []
    told = Told()
    logging.getLogger().addHandler(told)
    with contextlib.suppress(OSError):  # none is left for the clients, either
        for _ in range(clients):
            client = socket.socket()
            client.setblocking(False)
            client.connect_ex(address)
            open_ones.append(client)
            await asyncio.sleep(0)
    async with asyncio.timeout(60):
        while not told.count:
            await asyncio.sleep(0.001)
    for _ in range(100):  # whoever else is let in, or not, is no more news
        await asyncio.sleep(0)

configure("text", "info")
{run}
"""


def run(code: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(run=code)], capture_output=True, text=True, check=False
    )
    return [line.split(" ", 3)[3] for line in done.stderr.splitlines() if "descriptors[" in line]


def test_a_burst_of_connections_that_takes_all_is_told_once() -> None:
    """The client's sockets count here too: half of them are the server's."""
    lines = run("asyncio.run(serve(60))")
    assert len(lines) == 1
    assert "limit=40" in lines[0]
    assert "ulimit -n" in lines[0]


def test_none_left_and_few_left() -> None:
    few = "\n".join(
        [
            "resource.setrlimit(resource.RLIMIT_NOFILE, (40, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))",
            "taken = []",
            "look = Descriptors()",
            "look.look()",
            "while taken[-1:] != [{last}]: taken.append(os.dup(0))",
            "look.look()",
            "look.look()",
        ]
    )
    [none_left] = run(few.format(last=39))
    assert none_left.startswith('out-of-descriptors limit=40 error="Too many open files"')
    [few_left] = run(few.format(last=38))
    assert few_left.startswith("few-descriptors-left open=39 limit=40")


def test_the_limit_is_raised_as_far_as_it_may_be() -> None:
    raised = "\n".join(
        [
            "resource.setrlimit(resource.RLIMIT_NOFILE, (64, {hard}))",
            "raise_limit(1024)",
            "assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == {hard}",
        ]
    )
    assert run(raised.format(hard=4096)) == []
    [line] = run(raised.format(hard=512))
    assert line.startswith("few-descriptors limit=512 max_connections=1024")
