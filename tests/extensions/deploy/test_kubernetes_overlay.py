"""What `carpool deploy kubernetes` writes for a rate and a promise."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from carpool.engine.profile.model_profile import StartTimes
from carpool.errors import InvalidInput
from carpool.extensions.deploy.helm_chart import helm_chart
from carpool.extensions.deploy.kubernetes_overlay import (
    NETWORK,
    RULES,
    SHARED,
    UNRELIABLE,
    Deployment,
    overlay,
)
from carpool.lab.fleet_plan import FleetQuestion
from cli_run import run_cli
from extensions.deploy.manifests import DEPLOY, problems

ASKED = ["deploy", "kubernetes", "--curve", "4+1", "--rate", "500", "--slo-ms", "50"]


@pytest.fixture(autouse=True)
def planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `carpool plan` finds in seconds of simulation, which has tests of its own."""
    monkeypatch.setattr("carpool.lab.fleet_plan.plan", lambda _question, _tell: SimpleNamespace(replicas=2))


def wanted(**given: Any) -> Deployment:
    return Deployment(**{"rate": 500.0, "slo_ms": 50.0, "capacity": 840.0, "planned": 2} | given)


def test_500_a_second_at_50_ms_are_two_replicas() -> None:
    found = wanted()
    assert (found.least, found.most) == (2, 4)
    said = " ".join(found.why())
    assert said.startswith(
        "500/s at 50 ms: one replica answers 840/s within the SLO, so 1 replica is enough at 75 %"
    )


def test_the_start_time_is_the_measured_one_and_said_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "m"
    (model / "1").mkdir(parents=True)
    (model / "1" / "model.onnx").write_bytes(b"weights")
    found: list[StartTimes | None] = [None, StartTimes(12.5, 40.0), StartTimes(12.5)]
    monkeypatch.setattr("carpool.engine.profile.model_profile.last_start", lambda *_: found.pop(0))
    expected = ["60 s, assumed, since no start", "12.5 s, as its last start here took", "30 s, as given"]
    for number, said in enumerate(expected):
        out = tmp_path / f"out{number}"
        more = ["--cold-start", "30"] if number == 2 else []
        asked = run_cli([*ASKED, str(model), "--output", str(out), *more])
        assert asked.exit_code == 0, asked.output
        assert f"new replicas are ready ({said}" in (out / "kustomization.yaml").read_text()


