"""deploy/: what can be seen without a cluster, an image or a balancer."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from absent import needs
from carpool.config.server import variables
from carpool.observe.prometheus import FAMILIES
from extensions.deploy.manifests import DEPLOY, documents, pods, problems

KUBERNETES = DEPLOY / "kubernetes"
FILES = sorted(path for path in DEPLOY.rglob("*.y*ml") if not {"balancer", "templates"} & {*path.parts})
KUSTOMIZATIONS = sorted(KUBERNETES.rglob("kustomization.yaml"))
CUSTOM = {
    *("ScaledObject", "ServiceMonitor", "PrometheusRule"),
    *("RayService", "ServingRuntime", "Gateway", "HTTPRoute", "GRPCRoute", "BackendTrafficPolicy"),
}


def deployment() -> dict[str, Any]:
    found: dict[str, Any] = documents((KUBERNETES / "base" / "deployment.yaml").read_text())[0]
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(DEPLOY)))
def test_every_file_is_yaml(path: Path) -> None:
    assert documents(path.read_text())


@pytest.mark.parametrize("path", KUSTOMIZATIONS, ids=lambda path: str(path.parent.relative_to(KUBERNETES)))
def test_everything_that_is_named_is_there(path: Path) -> None:
    document = documents(path.read_text())[0]
    named = [*document.get("resources", ()), *document.get("components", ())]
    named += [patch["path"] for patch in document.get("patches", ()) if "path" in patch]
    named += [file for maps in document.get("configMapGenerator", ()) for file in maps["files"]]
    assert named or document.get("replicas")
    for name in named:
        assert (path.parent / name).exists(), name


def test_custom_resources_fit_their_definitions() -> None:
    found = [
        document
        for path in (KUBERNETES / "components").rglob("*.yaml")
        for document in documents(path.read_text())
        if document["kind"] in CUSTOM
    ]
    assert {document["kind"] for document in found} == CUSTOM
    assert [problem for document in found for problem in problems(document)] == []
    for document in found:
        document["spec"]["triggerz"] = []
        assert problems(document), "and what is not declared is seen"


def test_the_operator_has_the_same_rules() -> None:
    rule = documents((KUBERNETES / "components" / "servicemonitor" / "rules.yaml").read_text())[0]
    files = [DEPLOY / "monitoring" / name for name in ("rules.yml", "alerts.yml")]
    groups = [group for file in files for group in yaml.safe_load(file.read_text())["groups"]]
    assert rule["spec"]["groups"] == groups


@needs("rollout")
def test_rules_and_the_dashboard_name_metrics_that_exist() -> None:
    texts = [path.read_text() for path in (DEPLOY / "monitoring").glob("*.yml")]
    texts.append((KUBERNETES / "components" / "grafana" / "dashboard.json").read_text())
    known = {family.name for family in FAMILIES}
    known |= {f"{name}_{end}" for name in known for end in ("bucket", "sum", "count")}
    known |= {"carpool_replicas_wanted"}  # as the adapter calls it
    for text in texts:
        assert set(re.findall(r"\b(?:nv|carpool)_[a-z0-9_]+", text)) <= known
    recorded = set(re.findall(r"record: (\S+)", (DEPLOY / "monitoring" / "rules.yml").read_text()))
    used = {word for text in texts for word in re.findall(r"\bcarpool:[a-z0-9_:]+", text)}
    assert used <= recorded


def test_the_dashboard_draws_every_panel() -> None:
    board = json.loads((KUBERNETES / "components" / "grafana" / "dashboard.json").read_text())
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"]) >= 10
    assert all(target["expr"] for panel in board["panels"] for target in panel["targets"])


@pytest.mark.parametrize(
    "metric",
    [
        "nv_inference_request_success",  # SLO attainment
        "carpool_saturation",
        "carpool_shed_total",
        "carpool_batch_size_bucket",
        "carpool_rollout_state",
        "carpool_model_state",
    ],
)
def test_the_dashboard_shows(metric: str) -> None:
    board = json.loads((KUBERNETES / "components" / "grafana" / "dashboard.json").read_text())
    shown = [t["expr"] for panel in board["panels"] for t in panel["targets"] if metric in t["expr"]]
    assert shown
    assert all('namespace=~"$namespace",job=~"$job"' in expression for expression in shown)


def test_what_compose_mounts_is_there() -> None:
    document = yaml.safe_load((DEPLOY / "container" / "compose.yaml").read_text())
    mounted = [v for service in document["services"].values() for v in service.get("volumes", ())]
    files = [volume.partition(":")[0] for volume in mounted if volume.startswith("..")]
    assert len(files) >= 5
    assert all((DEPLOY / "container" / file).exists() for file in files)


def test_the_variables_of_the_base_are_settings() -> None:
    container = deployment()["spec"]["template"]["spec"]["containers"][0]
    assert {each["name"] for each in container["env"]} <= variables().keys()


@needs("rollout")
def test_the_variables_of_components_are_settings() -> None:
    found = [
        each["name"]
        for path in (KUBERNETES / "components").rglob("*.yaml")
        for document in documents(path.read_text())
        for pod in [
            *pods(document),
            *([document["spec"]["template"]] if document["kind"] == "Deployment" else []),
        ]
        for container in pod["spec"]["containers"]
        for each in container.get("env", ())
    ]
    assert "CARPOOL_LOAD_REPORT" in found
    assert set(found) <= variables().keys()


@pytest.mark.parametrize("path", ["kserve/servingruntime.yaml", "rayservice/rayservice.yaml"])
def test_replicas_of_other_engines_share_what_they_learn(path: str) -> None:
    """Profiles and rollouts lie on a claim that comes with the component, and outlive a pod."""
    first, claim = documents((KUBERNETES / "components" / path).read_text())
    (pod,) = [each for each in pods(first) if "volumes" in each["spec"]]
    (container,) = pod["spec"]["containers"]
    given = {each["name"]: each["value"] for each in container["env"]}
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    volume = next(
        each
        for each in pod["spec"]["volumes"]
        if "persistentVolumeClaim" in each
        and each["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    )
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    for name in ("CARPOOL_SHARED_PROFILES", "CARPOOL_ROLLOUT_STATE"):
        assert given[name] == f"file:{mounts[volume['name']]}"


def test_the_grace_period_is_long_enough() -> None:
    pod = deployment()["spec"]["template"]["spec"]
    values = {
        each["name"]: float(each["value"])
        for each in pod["containers"][0]["env"]
        if each["name"].endswith("_S")
    }
    lame_duck, drain = values["CARPOOL_LAME_DUCK_S"], values["CARPOOL_DRAIN_S"]
    assert pod["terminationGracePeriodSeconds"] >= lame_duck + drain + 10
    ready = pod["containers"][0]["readinessProbe"]
    assert lame_duck >= 2 * ready["periodSeconds"] * ready["failureThreshold"]


def test_containers_run_without_rights() -> None:
    pod = deployment()["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["automountServiceAccountToken"] is pod["enableServiceLinks"] is False
    rights = pod["containers"][0]["securityContext"]
    assert rights["readOnlyRootFilesystem"] is True
    assert rights["capabilities"] == {"drop": ["ALL"]}


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cuda"])
def test_images_are_built_in_stages_and_run_without_root(name: str) -> None:
    lines = (DEPLOY / "container" / name).read_text().splitlines()
    assert sum(line.startswith("FROM ") for line in lines) == 3
    assert any(line.startswith("HEALTHCHECK ") for line in lines)
    assert [line for line in lines if line.startswith("USER ")] == ["USER 10001:10001"]
    copied = {
        word
        for line in lines
        if line.startswith("COPY ") and "--from" not in line
        for word in line.split()[1:-1]
    }
    assert all((DEPLOY.parent / word).exists() for word in copied)
    assert "deploy" in copied, "which the package takes along"


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cuda"])
def test_images_install_extras_that_there_are(name: str) -> None:
    text = (DEPLOY / "container" / name).read_text()
    extras = re.findall(r"^ARG EXTRAS=(\S+)$", text, re.MULTILINE)[0].split(",")
    project = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())["project"]
    assert set(extras) <= project["optional-dependencies"].keys()
    assert "remote" in extras, "models may come from a repository elsewhere"


def test_compose_asks_the_balancer_for_what_there_is() -> None:
    document = yaml.safe_load((DEPLOY / "container" / "compose.yaml").read_text())
    services = document["services"]
    replicas = [name for name in services if name.startswith("carpool-")]
    asked = services["balancer-configuration"]["command"]
    assert [word for word in asked if word.startswith("http://")] == [
        f"http://{name}:8000" for name in replicas
    ]
    scraped = yaml.safe_load((DEPLOY / "monitoring" / "prometheus.yml").read_text())["scrape_configs"][0]
    assert scraped["static_configs"][0]["targets"] == [f"{name}:8002" for name in replicas]


def test_the_target_of_the_rules_is_that_of_the_code() -> None:
    from carpool.core.scaling import TARGET_LOAD

    assert f"({TARGET_LOAD:g} * carpool:capacity" in (DEPLOY / "monitoring" / "rules.yml").read_text()
