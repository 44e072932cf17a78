"""Lists every route of the server itself, and what it takes to use it. What is not listed takes the most;
extensions say it of their own routes."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    """Names what a route is for, and so whose key opens it once keys are asked for."""

    HEALTH = "health"  # every client, always
    PAGE = "page"  # every client, always: the console's files, which say nothing about this server
    METRICS = "metrics"  # every client, or with --metrics-key clients with a key
    INFERENCE = "inference"  # clients with a key
    CONTROL = "control"  # clients with an admin key


class Rule(NamedTuple):
    kind: Kind
    changes: bool
    """Using it changes something for others. A browser may send neither it nor any other request but GET
    for another site."""
    api: str = ""  # as Triton groups them, where it knows the route


_MODEL = "/v2/models/{model}[/versions/{version}]"
_REPOSITORY = "/v2/repository[/{repository}]/models/{model}"
_SYSTEM, _CUDA = "/v2/systemsharedmemory", "/v2/cudasharedmemory"

_TABLE: dict[Rule, tuple[str, ...]] = {
    Rule(Kind.HEALTH, False, "health"): (
        *("GET /health", "GET /v2/health/live", "GET /v2/health/ready"),
        *("ServerLive", "ServerReady", "Check", "Watch"),
    ),
    Rule(Kind.PAGE, False): ("GET /", "GET /console/{file}"),
    Rule(Kind.METRICS, False): ("GET /metrics",),
    Rule(Kind.INFERENCE, False, "inference"): (
        f"POST {_MODEL}/infer",
        *("POST /detect", "POST /classify", "POST /segment", "POST /pose", "POST /obb", "POST /depth"),
        *("POST /embed", "POST /text_regions", "POST /read", "POST /models/{model}/predict"),
        *("POST /caption", "POST /anomaly", "POST /restore"),
        *("ModelInfer", "ModelStreamInfer"),
    ),
    Rule(Kind.INFERENCE, False, "metadata"): (
        *("GET /v2", f"GET {_MODEL}", "GET /openapi.json", "GET /docs"),
        *("ServerMetadata", "ModelMetadata"),
    ),
    Rule(Kind.INFERENCE, False, "health"): (f"GET {_MODEL}/ready", "ModelReady"),
    Rule(Kind.INFERENCE, False, "model-config"): (f"GET {_MODEL}/config", "ModelConfig"),
    Rule(Kind.INFERENCE, False, "statistics"): (
        *(f"GET {_MODEL}/stats", f"GET {_MODEL}/profile", "GET /v2/models/stats", "GET /console/live"),
        "GET /v2/history",
        "ModelStatistics",
    ),
    Rule(Kind.INFERENCE, False, "model-repository"): (
        *("POST /v2/repository/index", "POST /v2/repository/{repository}/index"),
        "RepositoryIndex",
    ),
    Rule(Kind.INFERENCE, False, "shared-memory"): (
        *(f"GET {_SYSTEM}[/region/{{region}}]/status", f"GET {_CUDA}[/region/{{region}}]/status"),
        *("SystemSharedMemoryStatus", "CudaSharedMemoryStatus"),
    ),
    Rule(Kind.INFERENCE, True, "shared-memory"): (
        *(f"POST {_SYSTEM}/region/{{region}}/register", f"POST {_CUDA}/region/{{region}}/register"),
        *(f"POST {_SYSTEM}[/region/{{region}}]/unregister", f"POST {_CUDA}[/region/{{region}}]/unregister"),
        *("SystemSharedMemoryRegister", "SystemSharedMemoryUnregister"),
        *("CudaSharedMemoryRegister", "CudaSharedMemoryUnregister"),
    ),
    Rule(Kind.CONTROL, True, "model-repository"): (
        *(f"POST {_REPOSITORY}/load", f"POST {_REPOSITORY}/unload"),
        *("RepositoryModelLoad", "RepositoryModelUnload"),
    ),
    Rule(Kind.CONTROL, False, "logging"): ("GET /v2/logging",),
    Rule(Kind.CONTROL, True, "logging"): ("POST /v2/logging", "LogSettings"),
    Rule(Kind.CONTROL, True, "trace"): ("TraceSetting",),
}
"""HTTP routes by `METHOD pattern`, and gRPC calls by name."""

RULES: dict[str, Rule] = {name: rule for rule, names in _TABLE.items() for name in names}


def rule_of(name: str) -> Rule:
    """Returns the rule of a route. One that is missing from the table is for administrators, and for no other
    site's pages."""
    return RULES.get(name, Rule(Kind.CONTROL, True))
