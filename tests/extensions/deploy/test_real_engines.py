"""deploy/ in the hands of the programs that it is for: Kustomize, Kubernetes' schemas, promtool, hadolint and
the balancers themselves. `make fleet` fetches them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from carpool.extensions.deploy.balancer_config import FILES, Address, balancer_config
from carpool.extensions.deploy.balancer_extras import BalancerExtras, whole_balancer_config
from cli_run import run_cli
from conformance.fleet_engines import VARIABLE, binary
from extensions.deploy.manifests import DEPLOY, documents, pods, problems
from extensions.deploy.rendered import DEPLOYMENTS, FORMS, rendered
from extensions.deploy.test_deploy_files import CUSTOM

pytestmark = pytest.mark.conformance

VERSIONS = ("1.29", "1.33", "1.37")
OVERLAYS = ("demo", "production", "gpu")
VALIDATE = """
import sys, yaml, kubernetes_validate
for document in yaml.safe_load_all(sys.stdin):
    for version in sys.argv[1:]:
        kubernetes_validate.validate(document, version, strict=True)
"""


def program(name: str) -> Path:
    folder = os.environ.get(VARIABLE)
    if not folder:
        pytest.skip("make fleet fetches what this needs, and make conformance names its folder")
    found = binary(name, Path(folder))
    if found is None:
        pytest.skip(f"there is no {name} for this machine")
    return found


def run(name: str, *arguments: object, given: str = "", folder: Path | None = None) -> str:
    found = program(name)
    libraries = {"LD_LIBRARY_PATH": str(found.parent / "lib")} if name == "haproxy" else {}
    done = subprocess.run(
        [str(found), *map(str, arguments)],
        input=given,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=folder,
        env=os.environ | libraries,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check(text: str) -> None:
    found = documents(text)
    custom = [document for document in found if document["kind"] in CUSTOM]
    assert [problem for document in custom for problem in problems(document)] == []
    described = [pod for document in custom for pod in pods(document)]
    plain = yaml.safe_dump_all([*(each for each in found if each["kind"] not in CUSTOM), *described])
    run("python", "-c", VALIDATE, *VERSIONS, given=plain)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_overlays_render_and_fit_the_schemas(overlay: str) -> None:
    check(run("kubectl", "kustomize", DEPLOY / "kubernetes" / "overlays" / overlay))


@pytest.mark.parametrize(
    ("component", "base", "kind"),
    [
        ("envoy-gateway", True, "BackendTrafficPolicy"),
        ("kserve", False, "ServingRuntime"),
        ("rayservice", False, "RayService"),
    ],
)
def test_components_render_and_fit(tmp_path: Path, component: str, base: bool, kind: str) -> None:
    shutil.copytree(DEPLOY / "kubernetes", tmp_path / "kubernetes")
    (tmp_path / "kustomization.yaml").write_text(
        f"resources: [{'kubernetes/base' if base else ''}]\ncomponents: [kubernetes/components/{component}]\n"
    )
    text = run("kubectl", "kustomize", tmp_path)
    check(text)
    found = {document["kind"]: document for document in documents(text)}
    assert kind in found
    if base:
        container = found["Deployment"]["spec"]["template"]["spec"]["containers"][0]
        given = {each["name"]: each["value"] for each in container["env"]}
        assert (given["CARPOOL_LOAD_REPORT"], given["CARPOOL_GATE_STATUS"]) == ("always", "503")


def test_what_deploy_ray_writes_renders_and_fits(tmp_path: Path) -> None:
    folder = tmp_path / "overlay"
    asked = ["deploy", "ray", "/models", "--slo-ms", "50", "--replicas", "2,8", "--output", str(folder)]
    written = run_cli(asked)
    assert written.exit_code == 0, written.output
    text = run("kubectl", "kustomize", folder)
    check(text)
    service = next(each for each in documents(text) if each["kind"] == "RayService")
    assert service["spec"]["serveConfigV2"] == (folder / "serve.yaml").read_text()


def test_what_deploy_writes_renders_and_fits(tmp_path: Path) -> None:
    folder = tmp_path / "overlay"
    asked = ["deploy", "kubernetes", "--curve", "4+1", "--rate", "900", "--slo-ms", "50", "--gpus", "1"]
    written = run_cli([*asked, "--output", str(folder)])
    assert written.exit_code == 0, written.output
    check(run("kubectl", "kustomize", folder))
    written = run_cli([*asked, "--helm", "--output", str(tmp_path / "chart")])
    assert written.exit_code == 0, written.output
    run("helm", "lint", "--strict", tmp_path / "chart")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_five_deployments_fit_the_schemas(name: str, form: str) -> None:
    check(yaml.safe_dump_all(rendered(name, form).values()))


def test_a_typo_is_seen() -> None:
    program("kubernetes-validate")
    wrong = (
        (DEPLOY / "kubernetes" / "base" / "deployment.yaml")
        .read_text()
        .replace("readinessProbe", "readinesProbe")
    )
    with pytest.raises(AssertionError, match="readinesProbe"):
        run("python", "-c", VALIDATE, *VERSIONS, given=wrong)


def test_rules(tmp_path: Path) -> None:
    folder = DEPLOY / "monitoring"
    run("promtool", "check", "rules", "rules.yml", "alerts.yml", folder=folder)
    run("promtool", "test", "rules", "rules_test.yml", folder=folder)
    run("promtool", "check", "config", "prometheus.yml", "local.yml", folder=folder)
    board = json.loads((DEPLOY / "kubernetes" / "components" / "grafana" / "dashboard.json").read_text())
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    rules = {
        "groups": [{"name": "x", "rules": [{"record": f"x:x{n}", "expr": e} for n, e in enumerate(asked)]}]
    }
    file = tmp_path / "panels.yml"
    file.write_text(yaml.safe_dump(rules))
    run("promtool", "check", "rules", file)


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cuda"])
def test_dockerfiles(name: str) -> None:
    run("hadolint", DEPLOY / "container" / name)


@pytest.mark.parametrize("kind", FILES)
def test_balancers_take_all_that_operators_ask_for(tmp_path: Path, kind: str) -> None:
    cert, key = (tmp_path / name for name in ("carpool.pem", "carpool.pem.key"))
    made = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost", "-days", "2"]
    subprocess.run(["openssl", *made, "-keyout", key, "-out", cert], check=True, capture_output=True)
    extras = BalancerExtras(
        grpc=None if kind == "nginx" else Address("127.0.0.1", 8081),
        tls_cert=str(cert),
        tls_key="" if kind == "haproxy" else str(key),
        stats=None if kind == "nginx" else Address("127.0.0.1", 8404),  # this build has no stub_status
        access_log=True,
    )
    replicas = [Address("127.0.0.1", 8000), Address("localhost", 8010)]
    file = tmp_path / FILES[kind]
    file.write_text(whole_balancer_config(kind, replicas, Address("127.0.0.1", 8080), extras))
    check_balancer(kind, file)


@pytest.mark.parametrize("weighted", [False, True], ids=["evenly", "weighted"])
@pytest.mark.parametrize("kind", FILES)
def test_balancers_take_their_configurations(tmp_path: Path, kind: str, weighted: bool) -> None:
    if weighted and kind != "envoy":
        pytest.skip("it has no weights")
    replicas = [Address("127.0.0.1", 8000), Address("localhost", 8010)]
    file = tmp_path / FILES[kind]
    file.write_text(balancer_config(kind, replicas, Address("127.0.0.1", 8080), weighted=weighted))
    check_balancer(kind, file)


def check_balancer(kind: str, file: Path) -> None:
    (file.parent / "logs").mkdir()
    arguments: dict[str, list[object]] = {
        "haproxy": ["-c", "-f", file],
        "envoy": ["--mode", "validate", "-c", file],
        "nginx": ["-t", "-p", file.parent, "-c", file],
    }
    run(kind, *arguments[kind])
