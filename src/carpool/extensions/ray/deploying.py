"""Defines the target `ray` of `carpool deploy`: a fleet on this machine's cluster, or the files for one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from carpool.cli import show
from carpool.errors import InvalidInput
from carpool.extensions.deploy.kubernetes_overlay import Deployment, write_overlay
from carpool.extensions.ray.fleet_settings import FleetSettings
from carpool.extensions.ray.ray_config import COMPONENT, rayservice_overlay, serve_config


class RayTarget:
    """Holds the settings of one fleet, which were checked."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._settings = FleetSettings.read(given)

    def config(self) -> str:
        return serve_config(self._settings.name, self._settings.written())

    def write(self, output: Path, pods: Deployment) -> None:
        settings = self._settings
        files = rayservice_overlay(settings.name, settings.written(), settings.replicas, pods)
        write_overlay(files, output, (COMPONENT,), base=False)
        serve, kubectl = f"serve deploy {output / 'serve.yaml'}", f"kubectl apply -k {output}"
        show.paragraph(f"Wrote {output}: {serve}, or {kubectl}")

    def deploy(self) -> None:
        try:
            import carpool.ray
        except ImportError as error:
            raise InvalidInput(str(error)) from None
        with show.status("deploying"):
            url = carpool.ray.deploy_settings(self._settings)
        least, most = self._settings.replicas
        many = show.count(least, "replica") if least == most else f"{least} to {most} replicas"
        show.paragraph(f"{self._settings.name} serves at {url}, with {many}.")
