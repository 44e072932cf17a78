"""A real Prometheus that scrapes servers and evaluates the rules of deploy/monitoring as they are."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from carpool.extensions.deploy.balancer_config import Address, deploy_folder
from load.balancers import FOLDER, Replica, answers
from load.burst import LoadError
from load.carpool_server import READY_S, STOP_S
from load.ports import free_port

PROGRAM = FOLDER / "fetched" / "usr" / "bin" / "prometheus"
"""Where `make fleet` puts it."""


@contextlib.contextmanager
def prometheus(servers: Sequence[Replica], folder: Path) -> Iterator[Callable[[str], float]]:
    """Gives the value of a query that has one, now."""
    if not PROGRAM.is_file():
        raise LoadError("no prometheus here: make fleet")
    folder.mkdir(parents=True)
    at = Address("127.0.0.1", free_port())
    rules = deploy_folder() / "monitoring" / "rules.yml"
    targets = [f"127.0.0.1:{server.metrics_port}" for server in servers]
    (folder / "prometheus.yml").write_text(
        json.dumps(  # which is YAML
            {
                "global": {"scrape_interval": "5s", "evaluation_interval": "5s"},
                "rule_files": [str(rules)],
                "scrape_configs": [{"job_name": "carpool", "static_configs": [{"targets": targets}]}],
            }
        )
    )
    command = [str(PROGRAM), f"--config.file={folder / 'prometheus.yml'}", f"--web.listen-address={at}"]
    with (folder / "log.txt").open("wb") as log:
        process = subprocess.Popen(
            [*command, f"--storage.tsdb.path={folder / 'data'}"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=folder,
        )
    try:
        give_up = time.monotonic() + READY_S
        while not answers(at, "/-/ready"):
            if process.poll() is not None or time.monotonic() > give_up:
                raise LoadError(f"prometheus does not run:\n{(folder / 'log.txt').read_text()[-2000:]}")
            time.sleep(0.05)
        yield lambda query: _value(at, query)
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(STOP_S)


def _value(at: Address, query: str) -> float:
    asked = f"http://{at}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    with urllib.request.urlopen(asked, timeout=10) as answer:
        found = json.load(answer)["data"]["result"]
    if len(found) != 1:
        raise LoadError(f"prometheus knows {len(found)} values of {query}")
    return float(found[0]["value"][1])
