"""The names that users and their programs rely on, as the code has them now."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
from tritonclient.grpc import service_pb2

import carpool
from carpool import errors
from carpool.cli.verbs import listed
from carpool.config.server import variables
from carpool.config.table import every_key
from carpool.extensions.pipelines.pipeline_toml import KEYS as PIPELINE_KEYS
from carpool.frontend.http.app import all_routes
from carpool.observe.prometheus import chosen
from cli_run import params
from frontend.grpc.front_end import PATIENCE, channel, front_end

# What docs/python.md promises of the engine. What else it has is for the server's own use.
ENGINE = ("start", "infer", "predict", "load", "unload", "index", "stop")
CLIENT = ("predict", "detect", "classify", "segment", "embed", "draw", "infer", "map", "stream", "close")
INTERNAL = {
    "__init__": {"table", "block", "device_memory_gb", "profiles", "publisher", "loads"},
    "start": {"only", "some", "patient"},
}


def public_names() -> dict[str, Any]:
    return {
        "python": _python(),
        "errors": _errors(),
        "commands": _commands(),
        "routes": sorted(f"{route.method} {route.pattern}" for route in all_routes()),
        "grpc": _grpc_methods(),
        "metrics": {family.name: family.kind for family in _families()},
        "headers": _headers(),
        "model.toml": {section or "top": sorted(keys) for section, keys in sorted(every_key().items())},
        "pipeline.toml": {section or "top": sorted(keys) for section, keys in sorted(PIPELINE_KEYS.items())},
        "variables": sorted(variables()),
    }


def _headers() -> list[str]:
    """Of requests and answers: whatever the code calls by our name."""
    files = Path(carpool.__file__).parent.rglob("*.py")
    return sorted(
        {name for file in files for name in re.findall(r"X-Carpool-[A-Za-z-]+", file.read_text("utf-8"))}
    )


def _python() -> dict[str, Any]:
    names: dict[str, Any] = dict.fromkeys(sorted(carpool.__all__))
    names["batched"] = _parameters(carpool.batched)
    names["Engine"] = _parameters(carpool.Engine.__init__)
    for name in ENGINE:
        names[f"Engine.{name}"] = _parameters(getattr(carpool.Engine, name))
    for kind in (carpool.Client, carpool.AsyncClient):
        names[kind.__name__] = _parameters(kind.__init__)
        names |= {f"{kind.__name__}.{name}": _parameters(getattr(kind, name)) for name in CLIENT}
    return names


def _parameters(function: Callable[..., Any]) -> dict[str, list[str]]:
    """Kind and default of each. Types are mypy's business."""
    hidden = {"self", *INTERNAL.get(function.__name__, ())}
    found = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if name in hidden:
            continue
        default = parameter.default
        shown = "a function" if callable(default) else repr(default)
        shown = "required" if default is parameter.empty else shown
        found[name] = [parameter.kind.description, shown]
    return found


def _errors() -> dict[str, str]:
    kinds = [kind for _, kind in inspect.getmembers(errors, inspect.isclass)]
    return {kind.__name__: kind.reason for kind in kinds if issubclass(kind, errors.CarpoolError)}


def _commands() -> dict[str, dict[str, Any]]:
    """By verb, the options and what they are by default."""
    return {
        verb: {
            " ".join(parameter.opts): "required" if parameter.required else _default(parameter)
            for parameter in sorted(params(verb), key=lambda parameter: parameter.opts[0])
        }
        for verb in sorted(listed())
    }


def _default(parameter: Any) -> Any:
    value = getattr(parameter.default, "value", parameter.default)
    if isinstance(value, Path):
        return str(value)
    return list(value) if isinstance(value, tuple) else value


def _grpc_methods() -> list[str]:
    """Of Triton's service and of the health protocol, those that a server here answers to, if only to say
    that this message is none."""
    triton = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
    asked = [f"{triton.full_name}/{method.name}" for method in triton.methods]
    asked += ["grpc.health.v1.Health/Check", "grpc.health.v1.Health/Watch"]
    with front_end() as front, channel(front) as connected:
        return sorted(path for path in asked if _answers(connected, path))


def _answers(connected: grpc.Channel, path: str) -> bool:
    call = connected.stream_stream(f"/{path}")(iter([b"\xff"]), timeout=PATIENCE)
    try:
        next(iter(call))
    except StopIteration:
        return True
    except grpc.RpcError as error:
        return "Method not found" not in (error.details() or "")
    finally:
        call.cancel()
    return True


def _families() -> Any:
    return chosen({"counter_latencies": True, "histogram_latencies": True})
