"""What an SRE looks for in manifests before they are applied, asked of five deployments in two forms."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from carpool.config.server import variables
from carpool.extensions.deploy.kubernetes_overlay import Deployment
from extensions.deploy.manifests import DEPLOY, problems
from extensions.deploy.rendered import DEPLOYMENTS, DIGEST, FORMS, Documents, kustomized, rendered

pytestmark = pytest.mark.conformance  # which fetches kubectl and helm

Check = Callable[[Documents, Deployment], bool]


def fleet(found: Documents) -> dict[str, Any]:
    spec: dict[str, Any] = found["Deployment", "carpool"]["spec"]
    return spec


def pod(found: Documents) -> dict[str, Any]:
    spec: dict[str, Any] = fleet(found)["template"]["spec"]
    return spec


def box(found: Documents) -> dict[str, Any]:
    (container,) = pod(found)["containers"]
    return dict(container)


def environment(found: Documents) -> dict[str, str]:
    return {each["name"]: each["value"] for each in box(found)["env"]}


def claims(found: Documents) -> set[str]:
    volumes = pod(found)["volumes"]
    return {v["persistentVolumeClaim"]["claimName"] for v in volumes if "persistentVolumeClaim" in v}


def expressions(found: Documents) -> list[str]:
    groups = found["PrometheusRule", "carpool"]["spec"]["groups"]
    return [rule["expr"] for group in groups for rule in group["rules"]]


def scaler(found: Documents) -> dict[str, Any]:
    for kind in ("ScaledObject", "HorizontalPodAutoscaler"):
        if (kind, "carpool") in found:
            spec: dict[str, Any] = found[kind, "carpool"]["spec"]
            return spec
    return {}


def bounds(found: Documents) -> tuple[int, int]:
    spec = scaler(found)
    least = spec.get("minReplicaCount", spec.get("minReplicas"))
    return int(least), int(spec.get("maxReplicaCount", spec.get("maxReplicas")))


def behavior(found: Documents) -> dict[str, Any]:
    spec = scaler(found)
    inside = spec.get("advanced", {}).get("horizontalPodAutoscalerConfig", spec)
    found_there: dict[str, Any] = inside["behavior"]
    return found_there


def network(found: Documents) -> dict[str, Any]:
    spec: dict[str, Any] = found["NetworkPolicy", "carpool"]["spec"]
    return spec


def egress(found: Documents) -> set[tuple[int, str]]:
    return {(p["port"], p["protocol"]) for rule in network(found)["egress"] for p in rule["ports"]}


def selected_namespaces(found: Documents) -> list[dict[str, str]]:
    peers = [peer for rule in network(found)["ingress"] for peer in rule["from"]]
    return [peer["namespaceSelector"]["matchLabels"] for peer in peers if "namespaceSelector" in peer]


def spread(found: Documents) -> set[str]:
    return {each["topologyKey"] for each in pod(found)["topologySpreadConstraints"]}


def probe(found: Documents, name: str) -> dict[str, Any]:
    asked: dict[str, Any] = box(found)[f"{name}Probe"]
    return asked


CHECKS: dict[str, Check] = {
    # who decides how many there are
    "an autoscaler alone says how many": lambda f, w: ("replicas" in fleet(f)) == (w.autoscaler == "none"),
    "without one the plan does": lambda f, w: w.autoscaler != "none" or fleet(f)["replicas"] == w.least,
    "bounds are the plan's": lambda f, w: not scaler(f) or bounds(f) == (w.least, w.most),
    "one autoscaler, not two": lambda f, _: (
        sum(kind in ("ScaledObject", "HorizontalPodAutoscaler") for kind, _ in f) <= 1
    ),
    "down is slow": lambda f, _: (
        not scaler(f) or behavior(f)["scaleDown"]["stabilizationWindowSeconds"] >= 300
    ),
    "up is at once": lambda f, _: not scaler(f) or behavior(f)["scaleUp"]["stabilizationWindowSeconds"] == 0,
    "KEDA stays where it is without Prometheus": lambda f, w: (
        w.autoscaler != "keda"
        or scaler(f)["fallback"]
        == {"failureThreshold": 3, "replicas": w.least, "behavior": "currentReplicasIfHigher"}
    ),
    "KEDA takes no series for no answer": lambda f, w: (
        w.autoscaler != "keda" or scaler(f)["triggers"][0]["metadata"]["ignoreNullValues"] == "false"
    ),
    "KEDA asks about its own namespace": lambda f, w: (
        w.autoscaler != "keda"
        or f'namespace="{w.namespace}"' in scaler(f)["triggers"][0]["metadata"]["query"]
    ),
    "every rule is about its own namespace": lambda f, w: (
        expressions(f) != []
        and all(
            re.findall(r"\b(?:carpool|nv)[_:][a-z0-9_:]+(?!.)|\b(?:carpool|nv)[_:][a-z0-9_:]+[^{a-z0-9_:]", e)
            == []
            and f'namespace="{w.namespace}"' in e
            for e in expressions(f)
        )
    ),
    # rolling updates
    "an update takes none away first": lambda f, _: (
        fleet(f)["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    ),
    "an update that does not get ready fails": lambda f, _: fleet(f)["progressDeadlineSeconds"] == 600,
    "a failed model is not ready": lambda f, _: environment(f)["CARPOOL_STRICT_READINESS"] == "all",
    "an alert names a failed model": lambda f, _: any("carpool_model_state" in e for e in expressions(f)),
    "few old versions are kept": lambda f, _: fleet(f)["revisionHistoryLimit"] <= 5,
    # health
    "a start may take its time": lambda f, w: (
        probe(f, "startup")["failureThreshold"] * probe(f, "startup")["periodSeconds"] >= 5 * w.cold_start_s
    ),
    "readiness is asked for": lambda f, _: probe(f, "readiness")["httpGet"]["path"] == "/v2/health/ready",
    "liveness does not ask for readiness": lambda f, _: (
        probe(f, "liveness")["httpGet"]["path"] == "/v2/health/live"
    ),
    "a grace period as long as draining": lambda f, _: (
        pod(f)["terminationGracePeriodSeconds"]
        >= float(environment(f)["CARPOOL_LAME_DUCK_S"]) + float(environment(f)["CARPOOL_DRAIN_S"]) + 10
    ),
    "a budget for disruptions": lambda f, _: (
        f["PodDisruptionBudget", "carpool"]["spec"]["maxUnavailable"] == 1
    ),
    "a sick pod blocks no drain": lambda f, _: (
        f["PodDisruptionBudget", "carpool"]["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
    ),
    "spread over nodes and zones": lambda f, _: (
        spread(f) == {"kubernetes.io/hostname", "topology.kubernetes.io/zone"}
    ),
    # what it runs
    "the image fits the hardware": lambda f, w: bool(w.image) or ("cuda" in box(f)["image"]) == (w.gpus > 0),
    "a digest is pulled as such": lambda f, w: "@" not in w.image or box(f)["image"].endswith(f"@{DIGEST}"),
    "GPUs are asked for": lambda f, w: (
        box(f)["resources"]["limits"].get("nvidia.com/gpu", "0") == str(w.gpus)
    ),
    "GPU pods go to GPU nodes": lambda f, w: (
        pod(f).get("nodeSelector") == ({"nvidia.com/gpu.present": "true"} if w.gpus else None)
    ),
    "GPU nodes' taint is tolerated": lambda f, w: bool(pod(f).get("tolerations")) == (w.gpus > 0),
    "the runtime class is the one asked for": lambda f, w: (
        pod(f).get("runtimeClassName", "") == w.runtime_class
    ),
    "requests are limits": lambda f, _: all(
        box(f)["resources"]["requests"][what] == box(f)["resources"]["limits"][what]
        for what in ("cpu", "memory")
    ),
    # what outlives a pod
    "profiles are shared": lambda f, w: (
        environment(f)["CARPOOL_SHARED_PROFILES"] == w.variables["CARPOOL_SHARED_PROFILES"]
    ),
    "rollouts are shared": lambda f, w: (
        environment(f)["CARPOOL_ROLLOUT_STATE"] == w.variables["CARPOOL_ROLLOUT_STATE"]
    ),
    "what is shared lies on a volume or in Redis": lambda f, w: (
        w.shares_redis or ("PersistentVolumeClaim", w.shared) in f
    ),
    "many pods may write that volume": lambda f, w: (
        w.shares_redis or f["PersistentVolumeClaim", w.shared]["spec"]["accessModes"] == ["ReadWriteMany"]
    ),
    "models come from where they are": lambda f, w: (
        box(f)["args"][1] == w.models and (w.claim in claims(f)) == (not w.repository)
    ),
    "models are not written": lambda f, w: (
        bool(w.repository) or any(m["name"] == "models" and m["readOnly"] for m in box(f)["volumeMounts"])
    ),
    # rights
    "nobody is root": lambda f, _: (
        pod(f)["securityContext"]["runAsNonRoot"] is True and pod(f)["securityContext"]["runAsUser"] > 0
    ),
    "the root file system is read only": lambda f, _: (
        box(f)["securityContext"]["readOnlyRootFilesystem"] is True
    ),
    "no capability, no way to more": lambda f, _: (
        box(f)["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        and box(f)["securityContext"]["allowPrivilegeEscalation"] is False
    ),
    "no token of the API": lambda f, _: pod(f)["automountServiceAccountToken"] is False,
    "services are not taken for settings": lambda f, _: pod(f)["enableServiceLinks"] is False,
    "the usual system calls": lambda f, _: (
        pod(f)["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault"
    ),
    "no secret is written down": lambda f, w: (
        [each["secretRef"]["name"] for each in box(f).get("envFrom", ())] == [w.secret] * bool(w.secret)
    ),
    "every variable is a setting": lambda f, _: environment(f).keys() <= variables().keys(),
    "every scratch volume has a bound": lambda f, _: all(
        v["emptyDir"]["sizeLimit"] for v in pod(f)["volumes"] if "emptyDir" in v
    ),
    # the network
    "both directions are ruled": lambda f, _: set(network(f)["policyTypes"]) == {"Ingress", "Egress"},
    "Prometheus may scrape": lambda f, w: (
        {"kubernetes.io/metadata.name": w.scrapers} in selected_namespaces(f)
    ),
    "names can be looked up": lambda f, _: {(53, "UDP"), (53, "TCP")} <= egress(f),
    "only what is needed can be asked": lambda f, w: (
        egress(f) - {(53, "UDP"), (53, "TCP"), (443, "TCP")}
        == ({(w.redis_port, "TCP")} if w.redis_port else set())
    ),
    "every pod is known to a balancer": lambda f, _: (
        f["Service", "carpool-pods"]["spec"]["clusterIP"] == "None"
    ),
    "gRPC is told as such": lambda f, _: any(
        port.get("appProtocol") == "kubernetes.io/h2c" for port in f["Service", "carpool"]["spec"]["ports"]
    ),
    "services find the pods": lambda f, _: (
        f["Service", "carpool"]["spec"]["selector"].items()
        <= fleet(f)["template"]["metadata"]["labels"].items()
    ),
    "metrics are scraped": lambda f, _: (
        f["ServiceMonitor", "carpool"]["spec"]["endpoints"][0]["port"] == "metrics"
    ),
    "custom resources fit their definitions": lambda f, _: (
        [
            problem
            for (kind, _), document in f.items()
            if kind in ("ScaledObject", "ServiceMonitor", "PrometheusRule")
            for problem in problems(document)
        ]
        == []
    ),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", DEPLOYMENTS)
@pytest.mark.parametrize("check", CHECKS)
def test_a_deployment(check: str, name: str, form: str) -> None:
    assert CHECKS[check](rendered(name, form), DEPLOYMENTS[name])


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_both_forms_say_the_same(name: str) -> None:
    def without_labels(found: Documents) -> Documents:
        for document in found.values():
            document["metadata"] = {"name": document["metadata"]["name"]}
        return found

    assert without_labels(rendered(name, "helm")) == without_labels(rendered(name, "kubectl"))


@pytest.mark.parametrize("overlay", ["production", "gpu"])
def test_the_overlays_that_come_along(overlay: str) -> None:
    found = kustomized(DEPLOY / "kubernetes" / "overlays" / overlay)
    assert "replicas" not in fleet(found)
    assert scaler(found)["fallback"]["behavior"] == "currentReplicasIfHigher"
    assert 'namespace="carpool"' in scaler(found)["triggers"][0]["metadata"]["query"]
    assert environment(found)["CARPOOL_SHARED_PROFILES"] == "file:/var/lib/carpool-shared"
    assert claims(found) == {"carpool-models", "carpool-shared"}
    assert ("cuda" in box(found)["image"]) == (overlay == "gpu")


def test_two_namespaces_have_nothing_to_do_with_each_other() -> None:
    ours, theirs = rendered("keda", "kubectl"), rendered("other-namespace", "kubectl")
    assert not set(expressions(ours)) & set(expressions(theirs))
    assert scaler(ours)["triggers"] != scaler(theirs)["triggers"]
    assert {d["metadata"]["namespace"] for d in ours.values()} == {"shop"}
    assert {d["metadata"]["namespace"] for d in theirs.values()} == {"street"}
