"""This writes a fleet on Ray down: a configuration for `serve deploy`, and an overlay with a RayService of
KubeRay around it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import ceil
from typing import Any

from carpool.extensions.deploy.kubernetes_overlay import Deployment

COMPONENT = "rayservice"
_WORKERS = "/spec/rayClusterConfig/workerGroupSpecs/0"


def serve_config(fleet: str, arguments: Mapping[str, Any]) -> str:
    """`arguments` are those of carpool.ray:app. JSON is YAML, whatever is in it."""
    return (
        "proxy_location: Disabled\napplications:\n"
        f"  - name: {fleet}\n    route_prefix: null\n    import_path: carpool.ray:app\n"
        f"    args: {json.dumps(dict(arguments))}\n"
    )


def rayservice_overlay(
    fleet: str, arguments: Mapping[str, Any], replicas: tuple[int, int], wanted: Deployment
) -> dict[str, str]:
    """`wanted` has been checked, and says what a worker is given: as much as one replica takes."""
    least, most = replicas
    resources: dict[str, Any] = {"cpu": str(wanted.cores), "memory": f"{ceil(wanted.memory_gb * 1024)}Mi"}
    if wanted.gpus:
        resources["nvidia.com/gpu"] = str(wanted.gpus)
    container = f"{_WORKERS}/template/spec/containers/0"
    changes = {
        "/metadata/name": fleet.lower().replace("_", "-"),
        "/spec/serveConfigV2": serve_config(fleet, arguments),
        "/spec/rayClusterConfig/headGroupSpec/template/spec/containers/0/image": wanted.image,
        f"{_WORKERS}/replicas": least,
        f"{_WORKERS}/minReplicas": least,
        f"{_WORKERS}/maxReplicas": most,
        f"{container}/image": wanted.image,
        f"{container}/resources": {"requests": resources, "limits": resources},
        f"{_WORKERS}/template/spec/volumes/0/persistentVolumeClaim/claimName": wanted.claim,
    }
    patch = [{"op": "replace", "path": path, "value": value} for path, value in changes.items()]
    kustomization = (
        "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\n"
        f"namespace: {wanted.namespace}\ncomponents:\n  - components/{COMPONENT}\n"
        "patches:\n  - path: rayservice.yaml\n    target: {kind: RayService}\n"
    )
    lines = ",\n".join(f" {json.dumps(change)}" for change in patch)
    return {
        "serve.yaml": serve_config(fleet, arguments),
        "kustomization.yaml": kustomization,
        "rayservice.yaml": f"[\n{lines}\n]\n",
    }
