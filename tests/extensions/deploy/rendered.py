"""Five deployments, rendered by kubectl from the Kustomize overlay and by helm from the chart."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from carpool.extensions.deploy.helm_chart import helm_chart
from carpool.extensions.deploy.kubernetes_overlay import (
    Deployment,
    components,
    overlay,
    write_files,
    write_overlay,
)
from conformance.fleet_engines import FOLDER, VARIABLE, binary
from extensions.deploy.manifests import documents

DIGEST = "sha256:" + 32 * "a1"
_ASKED: dict[str, Any] = {"rate": 500.0, "slo_ms": 50.0, "capacity": 840.0, "planned": 2}
DEPLOYMENTS = {
    "cpu": Deployment(**_ASKED, autoscaler="none", namespace="vision"),
    "gpu": Deployment(**_ASKED, gpus=1, memory_gb=8.0, cores=4, runtime_class="nvidia", namespace="vision"),
    "keda": Deployment(**_ASKED, namespace="shop", image=f"registry.example:5000/carpool@{DIGEST}"),
    "hpa": Deployment(
        **_ASKED, autoscaler="hpa", namespace="shop", repository="s3://bucket/models", secret="carpool-keys"
    ),
    "other-namespace": Deployment(
        **_ASKED, namespace="street", shared="redis://redis.street:6380", secret="carpool-keys"
    ),
}
FORMS = ("kubectl", "helm")
Documents = dict[tuple[str, str], dict[str, Any]]


def program(name: str) -> Path:
    found = binary(name, Path(os.environ.get(VARIABLE) or FOLDER)) or shutil.which(name)
    if not found:
        pytest.skip(f"there is no {name} here: make fleet fetches it")
    return Path(found)


def rendered(name: str, form: str) -> Documents:
    return _by_name(_text(DEPLOYMENTS[name], form, program(form)))


def kustomized(folder: Path) -> Documents:
    return _by_name(_run(program("kubectl"), "kustomize", folder))


def _by_name(text: str) -> Documents:
    """By kind and name."""
    return {(each["kind"], each["metadata"]["name"]): each for each in documents(text)}


@cache
def _text(wanted: Deployment, form: str, found: Path) -> str:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "written"
        if form == "kubectl":
            write_overlay(overlay(wanted), folder, components(wanted))
            return _run(found, "kustomize", folder)
        write_files(helm_chart(wanted), folder)
        return _run(found, "template", "carpool", folder, "--namespace", wanted.namespace)


def _run(found: Path, *arguments: object) -> str:
    command = [str(found), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
