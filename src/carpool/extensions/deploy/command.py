"""Implements `carpool deploy`: configurations for a fleet, from a model's profile and plan."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from enum import StrEnum
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING

from carpool.cli import shared_options as shared
from carpool.cli import show
from carpool.cli import verb_options as o
from carpool.cli.written_files import make_folder, write_file
from carpool.errors import InvalidInput

if TYPE_CHECKING:
    from carpool.extensions.deploy.kubernetes_overlay import Deployment
    from carpool.lab.machine_share import Machine

Target = StrEnum("Target", ["kubernetes", "balancer", "ray"])
Kind = StrEnum("Kind", ["haproxy", "envoy", "nginx"])
Autoscaler = StrEnum("Autoscaler", ["keda", "hpa", "none"])

_BALANCER, _KUBERNETES, _RAY = "Balancer", "Kubernetes", "Ray"
_ASSUMED_START_S = 60.0
_LEAST_MEMORY_GB = 2.0
_REPEATS = 10
_IMAGE, _RAY_IMAGE = "carpool:latest", "carpool-ray:latest"
_HTTP, _LISTEN, _LISTEN_GRPC, _STATS = 8000, 8080, 8081, 8404


@dataclass(frozen=True, kw_only=True)
class DeployVerb(shared.SharesCores):
    """Write a balancer's configuration or Kubernetes manifests, or serve on Ray.

    HAProxy for two replicas, which run with --gate-status 503:

        carpool deploy balancer http://10.0.0.1:8000 http://10.0.0.2:8000 --kind haproxy --output /etc/haproxy

    Replicas for 500 images/s within 50 ms, and their manifests. The model is measured here:

        carpool deploy kubernetes resnet50.onnx --rate 500 --slo-ms 50 --dry-run

    The same with a known curve, without measuring:

        carpool deploy kubernetes --curve 4+1 --rate 500 --slo-ms 50 --output overlay
        kubectl apply -k overlay

    Two to eight replicas on this machine's Ray cluster, or the files for it:

        carpool deploy ray /models --slo-ms 50 --replicas 2,8
        carpool deploy ray /models --slo-ms 50 --replicas 2,8 --output overlay
    """

    target: Target = o.argument("What to write, or where to serve.", metavar="kubernetes|balancer|ray")
    places: list[str] | None = o.argument(
        "Addresses of the replicas; or the model's file or folder, as on the machines that serve it.",
        default=None,
        metavar="URL…|MODEL",
    )
    output: Path | None = o.option(None, "Folder for the files. Default: print them.", metavar="DIR")
    replicas: str = o.option(
        "",
        "Number of replicas, or the least and the most: 2,8. Default: as many as --rate needs, or 1.",
        _RAY,
    )
    port: int = o.option(8000, "Port of HAProxy on every node; 0 takes a free one.", _RAY)
    fleet: str = o.option("carpool", "The application's name.", _RAY)
    dry_run: bool = o.option(False, "Print the files without writing them.")
    kind: Kind = o.option(Kind.haproxy, "Which balancer: haproxy, envoy or nginx.", _BALANCER)
    listen: str = o.option("0.0.0.0:8080", "Address on which it listens.", _BALANCER, metavar="HOST:PORT")
    grpc_listen: str = o.option(
        "", "Address on which it listens for gRPC; not for nginx.", _BALANCER, metavar="HOST:PORT"
    )
    grpc_port: int = o.option(8001, "With --grpc-listen: gRPC port of the replicas.", _BALANCER)
    tls_cert: str = o.option("", "TLS: file of the certificate on the balancer's machine.", _BALANCER)
    tls_key: str = o.option("", "TLS: file of its key, if it is another file; not for haproxy.", _BALANCER)
    stats: str = o.option("", "Address of its status page.", _BALANCER, metavar="HOST:PORT")
    access_log: bool = o.option(False, "Log every request to its output.", _BALANCER)
    weighted: bool = o.option(False, "Envoy: weight replicas by their load reports.", _BALANCER)
    rate: float | None = o.option(None, "Images per second, on average.", o.FLEET)
    slo_ms: float | None = o.option(None, "The SLO: largest latency of a response, in ms.", o.FLEET)
    curve: str = o.option(
        "", "The model's batch times, as printed by profile. Default: measure them.", o.FLEET
    )
    instances: int = o.option(1, "With --curve: instances per replica.", o.FLEET)
    name: str | None = o.option(None, "Which model of a repository.", o.FLEET)
    surge: float = o.option(3.0, "Largest scale-up, as a multiple of the rate.", o.FLEET)
    redundancy: int = o.option(1, "Replicas that may fail without missing the SLO.", o.FLEET)
    cold_start: float | None = o.option(
        None,
        "Time until a new replica answers, in seconds. Default: that of its last start here, else 60.",
        o.FLEET,
    )
    helm: bool = o.option(False, "Write a Helm chart in place of a Kustomize overlay.", _KUBERNETES)
    autoscaler: Autoscaler = o.option(Autoscaler.keda, "Autoscaler: keda, hpa or none.", _KUBERNETES)
    prometheus: str = o.option(
        "http://prometheus-operated.monitoring:9090",
        "KEDA: address of Prometheus.",
        _KUBERNETES,
        metavar="URL",
    )
    namespace: str = o.option("carpool", "An existing namespace.", _KUBERNETES)
    image: str = o.option(
        _IMAGE,
        f"Container image. Default: this one; with --gpus its -cuda variant; for ray {_RAY_IMAGE}.",
        _KUBERNETES,
    )
    claim: str = o.option("carpool-models", "Volume claim with the models.", _KUBERNETES)
    repository: str = o.option(
        "",
        "Address from which replicas fetch the models, like s3://bucket/models, in place of --claim.",
        _KUBERNETES,
    )
    shared: str = o.option(
        "carpool-shared",
        "Where replicas share profiles and rollouts: claim (a volume claim) or redis://HOST:6379.",
        _KUBERNETES,
    )
    storage_class: str = o.option(
        "", "Storage class of the shared claim, which many pods write to.", _KUBERNETES
    )
    secret: str = o.option("", "Secret whose fields become environment variables of the pods.", _KUBERNETES)
    node_selector: str = o.option(
        "", "Label of its nodes. Default: nvidia.com/gpu.present=true with --gpus.", _KUBERNETES
    )
    runtime_class: str = o.option("", "Runtime class of its pods, like nvidia.", _KUBERNETES)
    cores: int = o.option(2, "Cores per replica, request and limit.", _KUBERNETES)
    memory_gb: float | None = o.option(
        None,
        "Memory per replica. Default: what the measured model needs, at least 2.",
        _KUBERNETES,
    )
    gpus: int = o.option(0, "GPUs per replica.", _KUBERNETES)

    def run(self) -> None:
        if self.target is Target.balancer:
            self._balancer()
        elif self.target is Target.ray:
            self._ray()
        else:
            self._kubernetes()

    def _balancer(self) -> None:
        from carpool.extensions.deploy.balancer_config import FILES, read_address
        from carpool.extensions.deploy.balancer_extras import BalancerExtras, whole_balancer_config

        if not self.places:
            raise InvalidInput("name the replicas: carpool deploy balancer http://10.0.0.1:8000 …")
        replicas = [read_address(place, "a replica", _HTTP) for place in self.places]
        listen = read_address(self.listen, "--listen", _LISTEN)
        extras = BalancerExtras(
            grpc=read_address(self.grpc_listen, "--grpc-listen", _LISTEN_GRPC) if self.grpc_listen else None,
            grpc_port=o.whole("--grpc-port", self.grpc_port, least=1, most=65_535),
            tls_cert=self.tls_cert,
            tls_key=self.tls_key,
            stats=read_address(self.stats, "--stats", _STATS) if self.stats else None,
            access_log=self.access_log,
        )
        text = whole_balancer_config(self.kind, replicas, listen, extras, weighted=self.weighted)
        if self.output is None or self.dry_run:
            print(text, end="")
            return
        make_folder(self.output)
        write_file(self.output / FILES[self.kind], text)
        show.paragraph(f"Wrote {self.output / FILES[self.kind]} for {show.count(len(replicas), 'replica')}.")

    def _kubernetes(self) -> None:
        from carpool.extensions.deploy.helm_chart import helm_chart
        from carpool.extensions.deploy.kubernetes_overlay import (
            components,
            overlay,
            write_files,
            write_overlay,
        )

        wanted = self._wanted()
        files = helm_chart(wanted) if self.helm else overlay(wanted)
        if self.output is None or self.dry_run:
            print("\n".join(f"# ---- {name}\n{text}" for name, text in files.items()), end="")
            return
        if self.helm:
            write_files(files, self.output)
            then = f"helm upgrade --install carpool {self.output} --namespace {self.namespace}"
        else:
            write_overlay(files, self.output, components(wanted))
            then = f"kubectl apply -k {self.output}"
        for sentence in wanted.why():
            show.paragraph(sentence, "· ")
        show.paragraph(f"Wrote {self.output}: {then}")

    def _ray(self) -> None:
        from carpool.extensions import installed
        from carpool.extensions.deploy.kubernetes_overlay import UNRELIABLE, Deployment

        ray = installed().get("ray")
        if ray is None:
            raise InvalidInput("this installation has no extension ray, which deploys to Ray")
        if not self.places:
            raise InvalidInput("name what to serve: carpool deploy ray /models")
        replicas: object = self.replicas or 1
        if self.rate is not None and not self.replicas:
            planned = self._wanted()
            replicas = planned.least, planned.most
            if planned.unreliable:
                print(f"carpool: {UNRELIABLE}", file=sys.stderr)
        given = {"slo_ms": self.slo_ms, "replicas": replicas, "port": self.port, "name": self.fleet}
        given |= {"models": self.places, "cores": self.cores, "gpus": self.gpus}
        if known := self._known_start():
            given["cold_start_s"] = known[0]
        target = ray.part("deploying:RayTarget")(given)
        if self.dry_run:
            print(target.config(), end="")
        elif self.output is None:
            target.deploy()
        else:
            pods = Deployment(
                rate=0.0,
                slo_ms=0.0,
                capacity=1.0,
                planned=1,
                namespace=self.namespace,
                image=_RAY_IMAGE if self.image == _IMAGE else self.image,
                claim=self.claim,
                cores=self.cores,
                memory_gb=self._memory_gb(0.0),
                gpus=self.gpus,
            )
            target.write(self.output, pods)

    def _wanted(self) -> Deployment:
        from carpool.extensions.deploy.kubernetes_overlay import Deployment
        from carpool.lab.fleet_plan import FleetQuestion, plan

        if self.rate is None or self.slo_ms is None:
            raise InvalidInput("--rate and --slo-ms are both needed to plan")
        rate = o.number("--rate", self.rate, above=0, most=1e7)
        cores = o.whole("--cores", self.cores, least=1, most=4096)
        text, machine, unreliable, model_mb = self._curve(
            o.number("--slo-ms", self.slo_ms, above=0, most=1e7), cores
        )
        curve = shared.batch_curve(text, None, None)
        slo = shared.slo(self.slo_ms, curve)
        redundant = o.whole("--redundancy", self.redundancy, least=0, most=1000)
        wanted = Deployment(
            rate,
            self.slo_ms,
            machine.capacity(curve, slo),
            1,
            redundant,
            o.number("--surge", self.surge, least=1, most=1000),
            str(self.autoscaler),
            self.prometheus,
            self.namespace,
            "" if self.image == _IMAGE else self.image,
            self.claim,
            cores,
            self._memory_gb(model_mb),
            o.whole("--gpus", self.gpus, least=0, most=64),
            *(self._known_start() or (_ASSUMED_START_S, "assumed, since no start of it was measured here")),
            unreliable=unreliable,
            repository=self.repository,
            shared=self.shared,
            storage_class=self.storage_class,
            secret=self.secret,
            node_selector=self.node_selector,
            runtime_class=self.runtime_class,
        )
        question = FleetQuestion(curve, slo, rate, redundancy=redundant, machine=machine)
        with show.status("planning") as tell:
            answer = plan(question, tell)
        if answer.replicas is None:
            raise InvalidInput(f"--slo-ms: no number of replicas meets it: {' '.join(answer.why)}")
        return replace(wanted, planned=answer.replicas)

    def _memory_gb(self, model_mb: float) -> float:
        """Returns what was given, else what a replica needs with such a model; 0: that is not known."""
        from carpool.lab.machine_share import replica_memory_mb

        if self.memory_gb is not None:
            return o.number("--memory-gb", self.memory_gb, least=0.25, most=1e5)
        return max(_LEAST_MEMORY_GB, ceil(replica_memory_mb(model_mb) / 100) / 10)

    def _known_start(self) -> tuple[float, str] | None:
        """Returns seconds of the slowest model, and where they are from."""
        from carpool.config.repository import find_models
        from carpool.config.server import usual_folder
        from carpool.engine.profile.hardware import gpu_count
        from carpool.engine.profile.model_profile import last_start

        if self.cold_start is not None:
            return o.number("--cold-start", self.cold_start, above=0, most=86_400), "as given"
        here = [Path(place) for place in self.places or () if Path(place).exists()]
        if not here:
            return None  # an address, or a folder that only the nodes have
        found, _ = find_models(here, gpus=gpu_count(), only=None if self.name is None else [self.name])
        starts = [last_start(usual_folder("cache"), source.versions[-1]) for source in found]
        slowest = max((start.ready_s for start in starts if start is not None), default=0.0)
        return (max(1.0, slowest), "as its last start here took") if slowest else None

    def _curve(self, slo_ms: float, cores: int) -> tuple[str, Machine, bool, float]:
        """Returns the curve of one instance and what a replica has, as given or measured here, whether they
        are unreliable, and megabytes of the model, or 0."""
        from carpool.lab.batch_profile import ProfileQuestion, profile

        if self.curve:
            instances = o.whole("--instances", self.instances, least=1, most=1024)
            return self.curve, self.machine(cores, instances), False, 0.0
        if not self.places or len(self.places) != 1:
            raise InvalidInput("give one model to measure, or its --curve")
        question = ProfileQuestion(
            Path(self.places[0]), self.name, (), (slo_ms / 1e3,), _REPEATS, None, None, None
        )
        with show.status("measuring the model") as tell:
            report = profile(question, tell)
        machine = self.machine(cores, report.instances, report.infer_cores)
        return report.curve, machine, report.noisy, report.memory_mb
