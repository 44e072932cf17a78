"""A Kustomize overlay from a model's profile and the traffic that it is to carry: how many replicas, how far
they may grow, and what each is given.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path

from carpool.core.numerals import numeral
from carpool.core.scaling import TARGET_LOAD, replicas_for
from carpool.deploy_files.balancer_config import deploy_folder
from carpool.errors import InvalidInput

_NAME = re.compile(r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?")
_IMAGE = re.compile(r"[a-z0-9](?:[a-z0-9._/-]*[a-z0-9])?(?::[0-9]{1,5}/[a-z0-9._/-]+)?(?::[\w.-]{1,128})?")
_PROBE_S = 2
_STARTS = 5  # times as long as it should take: then it is stuck


@dataclass(frozen=True, slots=True)
class Deployment:
    """What is to run. `capacity` is of one replica, images per second within the promise."""

    rate: float
    slo_ms: float
    capacity: float
    planned: int  # replicas, by the plan, with those to spare
    spare: int = 1
    surge: float = 3.0
    autoscaler: str = "keda"
    prometheus: str = "http://prometheus-operated.monitoring:9090"
    namespace: str = "carpool"
    image: str = "carpool:latest"
    claim: str = "carpool-models"
    cores: int = 2
    memory_gb: float = 2.0
    gpus: int = 0
    cold_start_s: float = 60.0

    def __post_init__(self) -> None:
        for field in ("namespace", "claim"):
            if not _NAME.fullmatch(getattr(self, field)):
                raise InvalidInput(
                    f"--{field} must be small letters, digits and -, not {getattr(self, field)[:80]!r}",
                    field=field,
                )
        if not _IMAGE.fullmatch(self.image):
            raise InvalidInput(
                f"--image must be like registry/carpool:1.0, not {self.image[:80]!r}", field="image"
            )
        if not re.fullmatch(r"https?://[\w.:/-]+", self.prometheus):
            raise InvalidInput(
                f"--prometheus must be a URL, not {self.prometheus[:80]!r}", field="prometheus"
            )

    @property
    def least(self) -> int:
        return max(self.planned, replicas_for(self.rate, self.capacity, spare=self.spare))

    @property
    def most(self) -> int:
        return max(self.least, replicas_for(self.surge * self.rate, self.capacity, spare=self.spare))

    def why(self) -> Iterator[str]:
        carry = replicas_for(self.rate, self.capacity)
        yield (
            f"{numeral(self.rate)}/s at {self.slo_ms:g} ms: one replica answers {numeral(self.capacity)}/s "
            f"in time, so {carry} carry it at {100 * TARGET_LOAD:.0f} % of that; with {self.spare} to spare: "
            f"{self.least} replicas."
        )
        if self.autoscaler != "none":
            yield (
                f"Up to {self.most} by {self.autoscaler.upper()}, for {self.surge:g} times the rate: as many "
                f"as carpool:replicas_wanted says, doubled every 15 s at most, fewer after 5 minutes."
            )
            room = self.least * self.capacity
            yield (
                f"A step up to {numeral(room)}/s is answered in time at once; beyond that, refusals until "
                f"new replicas are there ({self.cold_start_s:g} s)."
            )


def overlay(wanted: Deployment) -> dict[str, str]:
    """The files that are made for this, by name."""
    files = {"kustomization.yaml": _kustomization(wanted), "deployment.yaml": _deployment(wanted)}
    if wanted.autoscaler == "keda":
        files["autoscaler.yaml"] = (
            "apiVersion: keda.sh/v1alpha1\nkind: ScaledObject\nmetadata:\n  name: carpool\nspec:\n"
            f"  minReplicaCount: {wanted.least}\n  maxReplicaCount: {wanted.most}\n"
            f"  fallback: {{failureThreshold: 3, replicas: {wanted.least}}}\n"
            "  triggers:\n    - type: prometheus\n      metricType: AverageValue\n      metadata:\n"
            f"        serverAddress: {wanted.prometheus}\n"
            '        query: max(carpool:replicas_wanted{namespace="'
            f'{wanted.namespace}",job="carpool"}})\n        threshold: "1"\n'
        )
    elif wanted.autoscaler == "hpa":
        files["autoscaler.yaml"] = (
            "apiVersion: autoscaling/v2\nkind: HorizontalPodAutoscaler\nmetadata:\n  name: carpool\nspec:\n"
            f"  minReplicas: {wanted.least}\n  maxReplicas: {wanted.most}\n"
        )
    return files


def _kustomization(wanted: Deployment) -> str:
    name, _, tag = (
        wanted.image.rpartition(":") if ":" in wanted.image.rpartition("/")[2] else (wanted.image, "", "")
    )
    scales = wanted.autoscaler != "none"
    said = "".join(f"# {sentence}\n" for sentence in wanted.why())
    lines = [
        "apiVersion: kustomize.config.k8s.io/v1beta1",
        "kind: Kustomization",
        f"namespace: {wanted.namespace}",
        "resources:",
        "  - base",
        "components:",
        *([f"  - components/{wanted.autoscaler}"] if scales else []),
        "  - components/servicemonitor",
        "  - components/grafana",
        "images:",
        "  - name: carpool",
        f"    newName: {name}",
        *([f'    newTag: "{tag}"'] if tag else []),
        "patches:",
        "  - path: deployment.yaml",
        *(["  - path: autoscaler.yaml"] if scales else []),
    ]
    return said + "\n".join(lines) + "\n"


def _deployment(wanted: Deployment) -> str:
    memory = f"{ceil(wanted.memory_gb * 1024)}Mi"
    gpus = f', nvidia.com/gpu: "{wanted.gpus}"' if wanted.gpus else ""
    tolerations = (
        "      tolerations:\n        - {key: nvidia.com/gpu, operator: Exists, effect: NoSchedule}\n"
        if wanted.gpus
        else ""
    )
    starts = max(30, ceil(_STARTS * wanted.cold_start_s / _PROBE_S))
    return (
        "apiVersion: apps/v1\nkind: Deployment\nmetadata:\n  name: carpool\nspec:\n"
        f"  replicas: {wanted.least}\n"
        f"  template:\n    spec:\n{tolerations}"
        "      containers:\n        - name: carpool\n"
        f'          args: [serve, /models, --host, 0.0.0.0, --slo-ms, "{wanted.slo_ms:g}"]\n'
        f"          startupProbe: {{periodSeconds: {_PROBE_S}, failureThreshold: {starts}}}\n"
        "          resources:\n"
        f'            requests: {{cpu: "{wanted.cores}", memory: {memory}}}\n'
        f'            limits: {{cpu: "{wanted.cores}", memory: {memory}{gpus}}}\n'
        "          volumeMounts:\n            - {name: models, mountPath: /models, readOnly: true}\n"
        "      volumes:\n        - name: models\n"
        f"          persistentVolumeClaim: {{claimName: {wanted.claim}, readOnly: true}}\n"
    )


def write_overlay(
    files: Mapping[str, str], folder: Path, components: tuple[str, ...], *, base: bool = True
) -> None:
    """With the base and the components that it is made of, so that the folder stands by itself."""
    source = deploy_folder() / "kubernetes"
    parts = (*(["base"] if base else []), *(f"components/{name}" for name in components))
    if folder.exists() and any(folder.iterdir()):
        raise InvalidInput(f"--output: {folder} is not empty", field="output")
    try:
        for part in parts:
            shutil.copytree(source / part, folder / part)
        for name, text in files.items():
            (folder / name).write_text(text, "utf-8")
    except OSError as error:
        raise InvalidInput(f"--output: {folder} cannot be written: {error}", field="output") from None