def test_an_unreliable_curve_is_said_to_be(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    report = SimpleNamespace(curve="4+1", instances=1, infer_cores=0.0, memory_mb=0.0, noisy=True)
    monkeypatch.setattr("carpool.lab.batch_profile.profile", lambda *_: report)
    asked = ["deploy", "kubernetes", "--rate", "500", "--slo-ms", "50", str(tmp_path / "m"), "--dry-run"]
    shown = run_cli(asked)
    assert shown.exit_code == 0, shown.output
    assert UNRELIABLE in " ".join(shown.stdout.replace("# ", "").split())
    report.noisy = False
    assert "unreliable" not in run_cli(asked).stdout


@pytest.mark.parametrize(
    ("model_mb", "more", "limit"),
    [(90.0, [], "2048Mi"), (3200.0, [], "4301Mi"), (3200.0, ["--memory-gb", "3"], "3072Mi")],
)
def test_the_memory_limit_is_what_the_measured_model_needs(
    model_mb: float, more: list[str], limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server takes 977 MB beside the model: its processes, and what clients can make it hold."""
    model = tmp_path / "m"
    (model / "1").mkdir(parents=True)
    (model / "1" / "model.onnx").write_bytes(b"weights")
    report = SimpleNamespace(curve="4+1", instances=1, infer_cores=1.0, memory_mb=model_mb, noisy=False)
    monkeypatch.setattr("carpool.lab.batch_profile.profile", lambda _question, _tell: report)
    asked = ["deploy", "kubernetes", str(model), "--rate", "500", "--slo-ms", "50", "--dry-run", *more]
    done = run_cli(asked)
    assert done.exit_code == 0, done.output
    assert f"memory: {limit}" in done.stdout


@given(
    st.floats(0.1, 1e6),
    st.floats(1.0, 1e5),
    st.integers(1, 2000),
    st.integers(0, 10),
    st.floats(1.0, 20.0),
    st.sampled_from(["keda", "hpa", "none"]),
)
def test_whatever_is_asked_fits_together(
    rate: float, capacity: float, planned: int, redundant: int, surge: float, autoscaler: str
) -> None:
    found = wanted(
        rate=rate,
        capacity=capacity,
        planned=planned,
        redundant=redundant,
        surge=surge,
        autoscaler=autoscaler,
    )
    assert found.most >= found.least >= max(planned, redundant + 1)
    assert (found.least - redundant) * capacity >= 0.999 * rate
    files = {name: yaml.safe_load(text) for name, text in overlay(found).items()}
    replicas = files["deployment.yaml"]["spec"].get("replicas")
    assert replicas == (found.least if autoscaler == "none" else None), "else an apply resets the fleet"
    if autoscaler == "keda":
        spec = files["autoscaler.yaml"]["spec"]
        assert (spec["minReplicaCount"], spec["maxReplicaCount"]) == (found.least, found.most)
    named = files["kustomization.yaml"]
    patches = {patch["path"] for patch in named["patches"]}
    assert patches == files.keys() - {"kustomization.yaml", "volumes.yaml", RULES, NETWORK}


def test_keda_gets_a_whole_trigger() -> None:
    document = yaml.safe_load(overlay(wanted(namespace="shop"))["autoscaler.yaml"])
    document["spec"]["scaleTargetRef"] = {"name": "carpool"}  # which the component has
    assert problems(document) == []
    assert document["spec"]["fallback"]["behavior"] == "currentReplicasIfHigher"
    trigger = document["spec"]["triggers"][0]["metadata"]
    assert trigger["ignoreNullValues"] == "false", "no series is no answer"
    query = trigger["query"]
    assert query == 'max(carpool:replicas_wanted{namespace="shop",job="carpool"})'


@pytest.mark.parametrize(
    ("image", "name", "tag"),
    [
        ("carpool", "carpool", None),
        ("carpool:1.0", "carpool", "1.0"),
        ("registry.example/team/carpool:1.0-cuda", "registry.example/team/carpool", "1.0-cuda"),
        ("localhost:5000/carpool:7", "localhost:5000/carpool", "7"),
        ("localhost:5000/carpool", "localhost:5000/carpool", None),
    ],
)
def test_images(image: str, name: str, tag: str | None) -> None:
    told = yaml.safe_load(overlay(wanted(image=image))["kustomization.yaml"])["images"][0]
    assert (told["newName"], told.get("newTag")) == (name, tag)


def test_an_image_by_its_digest() -> None:
    digest = "sha256:" + 64 * "0"
    told = yaml.safe_load(overlay(wanted(image=f"r.example:5000/c:1@{digest}"))["kustomization.yaml"])
    assert told["images"] == [{"name": "carpool", "newName": "r.example:5000/c", "digest": digest}]


@pytest.mark.parametrize(
    "wrong",
    [
        {"namespace": "a b"},
        {"namespace": "-"},
        {"claim": "x\n  y: z"},
        {"image": "carpool:1\nx: y"},
        {"image": "}"},
        {"prometheus": "http://a b"},
        {"image": "carpool@sha256:12"},
        {"repository": "s3://a b"},
        {"shared": "redis://:password@redis:6379", "secret": "s"},
        {"shared": "redis://redis:6379"},
        {"secret": "A B"},
        {"node_selector": "gpu"},
        {"runtime_class": "x: y"},
        {"prometheus": "http://a\n"},
    ],
)
def test_what_could_mean_something_else_in_a_manifest_is_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(InvalidInput, match="--"):
        wanted(**wrong)


def test_gpus_are_asked_for() -> None:
    pod = yaml.safe_load(overlay(wanted(gpus=2))["deployment.yaml"])["spec"]["template"]["spec"]
    assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "2"
    assert pod["tolerations"][0]["key"] == "nvidia.com/gpu"
    assert pod["nodeSelector"] == {"nvidia.com/gpu.present": "true"}
    images = yaml.safe_load(overlay(wanted(gpus=2))["kustomization.yaml"])["images"]
    assert images == [{"name": "carpool", "newName": "carpool", "newTag": "latest-cuda"}]


def test_what_was_learnt_outlives_a_pod() -> None:
    files = overlay(wanted())
    pod = yaml.safe_load(files["deployment.yaml"])["spec"]["template"]["spec"]
    claim = {"claimName": yaml.safe_load(files["volumes.yaml"])["metadata"]["name"]}
    assert {"name": "shared", "persistentVolumeClaim": claim} in pod["volumes"]
    told = {each["name"]: each["value"] for each in pod["containers"][0]["env"]}
    assert told.keys() == {"CARPOOL_SHARED_PROFILES", "CARPOOL_ROLLOUT_STATE"}
    assert set(told.values()) == {f"file:{SHARED}"}


def test_a_chart_has_a_value_for_everything() -> None:
    files = helm_chart(wanted(repository="s3://bucket/models"))
    values = yaml.safe_load(files["values.yaml"])
    used = {match for text in files.values() for match in re.findall(r"\.Values\.([A-Za-z.]+)", text)}
    for path in used:
        found = values
        for part in path.split("."):
            found = found[part]


@pytest.mark.parametrize(
    ("template", "source", "replaced"),
    [
        (
            "deployment",
            "base/deployment",
            (
                "replicas: 2|image: carpool|args: [serve, --host, 0.0.0.0]|failureThreshold: 150|"
                'requests: {cpu: "2", memory: 2Gi}|limits: {cpu: "2", memory: 2Gi}'
            ),
        ),
        (
            "keda",
            "components/keda/scaledobject",
            "minReplicaCount: 2|maxReplicaCount: 8|"
            "fallback: {failureThreshold: 3, replicas: 2, behavior: currentReplicasIfHigher}|"
            "serverAddress: http://prometheus-operated.monitoring:9090|"
            'query: max(carpool:replicas_wanted{namespace="FILLED-IN-BY-THE-OVERLAY",job="carpool"})',
        ),
        ("hpa", "components/hpa/autoscaler", "minReplicas: 2|maxReplicas: 8"),
        (
            "networkpolicy",
            "components/networkpolicy/networkpolicy",
            "matchLabels: {kubernetes.io/metadata.name: monitoring}",
        ),
        ("servicemonitor", "components/servicemonitor/servicemonitor", ""),
    ],
)
def test_a_chart_says_the_same_as_the_overlay(template: str, source: str, replaced: str) -> None:
    """But for the lines in whose place it has a value: a change of one must be made in the other."""
    files = (DEPLOY / "helm" / "templates" / f"{template}.yaml", DEPLOY / "kubernetes" / f"{source}.yaml")
    chart, overlay = ([line.strip() for line in file.read_text().splitlines()] for file in files)
    assert "|".join(line for line in overlay if line not in chart) == replaced


def test_printed_or_written(tmp_path: Path) -> None:
    printed = run_cli([*ASKED, "--dry-run"])
    assert printed.exit_code == 0, printed.output
    assert "# ---- kustomization.yaml\n# 500/s at 50 ms: " in printed.stdout
    folder = tmp_path / "overlay"
    assert run_cli([*ASKED, "--output", str(folder), "--autoscaler", "hpa"]).exit_code == 0
    named = yaml.safe_load((folder / "kustomization.yaml").read_text())
    for part in (*named["resources"], *named["components"]):
        assert (folder / part / "kustomization.yaml").is_file() or part == "volumes.yaml", part
    assert run_cli([*ASKED, "--output", str(folder)]).exit_code == 2, "it is not empty"


SHARED_CORES = ["--infer-cores", "2", "--decode-ms", "2.5", "--protocol-ms", "0.5"]


def test_replicas_are_sized_as_the_plan_sizes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding and the protocol take their part of a pod's cores: fewer images per replica, more replicas."""
    asked = ["--curve", "1:13,8:85", "--rate", "600", "--slo-ms", "250", *SHARED_CORES]
    questions: list[FleetQuestion] = []

    def plan(question: FleetQuestion, _tell: object) -> SimpleNamespace:
        questions.append(question)
        return SimpleNamespace(replicas=2)

    monkeypatch.setattr("carpool.lab.fleet_plan.plan", plan)
    with suppress(AttributeError):  # the stand-in's answer cannot be printed
        run_cli(["plan", *asked, "--cores", "2", "--redundancy", "1"])
    done = run_cli(["deploy", "kubernetes", *asked, "--cores", "2", "--dry-run"])
    assert done.exit_code == 0, done.output
    planned, deployed = questions
    assert (planned.machine, planned.capacity) == (deployed.machine, deployed.capacity)
    assert f"one replica answers {planned.capacity:.3g}/s within the SLO" in done.stdout
    alone = run_cli(["deploy", "kubernetes", *asked[:6], "--dry-run"]).stdout
    assert least_replicas(done.stdout) > least_replicas(alone)


def least_replicas(printed: str) -> int:
    return int(re.findall(r"minReplicaCount: (\d+)", printed)[0])


@pytest.mark.parametrize(
    "given",
    [
        ["--curve", "4+1", "--slo-ms", "50"],
        ["--curve", "4+1", "--rate", "500"],
        ["--rate", "500", "--slo-ms", "50"],
        ["--curve", "4+1", "--rate", "500", "--slo-ms", "1"],
        ["--curve", "4+1", "--rate", "0", "--slo-ms", "50"],
        ["--curve", "4+1", "--rate", "500", "--slo-ms", "50", "--cores", "0"],
        ["--curve", "4+1", "--rate", "500", "--slo-ms", "50", "--cores", "2", "--infer-cores", "3"],
    ],
)
def test_what_is_missing_or_cannot_be(given: list[str]) -> None:
    assert run_cli(["deploy", "kubernetes", *given]).exit_code in (1, 2)
