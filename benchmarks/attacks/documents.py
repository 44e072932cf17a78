"""Documents that cost more to make than to ask for."""

import contextlib
from functools import partial

from attacks.attacker import Attack, Pace, Ports, connected, get, read_answer

_AHEAD = 64


def pipelined(path: str, ports: Ports, pace: Pace) -> None:
    """One connection that asks again before it has its answers."""
    with connected(ports.http) as client:
        client.sendall(get(path) * _AHEAD)
        for _ in range(4 * _AHEAD):
            client.sendall(get(path))
            client.recv(1 << 18)
            pace.rest()


def in_turn(on_metrics_port: bool, ports: Ports, pace: Pace) -> None:
    """Eight connections with one request each."""
    with contextlib.ExitStack() as held:
        port = ports.metrics if on_metrics_port else ports.http
        clients = [held.enter_context(connected(port)) for _ in range(8)]
        for _ in range(50):
            for client in clients:
                client.sendall(get("/metrics"))
            for client in clients:
                read_answer(client)
            pace.rest()


def unknown_models(ports: Ports, pace: Pace) -> None:
    """Names that are nearly those of models."""
    with connected(ports.http) as client:
        for number in range(200):
            client.sendall(get(f"/v2/models/fast-{number}"))
            read_answer(client)
            pace.rest()


ATTACKS = {
    "/metrics, pipelined": Attack(partial(pipelined, "/metrics")),
    "/metrics, 8 connections": Attack(partial(in_turn, False)),
    "/metrics on its port": Attack(partial(in_turn, True)),
    "/openapi.json, pipelined": Attack(partial(pipelined, "/openapi.json")),
    "/console/live, pipelined": Attack(partial(pipelined, "/console/live")),
    "statistics, pipelined": Attack(partial(pipelined, "/v2/models/stats")),
    "unknown models": Attack(unknown_models),
}
