"""This writes a Kustomize overlay from a model's profile and the traffic that it is to carry: how many
replicas, how far they may grow, and what each is given."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from urllib.parse import urlsplit

from carpool.core.numerals import numeral
from carpool.core.scaling import TARGET_LOAD, replicas_for
from carpool.errors import InvalidInput
from carpool.extensions.deploy.balancer_config import deploy_folder

_NAME = re.compile(r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?")
_IMAGE = re.compile(
    r"[a-z0-9](?:[a-z0-9._/-]*[a-z0-9])?(?::[0-9]{1,5}/[a-z0-9._/-]+)?(?::[\w.-]{1,128})?(?:@sha256:[0-9a-f]{64})?"
)
_CPU_IMAGE, _GPU_IMAGE = "carpool:latest", "carpool:latest-cuda"
_GPU_NODES = "nvidia.com/gpu.present=true"  # as the NVIDIA GPU operator labels them
_LABEL = re.compile(r"[A-Za-z0-9][\w./-]{0,250}=[\w.-]{0,63}")
_ADDRESS = re.compile(r"[a-z][a-z0-9+]{1,15}://[\w.:/@%~+-]+")
_REDIS = re.compile(r"rediss?://[\w.-]+(?::([0-9]{1,5}))?(?:/[0-9]{1,2})?")
_SERIES = re.compile(r"\b((?:carpool|nv)[_:][a-z0-9_:]+)\b(\{)?")
_REDIS_PORT = 6379
SHARED = "/var/lib/carpool-shared"
"""Where the volume that all replicas see is mounted."""
_PROBE_S = 2
UNRELIABLE = (
    "These numbers are unreliable, because the machine was busy while batches were measured: measure again "
    "on a quiet machine."
)
_STARTS = 5  # times as long as it should take: then it is stuck


@dataclass(frozen=True, slots=True)
class Deployment:
    """This says what is to run. `capacity` is of one replica, images per second within the promise."""

    rate: float
    slo_ms: float
    capacity: float
    planned: int  # replicas by the plan, redundant ones included
    redundant: int = 1
    surge: float = 3.0
    autoscaler: str = "keda"
    prometheus: str = "http://prometheus-operated.monitoring:9090"
    namespace: str = "carpool"
    image: str = ""  # empty: the project's own, with CUDA where there are GPUs
    claim: str = "carpool-models"
    cores: int = 2
    memory_gb: float = 2.0
    gpus: int = 0
    cold_start_s: float = 60.0
    cold_start_known: str = "assumed"
    unreliable: bool = False  # the batch times behind it, since the machine was busy
    repository: str = ""  # an address that the models are fetched from, in place of the claim
    shared: str = "carpool-shared"  # a claim that all replicas write to, or a Redis server
    storage_class: str = ""
    secret: str = ""  # a Secret whose fields become variables
    node_selector: str = ""
    runtime_class: str = ""

    def __post_init__(self) -> None:
        for field in ("namespace", "claim", "storage_class", "secret", "runtime_class"):
            given = getattr(self, field)
            if not _NAME.fullmatch(given) and (given or field in ("namespace", "claim")):
                raise _wrong(field, "small letters, digits and -", given)
        if not _IMAGE.fullmatch(self.image or _CPU_IMAGE):
            raise _wrong("image", "like registry/carpool:1.0 or registry/carpool@sha256:…", self.image)
        if not re.fullmatch(r"https?://[\w.:/-]+", self.prometheus):
            raise _wrong("prometheus", "a URL", self.prometheus)
        if self.repository and not _ADDRESS.fullmatch(self.repository):
            raise _wrong("repository", "an address like s3://bucket/models", self.repository)
        if self.node_selector and not _LABEL.fullmatch(self.node_selector):
            raise _wrong("node_selector", "a label like pool=gpu", self.node_selector)
        if not _NAME.fullmatch(self.shared) and not _REDIS.fullmatch(self.shared):
            raise _wrong("shared", "a claim's name, or redis://HOST:6379 without a password", self.shared)
        if self.shares_redis and not self.secret:
            raise InvalidInput(
                "--shared redis://… needs --secret, the name of a Secret with CARPOOL_CACHE_SECRET. "
                "Otherwise any client that can write to that server could impersonate a replica",
                field="secret",
            )

    @property
    def shares_redis(self) -> bool:
        return "://" in self.shared

    @property
    def image_parts(self) -> tuple[str, str, str]:
        """Name, tag and digest; a digest needs no tag."""
        image, _, digest = (self.image or (_GPU_IMAGE if self.gpus else _CPU_IMAGE)).partition("@")
        name, tag = image.rsplit(":", 1) if ":" in image.rpartition("/")[2] else (image, "")
        return name, "" if digest else tag, digest

    @property
    def nodes(self) -> tuple[str, str] | None:
        """Returns the label that its nodes have."""
        key, found, value = (self.node_selector or (_GPU_NODES if self.gpus else "")).partition("=")
        return (key, value) if found else None

    @property
    def models(self) -> str:
        return self.repository or "/models"

    @property
    def variables(self) -> dict[str, str]:
        """Returns what replicas learn once for all: what was measured of a model, and how a rollout
        stands."""
        where = self.shared if self.shares_redis else f"file:{SHARED}"
        return {"CARPOOL_SHARED_PROFILES": where, "CARPOOL_ROLLOUT_STATE": where}

    @property
    def redis_port(self) -> int | None:
        found = _REDIS.fullmatch(self.shared)
        return int(found[1] or _REDIS_PORT) if found else None

    @property
    def starts(self) -> int:
        """Returns how often a pod that starts is asked before it counts as stuck."""
        return max(30, ceil(_STARTS * self.cold_start_s / _PROBE_S))

    @property
    def memory(self) -> str:
        return f"{ceil(self.memory_gb * 1024)}Mi"

    @property
    def scrapers(self) -> str:
        """Returns the namespace of Prometheus, by its address."""
        labels = (urlsplit(self.prometheus).hostname or "").split(".")
        return labels[1] if len(labels) > 1 and _NAME.fullmatch(labels[1]) else self.namespace

    @property
    def least(self) -> int:
        return max(self.planned, replicas_for(self.rate, self.capacity, redundant=self.redundant))

    @property
    def most(self) -> int:
        return max(self.least, replicas_for(self.surge * self.rate, self.capacity, redundant=self.redundant))

    def why(self) -> Iterator[str]:
        enough = replicas_for(self.rate, self.capacity)
        needed = "replica is" if enough == 1 else "replicas are"
        yield (
            f"{numeral(self.rate)}/s at {self.slo_ms:g} ms: one replica answers {numeral(self.capacity)}/s "
            f"within the SLO, so {enough} {needed} enough at {100 * TARGET_LOAD:.0f} % load; with "
            f"{self.redundant} redundant: {self.least} replicas."
        )
        if self.unreliable:
            yield UNRELIABLE
        if self.autoscaler != "none":
            yield (
                f"Up to {self.most} by {self.autoscaler.upper()}, for {self.surge:g} times the rate, as "
                "many as carpool:replicas_wanted; at most doubled every 15 s, and reduced after 5 minutes."
            )
            room = self.least * self.capacity
            yield (
                f"A step up to {numeral(room)}/s is answered within the SLO at once; beyond that, requests "
                f"are rejected until new replicas are ready ({self.cold_start_s:g} s, "
                f"{self.cold_start_known})."
            )


def _wrong(field: str, must: str, given: str) -> InvalidInput:
    return InvalidInput(f"--{field.replace('_', '-')} must be {must}, not {given[:80]!r}", field=field)


def overlay(wanted: Deployment) -> dict[str, str]:
    """Returns the files that are made for this, by name."""
    files = {"kustomization.yaml": _kustomization(wanted), "deployment.yaml": _deployment(wanted)}
    if not wanted.shares_redis:
        chosen = f"  storageClassName: {wanted.storage_class}\n" if wanted.storage_class else ""
        files["volumes.yaml"] = (
            "# What replicas learn once for all: measured profiles, and rollouts.\n"
            f"apiVersion: v1\nkind: PersistentVolumeClaim\nmetadata:\n  name: {wanted.shared}\nspec:\n"
            f"  accessModes: [ReadWriteMany]\n{chosen}  resources: {{requests: {{storage: 10Gi}}}}\n"
        )
    rules = (deploy_folder() / "kubernetes" / RULES).read_text("utf-8")
    files[RULES] = rules_of(rules, wanted.namespace)
    files[NETWORK] = _network(wanted)
    if wanted.autoscaler == "keda":
        files["autoscaler.yaml"] = (
            "apiVersion: keda.sh/v1alpha1\nkind: ScaledObject\nmetadata:\n  name: carpool\nspec:\n"
            f"  minReplicaCount: {wanted.least}\n  maxReplicaCount: {wanted.most}\n"
            f"  fallback: {{failureThreshold: 3, replicas: {wanted.least}, "
            "behavior: currentReplicasIfHigher}\n"
            "  triggers:\n    - type: prometheus\n      metricType: AverageValue\n      metadata:\n"
            f"        serverAddress: {wanted.prometheus}\n"
            '        query: max(carpool:replicas_wanted{namespace="'
            f'{wanted.namespace}",job="carpool"}})\n        ignoreNullValues: "false"\n'
            '        threshold: "1"\n'
        )
    elif wanted.autoscaler == "hpa":
        files["autoscaler.yaml"] = (
            "apiVersion: autoscaling/v2\nkind: HorizontalPodAutoscaler\nmetadata:\n  name: carpool\nspec:\n"
            f"  minReplicas: {wanted.least}\n  maxReplicas: {wanted.most}\n"
        )
    return files


RULES, NETWORK = "components/servicemonitor/rules.yaml", "components/networkpolicy/networkpolicy.yaml"


def rules_of(rules: str, namespace: str) -> str:
    """The same rules for the fleet of one namespace: two fleets would else record each series twice."""
    mine = f'namespace="{namespace}"'

    def narrowed(line: re.Match[str]) -> str:
        return line[1] + _SERIES.sub(lambda found: f"{found[1]}{{{mine}{',' if found[2] else '}'}", line[2])

    return re.sub(r"^( *expr: )(.*)$", narrowed, rules, flags=re.MULTILINE)


def components(wanted: Deployment) -> tuple[str, ...]:
    scaled = () if wanted.autoscaler == "none" else (wanted.autoscaler,)
    return (*scaled, "servicemonitor", "grafana", "networkpolicy")


def _kustomization(wanted: Deployment) -> str:
    name, tag, digest = wanted.image_parts
    said = "".join(f"# {sentence}\n" for sentence in wanted.why())
    lines = [
        "apiVersion: kustomize.config.k8s.io/v1beta1",
        "kind: Kustomization",
        f"namespace: {wanted.namespace}",
        "resources:",
        "  - base",
        *([] if wanted.shares_redis else ["  - volumes.yaml"]),
        "components:",
        *(f"  - components/{component}" for component in components(wanted)),
        "images:",
        "  - name: carpool",
        f"    newName: {name}",
        *([f'    newTag: "{tag}"'] if tag else []),
        *([f"    digest: {digest}"] if digest else []),
        "patches:",
        "  - path: deployment.yaml",
        *([] if wanted.autoscaler == "none" else ["  - path: autoscaler.yaml"]),
    ]
    return said + "\n".join(lines) + "\n"


def _network(wanted: Deployment) -> str:
    """Returns rules for who scrapes, and for the Redis server that replicas share, where there is one."""
    text = (deploy_folder() / "kubernetes" / NETWORK).read_text("utf-8")
    port = wanted.redis_port
    redis = "" if port is None else f"    - ports:\n        - {{port: {port}, protocol: TCP}}\n"
    return text.replace("name: monitoring}", f"name: {wanted.scrapers}}}") + redis


def _deployment(wanted: Deployment) -> str:
    """How many there are is said only where no autoscaler does."""
    gpus = f', nvidia.com/gpu: "{wanted.gpus}"' if wanted.gpus else ""
    replicas = f"  replicas: {wanted.least}\n" if wanted.autoscaler == "none" else ""
    limits = f'{{cpu: "{wanted.cores}", memory: {wanted.memory}'
    lines = ["  template:", "    spec:"]
    if wanted.nodes:
        lines.append(f'      nodeSelector: {{{wanted.nodes[0]}: "{wanted.nodes[1]}"}}')
    if wanted.runtime_class:
        lines.append(f"      runtimeClassName: {wanted.runtime_class}")
    if wanted.gpus:
        lines.append("      tolerations:")
        lines.append("        - {key: nvidia.com/gpu, operator: Exists, effect: NoSchedule}")
    lines += [
        "      containers:",
        "        - name: carpool",
        f'          args: [serve, "{wanted.models}", --host, 0.0.0.0, --slo-ms, "{wanted.slo_ms:g}"]',
        "          env:",
        *(f'            - {{name: {name}, value: "{value}"}}' for name, value in wanted.variables.items()),
    ]
    if wanted.secret:
        lines += ["          envFrom:", f"            - secretRef: {{name: {wanted.secret}}}"]
    lines += [
        f"          startupProbe: {{periodSeconds: {_PROBE_S}, failureThreshold: {wanted.starts}}}",
        "          resources:",
        f"            requests: {limits}}}",
        f"            limits: {limits}{gpus}}}",
    ]
    mounts, volumes = _volumes(wanted)
    if volumes:
        lines += ["          volumeMounts:", *mounts, "      volumes:", *volumes]
    head = f"apiVersion: apps/v1\nkind: Deployment\nmetadata:\n  name: carpool\nspec:\n{replicas}"
    return head + "\n".join(lines) + "\n"


def _volumes(wanted: Deployment) -> tuple[list[str], list[str]]:
    mounts, volumes = [], []
    if not wanted.repository:
        mounts.append("            - {name: models, mountPath: /models, readOnly: true}")
        volumes.append("        - name: models")
        volumes.append(f"          persistentVolumeClaim: {{claimName: {wanted.claim}, readOnly: true}}")
    if not wanted.shares_redis:
        mounts.append(f"            - {{name: shared, mountPath: {SHARED}}}")
        volumes.append("        - name: shared")
        volumes.append(f"          persistentVolumeClaim: {{claimName: {wanted.shared}}}")
    return mounts, volumes


def write_overlay(
    files: Mapping[str, str], folder: Path, components: tuple[str, ...], *, base: bool = True
) -> None:
    """Writes it with the base and the components that it is made of, so that the folder stands by itself."""
    parts = (*(["base"] if base else []), *(f"components/{name}" for name in components))
    write_files(files, folder, parts)


def write_files(files: Mapping[str, str], folder: Path, copied: Sequence[str] = ()) -> None:
    """Writes those that are made, over those that are copied from deploy/kubernetes."""
    if folder.exists() and any(folder.iterdir()):
        raise InvalidInput(f"--output: {folder} is not empty", field="output")
    try:
        for part in copied:
            shutil.copytree(deploy_folder() / "kubernetes" / part, folder / part)
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text, "utf-8")
    except OSError as error:
        raise InvalidInput(f"--output: {folder} cannot be written: {error}", field="output") from None
