"""A Helm chart of the same manifests as the Kustomize overlay: its templates are the files in
deploy/kubernetes, with a value wherever the overlay has a patch; its values are those of the same deployment.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from carpool.deploy_files.balancer_config import deploy_folder
from carpool.deploy_files.kubernetes_overlay import NETWORK, RULES, SHARED, Deployment, rules_of
from carpool.errors import InvalidInput

_RELEASE = "NAMESPACE-OF-THE-RELEASE"
_CHART = """\
apiVersion: v2
name: carpool
description: A fleet of Carpool servers
type: application
version: 0.1.0
"""
_DASHBOARD = """\
{{- if .Values.monitoring.dashboard }}
apiVersion: v1
kind: ConfigMap
metadata:
  name: carpool-dashboard
  labels: {grafana_dashboard: "1"}
data:
  dashboard.json: {{ .Files.Get "files/dashboard.json" | toJson }}
{{- end }}
"""
_CLAIM = """\
{{- if and .Values.shared.claim .Values.shared.create }}
apiVersion: v1
kind: PersistentVolumeClaim
metadata:
  name: {{ .Values.shared.claim }}
  # What replicas learnt outlives the release.
  annotations: {helm.sh/resource-policy: keep}
spec:
  accessModes: [ReadWriteMany]
{{- with .Values.shared.storageClass }}
  storageClassName: {{ . }}
{{- end }}
  resources: {requests: {storage: 10Gi}}
{{- end }}
"""
_RULES = f"""\
{{{{- if .Values.monitoring.rules }}}}
{{{{ .Files.Get "files/rules.yaml" | replace "{_RELEASE}" .Release.Namespace }}}}
{{{{- end }}}}
"""
_IMAGE = (
    '          image: "{{ .Values.image.repository }}{{ with .Values.image.tag }}:{{ . }}{{ end }}'
    '{{ with .Values.image.digest }}@{{ . }}{{ end }}"'
)
_ARGUMENTS = (
    '          args: [serve, "{{ .Values.models.repository | default "/models" }}", --host, 0.0.0.0, '
    '--slo-ms, "{{ .Values.sloMs }}"]'
)
_VARIABLES = f"""\
{{{{- $shared := .Values.shared.redis | default "file:{SHARED}" }}}}
{{{{- with .Values.secret }}}}
          envFrom:
            - secretRef: {{name: {{{{ . }}}}}}
{{{{- end }}}}
          env:
            - {{name: CARPOOL_SHARED_PROFILES, value: "{{{{ $shared }}}}"}}
            - {{name: CARPOOL_ROLLOUT_STATE, value: "{{{{ $shared }}}}"}}
"""
_PLACED = """\
{{- with .Values.nodeSelector }}
      nodeSelector: {{ toJson . }}
{{- end }}
{{- with .Values.runtimeClass }}
      runtimeClassName: {{ . }}
{{- end }}
{{- if .Values.resources.gpus }}
      tolerations:
        - {key: nvidia.com/gpu, operator: Exists, effect: NoSchedule}
{{- end }}
      containers:
"""
_MOUNTS = f"""\
          volumeMounts:
{{{{- if not .Values.models.repository }}}}
            - {{name: models, mountPath: /models, readOnly: true}}
{{{{- end }}}}
{{{{- if not .Values.shared.redis }}}}
            - {{name: shared, mountPath: {SHARED}}}
{{{{- end }}}}
"""
_VOLUMES = """\
      volumes:
{{- if not .Values.models.repository }}
        - name: models
          persistentVolumeClaim: {claimName: {{ .Values.models.claim }}, readOnly: true}
{{- end }}
{{- if not .Values.shared.redis }}
        - name: shared
          persistentVolumeClaim: {claimName: {{ .Values.shared.claim }}}
{{- end }}
"""
_LIMITS = '{cpu: "{{ .Values.resources.cpu }}", memory: {{ .Values.resources.memory }}'
_GPUS = '{{ with .Values.resources.gpus }}, nvidia.com/gpu: "{{ . }}"{{ end }}'
_REPLICAS = """\
{{- if eq .Values.autoscaler "none" }}
  replicas: {{ .Values.replicas.min }}
{{- end }}
"""
_POD_CHANGES = {
    "  replicas: 2\n": _REPLICAS,
    "          image: carpool\n": f"{_IMAGE}\n",
    "          args: [serve, --host, 0.0.0.0]\n": f"{_ARGUMENTS}\n",
    "          env:\n": _VARIABLES,
    "      containers:\n": _PLACED,
    "failureThreshold: 150": "failureThreshold: {{ .Values.startupFailures }}",
    'requests: {cpu: "2", memory: 2Gi}': f"requests: {_LIMITS}}}",
    'limits: {cpu: "2", memory: 2Gi}': f"limits: {_LIMITS}{_GPUS}}}",
    "          volumeMounts:\n": _MOUNTS,
    "      volumes:\n": _VOLUMES,
}
_KEDA_CHANGES = {
    "minReplicaCount: 2": "minReplicaCount: {{ .Values.replicas.min }}",
    "maxReplicaCount: 8": "maxReplicaCount: {{ .Values.replicas.max }}",
    "failureThreshold: 3, replicas: 2": "failureThreshold: 3, replicas: {{ .Values.replicas.min }}",
    "http://prometheus-operated.monitoring:9090": "{{ .Values.monitoring.prometheus }}",
    "FILLED-IN-BY-THE-OVERLAY": "{{ .Release.Namespace }}",
}
_HPA_CHANGES = {
    "minReplicas: 2": "minReplicas: {{ .Values.replicas.min }}",
    "maxReplicas: 8": "maxReplicas: {{ .Values.replicas.max }}",
}
_NETWORK_CHANGES = {
    "name: monitoring}": "name: {{ .Values.monitoring.namespace }}}",
    "        - {port: 443, protocol: TCP}\n": "        - {port: 443, protocol: TCP}\n"
    "{{- with .Values.networkPolicy.redisPort }}\n    - ports:\n        - {port: {{ . }}, protocol: TCP}\n"
    "{{- end }}\n",
}


def helm_chart(wanted: Deployment) -> dict[str, str]:
    """Returns the chart's files, by name."""
    rules = rules_of(_source(RULES), _RELEASE)
    return {
        "Chart.yaml": _CHART,
        "values.yaml": "".join(f"# {said}\n" for said in wanted.why()) + _written(helm_values(wanted)),
        "files/rules.yaml": rules,
        "files/dashboard.json": _source("components/grafana/dashboard.json"),
        "templates/service.yaml": _source("base/service.yaml"),
        "templates/disruption.yaml": _source("base/disruption.yaml"),
        "templates/deployment.yaml": _template("base/deployment.yaml", _POD_CHANGES),
        "templates/keda.yaml": _template(
            "components/keda/scaledobject.yaml", _KEDA_CHANGES, 'eq .Values.autoscaler "keda"'
        ),
        "templates/hpa.yaml": _template(
            "components/hpa/autoscaler.yaml", _HPA_CHANGES, 'eq .Values.autoscaler "hpa"'
        ),
        "templates/networkpolicy.yaml": _template(NETWORK, _NETWORK_CHANGES, ".Values.networkPolicy.enabled"),
        "templates/servicemonitor.yaml": _template(
            "components/servicemonitor/servicemonitor.yaml", {}, ".Values.monitoring.serviceMonitor"
        ),
        "templates/rules.yaml": _RULES,
        "templates/dashboard.yaml": _DASHBOARD,
        "templates/shared.yaml": _CLAIM,
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


def _source(name: str) -> str:
    return (deploy_folder() / "kubernetes" / name).read_text("utf-8")


def _template(name: str, changes: Mapping[str, str], when: str = "") -> str:
    text = _source(name)
    for old, new in changes.items():
        if len(re.findall(re.escape(old), text)) != 1:
            raise InvalidInput(f"deploy/kubernetes/{name} should have {old.strip()!r} once")
        text = text.replace(old, new)
    return f"{{{{- if {when} }}}}\n{text}{{{{- end }}}}\n" if when else text
