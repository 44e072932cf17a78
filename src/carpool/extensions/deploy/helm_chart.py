"""A Helm chart of the same manifests as the Kustomize overlay: deploy/helm has its templates, and its values
are those of the same deployment.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from carpool.extensions.deploy.balancer_config import deploy_folder
from carpool.extensions.deploy.kubernetes_overlay import RULES, Deployment, rules_of

_RELEASE = "NAMESPACE-OF-THE-RELEASE"  # the template of the rules puts the release's own in its place
_SHARED_WITH_OVERLAY = {
    "files/dashboard.json": "components/grafana/dashboard.json",
    "templates/service.yaml": "base/service.yaml",
    "templates/disruption.yaml": "base/disruption.yaml",
}


def helm_chart(wanted: Deployment) -> dict[str, str]:
    """Returns the chart's files, by name."""
    chart, manifests = deploy_folder() / "helm", deploy_folder() / "kubernetes"
    return {
        **{str(file.relative_to(chart)): _text(file) for file in sorted(chart.rglob("*.yaml"))},
        **{name: _text(manifests / source) for name, source in _SHARED_WITH_OVERLAY.items()},
        "files/rules.yaml": rules_of(_text(manifests / RULES), _RELEASE),
        "values.yaml": "".join(f"# {said}\n" for said in wanted.why()) + _written(helm_values(wanted)),
    }


def helm_values(wanted: Deployment) -> dict[str, Any]:
    name, tag, digest = wanted.image_parts
    redis = wanted.shared if wanted.shares_redis else ""
    return {
        "image": {"repository": name, "tag": tag, "digest": digest},
        "replicas": {"min": wanted.least, "max": wanted.most},
        "autoscaler": wanted.autoscaler,
        "sloMs": f"{wanted.slo_ms:g}",
        "models": {"repository": wanted.repository, "claim": wanted.claim},
        "shared": {
            "claim": "" if redis else wanted.shared,
            "create": True,
            "storageClass": wanted.storage_class,
            "redis": redis,
        },
        "secret": wanted.secret,
        "resources": {"cpu": str(wanted.cores), "memory": wanted.memory, "gpus": wanted.gpus},
        "startupFailures": wanted.starts,
        "nodeSelector": dict([wanted.nodes]) if wanted.nodes else {},
        "runtimeClass": wanted.runtime_class,
        "networkPolicy": {"enabled": True, "redisPort": wanted.redis_port or 0},
        "monitoring": {
            "prometheus": wanted.prometheus,
            "namespace": wanted.scrapers,
            "serviceMonitor": True,
            "rules": True,
            "dashboard": True,
        },
    }


def _written(values: Mapping[str, Any]) -> str:
    """YAML of two levels, each value as JSON has it."""
    lines = []
    for name, value in values.items():
        if isinstance(value, dict) and value:
            lines += [f"{name}:", *(f"  {key}: {json.dumps(each)}" for key, each in value.items())]
        else:
            lines.append(f"{name}: {json.dumps(value)}")
    return "\n".join(lines) + "\n"


def _text(file: Path) -> str:
    return file.read_text("utf-8")
