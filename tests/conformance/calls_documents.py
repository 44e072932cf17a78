"""Calls that ask about the server and its models, and those that concern the client alone."""

from __future__ import annotations

from typing import Any

import tritonclient.grpc.auth
import tritonclient.http.auth

from conformance.flavours import UNKNOWN, Session
from conformance.table import case, expect
from waiting import until

_ALWAYS = {"classification", "model_configuration", "parameters", "schedule_policy", "sequence", "statistics"}
_OPENED = {"model_repository", "system_shared_memory", "trace", "logging"}
_COUNTED = ("success", "queue", "compute_input", "compute_infer", "compute_output")


@case("is_server_live", "a running server", "true")
def live(session: Session) -> str:
    expect(session.call("is_server_live"), True)
    return "true"


@case("is_server_ready", "a warm server", "true")
def ready(session: Session) -> str:
    expect(session.call("is_server_ready"), True)
    return "true"


@case("is_model_ready", "a model, one of its versions", "true")
def model_ready(session: Session) -> str:
    expect(session.call("is_model_ready", "numbers"), True)
    expect(session.call("is_model_ready", "numbers", "2"), True)
    return "true"


@case("is_model_ready", "an unknown model, an unknown version", "false")
def model_not_ready(session: Session) -> str:
    expect(session.call("is_model_ready", "nothing"), False)
    expect(session.call("is_model_ready", "numbers", "7"), False)
    return "false"


@case("get_server_metadata", "", "name, version, the extensions that work")
def server_metadata(session: Session) -> str:
    document = session.call("get_server_metadata")
    expect(document["name"], "carpool")
    extensions = set(document["extensions"])
    expect(_ALWAYS | _OPENED, (_ALWAYS | _OPENED) & extensions)
    expect("cuda_shared_memory" in extensions, False)
    return f"{document['name']} {document['version']}, {len(extensions)} extensions"


@case("get_model_metadata", "a model with batches", "shapes begin with -1")
def model_metadata(session: Session) -> str:
    document = session.call("get_model_metadata", "vision")
    expect((document["name"], document["platform"]), ("vision", "onnxruntime_onnx"))
    (image,) = document["inputs"]
    expect(image["datatype"], "UINT8")
    expect([int(length) for length in image["shape"]], [-1, 224, 224, 3])
    return f"image {image['datatype']} [-1, 224, 224, 3]"


@case("get_model_metadata", "an unknown model", "refused, 404 / NOT_FOUND")
def unknown_metadata(session: Session) -> str:
    return session.refused(UNKNOWN, "unknown model", "get_model_metadata", "nothing")


@case("get_model_config", "", "the settings in force, with dynamic_batching")
def model_config(session: Session) -> str:
    document = session.call("get_model_config", "vision")
    config = document if session.flavour.is_http else document["config"]
    batching = config["dynamic_batching"]
    expect(config["max_batch_size"], 16)
    expect(batching["preferred_batch_size"], [4, 8])
    expect(int(batching["max_queue_delay_microseconds"]), 500)
    expect(config["input"][0]["data_type"], "TYPE_UINT8")
    return "max_batch_size 16, preferred [4, 8], delay 500 µs"


def _statistics(session: Session) -> dict[str, Any]:
    (found,) = session.call("get_inference_statistics", "numbers", "2")["model_stats"]
    return dict(found)


def _count(document: dict[str, Any], phase: str) -> int:
    """gRPC's documents leave zeros out and write long numbers as text."""
    return int(document.get("inference_stats", {}).get(phase, {}).get("count", 0))


@case("get_inference_statistics", "one version, before and after three requests", "every phase counts 3 more")
def statistics(session: Session) -> str:
    from conformance.calls_infer import numbers

    before = _statistics(session)
    for _ in range(3):
        session.infer("numbers", numbers(1, 2, 3), model_version="2")

    def grown() -> bool:  # an answer is on its way before it is counted
        after = _statistics(session)
        return all(_count(after, phase) == _count(before, phase) + 3 for phase in _COUNTED)

    until(grown, "three more in every phase")
    return "success, queue, compute ×3: 3 more"


@case("get_inference_statistics", "all models", "one entry for each version")
def all_statistics(session: Session) -> str:
    found = session.call("get_inference_statistics")["model_stats"]
    names = {(model["name"], model["version"]) for model in found}
    assert names >= {("vision", "1"), ("numbers", "1"), ("numbers", "2"), ("mean", "1")}
    return f"{len(names)} models and versions"


@case("get_model_repository_index", "", "name, version and state of each")
def index(session: Session) -> str:
    found = session.call("get_model_repository_index")
    lines = found if session.flavour.is_http else found["models"]
    states = {(line["name"], line["version"]): line["state"] for line in lines}
    expect(states["vision", "1"], "READY")
    assert states["numbers", "1"] == states["numbers", "2"] == "READY"
    return f"{len(lines)} lines, vision 1 READY"


# ---- the client's own


def _basic_auth(session: Session) -> Any:
    module = tritonclient.http.auth if session.flavour.is_http else tritonclient.grpc.auth
    return module.BasicAuth("user", "secret")


@case("register_plugin", "BasicAuth", "its header is sent; the server ignores it")
def register_plugin(session: Session) -> str:
    plugin = _basic_auth(session)
    session.call("register_plugin", plugin)
    try:
        expect(session.call("is_server_live"), True)
    finally:
        session.call("unregister_plugin")
    return "true"


@case("plugin", "while one is registered", "that one")
def plugin(session: Session) -> str:
    mine = _basic_auth(session)
    session.call("register_plugin", mine)
    try:
        expect(session.call("plugin"), mine)
    finally:
        session.call("unregister_plugin")
    return "BasicAuth"


@case("unregister_plugin", "", "none is left")
def unregister_plugin(session: Session) -> str:
    session.call("register_plugin", _basic_auth(session))
    session.call("unregister_plugin")
    expect(session.call("plugin"), None)
    return "none"


@case("close", "a second client", "its connections go, the first client stays")
def close(session: Session) -> str:
    with session.another() as second:
        expect(second.call("is_server_live"), True)
    expect(session.call("is_server_live"), True)
    return "closed"
